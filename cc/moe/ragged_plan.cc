#include "moe/ragged_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace turbobus::moe {
namespace {

bool StartsEarlier(const RaggedRun& a, const RaggedRun& b) {
  return a.output_row < b.output_row;
}

/// Rows already taken, as disjoint intervals [first, second).
class Taken {
 public:
  /// Takes [begin, end); calls `fresh(b, e)` for each part that was still free.
  template <typename Fresh>
  void Take(int64_t begin, int64_t end, Fresh fresh) {
    if (begin >= end) return;
    auto it = rows_.upper_bound(begin);
    if (it != rows_.begin() && std::prev(it)->second > begin) --it;
    int64_t at = begin;
    int64_t new_begin = begin;
    int64_t new_end = end;
    while (it != rows_.end() && it->first < end) {
      if (at < it->first) fresh(at, it->first);
      at = std::max(at, it->second);
      new_begin = std::min(new_begin, it->first);
      new_end = std::max(new_end, it->second);
      it = rows_.erase(it);
    }
    if (at < end) fresh(at, end);
    rows_[new_begin] = new_end;
  }

 private:
  std::map<int64_t, int64_t> rows_;
};

/// Cuts away what later runs overwrite. `runs` are in the order of writing.
std::vector<RaggedRun> KeepLastWriters(const std::vector<RaggedRun>& runs) {
  std::vector<RaggedRun> kept;
  Taken taken;
  for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
    taken.Take(run->output_row, run->output_row + run->num_rows,
               [&](int64_t begin, int64_t end) {
                 RaggedRun part = *run;
                 part.operand_row += begin - run->output_row;
                 part.output_row = begin;
                 part.num_rows = end - begin;
                 kept.push_back(part);
               });
  }
  std::sort(kept.begin(), kept.end(), StartsEarlier);
  return kept;
}

}  // namespace

Status CheckRaggedSlice(const RaggedSlice& slice, int64_t operand_rows,
                        int64_t output_rows) {
  const int peer = slice.slice / slice.slices_per_rank;
  const int64_t size = slice.send_size;
  const auto text = [](int64_t number) { return std::to_string(number); };
  std::string what;
  if (size < 0) {
    what = "send_sizes must not be negative, got " + text(size);
  } else if (slice.input_offset < 0 ||
             (size > 0 && slice.input_offset + size > operand_rows)) {
    what = "input_offsets and send_sizes must stay within the operand's " +
           text(operand_rows) + " rows, got " + text(size) + " rows from row " +
           text(slice.input_offset);
  } else if (slice.output_offset < 0 ||
             (size > 0 && slice.output_offset + size > output_rows)) {
    what = "output_offsets and send_sizes must stay within the result's " +
           text(output_rows) + " rows, got " + text(size) + " rows to row " +
           text(slice.output_offset);
  } else if (slice.recv_size != size) {
    const int back = slice.rank * slice.slices_per_rank +
                     slice.slice % slice.slices_per_rank;
    what = "it sends " + text(size) + " rows, but rank " + text(peer) +
           " expects recv_sizes[" + text(back) +
           "] = " + text(slice.recv_size) +
           "; recv_sizes must be the all_to_all of send_sizes";
  } else {
    return OkStatus();
  }
  return InvalidArgument("ragged_all_to_all: slice " + text(slice.slice) +
                         " of rank " + text(slice.rank) + ", for rank " +
                         text(peer) + ": " + what);
}

RaggedTable::RaggedTable(std::span<const int32_t> fields, int num_ranks,
                         int num_slices)
    : fields_(fields),
      num_ranks_(num_ranks),
      num_slices_(num_slices),
      slices_per_rank_(num_slices / num_ranks) {}

Status RaggedTable::Check(int64_t operand_rows, int64_t output_rows) const {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (int slice = 0; slice < num_slices_; ++slice) {
      const int peer = slice / slices_per_rank_;
      const int back = rank * slices_per_rank_ + slice % slices_per_rank_;
      TB_RETURN_IF_ERROR(
          CheckRaggedSlice({.rank = rank,
                            .slice = slice,
                            .slices_per_rank = slices_per_rank_,
                            .input_offset = At(rank, kInputOffset, slice),
                            .send_size = At(rank, kSendSize, slice),
                            .output_offset = At(rank, kOutputOffset, slice),
                            .recv_size = At(peer, kRecvSize, back)},
                           operand_rows, output_rows));
    }
  }
  return OkStatus();
}

std::vector<RaggedRun> RaggedTable::RunsInto(int rank) const {
  std::vector<RaggedRun> runs;
  for (int source = 0; source < num_ranks_; ++source) {
    for (int i = 0; i < slices_per_rank_; ++i) {
      const int slice = rank * slices_per_rank_ + i;
      const int64_t num_rows = At(source, kSendSize, slice);
      if (num_rows == 0) continue;
      runs.push_back({.source = source,
                      .destination = rank,
                      .operand_row = At(source, kInputOffset, slice),
                      .output_row = At(source, kOutputOffset, slice),
                      .num_rows = num_rows,
                      .slice = slice});
    }
  }
  std::vector<RaggedRun> sorted = runs;
  std::sort(sorted.begin(), sorted.end(), StartsEarlier);
  const auto meet = [](const RaggedRun& a, const RaggedRun& b) {
    return a.output_row + a.num_rows > b.output_row;
  };
  const bool is_disjoint =
      std::adjacent_find(sorted.begin(), sorted.end(), meet) == sorted.end();
  return is_disjoint ? sorted : KeepLastWriters(runs);
}

std::vector<RaggedRun> RaggedTable::RunsFrom(int rank) const {
  std::vector<RaggedRun> result;
  for (int destination = 0; destination < num_ranks_; ++destination) {
    for (const RaggedRun& run : RunsInto(destination)) {
      if (run.source == rank) result.push_back(run);
    }
  }
  const auto key = [](const RaggedRun& run) {
    return std::tuple(run.operand_row, run.destination, run.output_row);
  };
  std::sort(
      result.begin(), result.end(),
      [&](const RaggedRun& a, const RaggedRun& b) { return key(a) < key(b); });
  return result;
}

}  // namespace turbobus::moe
