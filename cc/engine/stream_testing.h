#ifndef TURBOBUS_ENGINE_STREAM_TESTING_H_
#define TURBOBUS_ENGINE_STREAM_TESTING_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "engine/fake_streams.h"
#include "engine/stream_engine.h"

// What tests of the stream engine share.

namespace turbobus::engine {

inline constexpr int64_t kKiB = 1024;

using Buffer = std::vector<std::byte>;

inline Buffer Random(int64_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Buffer buffer(static_cast<size_t>(size));
  for (std::byte& b : buffer) b = static_cast<std::byte>(random());
  return buffer;
}

inline std::vector<topo::Path> AllPaths(int num_gpus) {
  std::vector<topo::Path> paths;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    for (const topo::Direction direction :
         {topo::Direction::kH2d, topo::Direction::kD2h}) {
      for (int relay = topo::kNoRelay; relay < num_gpus; ++relay) {
        if (relay == gpu) continue;
        paths.push_back({.gpu = gpu,
                         .relay = relay,
                         .direction = direction,
                         .bandwidth_bytes_per_s = 50e9,
                         .links = {}});
      }
    }
  }
  return paths;
}

/// Small blocks: everything that pooled transfers do happens on kilobytes.
inline StreamSettings SmallBlocks() {
  return {.block_bytes = 64 * kKiB,
          .min_pooled_bytes = 128 * kKiB,
          .direct_latency_ns = 0,
          .relay_latency_ns = 0};
}

/// A machine of fake GPUs with an engine over all their paths, and a stream of
/// the program's own for each GPU. One thread at a time makes requests.
class Machine {
 public:
  explicit Machine(
      int num_gpus, uint64_t seed = 1, StreamSettings settings = SmallBlocks(),
      const std::function<void(FakeStreams&)>& configure = [](FakeStreams&) {
      }) {
    auto fake = std::make_unique<FakeStreams>(num_gpus, seed);
    streams = fake.get();
    configure(*fake);
    auto made =
        StreamEngine::Create(std::move(fake), AllPaths(num_gpus), settings);
    EXPECT_TRUE(made.ok()) << made.status();
    engine = std::move(made).value();
    for (int gpu = 0; gpu < num_gpus; ++gpu) {
      xla.push_back(*streams->CreateStream(gpu));
    }
  }

  CopyRequest H2d(int gpu, const Buffer& host, Buffer& device) {
    streams->device.insert(device.data());
    return {.call = "h2d",
            .gpu = gpu,
            .direction = topo::Direction::kH2d,
            .stream = xla[gpu],
            .run = 1,
            .src = host.data(),
            .dst = device.data(),
            .size_bytes = static_cast<int64_t>(host.size())};
  }
  CopyRequest D2h(int gpu, const Buffer& device, Buffer& host) {
    streams->device.insert(device.data());
    return {.call = "d2h",
            .gpu = gpu,
            .direction = topo::Direction::kD2h,
            .stream = xla[gpu],
            .run = 1,
            .src = device.data(),
            .dst = host.data(),
            .size_bytes = static_cast<int64_t>(device.size())};
  }
  DoneRequest DoneOf(const CopyRequest& start) {
    return {.call = "done",
            .gpu = start.gpu,
            .stream = start.stream,
            .run = start.run,
            .buffer = start.dst};
  }
  LeaveRequest LeaveOf(const CopyRequest& start) {
    return {.gpu = start.gpu, .stream = start.stream, .run = start.run};
  }
  RowRequest Row(int gpu, Buffer& stack, int32_t num_rows, int32_t& index,
                 Buffer& row, bool is_store = false) {
    streams->device.insert(row.data());
    streams->device.insert(&index);
    transport::RowCopy copy;
    copy.stack = stack.data();
    copy.row = row.data();
    copy.index = &index;
    copy.num_rows = num_rows;
    copy.piece_bytes = static_cast<int64_t>(row.size());
    copy.stride_bytes = static_cast<int64_t>(stack.size());
    copy.is_store = is_store;
    return {
        .call = "row", .gpu = gpu, .stream = xla[gpu], .run = 1, .row = copy};
  }
  int64_t BytesOver(int gpu, int relay) {
    int64_t bytes = 0;
    for (const PathStats& path : engine->stats().paths) {
      if (path.path.gpu == gpu && path.path.relay == relay) {
        bytes += path.size_bytes;
      }
    }
    return bytes;
  }

  FakeStreams* streams;
  std::unique_ptr<StreamEngine> engine;
  std::vector<transport::Stream> xla;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_STREAM_TESTING_H_
