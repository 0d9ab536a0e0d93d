#include "moe/ragged_exchange.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "moe/ragged_plan.h"

namespace turbobus::moe {
namespace {

/// Enough to be worth a claim, little enough that threads end together.
constexpr int64_t kPieceBytes = 256 * 1024;

const RaggedMember& AsRagged(const std::unique_ptr<Member>& member) {
  return static_cast<const RaggedMember&>(*member);
}

/// Shared by both directions: the ranks' buffers, moved on to one batch.
class RaggedWork : public Work {
 public:
  explicit RaggedWork(Members members) : shape_(AsRagged(members[0]).shape) {
    for (const auto& member : members) {
      sources_.push_back(AsRagged(member).source);
      results_.push_back(AsRagged(member).result);
    }
  }

 protected:
  int64_t RowsPerPiece() const {
    return std::max<int64_t>(
        1, kPieceBytes / std::max<int64_t>(1, shape_.row_bytes));
  }

  std::vector<const std::byte*> Sources(int64_t batch, int64_t rows) const {
    std::vector<const std::byte*> result = sources_;
    for (const std::byte*& source : result)
      source += batch * rows * shape_.row_bytes;
    return result;
  }

  std::byte* Result(int rank, int64_t batch, int64_t rows) const {
    return results_[rank] + batch * rows * shape_.row_bytes;
  }

  const RaggedShape shape_;

 private:
  std::vector<const std::byte*> sources_;
  std::vector<std::byte*> results_;
};

/// A piece is a few runs into one rank.
class Pull : public RaggedWork {
 public:
  using RaggedWork::RaggedWork;

  int64_t num_pieces() const override {
    return static_cast<int64_t>(pieces_.size());
  }

  void Add(int64_t batch, std::span<const RaggedRun> runs) {
    int64_t room = 0;
    for (RaggedRun run : runs) {
      while (run.num_rows > 0) {
        if (room == 0) {
          pieces_.push_back({.batch = batch, .begin = runs_.size()});
          room = RowsPerPiece();
        }
        RaggedRun part = run;
        part.num_rows = std::min(run.num_rows, room);
        runs_.push_back(part);
        pieces_.back().end = runs_.size();
        run.operand_row += part.num_rows;
        run.output_row += part.num_rows;
        run.num_rows -= part.num_rows;
        room -= part.num_rows;
      }
    }
  }

  void Run(int64_t index) override {
    const Piece& piece = pieces_[index];
    const std::span runs =
        std::span(runs_).subspan(piece.begin, piece.end - piece.begin);
    PullRows(runs, shape_.row_bytes, Sources(piece.batch, shape_.operand_rows),
             Result(runs[0].destination, piece.batch, shape_.output_rows));
  }

 private:
  struct Piece {
    int64_t batch = 0;
    size_t begin = 0;
    size_t end = 0;
  };
  std::vector<RaggedRun> runs_;
  std::vector<Piece> pieces_;
};

/// A piece is a range of one rank's operand rows.
class Sum : public RaggedWork {
 public:
  using RaggedWork::RaggedWork;

  int64_t num_pieces() const override {
    return static_cast<int64_t>(pieces_.size());
  }

  void Add(int64_t batch, int rank, std::vector<RaggedRun> runs) {
    for (int64_t row = 0; row < shape_.operand_rows; row += RowsPerPiece()) {
      pieces_.push_back(
          {.batch = batch,
           .rank = rank,
           .begin = row,
           .end = std::min(shape_.operand_rows, row + RowsPerPiece()),
           .runs = runs_.size()});
    }
    runs_.push_back(std::move(runs));
  }

  void Run(int64_t index) override {
    const Piece& piece = pieces_[index];
    SumRows(runs_[piece.runs], shape_.element, shape_.row_bytes, piece.begin,
            piece.end, Sources(piece.batch, shape_.output_rows),
            Result(piece.rank, piece.batch, shape_.operand_rows));
  }

 private:
  struct Piece {
    int64_t batch = 0;
    int rank = 0;
    int64_t begin = 0;
    int64_t end = 0;
    size_t runs = 0;
  };
  std::vector<std::vector<RaggedRun>> runs_;
  std::vector<Piece> pieces_;
};

Status CheckMembers(Members members) {
  for (size_t rank = 1; rank < members.size(); ++rank) {
    if (!(AsRagged(members[rank]).shape == AsRagged(members[0]).shape)) {
      return FailedPrecondition("ragged_all_to_all: rank " +
                                std::to_string(rank) +
                                " brought other shapes than rank 0; all ranks "
                                "must run the same program");
    }
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::unique_ptr<Work>> MakeRaggedWork(Members members) {
  TB_RETURN_IF_ERROR(CheckMembers(members));
  const RaggedMember& any = AsRagged(members[0]);
  const RaggedShape& shape = any.shape;
  const size_t table_size = size_t{4} * shape.num_ranks * shape.num_slices;
  std::vector<RaggedTable> tables;
  for (int64_t i = 0; i < shape.num_tables; ++i) {
    tables.emplace_back(any.tables.subspan(i * table_size, table_size),
                        shape.num_ranks, shape.num_slices);
    const Status status =
        tables.back().Check(shape.operand_rows, shape.output_rows);
    if (!status.ok() && shape.num_tables > 1) {
      return status.WithContext("batch " + std::to_string(i));
    }
    TB_RETURN_IF_ERROR(status);
  }
  const auto table = [&](int64_t batch) -> const RaggedTable& {
    return tables[shape.num_tables == 1 ? 0 : batch];
  };
  // By rank first: a rank's thread starts with its own share of the pieces.
  if (shape.direction == RaggedDirection::kForward) {
    auto work = std::make_unique<Pull>(members);
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      for (int64_t batch = 0; batch < shape.num_batches; ++batch) {
        work->Add(batch, table(batch).RunsInto(rank));
      }
    }
    return std::unique_ptr<Work>(std::move(work));
  }
  auto work = std::make_unique<Sum>(members);
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    for (int64_t batch = 0; batch < shape.num_batches; ++batch) {
      work->Add(batch, rank, table(batch).RunsFrom(rank));
    }
  }
  return std::unique_ptr<Work>(std::move(work));
}

}  // namespace turbobus::moe
