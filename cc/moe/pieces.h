#ifndef TURBOBUS_MOE_PIECES_H_
#define TURBOBUS_MOE_PIECES_H_

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moe/exchange.h"

namespace turbobus::moe {

/// A part of an exchange that one thread does in one go.
struct Piece {
  enum class Kind { kTokens, kPadding };
  Kind kind = Kind::kTokens;
  int rank = 0;  // Whose tokens, or whose result.
  int64_t batch = 0;
  int64_t begin = 0;  // Tokens of the rank, or rows of its result.
  int64_t end = 0;
};

/// Cuts the tokens of a rank into pieces that move about a cache's worth of
/// bytes, and appends them.
void AddTokenPieces(const ExchangeConfig& config, int rank, int64_t batch,
                    std::vector<Piece>& pieces);

/// The same for the rows of a rank's result that belong to no token.
void AddPaddingPieces(const ExchangeConfig& config, int rank, int64_t batch,
                      std::span<const int32_t> group_sizes,
                      std::vector<Piece>& pieces);

/// Zeroes the rows of a padding piece in `rows`, [num_batches, recv_capacity].
void ZeroPadding(const ExchangeConfig& config, const Piece& piece, void* rows);

/// What crossed between ranks: counted piece by piece, from any thread, and
/// logged once.
class CopyCount {
 public:
  explicit CopyCount(const ExchangeConfig& config);

  /// Counts the kept choices of `piece`'s tokens, of rank `piece.rank`.
  void Add(const Piece& piece, const int32_t* expert_ids, const int32_t* slots);

  /// Logs the rows that went from a token's rank to the experts' ranks (or back
  /// again), and `scalar_bytes` for each choice the other way.
  void Log(const std::string& op, bool is_to_experts,
           int64_t scalar_bytes = 0) const;

 private:
  const ExchangeConfig config_;
  // [num_ranks, num_ranks]: token's rank, expert's rank.
  std::vector<std::atomic<int64_t>> num_copies_;   // (token, rank) pairs
  std::vector<std::atomic<int64_t>> num_choices_;  // (token, choice) pairs
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_PIECES_H_
