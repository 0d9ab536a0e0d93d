#include <cstring>
#include <memory>
#include <vector>

#include "moe/exchange.h"
#include "moe/exchange_work.h"
#include "moe/pieces.h"

namespace turbobus::moe {
namespace {

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

}  // namespace turbobus::moe
