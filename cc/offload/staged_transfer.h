#ifndef TURBOBUS_OFFLOAD_STAGED_TRANSFER_H_
#define TURBOBUS_OFFLOAD_STAGED_TRANSFER_H_

#include <memory>
#include <vector>

#include "offload/transfer.h"
#include "topo/path.h"

namespace turbobus::offload {

/// A transfer whose end the program may never see: between its start and its
/// done another operation can fail, and the program's buffers go while bytes
/// still move. XLA's CPU backend tells nobody, so an engine moves private
/// copies, and the bytes land in the program's buffer when the program asks for
/// them.
///
/// Without an engine the bytes are in place when `Start` returns, and nothing
/// is copied twice. Thread-safe, but `Land` belongs to whoever calls done.
class StagedTransfer {
 public:
  static std::shared_ptr<StagedTransfer> Start(topo::Direction direction,
                                               int device,
                                               std::vector<Piece> pieces);

  const std::shared_ptr<Transfer>& transfer() const { return transfer_; }

  /// Puts the bytes where `pieces` said; to be called once, after the transfer
  /// has ended well, while those buffers are still there.
  void Land() const;

 private:
  StagedTransfer() = default;

  std::shared_ptr<Transfer> transfer_;
  std::vector<Piece> landing_;  // from private memory; empty if there is none
};

}  // namespace turbobus::offload

#endif  // TURBOBUS_OFFLOAD_STAGED_TRANSFER_H_
