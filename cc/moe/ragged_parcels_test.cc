#include "moe/ragged_parcels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace turbobus::moe {
namespace {

using Rows = std::vector<int>;
using Piece = RaggedParcels::Piece;

/// Random tables of a few batches; slices meet in operands and in results.
class Problem {
 public:
  Problem(ParcelShape sizes, int num_tables, int each, unsigned seed)
      : shape(sizes), num_slices(each * sizes.num_ranks), random_(seed) {
    for (int t = 0; t < num_tables; ++t) {
      fields_.push_back(MakeTable(each));
    }
    for (const std::vector<int32_t>& fields : fields_) {
      tables.emplace_back(fields, shape.num_ranks, num_slices);
      EXPECT_TRUE(
          tables.back().Check(shape.operand_rows, shape.output_rows).ok());
    }
  }

  const RaggedTable& Table(int64_t batch) const {
    return tables[tables.size() == 1 ? 0 : batch];
  }

  const ParcelShape shape;
  const int num_slices;
  std::vector<RaggedTable> tables;

 private:
  int Below(int64_t limit) { return static_cast<int>(random_() % limit); }

  std::vector<int32_t> MakeTable(int each) {
    std::vector<int32_t> fields(size_t{4} * shape.num_ranks * num_slices);
    const auto at = [&](int rank, int field, int slice) -> int32_t& {
      return fields[(rank * 4 + field) * num_slices + slice];
    };
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      for (int slice = 0; slice < num_slices; ++slice) {
        const int size =
            Below(3) == 0
                ? 0
                : Below(std::min(shape.operand_rows, shape.output_rows) / 2);
        at(rank, 0, slice) = Below(shape.operand_rows - size + 1);
        at(rank, 1, slice) = size;
        at(rank, 2, slice) = Below(shape.output_rows - size + 1);
        at(slice / each, 3, rank * each + slice % each) = size;
      }
    }
    return fields;
  }

  std::mt19937 random_;
  std::vector<std::vector<int32_t>> fields_;
};

/// All ranks' boxes after packing and moving, and the plans.
struct Moved {
  std::vector<RaggedParcels> plans;
  std::vector<Rows> boxes;
};

Moved Move(const Problem& problem, ParcelWay way,
           const std::vector<Rows>& sources) {
  Moved moved;
  for (int rank = 0; rank < problem.shape.num_ranks; ++rank) {
    const RaggedParcels& plan = moved.plans.emplace_back(
        PlanParcels(problem.tables, problem.shape, way, rank));
    Rows& boxes = moved.boxes.emplace_back(plan.num_box_rows, -7);
    for (const Piece& piece : plan.pack) {
      std::copy_n(sources[rank].begin() + piece.row, piece.num_rows,
                  boxes.begin() + piece.box_row);
    }
  }
  const std::vector<Rows> packed = moved.boxes;
  for (int rank = 0; rank < problem.shape.num_ranks; ++rank) {
    for (int peer = 0; peer < problem.shape.num_ranks; ++peer) {
      if (peer == rank) continue;
      const RaggedParcels::Parcel& parcel = moved.plans[rank].parcels[peer];
      std::copy_n(packed[peer].begin() + parcel.peer_box_row, parcel.num_rows,
                  moved.boxes[rank].begin() + parcel.box_row);
    }
  }
  return moved;
}

std::vector<Rows> Numbered(int num_ranks, int64_t num_rows) {
  std::vector<Rows> all(num_ranks, Rows(num_rows));
  int next = 1;
  for (Rows& rows : all) {
    for (int& row : rows) row = next++;
  }
  return all;
}

class RaggedParcelsTest : public ::testing::TestWithParam<int> {
 protected:
  Problem Make(int num_tables) const {
    const int num_ranks = GetParam();
    return {{.num_ranks = num_ranks,
             .num_batches = 3,
             .operand_rows = 23,
             .output_rows = 31},
            num_tables,
            /*each=*/2,
            static_cast<unsigned>(num_ranks)};
  }
};

TEST_P(RaggedParcelsTest, ForwardWritesWhatRowByRowWritingWrites) {
  for (const int num_tables : {1, 3}) {
    const Problem problem = Make(num_tables);
    const ParcelShape& shape = problem.shape;
    const std::vector<Rows> operands =
        Numbered(shape.num_ranks, shape.num_batches * shape.operand_rows);
    const Moved moved = Move(problem, ParcelWay::kForward, operands);
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      Rows want(shape.num_batches * shape.output_rows, -1);
      Rows got = want;
      for (int64_t batch = 0; batch < shape.num_batches; ++batch) {
        for (const RaggedRun& run : problem.Table(batch).RunsInto(rank)) {
          std::copy_n(
              operands[run.source].begin() + batch * shape.operand_rows +
                  run.operand_row,
              run.num_rows,
              want.begin() + batch * shape.output_rows + run.output_row);
        }
      }
      for (const Piece& piece : moved.plans[rank].unpack) {
        std::copy_n(moved.boxes[rank].begin() + piece.box_row, piece.num_rows,
                    got.begin() + piece.row);
      }
      EXPECT_EQ(got, want) << "rank " << rank;
    }
  }
}

TEST_P(RaggedParcelsTest, TransposeAddsEveryPlaceInTheOrderOfSlices) {
  for (const int num_tables : {1, 3}) {
    const Problem problem = Make(num_tables);
    const ParcelShape& shape = problem.shape;
    const std::vector<Rows> cotangents =
        Numbered(shape.num_ranks, shape.num_batches * shape.output_rows);
    const Moved moved = Move(problem, ParcelWay::kTranspose, cotangents);
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      // By operand row: what is added there, in order.
      std::vector<Rows> want(shape.num_batches * shape.operand_rows);
      std::vector<Rows> got = want;
      for (int64_t batch = 0; batch < shape.num_batches; ++batch) {
        std::vector<RaggedRun> runs = problem.Table(batch).RunsFrom(rank);
        std::ranges::stable_sort(runs, {}, &RaggedRun::slice);
        for (const RaggedRun& run : runs) {
          for (int64_t i = 0; i < run.num_rows; ++i) {
            want[batch * shape.operand_rows + run.operand_row + i].push_back(
                cotangents[run.destination]
                          [batch * shape.output_rows + run.output_row + i]);
          }
        }
      }
      for (const Piece& piece : moved.plans[rank].unpack) {
        for (int64_t i = 0; i < piece.num_rows; ++i) {
          got[piece.row + i].push_back(moved.boxes[rank][piece.box_row + i]);
        }
      }
      EXPECT_EQ(got, want) << "rank " << rank;
    }
  }
}

TEST_P(RaggedParcelsTest, OnlyRowsThatAreKeptTravel) {
  const Problem problem = Make(1);
  const ParcelShape& shape = problem.shape;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    int64_t kept = 0;
    for (const RaggedRun& run : problem.tables[0].RunsInto(rank)) {
      kept += run.num_rows;
    }
    const RaggedParcels plan =
        PlanParcels(problem.tables, shape, ParcelWay::kForward, rank);
    int64_t arrived = 0;
    for (const RaggedParcels::Parcel& parcel : plan.parcels) {
      arrived += parcel.num_rows;
    }
    EXPECT_EQ(arrived, shape.num_batches * kept);
    EXPECT_LE(kept, shape.output_rows);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RaggedParcelsTest,
                         ::testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace turbobus::moe
