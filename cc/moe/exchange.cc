#include "moe/exchange.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "moe/pieces.h"

namespace turbobus::moe {
namespace {

/// The pointer to row `index` of rows of `row_bytes` each.
const char* At(const void* rows, int64_t index, int64_t row_bytes) {
  return static_cast<const char*>(rows) + index * row_bytes;
}
char* At(void* rows, int64_t index, int64_t row_bytes) {
  return static_cast<char*>(rows) + index * row_bytes;
}

/// True if choice `c` of a call has a row in the result of its expert's rank.
bool HasRow(const ExchangeShape& shape, const int32_t* expert_ids,
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

class Dispatch : public Exchange<DispatchCall> {
 public:
  explicit Dispatch(std::span<const DispatchCall* const> calls)
      : Exchange(calls), moves_rows_(calls[0]->rows != nullptr) {
    for (int64_t b = 0; b < config_.num_batches; ++b) Plan(b);
    if (moves_rows_) {
      AddTokensAndPadding();
    } else {
      AddTokens();
    }
  }

  void Run(int64_t index) override {
    const Piece& piece = pieces_[index];
    if (piece.kind == Piece::Kind::kPadding) {
      ZeroPadding(config_, piece, calls_[piece.rank]->rows);
      return;
    }
    const DispatchCall& call = *calls_[piece.rank];
    for (int64_t t = piece.begin; t < piece.end; ++t) Send(call, piece, t);
    if (moves_rows_) count_.Add(piece, call.expert_ids, call.slots);
  }

  void Finish() override {
    if (moves_rows_) count_.Log("dispatch", /*is_to_experts=*/true);
  }

 private:
  void Plan(int64_t batch) {
    std::vector<const int32_t*> counts;
    for (const DispatchCall* call : calls_) {
      counts.push_back(call->counts.get() + batch * shape_.num_experts);
    }
    const RowPlan& plan = plans_.emplace_back(shape_, counts);
    const int num_local = shape_.num_local_experts();
    for (int32_t e = 0; e < shape_.num_experts; ++e) {
      const DispatchCall& owner = OwnerOf(e);
      const int64_t local = batch * num_local + e % num_local;
      owner.group_sizes[local] = static_cast<int32_t>(plan.kept(e));
      owner.wanted[local] = static_cast<int32_t>(plan.wanted(e));
    }
  }

  /// Gives the choices of a token their rows, and copies it there.
  void Send(const DispatchCall& call, const Piece& piece, int64_t t) const {
    const RowPlan& plan = plans_[piece.batch];
    const int64_t row_bytes = config_.row_bytes;
    const int64_t first = FirstChoice(piece, t);
    const int32_t* choices = call.expert_ids + first;
    int32_t* slots = call.slots + first;
    const char* token =
        At(call.tokens, piece.batch * shape_.num_tokens + t, row_bytes);
    for (int j = 0; j < shape_.top_k; ++j) {
      if (slots[j] == kNoRow) continue;
      slots[j] = plan.row(piece.rank, choices[j], slots[j]);
      if (!moves_rows_ || slots[j] == kNoRow || IsRepeated(choices, j))
        continue;
      std::memcpy(At(OwnerOf(choices[j]).rows, RowIndex(piece.batch, slots[j]),
                     row_bytes),
                  token, row_bytes);
    }
  }

  const bool moves_rows_;
  std::vector<RowPlan> plans_;  // By batch.
};

class Deliver : public Exchange<DeliverCall> {
 public:
  explicit Deliver(std::span<const DeliverCall* const> calls)
      : Exchange(calls) {
    AddTokensAndPadding();
  }

  void Run(int64_t index) override {
    const Piece& piece = pieces_[index];
    const DeliverCall& call = *calls_[piece.rank];
    if (piece.kind == Piece::Kind::kPadding) {
      ZeroPadding(config_, piece, call.rows);
      return;
    }
    for (int64_t t = piece.begin; t < piece.end; ++t) Send(call, piece, t);
    count_.Add(piece, call.expert_ids, call.slots);
  }

  void Finish() override { count_.Log("dispatch", /*is_to_experts=*/true); }

 private:
  void Send(const DeliverCall& call, const Piece& piece, int64_t t) const {
    const int64_t first = FirstChoice(piece, t);
    const char* token =
        At(call.tokens, piece.batch * shape_.num_tokens + t, config_.row_bytes);
    for (int j = 0; j < shape_.top_k; ++j) {
      const int64_t c = first + j;
      if (!HasRow(shape_, call.expert_ids, call.slots, c)) continue;
      if (IsRepeated(call.expert_ids + first, j)) continue;
      std::memcpy(At(OwnerOf(call.expert_ids[c]).rows,
                     RowIndex(piece.batch, call.slots[c]), config_.row_bytes),
                  token, config_.row_bytes);
    }
  }
};

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

void CountDispatch(DispatchCall& call) {
  const ExchangeShape& shape = call.config.shape;
  const int64_t num_batches = call.config.num_batches;
  const size_t num_choices = shape.num_tokens * shape.top_k;
  const size_t num_experts = shape.num_experts;
  call.counts = std::make_unique<int32_t[]>(num_batches * num_experts);
  for (int64_t b = 0; b < num_batches; ++b) {
    CountChoices(shape, {call.expert_ids + b * num_choices, num_choices},
                 {call.slots + b * num_choices, num_choices},
                 {call.counts.get() + b * num_experts, num_experts});
  }
}

StatusOr<std::unique_ptr<Work>> MakeDispatch(
    std::span<const DispatchCall* const> calls) {
  TB_RETURN_IF_ERROR(CheckSame(calls));
  return std::unique_ptr<Work>(new Dispatch(calls));
}

StatusOr<std::unique_ptr<Work>> MakeDeliver(
    std::span<const DeliverCall* const> calls) {
  TB_RETURN_IF_ERROR(CheckSame(calls));
  return std::unique_ptr<Work>(new Deliver(calls));
}

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
