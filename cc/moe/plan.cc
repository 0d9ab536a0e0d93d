#include "moe/plan.h"

#include <algorithm>
#include <numeric>

namespace turbobus::moe {
namespace {

/// The highest level to which `sizes` can be cut so that they sum to at most
/// `capacity`.
int64_t HighestLevel(std::span<const int64_t> sizes, int64_t capacity) {
  std::vector<int64_t> ascending(sizes.begin(), sizes.end());
  std::sort(ascending.begin(), ascending.end());
  int64_t left = capacity;
  for (size_t i = 0; i < ascending.size(); ++i) {
    const int64_t num_fuller = ascending.size() - i;
    if (ascending[i] * num_fuller > left) return left / num_fuller;
    left -= ascending[i];
  }
  return ascending.empty() ? 0 : ascending.back();
}

}  // namespace

void CountChoices(const ExchangeShape& shape,
                  std::span<const int32_t> expert_ids, std::span<int32_t> slots,
                  std::span<int32_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const int32_t* choices = &expert_ids[t * shape.top_k];
    int32_t* places = &slots[t * shape.top_k];
    for (int j = 0; j < shape.top_k; ++j) {
      places[j] = kNoRow;
      if (!shape.has_expert(choices[j])) continue;
      const int32_t* same = std::find(choices, choices + j, choices[j]);
      places[j] =
          same < choices + j ? places[same - choices] : counts[choices[j]]++;
    }
  }
}

RowPlan::RowPlan(const ExchangeShape& shape,
                 std::span<const int32_t* const> counts)
    : num_experts_(shape.num_experts),
      wanted_(shape.num_experts, 0),
      kept_(shape.num_experts),
      first_row_(shape.num_experts),
      before_(static_cast<int64_t>(shape.num_ranks) * shape.num_experts) {
  for (int source = 0; source < shape.num_ranks; ++source) {
    int64_t* before = &before_[static_cast<int64_t>(source) * num_experts_];
    for (int e = 0; e < num_experts_; ++e) {
      before[e] = wanted_[e];
      wanted_[e] += counts[source][e];
    }
  }
  for (int rank = 0; rank < shape.num_ranks; ++rank) Keep(shape, rank);
}

void RowPlan::Keep(const ExchangeShape& shape, int rank) {
  const int num_local = shape.num_local_experts();
  const int first = rank * num_local;
  const std::span<const int64_t> wanted(&wanted_[first], num_local);
  const int64_t total =
      std::accumulate(wanted.begin(), wanted.end(), int64_t{0});
  int64_t level = shape.expert_capacity;
  int64_t num_over = 0;  // Rows that the level leaves over.
  if (!shape.is_padded()) {
    level = HighestLevel(wanted, shape.recv_capacity);
    int64_t num_kept = 0;
    for (int64_t w : wanted) num_kept += std::min(w, level);
    num_over = std::min(total, shape.recv_capacity) - num_kept;
  }
  int64_t row = 0;
  for (int e = first; e < first + num_local; ++e) {
    kept_[e] = std::min(wanted_[e], level);
    if (wanted_[e] > level && num_over > 0) {
      ++kept_[e];
      --num_over;
    }
    first_row_[e] =
        shape.is_padded() ? (e - first) * shape.expert_capacity : row;
    row += kept_[e];
  }
}

std::vector<RowRange> PaddingRows(const ExchangeShape& shape,
                                  std::span<const int32_t> group_sizes) {
  std::vector<RowRange> padding;
  const auto add = [&](int64_t begin, int64_t end) {
    if (begin < end) padding.push_back({begin, end});
  };
  int64_t row = 0;
  for (int32_t size : group_sizes) {
    const int64_t limit =
        shape.is_padded() ? shape.expert_capacity : shape.recv_capacity - row;
    const int64_t kept = std::clamp<int64_t>(size, 0, limit);
    if (shape.is_padded()) {
      add(row + kept, row + shape.expert_capacity);
      row += shape.expert_capacity;
    } else {
      row += kept;
    }
  }
  if (!shape.is_padded()) add(row, shape.recv_capacity);
  return padding;
}

}  // namespace turbobus::moe
