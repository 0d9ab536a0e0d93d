#ifndef TURBOBUS_ENGINE_CUDA_SHARED_CARDS_H_
#define TURBOBUS_ENGINE_CUDA_SHARED_CARDS_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "transport/cuda/cuda_streams.h"
#include "transport/streams.h"

namespace turbobus::engine {

/// CUDA's streams for tests that want more GPUs than the machine has: GPU g is
/// card g modulo their number. A card that lends its link to itself carries
/// each relayed block in over PCIe and on within its own memory, by the calls,
/// events and staging that two cards take. Counts what is made.
class SharedCards : public transport::Streams {
 public:
  using Stream = transport::Stream;
  using Event = transport::Event;

  SharedCards(std::unique_ptr<transport::cuda::CudaStreams> cards, int num_gpus)
      : cards_(std::move(cards)), num_gpus_(num_gpus) {}

  int num_made() const { return num_made_; }

  int num_gpus() const override { return num_gpus_; }
  int64_t NowNs() const override { return cards_->NowNs(); }
  StatusOr<Stream> CreateStream(int gpu) override {
    ++num_made_;
    return cards_->CreateStream(Card(gpu));
  }
  StatusOr<Event> CreateEvent(int gpu, bool is_timed) override {
    ++num_made_;
    return cards_->CreateEvent(Card(gpu), is_timed);
  }
  StatusOr<void*> AllocateDevice(int gpu, int64_t size_bytes) override {
    ++num_made_;
    return cards_->AllocateDevice(Card(gpu), size_bytes);
  }
  StatusOr<void*> AllocatePinnedHost(int64_t size_bytes) override {
    ++num_made_;
    return cards_->AllocatePinnedHost(size_bytes);
  }
  void Free(void* memory) override {
    --num_made_;
    cards_->Free(memory);
  }
  Status EnablePeerAccess(int relay, int gpu) override {
    if (Card(relay) == Card(gpu)) return OkStatus();
    return cards_->EnablePeerAccess(Card(relay), Card(gpu));
  }
  Status LockLender(int gpu) override { return cards_->LockLender(Card(gpu)); }
  Status Record(int gpu, Event event, Stream stream) override {
    return cards_->Record(Card(gpu), event, stream);
  }
  Status Wait(Stream stream, Event event) override {
    return cards_->Wait(stream, event);
  }
  using Streams::Copy;
  Status Copy(Stream stream, void* dst, const void* src, int64_t size_bytes,
              transport::CopyKind kind) override {
    return cards_->Copy(stream, dst, src, size_bytes, kind);
  }
  Status Yield(int gpu, Stream stream) override {
    return cards_->Yield(Card(gpu), stream);
  }
  Status CopyRow(int gpu, Stream stream,
                 const transport::RowCopy& copy) override {
    return cards_->CopyRow(Card(gpu), stream, copy);
  }
  StatusOr<bool> IsDone(Event event) override { return cards_->IsDone(event); }
  StatusOr<int64_t> ElapsedNs(Event from, Event to) override {
    return cards_->ElapsedNs(from, to);
  }
  transport::MemoryKind KindOf(const void* pointer) override {
    return cards_->KindOf(pointer);
  }
  Status CheckPeerAccess(int relay, const void* device_pointer) override {
    return cards_->CheckPeerAccess(Card(relay), device_pointer);
  }

 private:
  int Card(int gpu) const { return gpu % cards_->num_gpus(); }

  const std::unique_ptr<transport::cuda::CudaStreams> cards_;
  const int num_gpus_;
  int num_made_ = 0;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_CUDA_SHARED_CARDS_H_
