#ifndef TURBOBUS_MOE_RAGGED_ROWS_H_
#define TURBOBUS_MOE_RAGGED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/ragged_plan.h"

namespace turbobus::moe {

/// What a row is made of, as far as adding rows needs to know. Complex numbers
/// are two reals.
enum class RowElement { kFloat64, kFloat32, kFloat16, kBfloat16 };

int64_t ElementBytes(RowElement element);

/// Copies `runs` (as `RunsInto` returns them) out of the ranks' operands, one
/// pointer a rank, into `result`. Rows that no run writes are left alone.
/// Synchronous; runs of different receivers may be pulled at the same time.
void PullRows(std::span<const RaggedRun> runs, int64_t row_bytes,
              std::span<const std::byte* const> operands, std::byte* result);

/// The transpose of what one rank sends: for each row of its operand, the sum
/// of the `cotangents` (one pointer a rank) of the result rows it was sent to,
/// zero if to none. `runs` as `RunsFrom` returns them. They are added in the
/// order of the slices; half precision in float32, rounded once. Synchronous.
void SumRows(std::span<const RaggedRun> runs, RowElement element,
             int64_t row_bytes, int64_t begin, int64_t end,
             std::span<const std::byte* const> cotangents, std::byte* result);

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_RAGGED_ROWS_H_
