#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "moe/exchange.h"
#include "moe/exchange_work.h"
#include "moe/pieces.h"

namespace turbobus::moe {
namespace {

class Combine : public Exchange<CombineCall> {
 public:
  explicit Combine(std::span<const CombineCall* const> calls)
      : Exchange(calls),
        size_(config_.row_bytes / SizeOf(calls[0]->element)),
        weight_bytes_(calls[0]->element == Element::kF64 ? 8 : 4),
        sum_(WeightedSum(calls[0]->element)) {
    AddTokens();
  }

  void Run(int64_t index) override {
    const Piece& piece = pieces_[index];
    const CombineCall& call = *calls_[piece.rank];
    std::vector<const void*> rows(shape_.top_k);
    std::vector<double> weights(shape_.top_k);  // Storage for either type.
    for (int64_t t = piece.begin; t < piece.end; ++t) {
      const int num_rows = Gather(call, piece, t, rows, weights.data());
      sum_(rows.data(), call.weights == nullptr ? nullptr : weights.data(),
           num_rows, size_,
           At(call.sums, piece.batch * shape_.num_tokens + t,
              config_.row_bytes));
    }
    count_.Add(piece, call.expert_ids, call.slots);
  }

  void Finish() override {
    count_.Log(calls_[0]->weights == nullptr ? "dispatch_grad" : "combine",
               /*is_to_experts=*/false);
  }

 private:
  int Gather(const CombineCall& call, const Piece& piece, int64_t t,
             std::vector<const void*>& rows, void* weights) const {
    const int64_t first = FirstChoice(piece, t);
    int num_rows = 0;
    for (int j = 0; j < shape_.top_k; ++j) {
      const int64_t c = first + j;
      if (!HasRow(shape_, call.expert_ids, call.slots, c)) continue;
      if (call.weights == nullptr) {
        if (IsRepeated(call.expert_ids + first, j)) continue;
      } else {
        std::memcpy(At(weights, num_rows, weight_bytes_),
                    At(call.weights, c, weight_bytes_), weight_bytes_);
      }
      rows[num_rows++] =
          At(OwnerOf(call.expert_ids[c]).rows,
             RowIndex(piece.batch, call.slots[c]), config_.row_bytes);
    }
    return num_rows;
  }

  const int64_t size_;
  const int64_t weight_bytes_;
  const WeightedSumFn sum_;
};

/// `Weight` is what sums of the element accumulate in.
template <typename Weight>
class CombineGrad : public Exchange<CombineGradCall> {
 public:
  explicit CombineGrad(std::span<const CombineGradCall* const> calls)
      : Exchange(calls),
        size_(config_.row_bytes / SizeOf(calls[0]->element)),
        scale_and_dot_(ScaleAndDot(calls[0]->element)),
        is_written_(shape_.num_ranks * RowsOfRank()) {
    AddTokensAndPadding();
    for (const Piece& piece : pieces_) {
      if (piece.kind != Piece::Kind::kPadding) continue;
      uint8_t* flags = FlagOf(piece.rank, RowIndex(piece.batch, 0));
      std::fill(flags + piece.begin, flags + piece.end, 1);
    }
  }

  void Run(int64_t index) override {
    const Piece& piece = pieces_[index];
    const CombineGradCall& call = *calls_[piece.rank];
    if (piece.kind == Piece::Kind::kPadding) {
      ZeroPadding(config_, piece, call.row_grads);
      return;
    }
    for (int64_t t = piece.begin; t < piece.end; ++t) Spread(call, piece, t);
    count_.Add(piece, call.expert_ids, call.slots);
  }

  void Finish() override {
    ZeroRowsOfNobody();
    count_.Log("combine_grad", /*is_to_experts=*/true, sizeof(Weight));
  }

 private:
  /// Writes the gradients of a token's rows and of its weights.
  void Spread(const CombineGradCall& call, const Piece& piece, int64_t t) {
    const int64_t first = FirstChoice(piece, t);
    const int32_t* choices = call.expert_ids + first;
    const auto* weights = static_cast<const Weight*>(call.weights) + first;
    auto* grads = static_cast<Weight*>(call.weight_grads) + first;
    const char* in = At(call.sum_grads, piece.batch * shape_.num_tokens + t,
                        config_.row_bytes);
    for (int j = 0; j < shape_.top_k; ++j) {
      grads[j] = 0;
      if (!HasRow(shape_, call.expert_ids, call.slots, first + j)) continue;
      if (IsRepeated(choices, j)) {
        for (int i = 0; i < j; ++i) {
          if (choices[i] == choices[j]) grads[j] = grads[i];
        }
        continue;
      }
      double weight = 0;  // Of all choices that share the row.
      for (int i = j; i < shape_.top_k; ++i) {
        if (choices[i] == choices[j]) weight += weights[i];
      }
      const CombineGradCall& owner = OwnerOf(choices[j]);
      const int64_t row = RowIndex(piece.batch, call.slots[first + j]);
      std::atomic_ref(*FlagOf(shape_.rank_of(choices[j]), row))
          .store(1, std::memory_order_relaxed);
      grads[j] = static_cast<Weight>(
          scale_and_dot_(in, At(owner.rows, row, config_.row_bytes), weight,
                         size_, At(owner.row_grads, row, config_.row_bytes)));
    }
  }

  /// Rows that a caller's changes left to no slot, though they count as kept.
  void ZeroRowsOfNobody() {
    const uint8_t* const begin = is_written_.data();
    const uint8_t* const end = begin + is_written_.size();
    for (const uint8_t* flag = begin; flag < end; ++flag) {
      flag = static_cast<const uint8_t*>(std::memchr(flag, 0, end - flag));
      if (flag == nullptr) return;
      const int64_t rank = (flag - begin) / RowsOfRank();
      std::memset(At(calls_[rank]->row_grads, (flag - begin) % RowsOfRank(),
                     config_.row_bytes),
                  0, config_.row_bytes);
    }
  }

  int64_t RowsOfRank() const {
    return config_.num_batches * shape_.recv_capacity;
  }
  uint8_t* FlagOf(int rank, int64_t row) {
    return is_written_.data() + rank * RowsOfRank() + row;
  }

  const int64_t size_;
  const ScaleAndDotFn scale_and_dot_;
  // [num_ranks, B, recv_capacity]: rows of gradients that somebody writes.
  std::vector<uint8_t> is_written_;
};

}  // namespace

StatusOr<std::unique_ptr<Work>> MakeCombine(
    std::span<const CombineCall* const> calls) {
  TB_RETURN_IF_ERROR(CheckSame(calls));
  return std::unique_ptr<Work>(new Combine(calls));
}

StatusOr<std::unique_ptr<Work>> MakeCombineGrad(
    std::span<const CombineGradCall* const> calls) {
  TB_RETURN_IF_ERROR(CheckSame(calls));
  if (calls[0]->element == Element::kF64) {
    return std::unique_ptr<Work>(new CombineGrad<double>(calls));
  }
  return std::unique_ptr<Work>(new CombineGrad<float>(calls));
}

}  // namespace turbobus::moe
