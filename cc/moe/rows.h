#ifndef TURBOBUS_MOE_ROWS_H_
#define TURBOBUS_MOE_ROWS_H_

#include <cstdint>

namespace turbobus::moe {

/// Element types that rows are added in. Sums accumulate in float32, those of
/// float64 in float64, and are rounded once.
enum class Element { kF32, kF64, kBF16, kF16 };

int64_t SizeOf(Element element);

/// out[h] = sum over i of weights[i] * rows[i][h], for h in [0, size). No rows
/// give zeros. `weights` null: all are 1; else float, or double for kF64.
/// `out` overlaps no row.
using WeightedSumFn = void (*)(const void* const* rows, const void* weights,
                               int num_rows, int64_t size, void* out);
WeightedSumFn WeightedSum(Element element);

/// out[h] = weight * in[h], and returns the sum over h of in[h] * row[h]. The
/// backward half of `WeightedSum` for one row.
using ScaleAndDotFn = double (*)(const void* in, const void* row, double weight,
                                 int64_t size, void* out);
ScaleAndDotFn ScaleAndDot(Element element);

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_ROWS_H_
