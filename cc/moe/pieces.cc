#include "moe/pieces.h"

#include <algorithm>
#include <cstring>

namespace turbobus::moe {
namespace {

// Long enough that claiming a piece is free beside it, short enough that the
// threads finish together.
constexpr int64_t kPieceBytes = 256 << 10;

void Cut(Piece piece, int64_t bytes_each, std::vector<Piece>& pieces) {
  const int64_t end = piece.end;
  const int64_t step =
      std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, bytes_each));
  for (; piece.begin < end; piece.begin = piece.end) {
    piece.end = std::min(end, piece.begin + step);
    pieces.push_back(piece);
  }
}

}  // namespace

void AddTokenPieces(const ExchangeConfig& config, int rank, int64_t batch,
                    std::vector<Piece>& pieces) {
  const ExchangeShape& shape = config.shape;
  const int64_t choice_bytes = config.row_bytes + sizeof(int32_t);
  Cut({Piece::Kind::kTokens, rank, batch, 0, shape.num_tokens},
      config.row_bytes + shape.top_k * choice_bytes, pieces);
}

void AddPaddingPieces(const ExchangeConfig& config, int rank, int64_t batch,
                      std::span<const int32_t> group_sizes,
                      std::vector<Piece>& pieces) {
  for (const RowRange& rows : PaddingRows(config.shape, group_sizes)) {
    Cut({Piece::Kind::kPadding, rank, batch, rows.begin, rows.end},
        config.row_bytes, pieces);
  }
}

void ZeroPadding(const ExchangeConfig& config, const Piece& piece, void* rows) {
  const int64_t first = piece.batch * config.shape.recv_capacity + piece.begin;
  std::memset(static_cast<char*>(rows) + first * config.row_bytes, 0,
              (piece.end - piece.begin) * config.row_bytes);
}

CopyCount::CopyCount(const ExchangeConfig& config)
    : config_(config),
      num_copies_(static_cast<size_t>(config.shape.num_ranks) *
                  config.shape.num_ranks),
      num_choices_(num_copies_.size()) {}

void CopyCount::Add(const Piece& piece, const int32_t* expert_ids,
                    const int32_t* slots) {
  const ExchangeShape& shape = config_.shape;
  std::vector<int64_t> copies(shape.num_ranks);
  std::vector<int64_t> choices(shape.num_ranks);
  std::vector<int64_t> last_token(shape.num_ranks, -1);
  for (int64_t t = piece.begin; t < piece.end; ++t) {
    const int64_t first = (piece.batch * shape.num_tokens + t) * shape.top_k;
    for (int64_t c = first; c < first + shape.top_k; ++c) {
      if (slots[c] == kNoRow || !shape.has_expert(expert_ids[c])) continue;
      const int rank = shape.rank_of(expert_ids[c]);
      ++choices[rank];
      if (last_token[rank] != t) ++copies[rank];
      last_token[rank] = t;
    }
  }
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const size_t pair =
        static_cast<size_t>(piece.rank) * shape.num_ranks + rank;
    num_copies_[pair].fetch_add(copies[rank], std::memory_order_relaxed);
    num_choices_[pair].fetch_add(choices[rank], std::memory_order_relaxed);
  }
}

void CopyCount::Log(const std::string& op, bool is_to_experts,
                    int64_t scalar_bytes) const {
  const int num_ranks = config_.shape.num_ranks;
  const int64_t all_tokens = config_.num_batches * config_.shape.num_tokens;
  std::vector<int64_t> bytes(num_copies_.size());
  for (int token = 0; token < num_ranks; ++token) {
    for (int expert = 0; expert < num_ranks; ++expert) {
      if (token == expert) continue;
      const size_t pair = static_cast<size_t>(token) * num_ranks + expert;
      const size_t back = static_cast<size_t>(expert) * num_ranks + token;
      const int64_t num_rows = config_.schedule == Schedule::kBroadcast
                                   ? all_tokens
                                   : num_copies_[pair].load();
      bytes[is_to_experts ? pair : back] += num_rows * config_.row_bytes;
      bytes[is_to_experts ? back : pair] +=
          num_choices_[pair].load() * scalar_bytes;
    }
  }
  TrafficLog::Process().Add(op, config_.schedule, num_ranks, bytes);
}

}  // namespace turbobus::moe
