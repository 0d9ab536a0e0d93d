#include "moe/ragged_parcels.h"

#include <algorithm>
#include <utility>

namespace turbobus::moe {
namespace {

/// A run with its batch.
struct BatchRun {
  int64_t batch = 0;
  RaggedRun run;
};

/// What goes from each rank to each other, in the order of boxes.
class Flows {
 public:
  Flows(std::span<const RaggedTable> tables, const ParcelShape& shape,
        ParcelWay way)
      : num_ranks_(shape.num_ranks),
        runs_(static_cast<size_t>(num_ranks_) * num_ranks_),
        num_rows_(runs_.size()) {
    for (int destination = 0; destination < num_ranks_; ++destination) {
      std::vector<RaggedRun> runs;
      for (int64_t batch = 0; batch < shape.num_batches; ++batch) {
        if (batch < static_cast<int64_t>(tables.size())) {
          runs = tables[batch].RunsInto(destination);
        }
        for (const RaggedRun& run : runs) {
          const size_t index = way == ParcelWay::kForward
                                   ? Index(run.source, destination)
                                   : Index(destination, run.source);
          runs_[index].push_back({batch, run});
          num_rows_[index] += run.num_rows;
        }
      }
    }
  }

  const std::vector<BatchRun>& Runs(int from, int to) const {
    return runs_[Index(from, to)];
  }
  int64_t NumRows(int from, int to) const { return num_rows_[Index(from, to)]; }

  /// Where the rows for `to` begin in the boxes of `from`; of itself: where
  /// those for it end.
  int64_t OutRow(int from, int to) const {
    const int last = from == to ? num_ranks_ : to;
    int64_t row = 0;
    for (int r = 0; r < last; ++r) {
      if (r != from) row += NumRows(from, r);
    }
    return row;
  }
  /// Where the rows from `from` begin in the boxes of `to`.
  int64_t InRow(int from, int to) const {
    int64_t row = OutRow(to, to);
    for (int r = 0; r < from; ++r) row += NumRows(r, to);
    return row;
  }

 private:
  size_t Index(int from, int to) const {
    return static_cast<size_t>(from) * num_ranks_ + to;
  }

  const int num_ranks_;
  std::vector<std::vector<BatchRun>> runs_;  // [from, to]
  std::vector<int64_t> num_rows_;            // [from, to]
};

}  // namespace

RaggedParcels PlanParcels(std::span<const RaggedTable> tables,
                          const ParcelShape& shape, ParcelWay way, int rank) {
  const Flows flows(tables, shape, way);
  const auto operand_row = [&](const BatchRun& one) {
    return one.batch * shape.operand_rows + one.run.operand_row;
  };
  const auto output_row = [&](const BatchRun& one) {
    return one.batch * shape.output_rows + one.run.output_row;
  };
  const bool is_forward = way == ParcelWay::kForward;

  RaggedParcels plan;
  for (int to = 0; to < shape.num_ranks; ++to) {
    int64_t box_row =
        to == rank ? flows.InRow(rank, rank) : flows.OutRow(rank, to);
    for (const BatchRun& one : flows.Runs(rank, to)) {
      plan.pack.push_back(
          {.row = is_forward ? operand_row(one) : output_row(one),
           .box_row = box_row,
           .num_rows = one.run.num_rows});
      box_row += one.run.num_rows;
    }
  }
  std::vector<std::pair<int, RaggedParcels::Piece>> unpack;  // By slice.
  for (int from = 0; from < shape.num_ranks; ++from) {
    int64_t box_row = flows.InRow(from, rank);
    plan.parcels.push_back({.peer_box_row = flows.OutRow(from, rank),
                            .box_row = box_row,
                            .num_rows = flows.NumRows(from, rank)});
    for (const BatchRun& one : flows.Runs(from, rank)) {
      unpack.push_back({one.run.slice,
                        {.row = is_forward ? output_row(one) : operand_row(one),
                         .box_row = box_row,
                         .num_rows = one.run.num_rows}});
      box_row += one.run.num_rows;
    }
    plan.num_box_rows = box_row;
  }
  if (!is_forward) {
    std::ranges::stable_sort(unpack, {},
                             [](const auto& one) { return one.first; });
  }
  for (const auto& [slice, piece] : unpack) plan.unpack.push_back(piece);
  return plan;
}

}  // namespace turbobus::moe
