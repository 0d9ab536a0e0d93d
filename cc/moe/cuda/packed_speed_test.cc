#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/transfer.h"

// How fast GPUs that do not reach each other exchange, printed for people. Two
// ranks that share a GPU share its link: each has half of what it would have.

namespace turbobus::moe::cuda {
namespace {

using testing::DeviceBytes;
using testing::OnRanks;
using testing::Ranks;
using testing::ToBytes;
using Clock = std::chrono::steady_clock;

[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

constexpr int kRanks = 2;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Wiring Apart(bool has_mail, bool is_broadcast) {
  Wiring wiring;
  wiring.is_direct = false;
  wiring.most_mailed_bytes = has_mail ? int64_t{4} << 20 : -1;
  wiring.is_broadcast = is_broadcast;
  for (int r = 0; r < kRanks; ++r)
    wiring.devices.push_back(testing::DeviceOf(r));
  return wiring;
}

class PackedSpeed : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  }
};

TEST_F(PackedSpeed, DISABLED_OfRingsBothWaysAtOnce) {
  constexpr int64_t kSize = 256 << 20;
  Ranks ranks(Apart(false, false), std::chrono::seconds(20));
  std::vector<DeviceBytes> from, to;
  for (int r = 0; r < kRanks; ++r) {
    (void)cudaSetDevice(ranks.devices()[r]);
    from.emplace_back(kSize, r + 1);
    to.emplace_back(kSize, 0);
  }
  for (const int64_t size : {kSize, kSize / 8, kSize / 32}) {
    for (const int64_t slot : {1 << 20, 2 << 20, 4 << 20, 8 << 20}) {
      for (const int num_slots : {2, 3, 4}) {
        double best = 1e9;
        std::vector<RingPool::Lease> rings(kRanks);
        for (int r = 0; r < kRanks; ++r) {
          auto ring = Ring::Create(ranks.devices()[1 - r], {ranks.devices()[r]},
                                   {}, {num_slots, slot});
          ASSERT_TRUE(ring.ok()) << ring.status();
          rings[r].reset(ring->release());
        }
        for (int round = 0; round < 4; ++round) {
          const auto start = Clock::now();
          std::vector<std::vector<Transfer>> transfers(kRanks);
          for (const Status& status : OnRanks(ranks.devices(), [&](int rank) {
                 Transfer& transfer = transfers[rank].emplace_back();
                 transfer.from = from[1 - rank].as();
                 transfer.to = {to[rank].as()};
                 transfer.size_bytes = size;
                 transfer.ring = std::move(rings[rank]);
                 return Enqueue(transfers[rank]);
               })) {
            ASSERT_TRUE(status.ok()) << status;
          }
          ASSERT_EQ(testing::Synchronize(), cudaSuccess);
          best = std::min(best, SecondsSince(start));
          for (int r = 0; r < kRanks; ++r) {
            rings[r] = std::move(transfers[r][0].ring);
          }
        }
        for (int r = 0; r < kRanks; ++r) delete rings[r].release();
        std::printf("ring %4lld MiB, %d x %lld MiB: %5.1f GB/s each way\n",
                    static_cast<long long>(size >> 20), num_slots,
                    static_cast<long long>(slot >> 20),
                    static_cast<double>(size) / best / 1e9);
      }
    }
  }
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_TRUE(to[r].Read() == testing::Bytes(kSize, 2 - r));
  }
}

struct Batch {
  int num_tokens;
  int hidden;
  int num_experts;
  int top_k;
};

TEST_F(PackedSpeed, DISABLED_OfDispatchAndCombine) {
  for (const Batch& batch :
       {Batch{4096, 4096, 64, 2}, Batch{16384, 2048, 128, 8},
        Batch{32, 4096, 64, 2}, Batch{128, 4096, 64, 2},
        Batch{256, 4096, 64, 2}, Batch{512, 4096, 64, 2}}) {
    for (const auto& [has_mail, is_broadcast] :
         {std::pair(true, false), std::pair(false, false),
          std::pair(false, true)}) {
      Ranks ranks(Apart(has_mail, is_broadcast), std::chrono::seconds(20));
      Shape shape;
      shape.num_ranks = kRanks;
      shape.num_tokens = batch.num_tokens;
      shape.top_k = batch.top_k;
      shape.num_experts = batch.num_experts;
      shape.num_local_experts = batch.num_experts / kRanks;
      shape.row_bytes = batch.hidden * 2;
      shape.num_rows = int64_t{batch.num_tokens} * batch.top_k * 5 / 4;
      const int64_t choices = int64_t{batch.num_tokens} * batch.top_k;
      int64_t num_sent = 0;
      struct Memory {
        DeviceBytes tokens, ids, weights, rows, sizes, slots, sums, scratch[2];
      };
      std::vector<Memory> memory(kRanks);
      for (int r = 0; r < kRanks; ++r) {
        (void)cudaSetDevice(ranks.devices()[r]);
        std::mt19937 random(r);
        std::vector<int32_t> ids;
        for (int t = 0; t < batch.num_tokens; ++t) {
          bool is_sent = false;
          for (int j = 0; j < batch.top_k; ++j) {
            ids.push_back(static_cast<int32_t>(random() % batch.num_experts));
            is_sent |= ids.back() / shape.num_local_experts != r;
          }
          if (r == 0) num_sent += is_sent;
        }
        Memory& own = memory[r];
        own.ids = DeviceBytes(ToBytes(ids));
        own.tokens = DeviceBytes(batch.num_tokens * shape.row_bytes, 1);
        own.weights = DeviceBytes(ToBytes(std::vector<float>(choices, 0.5f)));
        own.rows = DeviceBytes(shape.num_rows * shape.row_bytes, 0);
        own.sizes = DeviceBytes(8 * shape.num_local_experts, 0);
        own.slots = DeviceBytes(4 * choices, 0);
        own.sums = DeviceBytes(batch.num_tokens * shape.row_bytes, 0);
      }
      const auto dispatch_of = [&](int rank) {
        Memory& own = memory[rank];
        GpuDispatch call;
        call.shape = shape;
        call.shape.rank = rank;
        call.tokens = own.tokens.as();
        call.expert_ids = own.ids.as<int32_t>();
        call.rows = own.rows.as();
        call.group_sizes = own.sizes.as<int32_t>();
        call.wanted = call.group_sizes + shape.num_local_experts;
        call.slots = own.slots.as<int32_t>();
        call.scratch = own.scratch[0].as();
        return call;
      };
      const auto combine_of = [&](int rank) {
        Memory& own = memory[rank];
        GpuCombine call;
        call.shape = shape;
        call.shape.rank = rank;
        call.dtype = DType::kBF16;
        call.rows = own.rows.as();
        call.expert_ids = own.ids.as<int32_t>();
        call.slots = own.slots.as<int32_t>();
        call.weights = own.weights.as();
        call.sums = own.sums.as();
        call.scratch = own.scratch[1].as();
        return call;
      };
      for (int r = 0; r < kRanks; ++r) {
        (void)cudaSetDevice(ranks.devices()[r]);
        const Caller caller = ranks.CallerOf(r, 0);
        memory[r].scratch[0] =
            DeviceBytes::Scratch(ScratchBytes(caller, dispatch_of(r)));
        memory[r].scratch[1] =
            DeviceBytes::Scratch(ScratchBytes(caller, combine_of(r)));
      }
      const auto time = [&](auto run) {
        double best = 1e9;
        constexpr int kCalls = 8;
        for (int round = 0; round < 4; ++round) {
          static int64_t position = 1;
          const auto start = Clock::now();
          for (const Status& status :
               OnRanks(ranks.devices(), [&](int rank) -> Status {
                 for (int i = 0; i < kCalls; ++i) {
                   TB_RETURN_IF_ERROR(run(ranks.CallerOf(rank, position + i)));
                 }
                 return OkStatus();
               })) {
            EXPECT_TRUE(status.ok()) << status;
          }
          EXPECT_EQ(testing::Synchronize(), cudaSuccess);
          best = std::min(best, SecondsSince(start) / kCalls);
          position += kCalls;
        }
        return best;
      };
      const double dispatch = time([&](const Caller& caller) {
        return RunDispatch(caller, dispatch_of(caller.rank));
      });
      const double combine = time([&](const Caller& caller) {
        return RunCombine(caller, combine_of(caller.rank));
      });
      const double bytes =
          static_cast<double>(num_sent) * static_cast<double>(shape.row_bytes);
      std::printf(
          "%d tokens, hidden %d, %d experts, top %d, %s: dispatch %.3f ms "
          "(%.1f "
          "GB/s each way), combine %.3f ms (%.1f)\n",
          batch.num_tokens, batch.hidden, batch.num_experts, batch.top_k,
          is_broadcast ? "broadcast"
          : has_mail   ? "auto"
                       : "rings",
          dispatch * 1e3, bytes / dispatch / 1e9, combine * 1e3,
          bytes / combine / 1e9);
    }
  }
}

/// The mean time of a launch in a row of them.
template <typename Launch>
void Print(const char* name, Launch launch) {
  constexpr int kCalls = 50;
  (void)launch();
  (void)cudaDeviceSynchronize();
  const auto start = Clock::now();
  for (int i = 0; i < kCalls; ++i) EXPECT_EQ(launch(), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::printf("  %-12s %6.1f us\n", name, SecondsSince(start) / kCalls * 1e6);
}

TEST_F(PackedSpeed, DISABLED_OfKernels) {
  for (const Batch& batch :
       {Batch{4096, 4096, 64, 2}, Batch{16384, 2048, 128, 8}}) {
    Shape shape;
    shape.num_ranks = 2;
    shape.num_tokens = batch.num_tokens;
    shape.top_k = batch.top_k;
    shape.num_experts = batch.num_experts;
    shape.num_local_experts = batch.num_experts / 2;
    shape.row_bytes = batch.hidden * 2;
    shape.num_rows = int64_t{batch.num_tokens} * batch.top_k * 5 / 4;
    const int64_t choices = int64_t{batch.num_tokens} * batch.top_k;
    const int64_t token_bytes = batch.num_tokens * shape.row_bytes;
    std::mt19937 random(1);
    std::vector<int32_t> ids(choices);
    for (int32_t& id : ids) {
      id = static_cast<int32_t>(random() % batch.num_experts);
    }
    (void)cudaSetDevice(0);
    const DeviceBytes expert_ids(ToBytes(ids)), tokens(token_bytes, 1),
        counts(4 * batch.num_experts, 0), offsets(PlanScratchBytes(shape), 0),
        slots(4 * choices, 0), sizes(8 * batch.num_experts, 0),
        index(8 * batch.num_tokens, 0), blocks(NumberScratchBytes(shape), 0),
        rows(shape.num_rows * shape.row_bytes, 0), outbox(token_bytes, 0),
        inbox(token_bytes, 0), sums(token_bytes, 0), posted(8 * choices, 0),
        totals(8, 0), arrivals(8 * choices, 0),
        weights(ToBytes(std::vector<float>(choices, 1.0f)));
    const auto both = [](auto* pointer) {
      Peers<std::remove_pointer_t<decltype(pointer)>> peers;
      peers.of[0] = peers.of[1] = pointer;
      return peers;
    };
    std::printf("%d tokens, hidden %d, %d experts, top %d\n", batch.num_tokens,
                batch.hidden, batch.num_experts, batch.top_k);
    Print("plan", [&] {
      return LaunchPlan(shape, expert_ids.as<int32_t>(), counts.as<int32_t>(),
                        offsets.as<int32_t>(), nullptr);
    });
    const PositionsArgs positions = {
        .counts = both(counts.as<const int32_t>()),
        .expert_ids = expert_ids.as<int32_t>(),
        .block_offsets = offsets.as<int32_t>(),
        .positions = slots.as<int32_t>(),
        .group_sizes = sizes.as<int32_t>(),
        .wanted = sizes.as<int32_t>() + batch.num_experts,
        .posted_ids = posted.as<int32_t>(),
        .posted_positions = posted.as<int32_t>() + choices};
    Print("positions",
          [&] { return LaunchPositions(shape, positions, nullptr); });
    NumberArgs number = {.expert_ids = both(expert_ids.as<const int32_t>()),
                         .positions = both(slots.as<const int32_t>()),
                         .is_outgoing = true,
                         .index = index.as<int32_t>(),
                         .block_counts = blocks.as<int32_t>(),
                         .totals = totals.as<int32_t>()};
    Print("number", [&] { return LaunchNumber(shape, number, nullptr); });
    PackArgs pack = {
        .tokens = tokens.as(),
        .expert_ids = expert_ids.as<int32_t>(),
        .positions = slots.as<int32_t>(),
        .group_sizes = sizes.as<int32_t>(),
        .rows = rows.as(),
        .outbox = {.of = both(outbox.as()), .index = index.as<int32_t>()},
        .for_peers = true,
        .for_own = false,
        .tally = {}};
    // What counting bytes costs: nothing to be seen.
    Tally tally;
    ASSERT_EQ(TrafficCounters(&tally.bytes), cudaSuccess);
    Print("pack", [&] { return LaunchPack(shape, pack, nullptr); });
    pack.tally = tally;
    Print("  counted", [&] { return LaunchPack(shape, pack, nullptr); });
    SendArgs send = {.counts = both(counts.as<const int32_t>()),
                     .arrivals = both(arrivals.as<int32_t>()),
                     .rows = both(rows.as()),
                     .expert_ids = expert_ids.as<int32_t>(),
                     .block_offsets = offsets.as<int32_t>(),
                     .tokens = tokens.as(),
                     .positions = slots.as<int32_t>(),
                     .group_sizes = sizes.as<int32_t>(),
                     .wanted = sizes.as<int32_t>() + batch.num_experts,
                     .is_deduplicated = true,
                     .tally = {}};
    Print("send", [&] { return LaunchSend(shape, send, nullptr); });
    send.tally = tally;
    Print("  counted", [&] { return LaunchSend(shape, send, nullptr); });
    pack.for_peers = false;
    pack.for_own = true;
    Print("own rows", [&] { return LaunchPack(shape, pack, nullptr); });
    CombineArgs combine = {
        .expert_ids = both(expert_ids.as<const int32_t>()),
        .positions = both(slots.as<const int32_t>()),
        .weights = {},
        .rows = rows.as(),
        .outbox = {.of = both(outbox.as()), .index = index.as<int32_t>()},
        .leaving = {},
        .inbox = {.of = both(inbox.as()), .index = index.as<int32_t>()},
        .arrived = {},
        .out = sums.as(),
        .tally = {}};
    combine.weights.of[0] = combine.weights.of[1] = weights.as();
    Print("sum",
          [&] { return LaunchSum(shape, DType::kBF16, combine, nullptr); });
    number.is_outgoing = false;
    (void)LaunchNumber(shape, number, nullptr);
    Print("partial",
          [&] { return LaunchPartial(shape, DType::kBF16, combine, nullptr); });
    combine.tally = tally;
    Print("  counted",
          [&] { return LaunchPartial(shape, DType::kBF16, combine, nullptr); });
    const UnpackArgs unpack = {
        .expert_ids = both(expert_ids.as<const int32_t>()),
        .positions = both(slots.as<const int32_t>()),
        .inbox = {.of = both(inbox.as()), .index = index.as<int32_t>()},
        .arrived = {},
        .rows = rows.as()};
    Print("unpack", [&] { return LaunchUnpack(shape, unpack, nullptr); });
  }
}

}  // namespace
}  // namespace turbobus::moe::cuda
