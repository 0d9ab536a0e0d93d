#ifndef TURBOBUS_MOE_RAGGED_PLAN_H_
#define TURBOBUS_MOE_RAGGED_PLAN_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace turbobus::moe {

/// Consecutive rows that go from one rank's operand to another's result.
struct RaggedRun {
  int source = 0;
  int destination = 0;
  int64_t operand_row = 0;
  int64_t output_row = 0;
  int64_t num_rows = 0;
  int slice = 0;  // The source's slice that it is of, or a part of.

  friend bool operator==(const RaggedRun&, const RaggedRun&) = default;
};

/// One slice of one rank, as the ranks' tables have it.
struct RaggedSlice {
  int rank = 0;
  int slice = 0;
  int slices_per_rank = 1;
  int64_t input_offset = 0;
  int64_t send_size = 0;
  int64_t output_offset = 0;
  int64_t recv_size = 0;  // What its receiver expects of it.
};

/// INVALID_ARGUMENT, naming rank and slice, if it leaves the operand or the
/// result, or if its receiver expects another size.
Status CheckRaggedSlice(const RaggedSlice& slice, int64_t operand_rows,
                        int64_t output_rows);

/// What all ranks of a ragged exchange want, as it came through an all-gather:
/// `int32[num_ranks, 4, num_slices]`, the four being input offsets, send sizes,
/// output offsets and receive sizes. Slice i of a rank goes to rank
/// i / (num_slices / num_ranks). Every rank holds the same table, so all of
/// them come to the same verdict and the same runs without talking.
///
/// A view: the table must outlive it. Immutable, so safe to share.
class RaggedTable {
 public:
  /// `fields` holds num_ranks * 4 * num_slices integers; num_slices is a
  /// multiple of num_ranks.
  RaggedTable(std::span<const int32_t> fields, int num_ranks, int num_slices);

  int num_ranks() const { return num_ranks_; }

  /// INVALID_ARGUMENT, naming rank and slice, if a slice leaves the operand or
  /// the result, or if a rank expects another size than it is sent.
  Status Check(int64_t operand_rows, int64_t output_rows) const;

  /// The runs that arrive at `rank`, disjoint and in the order of its rows.
  /// Where two slices meet, the one from the later (source, slice) wins. Only
  /// for a table that passed `Check`.
  std::vector<RaggedRun> RunsInto(int rank) const;

  /// The runs that leave `rank` and are kept by their receivers, by
  /// destination.
  std::vector<RaggedRun> RunsFrom(int rank) const;

 private:
  enum Field { kInputOffset = 0, kSendSize, kOutputOffset, kRecvSize };

  int64_t At(int rank, Field field, int slice) const {
    return fields_[(int64_t{rank} * 4 + field) * num_slices_ + slice];
  }

  std::span<const int32_t> fields_;
  int num_ranks_;
  int num_slices_;
  int slices_per_rank_;
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_RAGGED_PLAN_H_
