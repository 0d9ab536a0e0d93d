#ifndef TURBOBUS_MOE_CUDA_RAGGED_H_
#define TURBOBUS_MOE_CUDA_RAGGED_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/cuda/kernels.h"

// The kernels of `ragged_all_to_all` (docs/gpu_exchange.md). Each `Launch…`
// only enqueues on `stream`, on the current device, and returns the launch's
// status. Push reads the peers' tables and writes into their results; sum reads
// the peers' tables and rows, and writes this rank's result. Whatever a table
// says, nothing outside the arrays is touched: a slice that does not fit
// (`CheckRaggedSlice` in moe/ragged_plan.h) moves no row.

namespace turbobus::moe::cuda {

/// Slices of a rank up to which the kernels have room for their bookkeeping.
inline constexpr int kMaxRaggedSlices = 16384;

/// The sizes of a ragged exchange, equal on all its ranks but for `rank`.
struct RaggedSizes {
  int rank = 0;
  int num_ranks = 1;
  int num_slices = 1;  // Of each rank.
  int64_t num_batches = 1;
  int64_t num_tables = 1;  // 1, or one a batch.
  int64_t operand_rows = 0;
  int64_t output_rows = 0;
  int64_t row_bytes = 0;
};

/// A slice that did not fit, as a kernel tells the host of it: in pinned host
/// memory, one of these a device.
struct RaggedFault {
  enum State : int32_t { kNone, kClaimed, kReported };

  int32_t state = kNone;  // Written last.
  int32_t rank = 0;
  int32_t slice = 0;
  int32_t input_offset = 0;
  int32_t send_size = 0;
  int32_t output_offset = 0;
  int32_t recv_size = 0;
  int32_t slices_per_rank = 1;
  int64_t batch = 0;
  int64_t num_tables = 1;
  int64_t operand_rows = 0;
  int64_t output_rows = 0;
  int64_t serial = 0;  // Of the call.
};

/// Where a kernel tells of slices that do not fit, and as part of which call.
struct RaggedReport {
  RaggedFault* fault = nullptr;  // Null: nowhere.
  int64_t serial = 0;
};

struct RaggedPushArgs {
  Peers<const int32_t> tables;  // s32[num_tables, 4, num_slices] of each rank.
  const uint8_t* operand = nullptr;  // [num_batches, operand_rows, row]
  Peers<uint8_t> results;  // [num_batches, output_rows, row] of each rank.
  /// Whether rows that nobody sends are zeroed; else they are left alone.
  bool is_onto_zeros = false;
  void* scratch = nullptr;  // `RaggedPushScratchBytes`.
  RaggedReport report;
};

int64_t RaggedPushScratchBytes(const RaggedSizes& sizes);

/// Writes this rank's slices into the peers' results, and zeroes rows of its
/// own that nobody sends. Where slices meet, the one of the later rank, then
/// the later slice, wins: nothing else is written there.
cudaError_t LaunchRaggedPush(const RaggedSizes& sizes,
                             const RaggedPushArgs& args, cudaStream_t stream);

struct RaggedSumArgs {
  Peers<const int32_t> tables;      // As above.
  Peers<const uint8_t> cotangents;  // [num_batches, output_rows, row] of each.
  uint8_t* result = nullptr;        // [num_batches, operand_rows, row]
  void* scratch = nullptr;          // `RaggedSumScratchBytes`.
};

int64_t RaggedSumScratchBytes(const RaggedSizes& sizes);

/// The transpose of this rank's part in `LaunchRaggedPush`: each operand row
/// gets the sum of the cotangents of the places where it won, in the order of
/// its slices (half precision in float32, rounded once), zero if there is none.
cudaError_t LaunchRaggedSum(const RaggedSizes& sizes, DType dtype,
                            const RaggedSumArgs& args, cudaStream_t stream);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RAGGED_H_
