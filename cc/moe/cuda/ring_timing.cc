#include "moe/cuda/ring_timing.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "moe/cuda/events.h"
#include "moe/cuda/transfer.h"
#include "transport/cuda/device_guard.h"

namespace turbobus::moe::cuda {
namespace {

using Clock = std::chrono::steady_clock;

struct Free {
  void operator()(uint8_t* memory) const { (void)cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<uint8_t, Free>;

StatusOr<DeviceMemory> Allocate(int device, int64_t size_bytes) {
  TB_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device), "cudaSetDevice"));
  void* memory = nullptr;
  const cudaError_t error =
      cudaMalloc(&memory, static_cast<size_t>(size_bytes));
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return ResourceExhausted("no " + std::to_string(size_bytes) +
                             " bytes of memory of GPU " +
                             std::to_string(device) + " to measure with (" +
                             cudaGetErrorName(error) + ")");
  }
  DeviceMemory owned(static_cast<uint8_t*>(memory));
  TB_RETURN_IF_ERROR(FromCuda(
      cudaMemset(memory, 0, static_cast<size_t>(size_bytes)), "cudaMemset"));
  // Our streams do not wait for the one that this is done on.
  TB_RETURN_IF_ERROR(FromCuda(cudaDeviceSynchronize(), "cudaMemset"));
  return owned;
}

/// One way and what it needs.
struct Lane {
  Way way;
  DeviceMemory from, to;
  RingPool::Lease ring;
  double seconds = std::numeric_limits<double>::infinity();
  Status status;
};

Status Send(Lane& lane, int64_t size_bytes) {
  std::vector<Transfer> transfers(1);
  Transfer& transfer = transfers[0];
  transfer.from = lane.from.get();
  transfer.to = {lane.to.get()};
  transfer.size_bytes = size_bytes;
  transfer.ring = std::move(lane.ring);
  Status status = Enqueue(transfers);
  if (status.ok()) {
    status = FromCuda(cudaEventSynchronize(transfer.received[0].get()),
                      "an exchange that was measured");
  }
  lane.ring = std::move(transfer.ring);
  return status;
}

}  // namespace

StatusOr<std::vector<double>> TimeWays(const std::vector<Way>& ways,
                                       int64_t size_bytes, RingSize size,
                                       int repeats) {
  if (ways.empty() || size_bytes < 1 || repeats < 1) {
    return InvalidArgument("there is nothing to measure");
  }
  const transport::cuda::DeviceGuard guard;
  RingPool pool;  // Outlives the lanes, whose rings it destroys.
  std::vector<Lane> lanes(ways.size());
  for (size_t i = 0; i < ways.size(); ++i) {
    Lane& lane = lanes[i];
    lane.way = ways[i];
    TB_ASSIGN_OR_RETURN(lane.from, Allocate(lane.way.source, size_bytes));
    TB_ASSIGN_OR_RETURN(lane.to, Allocate(lane.way.reader, size_bytes));
    TB_ASSIGN_OR_RETURN(lane.ring, pool.Take(lane.way.source, {lane.way.reader},
                                             lane.way.path, size));
  }
  std::barrier together(static_cast<std::ptrdiff_t>(lanes.size()));
  {
    std::vector<std::jthread> threads;
    threads.reserve(lanes.size());
    for (Lane& lane : lanes) {
      threads.emplace_back([&together, &lane, size_bytes, repeats] {
        for (int round = 0; round <= repeats; ++round) {
          together.arrive_and_wait();
          const Clock::time_point start = Clock::now();
          lane.status = Send(lane, size_bytes);
          if (!lane.status.ok()) {
            together.arrive_and_drop();
            return;
          }
          const std::chrono::duration<double> spent = Clock::now() - start;
          if (round > 0) lane.seconds = std::min(lane.seconds, spent.count());
        }
      });
    }
  }
  std::vector<double> seconds;
  for (const Lane& lane : lanes) {
    TB_RETURN_IF_ERROR(lane.status);
    seconds.push_back(lane.seconds);
  }
  return seconds;
}

}  // namespace turbobus::moe::cuda
