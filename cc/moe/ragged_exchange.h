#ifndef TURBOBUS_MOE_RAGGED_EXCHANGE_H_
#define TURBOBUS_MOE_RAGGED_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "moe/ragged_rows.h"
#include "moe/rendezvous.h"

namespace turbobus::moe {

enum class RaggedDirection {
  kForward,    // operand rows to their places in the results
  kTranspose,  // cotangents of results back to operand rows, summed
};

/// The sizes of a ragged exchange, equal on all its ranks.
struct RaggedShape {
  RaggedDirection direction = RaggedDirection::kForward;
  int num_ranks = 1;
  int num_slices = 1;
  int64_t num_batches = 1;
  int64_t num_tables = 1;  // 1, or one a batch
  int64_t operand_rows = 0;
  int64_t output_rows = 0;
  int64_t row_bytes = 0;
  RowElement element = RowElement::kFloat32;  // of a transpose

  friend bool operator==(const RaggedShape&, const RaggedShape&) = default;
};

/// What one rank brings. Subclasses say what to do when all is over.
class RaggedMember : public Member {
 public:
  RaggedShape shape;
  /// `int32[num_tables, num_ranks, 4, num_slices]`; see `RaggedTable`.
  std::span<const int32_t> tables;
  /// Forward: `[num_batches, operand_rows]` rows, and the result already holds
  /// what no row overwrites. Transpose: `[num_batches, output_rows]` in,
  /// `[num_batches, operand_rows]` out, whatever was there before.
  const std::byte* source = nullptr;
  std::byte* result = nullptr;
};

/// Plans the exchange of members that are all `RaggedMember`s. INVALID_ARGUMENT
/// if a table asks for rows that are not there, FAILED_PRECONDITION if the
/// ranks brought different shapes.
StatusOr<std::unique_ptr<Work>> MakeRaggedWork(Members members);

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_RAGGED_EXCHANGE_H_
