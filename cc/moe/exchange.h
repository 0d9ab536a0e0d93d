#ifndef TURBOBUS_MOE_EXCHANGE_H_
#define TURBOBUS_MOE_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "moe/plan.h"
#include "moe/rendezvous.h"
#include "moe/rows.h"
#include "moe/traffic.h"

// The exchanges of an MoE layer between ranks of one address space. A rank's
// call is a record of pointers; the work made from all of them moves each row
// straight from where it is to its final place, once. Arrays are row-major,
// with one leading batch axis: entry b of all ranks' arrays is an exchange of
// its own.
//
// A slot s32[num_tokens, top_k] holds the row of a choice in the result of its
// expert's rank, or kNoRow. Slots are data that a caller may have changed:
// those that point outside a result count as kNoRow, and every element of every
// result is written whatever they say.

namespace turbobus::moe {

/// What all calls of an exchange agree on.
struct ExchangeConfig {
  ExchangeShape shape;
  int64_t num_batches = 1;
  int64_t row_bytes = 0;
  Schedule schedule = Schedule::kPacked;

  friend bool operator==(const ExchangeConfig&,
                         const ExchangeConfig&) = default;
};

/// Tokens to the ranks of their experts. With null `rows` and `tokens` and
/// row_bytes 0 only planned: `MakeDeliver` moves them.
struct DispatchCall {
  ExchangeConfig config;
  const void* tokens = nullptr;         // [B, num_tokens, row]
  const int32_t* expert_ids = nullptr;  // [B, num_tokens, top_k]
  void* rows = nullptr;                 // [B, recv_capacity, row], padding zero
  int32_t* group_sizes = nullptr;       // [B, num_local_experts]: rows kept
  int32_t* wanted = nullptr;  // [B, num_local_experts]: rows before dropping
  int32_t* slots = nullptr;   // [B, num_tokens, top_k]

  /// [B, num_experts], written by `CountDispatch`.
  std::unique_ptr<int32_t[]> counts;
};

/// The part of a dispatch that needs nobody else, to be done before meeting.
void CountDispatch(DispatchCall& call);

/// The rows of a dispatch that has been planned.
struct DeliverCall {
  ExchangeConfig config;
  const void* tokens = nullptr;          // [B, num_tokens, row]
  const int32_t* expert_ids = nullptr;   // [B, num_tokens, top_k]
  const int32_t* slots = nullptr;        // [B, num_tokens, top_k]
  const int32_t* group_sizes = nullptr;  // [B, num_local_experts]
  void* rows = nullptr;  // [B, recv_capacity, row], padding zero
};

/// Rows back to their tokens, added up.
struct CombineCall {
  ExchangeConfig config;
  Element element = Element::kF32;
  const void* rows = nullptr;           // [B, recv_capacity, row]
  const int32_t* expert_ids = nullptr;  // [B, num_tokens, top_k]
  const int32_t* slots = nullptr;       // [B, num_tokens, top_k]
  /// [B, num_tokens, top_k], float, or double for kF64. Null: each row counts
  /// once, whatever choices share it (the transpose of dispatch).
  const void* weights = nullptr;
  void* sums = nullptr;  // [B, num_tokens, row]
};

/// The gradients of a weighted combine.
struct CombineGradCall {
  ExchangeConfig config;
  Element element = Element::kF32;
  const void* sum_grads = nullptr;       // [B, num_tokens, row]
  const void* rows = nullptr;            // [B, recv_capacity, row]
  const int32_t* expert_ids = nullptr;   // [B, num_tokens, top_k]
  const int32_t* slots = nullptr;        // [B, num_tokens, top_k]
  const void* weights = nullptr;         // [B, num_tokens, top_k]
  const int32_t* group_sizes = nullptr;  // [B, num_local_experts]
  void* row_grads = nullptr;     // [B, recv_capacity, row], padding zero
  void* weight_grads = nullptr;  // [B, num_tokens, top_k], as `weights`
};

// The calls, by rank, stay valid until the work is done. INVALID_ARGUMENT if
// their configurations differ.
StatusOr<std::unique_ptr<Work>> MakeDispatch(
    std::span<const DispatchCall* const> calls);
StatusOr<std::unique_ptr<Work>> MakeDeliver(
    std::span<const DeliverCall* const> calls);
StatusOr<std::unique_ptr<Work>> MakeCombine(
    std::span<const CombineCall* const> calls);
StatusOr<std::unique_ptr<Work>> MakeCombineGrad(
    std::span<const CombineGradCall* const> calls);

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_EXCHANGE_H_
