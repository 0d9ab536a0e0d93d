#ifndef TURBOBUS_MOE_RAGGED_PARCELS_H_
#define TURBOBUS_MOE_RAGGED_PARCELS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "moe/ragged_plan.h"

namespace turbobus::moe {

/// Which way the rows of a ragged exchange go.
enum class ParcelWay {
  kForward,    // From operands into results.
  kTranspose,  // The cotangents of results, back to operand rows.
};

/// The sizes that all ranks of the exchange share.
struct ParcelShape {
  int num_ranks = 1;
  int64_t num_batches = 1;
  int64_t operand_rows = 0;
  int64_t output_rows = 0;
};

/// A ragged exchange as one rank sees it where ranks do not reach each other's
/// memory: it packs its rows for each peer one behind the other into *boxes*,
/// takes as many bytes out of the peers' boxes, and moves what came to its
/// places. Only rows that no later slice overwrites travel.
///
/// Boxes hold first the rows for each peer, by rank, then those from each rank,
/// itself included, which it packs there at once. All batches lie behind each
/// other, in the rank's own arrays too.
struct RaggedParcels {
  /// Rows [first, first + num_rows) of this rank's array and as many in boxes.
  struct Piece {
    int64_t row = 0;
    int64_t box_row = 0;
    int64_t num_rows = 0;

    friend bool operator==(const Piece&, const Piece&) = default;
  };
  /// What comes from a peer.
  struct Parcel {
    int64_t peer_box_row = 0;  // Where it begins in the peer's boxes,
    int64_t box_row = 0;       // and in this rank's.
    int64_t num_rows = 0;

    friend bool operator==(const Parcel&, const Parcel&) = default;
  };

  std::vector<Piece> pack;      // Into boxes.
  std::vector<Parcel> parcels;  // By rank; this rank's own is not moved.
  /// Out of boxes. Of a transpose: in the order in which pieces are added.
  std::vector<Piece> unpack;
  int64_t num_box_rows = 0;
};

/// Plans for `rank`. `tables`: one for all batches, or one a batch; each passed
/// `RaggedTable::Check`. All ranks plan from the same tables, so that their
/// boxes fit together.
RaggedParcels PlanParcels(std::span<const RaggedTable> tables,
                          const ParcelShape& shape, ParcelWay way, int rank);

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_RAGGED_PARCELS_H_
