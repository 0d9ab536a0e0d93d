#ifndef TURBOBUS_MOE_PLAN_H_
#define TURBOBUS_MOE_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

namespace turbobus::moe {

/// The slot of a choice that has no row: masked, or dropped.
inline constexpr int32_t kNoRow = -1;

/// The sizes that all ranks of an exchange share. Rank r owns the experts
/// [r * L, (r + 1) * L), L = num_experts / num_ranks.
struct ExchangeShape {
  int num_ranks = 1;
  int num_experts = 1;        // A multiple of num_ranks.
  int64_t num_tokens = 0;     // On each rank.
  int top_k = 1;              // Choices of a token.
  int64_t recv_capacity = 0;  // Rows of a rank's result.
  // Rows of an expert's part of the result, whose parts all have this size;
  // then recv_capacity = L * expert_capacity. 0: the parts lie packed.
  int64_t expert_capacity = 0;

  int num_local_experts() const { return num_experts / num_ranks; }
  int rank_of(int32_t expert) const { return expert / num_local_experts(); }
  bool has_expert(int32_t id) const { return id >= 0 && id < num_experts; }
  bool is_padded() const { return expert_capacity > 0; }

  friend bool operator==(const ExchangeShape&, const ExchangeShape&) = default;
};

/// True if choice `j` of a token names an expert that an earlier one has named.
/// Such choices share one row.
inline bool IsRepeated(const int32_t* choices, int j) {
  for (int i = 0; i < j; ++i) {
    if (choices[i] == choices[j]) return true;
  }
  return false;
}

/// The half of a plan that needs one rank's ids only. `expert_ids` and `slots`
/// hold top_k choices a token; `counts` one entry an expert.
///
/// Sets counts[e] to the number of this rank's tokens that chose e, and each
/// slot to the place of its token among those (kNoRow where the id is no
/// expert's).
void CountChoices(const ExchangeShape& shape,
                  std::span<const int32_t> expert_ids, std::span<int32_t> slots,
                  std::span<int32_t> counts);

/// Where every row goes: the half that needs the counts of all ranks, and
/// nothing else. Rows of a result are ordered by (local expert, source rank,
/// token).
///
/// Over capacity, an expert keeps a prefix of its rows. With expert_capacity
/// that is each expert's limit. With recv_capacity alone, the fullest experts
/// of the rank are cut to a common level, the highest that fits, and experts of
/// lower index keep one row more where the level leaves some over.
class RowPlan {
 public:
  /// `counts[r]`: one entry an expert, from rank r's `CountChoices`.
  RowPlan(const ExchangeShape& shape, std::span<const int32_t* const> counts);

  /// The row, in the result of the expert's rank, of the source's token that is
  /// the `place`-th to choose `expert`; kNoRow if it is dropped.
  int32_t row(int source, int32_t expert, int32_t place) const {
    const int64_t index =
        before_[static_cast<int64_t>(source) * num_experts_ + expert] + place;
    return index < kept_[expert]
               ? static_cast<int32_t>(first_row_[expert] + index)
               : kNoRow;
  }

  int64_t wanted(int32_t expert) const { return wanted_[expert]; }
  int64_t kept(int32_t expert) const { return kept_[expert]; }
  int64_t first_row(int32_t expert) const { return first_row_[expert]; }

 private:
  void Keep(const ExchangeShape& shape, int rank);

  int num_experts_;
  std::vector<int64_t> wanted_;     // [num_experts]
  std::vector<int64_t> kept_;       // [num_experts]
  std::vector<int64_t> first_row_;  // [num_experts], in the result of its rank
  std::vector<int64_t> before_;  // [num_ranks, num_experts]: lower ranks' rows
};

/// Consecutive rows of a result.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// The rows of a result that belong to no token, given how many each local
/// expert has. Sizes that do not fit the capacity are cut to it.
std::vector<RowRange> PaddingRows(const ExchangeShape& shape,
                                  std::span<const int32_t> group_sizes);

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_PLAN_H_
