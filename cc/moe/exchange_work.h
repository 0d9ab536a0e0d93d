#ifndef TURBOBUS_MOE_EXCHANGE_WORK_H_
#define TURBOBUS_MOE_EXCHANGE_WORK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "moe/exchange.h"
#include "moe/pieces.h"

// What dispatch.cc and combine.cc share.

namespace turbobus::moe {

/// The pointer to row `index` of rows of `row_bytes` each.
inline const char* At(const void* rows, int64_t index, int64_t row_bytes) {
  return static_cast<const char*>(rows) + index * row_bytes;
}
inline char* At(void* rows, int64_t index, int64_t row_bytes) {
  return static_cast<char*>(rows) + index * row_bytes;
}

/// True if choice `c` of a call has a row in the result of its expert's rank.
inline bool HasRow(const ExchangeShape& shape, const int32_t* expert_ids,
                   const int32_t* slots, int64_t c) {
  return slots[c] >= 0 && slots[c] < shape.recv_capacity &&
         shape.has_expert(expert_ids[c]);
}

template <typename Call>
Status CheckSame(std::span<const Call* const> calls) {
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    if (calls[rank]->config == calls[0]->config) continue;
    return InvalidArgument("rank " + std::to_string(rank) +
                           " calls with other sizes than rank 0");
  }
  return OkStatus();
}

/// What the three exchanges share: calls by rank, cut into pieces.
template <typename Call>
class Exchange : public Work {
 public:
  explicit Exchange(std::span<const Call* const> calls)
      : calls_(calls.begin(), calls.end()),
        config_(calls[0]->config),
        shape_(config_.shape),
        count_(config_) {}

  int64_t num_pieces() const override { return pieces_.size(); }

 protected:
  /// The call of the rank that owns an expert.
  const Call& OwnerOf(int32_t expert) const {
    return *calls_[shape_.rank_of(expert)];
  }
  int64_t RowIndex(int64_t batch, int32_t slot) const {
    return batch * shape_.recv_capacity + slot;
  }
  int64_t FirstChoice(const Piece& piece, int64_t token) const {
    return (piece.batch * shape_.num_tokens + token) * shape_.top_k;
  }
  /// For pieces of tokens alone; a rank's pieces lie together.
  void AddTokens() {
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      for (int64_t b = 0; b < config_.num_batches; ++b) {
        AddTokenPieces(config_, rank, b, pieces_);
      }
    }
  }
  /// And for pieces of padding too, by the calls' `group_sizes`.
  void AddTokensAndPadding() {
    const int num_local = shape_.num_local_experts();
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      for (int64_t b = 0; b < config_.num_batches; ++b) {
        AddTokenPieces(config_, rank, b, pieces_);
        const int32_t* sizes = calls_[rank]->group_sizes + b * num_local;
        AddPaddingPieces(config_, rank, b, {sizes, size_t(num_local)}, pieces_);
      }
    }
  }

  const std::vector<const Call*> calls_;
  const ExchangeConfig config_;
  const ExchangeShape shape_;
  std::vector<Piece> pieces_;
  CopyCount count_;
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_EXCHANGE_WORK_H_
