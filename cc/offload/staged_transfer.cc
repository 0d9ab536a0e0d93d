#include "offload/staged_transfer.h"

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include "engine/engine.h"

namespace turbobus::offload {
namespace {

/// What is read and what is written in the program's stead.
struct Staging {
  std::unique_ptr<std::byte[]> source;
  std::unique_ptr<std::byte[]> destination;
};

}  // namespace

std::shared_ptr<StagedTransfer> StagedTransfer::Start(
    topo::Direction direction, int device, std::vector<Piece> pieces) {
  const std::shared_ptr<StagedTransfer> staged(new StagedTransfer);
  const int64_t size_bytes = TotalBytes(pieces);
  // Asked for once: were it taken out meanwhile, who copies and who lands would
  // disagree about the private memory.
  std::shared_ptr<engine::Engine> engine = engine::ProcessEngine();
  if (size_bytes == 0 || engine == nullptr) {
    staged->transfer_ =
        Transfer::StartOn(nullptr, direction, device, std::move(pieces));
    return staged;
  }
  const auto staging = std::make_shared<Staging>();
  staging->source.reset(new (std::nothrow) std::byte[size_bytes]);
  staging->destination.reset(new (std::nothrow) std::byte[size_bytes]);
  if (staging->source == nullptr || staging->destination == nullptr) {
    staged->transfer_ =
        Transfer::StartOn(nullptr, direction, device, std::move(pieces));
    return staged;
  }
  std::vector<Piece> gather;
  int64_t offset = 0;
  for (const Piece& piece : pieces) {
    gather.push_back(
        {piece.src, staging->source.get() + offset, piece.size_bytes});
    staged->landing_.push_back(
        {staging->destination.get() + offset, piece.dst, piece.size_bytes});
    offset += piece.size_bytes;
  }
  CopyDirectly(gather);
  staged->transfer_ = Transfer::StartOn(
      std::move(engine), direction, device,
      {{staging->source.get(), staging->destination.get(), size_bytes}},
      staging);
  return staged;
}

void StagedTransfer::Land() const { CopyDirectly(landing_); }

}  // namespace turbobus::offload
