#include "moe/cuda/side_streams.h"

#include <algorithm>
#include <string>
#include <utility>

namespace turbobus::moe::cuda {
namespace {

constexpr int64_t kAlignment = 256;

Status Wait(cudaStream_t stream, const SharedEvent& event) {
  return FromCuda(cudaStreamWaitEvent(stream, event.get(), 0),
                  "cudaStreamWaitEvent");
}

}  // namespace

StatusOr<std::unique_ptr<SideStreams::Lane>> SideStreams::Lane::Create() {
  int least = 0;
  int greatest = 0;
  TB_RETURN_IF_ERROR(
      FromCuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
               "cudaDeviceGetStreamPriorityRange"));
  cudaStream_t stream = nullptr;
  // An exchange's few blocks go before the experts' many: others wait for it.
  TB_RETURN_IF_ERROR(FromCuda(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
      "cudaStreamCreateWithPriority"));
  return std::unique_ptr<Lane>(new Lane(stream));
}

StatusOr<void*> SideStreams::Lane::Allocate(int64_t size_bytes) {
  const int64_t wanted = std::max(size_bytes, kAlignment);
  if (used_bytes_ + wanted > block_bytes_) {
    // The old block stays: freeing it would wait for the device. Doubling keeps
    // all of them below twice what is needed.
    const int64_t bytes = std::max(wanted, 2 * block_bytes_);
    void* block = nullptr;
    if (const cudaError_t error = cudaMalloc(&block, bytes);
        error != cudaSuccess) {
      (void)cudaGetLastError();
      return ResourceExhausted(
          "no " + std::to_string(bytes) +
          " bytes of device memory for an exchange beside the experts (" +
          cudaGetErrorName(error) +
          "); leave more to it, by XLA_PYTHON_CLIENT_MEM_FRACTION for example");
    }
    block_ = static_cast<uint8_t*>(block);
    block_bytes_ = bytes;
    used_bytes_ = 0;
  }
  void* const result = block_ + used_bytes_;
  used_bytes_ += (wanted + kAlignment - 1) / kAlignment * kAlignment;
  return result;
}

SideStreams& SideStreams::Process() {
  static auto* const streams = new SideStreams;
  return *streams;
}

StatusOr<std::unique_ptr<SideStreams::Lane>> SideStreams::TakeLane(int device) {
  {
    const std::lock_guard lock(mutex_);
    // The one that was used longest ago: what was started last may be long
    // under way when the next exchange can begin.
    std::deque<std::unique_ptr<Lane>>& lanes = free_[device];
    if (num_lanes_[device] >= lanes_a_device_ && !lanes.empty()) {
      std::unique_ptr<Lane> lane = std::move(lanes.front());
      lanes.pop_front();
      lane->used_bytes_ = 0;
      return lane;
    }
    ++num_lanes_[device];
  }
  return Lane::Create();
}

StatusOr<SideStreams::Start> SideStreams::Prepare(const Program& program) {
  EventPool& events = EventPool::Process();
  TB_ASSIGN_OR_RETURN(const SharedEvent begin,
                      events.Record(program.device, program.stream));
  Start start;
  TB_ASSIGN_OR_RETURN(start.end, events.Take(program.device));
  TB_ASSIGN_OR_RETURN(start.lane, TakeLane(program.device));
  if (const Status status = Wait(start.lane->stream(), begin); !status.ok()) {
    const std::lock_guard lock(mutex_);
    free_[program.device].push_back(std::move(start.lane));
    return status;
  }
  return start;
}

Status SideStreams::Run(
    const Program& program, const std::vector<const void*>& results,
    const std::function<Status(const StatusOr<Lane*>&)>& enqueue) {
  StatusOr<Start> start = Prepare(program);
  if (!start.ok()) {
    const Status told = enqueue(start.status());
    return told.ok() ? start.status() : told;
  }
  std::unique_ptr<Lane> lane = std::move(start->lane);
  SharedEvent end = std::move(start->end);
  // From here on nothing returns before the lane is back and its end recorded.
  Status status = enqueue(lane.get());
  const Status recorded =
      FromCuda(cudaEventRecord(end.get(), lane->stream()), "cudaEventRecord");
  if (status.ok()) status = recorded;
  const std::lock_guard lock(mutex_);
  free_[program.device].push_back(std::move(lane));
  under_way_.push_back({program, results, std::move(end)});
  return status;
}

Status SideStreams::Join(const Program& program,
                         const std::vector<const void*>& results) {
  SharedEvent end;
  {
    const std::lock_guard lock(mutex_);
    const auto it = std::ranges::find_if(under_way_, [&](const UnderWay& one) {
      return one.IsOf(program) && one.results == results;
    });
    if (it != under_way_.end()) {
      end = std::move(it->end);
      under_way_.erase(it);
    }
  }
  if (end == nullptr) {
    return FailedPrecondition(
        "no exchange with these results is under way: XLA copied or moved what "
        "an unfinished exchange writes; please report the program");
  }
  return Wait(program.stream, end);
}

void SideStreams::Leave(const Program& program) {
  std::vector<SharedEvent> ends;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(under_way_, [&](UnderWay& one) {
      if (!one.IsOf(program)) return false;
      ends.push_back(std::move(one.end));
      return true;
    });
  }
  // If this fails the device is lost, and nothing is written any more.
  for (const SharedEvent& end : ends) (void)Wait(program.stream, end);
}

int64_t SideStreams::num_under_way() {
  const std::lock_guard lock(mutex_);
  return std::ssize(under_way_);
}

}  // namespace turbobus::moe::cuda
