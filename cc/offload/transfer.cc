#include "offload/transfer.h"

#include <cstring>
#include <utility>

#include "offload/plain_traffic.h"
#include "transport/host/memory_copy.h"

namespace turbobus::offload {
void CopyDirectly(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    const auto size = static_cast<size_t>(piece.size_bytes);
    if (piece.size_bytes >= transport::host::kStreamingBytes) {
      // Results of a program are mostly fresh pages, and large ones cost more
      // to map than to copy.
      transport::host::AdviseHugePages(piece.dst, size);
      transport::host::StreamingCopy(piece.dst, piece.src, size);
    } else if (size > 0) {
      std::memcpy(piece.dst, piece.src, size);
    }
  }
}

namespace {

/// Whether a direct copy would hide something that the program should know: it
/// asked to stop, or for what cannot be (a device that the topology lacks).
bool IsForTheProgram(const Status& status) {
  return status.code() == StatusCode::kCancelled ||
         status.code() == StatusCode::kAborted ||
         status.code() == StatusCode::kInvalidArgument;
}

}  // namespace

int64_t TotalBytes(const std::vector<Piece>& pieces) {
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.size_bytes;
  return total;
}

std::shared_ptr<Transfer> Transfer::Start(
    topo::Direction direction, int device, std::vector<Piece> pieces,
    std::shared_ptr<const void> keep_alive) {
  return StartOn(engine::ProcessEngine(), direction, device, std::move(pieces),
                 std::move(keep_alive));
}

std::shared_ptr<Transfer> Transfer::StartOn(
    std::shared_ptr<engine::Engine> engine, topo::Direction direction,
    int device, std::vector<Piece> pieces,
    std::shared_ptr<const void> keep_alive) {
  std::erase_if(pieces, [](const Piece& p) { return p.size_bytes == 0; });
  if (pieces.empty()) {
    return CopyNow(std::move(pieces), std::move(keep_alive));
  }
  if (engine == nullptr) {
    const PlainTraffic traffic(direction, device, TotalBytes(pieces));
    return CopyNow(std::move(pieces), std::move(keep_alive));
  }
  const std::shared_ptr<Transfer> transfer(
      new Transfer(std::move(pieces), std::move(keep_alive)));
  transfer->Submit(engine, direction, device);
  return transfer;
}

std::shared_ptr<Transfer> Transfer::CopyNow(
    std::vector<Piece> pieces, std::shared_ptr<const void> keep_alive) {
  const std::shared_ptr<Transfer> transfer(
      new Transfer(std::move(pieces), std::move(keep_alive)));
  CopyDirectly(transfer->pieces_);
  transfer->Finish(OkStatus());
  return transfer;
}

void Transfer::Submit(const std::shared_ptr<engine::Engine>& engine,
                      topo::Direction direction, int device) {
  {
    const std::lock_guard lock(mutex_);
    num_pending_ = pieces_.size();
  }
  for (const Piece& piece : pieces_) {
    engine::Request request;
    request.gpu = device;
    request.direction = direction;
    request.src = piece.src;
    request.dst = piece.dst;
    request.size_bytes = piece.size_bytes;
    // The engine goes with its last request, on a thread of its own that may
    // wait for it to drain: the thread that started the transfer may not, the
    // programs that the engine would wait for can wait for that thread.
    request.done = [self = shared_from_this(), engine](const Status& status) {
      self->PieceDone(status);
    };
    const auto submitted = engine->Submit(std::move(request));
    if (!submitted.ok()) PieceDone(submitted.status());
  }
}

void Transfer::PieceDone(const Status& status) {
  Status error;
  {
    const std::lock_guard lock(mutex_);
    if (first_error_.ok()) first_error_ = status;
    if (--num_pending_ > 0) return;
    error = first_error_;
  }
  if (!error.ok() && !IsForTheProgram(error)) {
    CopyDirectly(pieces_);
    error = OkStatus();
  }
  Finish(std::move(error));
}

void Transfer::Finish(const Status& status) {
  std::function<void(Status)> callback;
  {
    const std::lock_guard lock(mutex_);
    outcome_ = status;
    callback = std::exchange(callback_, nullptr);
    finished_.notify_all();
  }
  if (callback) callback(status);
}

std::optional<Status> Transfer::outcome() const {
  const std::lock_guard lock(mutex_);
  return outcome_;
}

void Transfer::OnDone(std::function<void(Status)> callback) {
  Status status;
  {
    const std::lock_guard lock(mutex_);
    if (!outcome_.has_value()) {
      callback_ = std::move(callback);
      return;
    }
    status = *outcome_;
  }
  callback(std::move(status));
}

Status Transfer::Wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return outcome_.has_value(); });
  return *outcome_;
}

}  // namespace turbobus::offload
