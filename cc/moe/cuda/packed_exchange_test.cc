#include "moe/cuda/packed_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "moe/cuda/events.h"
#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/mail.h"
#include "moe/cuda/ring.h"
#include "moe/plan.h"

namespace turbobus::moe::cuda {
namespace {

using testing::Bytes;
using testing::DeviceBytes;
using testing::OnRanks;
using testing::Ranks;
using testing::ToBytes;

// Small slots, so that small batches go around the ring often; and GPUs that do
// not reach each other.
[[maybe_unused]] const int kSlots =
    setenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", "65536", /*overwrite=*/1);
[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

enum class How { kDirect, kMail, kRing, kBroadcast };

Wiring WiringOf(int num_ranks, How how) {
  Wiring wiring;
  wiring.is_direct = how == How::kDirect;
  for (int r = 0; r < num_ranks; ++r) {
    // One GPU always reaches its own memory.
    wiring.devices.push_back(wiring.is_direct ? 0 : testing::DeviceOf(r));
  }
  wiring.is_broadcast = how == How::kBroadcast;
  wiring.most_mailed_bytes = how == How::kMail ? int64_t{1} << 40 : -1;
  return wiring;
}

struct Case {
  std::string name;
  int num_ranks = 2;
  int num_tokens = 40;
  int top_k = 2;
  int num_experts = 8;
  int hidden = 64;
  DType dtype = DType::kF32;
  std::string routing = "random";
  int64_t num_rows = 0;  // 0: nothing is dropped.
  int expert_capacity = 0;

  int element_bytes() const {
    switch (dtype) {
      case DType::kF64:
        return 8;
      case DType::kF32:
        return 4;
      case DType::kF16:
      case DType::kBF16:
        return 2;
      case DType::kOther:
        return 1;
    }
    return 1;
  }

  Shape ShapeOf(int rank) const {
    Shape shape;
    shape.rank = rank;
    shape.num_ranks = num_ranks;
    shape.num_tokens = num_tokens;
    shape.top_k = top_k;
    shape.num_experts = num_experts;
    shape.num_local_experts = num_experts / num_ranks;
    shape.row_bytes = int64_t{hidden} * element_bytes();
    shape.expert_capacity = expert_capacity;
    shape.num_rows = num_rows;
    if (expert_capacity > 0) {
      shape.num_rows = int64_t{shape.num_local_experts} * expert_capacity;
    } else if (num_rows == 0) {
      shape.num_rows = int64_t{num_ranks} * num_tokens *
                       std::min(top_k, shape.num_local_experts);
    }
    return shape;
  }
};

std::ostream& operator<<(std::ostream& out, const Case& one) {
  return out << one.name;
}

std::vector<int32_t> IdsOf(const Case& one, int rank) {
  std::mt19937 random(17 + rank);
  std::vector<int32_t> ids;
  for (int t = 0; t < one.num_tokens; ++t) {
    for (int j = 0; j < one.top_k; ++j) {
      int32_t id = static_cast<int32_t>(random() % one.num_experts);
      if (one.routing == "one") id = one.num_experts - 1;
      if (one.routing == "skewed" && random() % 4 != 0) id = j % 2;
      if (one.routing == "masked" && random() % 3 == 0) {
        id = random() % 2 == 0 ? -1 : one.num_experts + 7;
      }
      if (one.routing == "nobody") id = -1;
      // Nobody chooses the first rank, and the last rank chooses nobody.
      if (one.routing == "empty") {
        const int local = one.num_experts / one.num_ranks;
        id = local + id % (one.num_experts - local);
        if (rank == one.num_ranks - 1) id = -1;
      }
      ids.push_back(id);
    }
  }
  return ids;
}

/// Elements of small integers: sums are exact in any order.
Bytes Elements(DType dtype, int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes;
  for (int64_t i = 0; i < count; ++i) {
    const int value = static_cast<int>(random() % 17) - 8;
    const auto append = [&](auto element) {
      const auto* data = reinterpret_cast<const uint8_t*>(&element);
      bytes.insert(bytes.end(), data, data + sizeof(element));
    };
    switch (dtype) {
      case DType::kF64:
        append(static_cast<double>(value) / 3);
        break;
      case DType::kF32:
        append(static_cast<float>(value) / 3);
        break;
      case DType::kF16: {
        // 1.5 to 2 by the bits; both signs.
        append(static_cast<uint16_t>(0x3e00 + value * 16 +
                                     (value < 0 ? 0x8000 : 0)));
        break;
      }
      case DType::kBF16:
        append(
            static_cast<uint16_t>(0x3fc0 + value + (value < 0 ? 0x8000 : 0)));
        break;
      case DType::kOther:
        append(static_cast<uint8_t>(value));
        break;
    }
  }
  return bytes;
}

/// The operands and results of one rank.
struct RankMemory {
  DeviceBytes tokens, ids, weights;
  DeviceBytes rows, group_sizes, wanted, slots;
  DeviceBytes sums, collected, row_grads, weight_grads;
  std::vector<DeviceBytes> scratch;
};

/// What all ranks have, by name, after an exchange there and back.
struct Results {
  std::vector<std::pair<std::string, Bytes>> of;
};

class PackedExchange : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  }

  static void ExpectOk(const std::vector<Status>& said) {
    for (const Status& status : said) EXPECT_TRUE(status.ok()) << status;
  }

  /// On the rank's GPU, which becomes the current one.
  static RankMemory MemoryOf(const Case& one, const Ranks& ranks, int rank,
                             int fill) {
    (void)cudaSetDevice(ranks.devices()[rank]);
    const Shape shape = one.ShapeOf(rank);
    const int64_t choices = int64_t{one.num_tokens} * one.top_k;
    const int64_t token_bytes = one.num_tokens * shape.row_bytes;
    const int weight_bytes = one.dtype == DType::kF64 ? 8 : 4;
    const DType weight_type =
        one.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    RankMemory memory;
    memory.tokens = DeviceBytes(
        Elements(one.dtype, int64_t{one.num_tokens} * one.hidden, 100 + rank));
    memory.ids = DeviceBytes(ToBytes(IdsOf(one, rank)));
    memory.weights = DeviceBytes(Elements(weight_type, choices, 200 + rank));
    memory.rows = DeviceBytes(shape.num_rows * shape.row_bytes, fill);
    memory.group_sizes = DeviceBytes(shape.num_local_experts * 4, fill);
    memory.wanted = DeviceBytes(shape.num_local_experts * 4, fill);
    memory.slots = DeviceBytes(choices * 4, fill);
    memory.sums = DeviceBytes(token_bytes, fill);
    memory.collected = DeviceBytes(token_bytes, fill);
    memory.row_grads = DeviceBytes(shape.num_rows * shape.row_bytes, fill);
    memory.weight_grads = DeviceBytes(choices * weight_bytes, fill);
    return memory;
  }

  template <typename Call>
  static void* ScratchFor(const Caller& caller, const Call& call,
                          RankMemory& memory) {
    const int64_t bytes = ScratchBytes(caller, call);
    memory.scratch.push_back(DeviceBytes::Scratch(bytes));
    return memory.scratch.back().as();
  }

  static GpuDispatch DispatchOf(const Case& one, int rank,
                                const RankMemory& memory) {
    GpuDispatch call;
    call.shape = one.ShapeOf(rank);
    call.is_deduplicated = one.top_k > 1;
    call.tokens = memory.tokens.as();
    call.expert_ids = memory.ids.as<int32_t>();
    call.rows = memory.rows.as();
    call.group_sizes = memory.group_sizes.as<int32_t>();
    call.wanted = memory.wanted.as<int32_t>();
    call.slots = memory.slots.as<int32_t>();
    return call;
  }

  static GpuCombine CombineOf(const Case& one, int rank,
                              const RankMemory& memory, bool has_weights) {
    GpuCombine call;
    call.shape = one.ShapeOf(rank);
    call.dtype = one.dtype;
    call.rows = memory.rows.as();
    call.expert_ids = memory.ids.as<int32_t>();
    call.slots = memory.slots.as<int32_t>();
    call.has_weights = has_weights;
    if (has_weights) call.weights = memory.weights.as();
    call.sums = has_weights ? memory.sums.as() : memory.collected.as();
    return call;
  }

  static GpuCombineGrad CombineGradOf(const Case& one, int rank,
                                      const RankMemory& memory) {
    GpuCombineGrad call;
    call.shape = one.ShapeOf(rank);
    call.dtype = one.dtype;
    call.sum_grads = memory.tokens.as();
    call.rows = memory.rows.as();
    call.expert_ids = memory.ids.as<int32_t>();
    call.slots = memory.slots.as<int32_t>();
    call.weights = memory.weights.as();
    call.group_sizes = memory.group_sizes.as<int32_t>();
    call.row_grads = memory.row_grads.as();
    call.weight_grads = memory.weight_grads.as();
    return call;
  }

  /// All four exchanges, one after the other.
  static Results RunAll(const Case& one, How how, int fill) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
    std::vector<RankMemory> memory;
    for (int r = 0; r < one.num_ranks; ++r) {
      memory.push_back(MemoryOf(one, ranks, r, fill));
    }
    ExpectOk(ranks.Call([&](const Caller& caller) {
      RankMemory& own = memory[caller.rank];
      GpuDispatch call = DispatchOf(one, caller.rank, own);
      call.scratch = ScratchFor(caller, call, own);
      return RunDispatch(caller, call);
    }));
    if (one.dtype != DType::kOther) {
      for (const bool has_weights : {true, false}) {
        ExpectOk(ranks.Call([&](const Caller& caller) {
          RankMemory& own = memory[caller.rank];
          GpuCombine call = CombineOf(one, caller.rank, own, has_weights);
          call.scratch = ScratchFor(caller, call, own);
          return RunCombine(caller, call);
        }));
      }
      ExpectOk(ranks.Call([&](const Caller& caller) {
        RankMemory& own = memory[caller.rank];
        GpuCombineGrad call = CombineGradOf(one, caller.rank, own);
        call.scratch = ScratchFor(caller, call, own);
        return RunCombineGrad(caller, call);
      }));
    }
    Results results;
    for (int r = 0; r < one.num_ranks; ++r) {
      const std::string of_rank = " of rank " + std::to_string(r);
      const auto add = [&](const char* name, const DeviceBytes& bytes) {
        results.of.emplace_back(name + of_rank, bytes.Read());
      };
      add("rows", memory[r].rows);
      add("group_sizes", memory[r].group_sizes);
      add("wanted", memory[r].wanted);
      add("slots", memory[r].slots);
      if (one.dtype == DType::kOther) continue;
      add("sums", memory[r].sums);
      add("collected", memory[r].collected);
      add("row_grads", memory[r].row_grads);
      add("weight_grads", memory[r].weight_grads);
    }
    return results;
  }
};

void ExpectSame(const Results& got, const Results& want) {
  ASSERT_EQ(got.of.size(), want.of.size());
  for (size_t i = 0; i < got.of.size(); ++i) {
    EXPECT_TRUE(got.of[i].second == want.of[i].second) << want.of[i].first;
  }
}

const Case kCases[] = {
    {.name = "Random"},
    {.name = "OneChoice", .top_k = 1},
    {.name = "ThreeRanks", .num_ranks = 3, .top_k = 4, .num_experts = 9},
    {.name = "FourRanksManyChoices",
     .num_ranks = 4,
     .num_tokens = 77,
     .top_k = 8,
     .num_experts = 32},
    {.name = "OneToken", .num_tokens = 1},
    {.name = "NoTokens", .num_tokens = 0, .num_rows = 16},
    {.name = "ManyBlocksOfTokens", .num_tokens = 1500, .hidden = 8},
    {.name = "ManyWraps",
     .num_ranks = 3,
     .num_tokens = 700,
     .top_k = 3,
     .num_experts = 9,
     .hidden = 512},
    {.name = "Skewed", .num_tokens = 200, .routing = "skewed"},
    {.name = "Masked", .num_ranks = 4, .top_k = 3, .routing = "masked"},
    {.name = "AllToOne", .num_ranks = 4, .routing = "one"},
    {.name = "NobodyChooses", .routing = "nobody"},
    {.name = "EmptyRank", .num_ranks = 3, .num_experts = 6, .routing = "empty"},
    {.name = "Dropped",
     .num_ranks = 3,
     .num_tokens = 120,
     .num_experts = 9,
     .routing = "skewed",
     .num_rows = 70},
    {.name = "NoRoom", .num_rows = 1, .expert_capacity = 0},
    {.name = "Padded", .num_tokens = 90, .expert_capacity = 25},
    {.name = "PaddedSkewed",
     .num_ranks = 4,
     .num_tokens = 60,
     .routing = "skewed",
     .expert_capacity = 31},
    {.name = "OddHidden", .hidden = 13},
    {.name = "HiddenOfOne", .hidden = 1, .dtype = DType::kBF16},
    {.name = "Doubles", .num_ranks = 3, .num_experts = 6, .dtype = DType::kF64},
    {.name = "DoublesOdd", .hidden = 7, .dtype = DType::kF64},
    {.name = "Halves", .hidden = 72, .dtype = DType::kF16},
    {.name = "BFloats", .num_ranks = 4, .dtype = DType::kBF16},
    {.name = "OddBytes", .hidden = 37, .dtype = DType::kOther},
    {.name = "Bytes",
     .num_ranks = 3,
     .num_experts = 6,
     .hidden = 48,
     .dtype = DType::kOther},
};

class PackedEqualsDirect
    : public PackedExchange,
      public ::testing::WithParamInterface<std::tuple<Case, How>> {};

TEST_P(PackedEqualsDirect, InEveryResultOfEveryExchange) {
  const auto& [one, how] = GetParam();
  ExpectSame(RunAll(one, how, 0x5a), RunAll(one, How::kDirect, 0xa5));
}

std::string HowName(How how) {
  switch (how) {
    case How::kDirect:
      return "Direct";
    case How::kMail:
      return "Mail";
    case How::kRing:
      return "Ring";
    case How::kBroadcast:
      return "Broadcast";
  }
  return "";
}

INSTANTIATE_TEST_SUITE_P(, PackedEqualsDirect,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(How::kMail,
                                                              How::kRing,
                                                              How::kBroadcast)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  HowName(std::get<1>(info.param));
                         });

/// The rows of a dispatch by the plan that CPU devices make.
Bytes RowsByThePlan(const Case& one, int rank) {
  const Shape shape = one.ShapeOf(rank);
  ExchangeShape plan_shape;
  plan_shape.num_ranks = one.num_ranks;
  plan_shape.num_experts = one.num_experts;
  plan_shape.num_tokens = one.num_tokens;
  plan_shape.top_k = one.top_k;
  plan_shape.recv_capacity = shape.num_rows;
  plan_shape.expert_capacity = one.expert_capacity;
  std::vector<std::vector<int32_t>> ids, places, counts;
  std::vector<const int32_t*> all_counts;
  for (int r = 0; r < one.num_ranks; ++r) {
    ids.push_back(IdsOf(one, r));
    places.emplace_back(ids[r].size());
    counts.emplace_back(one.num_experts);
    CountChoices(plan_shape, ids[r], places[r], counts[r]);
  }
  for (const auto& count : counts) all_counts.push_back(count.data());
  const RowPlan plan(plan_shape, all_counts);
  Bytes rows(shape.num_rows * shape.row_bytes);
  for (int r = 0; r < one.num_ranks; ++r) {
    const Bytes tokens =
        Elements(one.dtype, int64_t{one.num_tokens} * one.hidden, 100 + r);
    for (size_t slot = 0; slot < ids[r].size(); ++slot) {
      const int32_t id = ids[r][slot];
      if (places[r][slot] == kNoRow || plan_shape.rank_of(id) != rank) continue;
      const int32_t row = plan.row(r, id, places[r][slot]);
      if (row == kNoRow) continue;
      const int64_t token = static_cast<int64_t>(slot) / one.top_k;
      std::memcpy(&rows[row * shape.row_bytes],
                  &tokens[token * shape.row_bytes], shape.row_bytes);
    }
  }
  return rows;
}

TEST_F(PackedExchange, DispatchGivesTheRowsOfThePlan) {
  for (const Case& one : kCases) {
    if (one.num_tokens == 0) continue;
    for (const How how : {How::kDirect, How::kRing}) {
      const Results results = RunAll(one, how, 0x5a);
      for (int r = 0; r < one.num_ranks; ++r) {
        const std::string name = "rows of rank " + std::to_string(r);
        const auto found = std::find_if(
            results.of.begin(), results.of.end(),
            [&](const auto& entry) { return entry.first == name; });
        ASSERT_NE(found, results.of.end());
        EXPECT_TRUE(found->second == RowsByThePlan(one, r))
            << one << HowName(how) << ", " << name;
      }
    }
  }
}

/// Dispatches one after the other, none of which is waited for, on streams in
/// turn: what they share must keep itself in order.
TEST_F(PackedExchange, ManyCallsInARowOnSeveralStreams) {
  constexpr int kStreams = 3;
  constexpr int kCalls = 60;
  const Case one = {.name = "",
                    .num_ranks = 3,
                    .num_tokens = 300,
                    .num_experts = 6,
                    .hidden = 256};
  const Results want = RunAll(one, How::kDirect, 0xa5);
  for (const How how : {How::kMail, How::kRing, How::kBroadcast}) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
    std::vector<std::vector<RankMemory>> memory(kStreams);
    std::vector<std::vector<cudaStream_t>> streams(kStreams);
    for (int s = 0; s < kStreams; ++s) {
      for (int r = 0; r < one.num_ranks; ++r) {
        RankMemory& own = memory[s].emplace_back(MemoryOf(one, ranks, r, 0x5a));
        Caller caller = ranks.CallerOf(r, 0);
        const GpuDispatch dispatch = DispatchOf(one, r, own);
        ScratchFor(caller, dispatch, own);
        const GpuCombine combine = CombineOf(one, r, own, true);
        ScratchFor(caller, combine, own);
        (void)cudaStreamCreateWithFlags(&streams[s].emplace_back(),
                                        cudaStreamNonBlocking);
      }
    }
    ExpectOk(OnRanks(ranks.devices(), [&](int rank) -> Status {
      for (int i = 0; i < kCalls; ++i) {
        Caller caller = ranks.CallerOf(rank, 1000 + 2 * i);
        caller.stream = streams[i % kStreams][rank];
        RankMemory& own = memory[i % kStreams][rank];
        GpuDispatch dispatch = DispatchOf(one, rank, own);
        dispatch.scratch = own.scratch[0].as();
        TB_RETURN_IF_ERROR(RunDispatch(caller, dispatch));
        ++caller.key.position;
        GpuCombine combine = CombineOf(one, rank, own, true);
        combine.scratch = own.scratch[1].as();
        TB_RETURN_IF_ERROR(RunCombine(caller, combine));
      }
      return OkStatus();
    }));
    ASSERT_EQ(testing::Synchronize(), cudaSuccess);
    for (int s = 0; s < kStreams; ++s) {
      for (int r = 0; r < one.num_ranks; ++r) {
        EXPECT_TRUE(memory[s][r].rows.Read() == want.of[8 * r].second)
            << HowName(how) << ": rows of rank " << r;
        EXPECT_TRUE(memory[s][r].sums.Read() == want.of[8 * r + 4].second)
            << HowName(how) << ": sums of rank " << r;
        (void)cudaStreamDestroy(streams[s][r]);
      }
    }
  }
}

/// Pinned memory, events and device memory, once calls have had what they need.
std::tuple<int64_t, int64_t, int64_t, size_t> InUse() {
  size_t free = 0;
  size_t total = 0;
  (void)cudaMemGetInfo(&free, &total);
  return {MailPool::Process().total_bytes(), RingPool::Process().total_bytes(),
          EventPool::Process().num_made(), total - free};
}

TEST_F(PackedExchange, ThousandsOfCallsKeepNothing) {
  const char* const wanted = std::getenv("TURBOBUS_TEST_CALLS");
  const int num_calls = wanted == nullptr ? 300 : std::atoi(wanted);
  const Case one = {.name = "", .num_tokens = 32, .hidden = 64};
  for (const How how : {How::kMail, How::kRing, How::kBroadcast}) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
    std::vector<RankMemory> memory;
    for (int r = 0; r < one.num_ranks; ++r) {
      RankMemory& own = memory.emplace_back(MemoryOf(one, ranks, r, 0x5a));
      const Caller caller = ranks.CallerOf(r, 0);
      ScratchFor(caller, DispatchOf(one, r, own), own);
      ScratchFor(caller, CombineOf(one, r, own, true), own);
      ScratchFor(caller, CombineGradOf(one, r, own), own);
    }
    int64_t position = 1;
    const auto calls = [&](int count) {
      ExpectOk(OnRanks(ranks.devices(), [&](int rank) -> Status {
        RankMemory& own = memory[rank];
        for (int i = 0; i < count; ++i) {
          Caller caller = ranks.CallerOf(rank, position + 3 * i);
          GpuDispatch dispatch = DispatchOf(one, rank, own);
          dispatch.scratch = own.scratch[0].as();
          TB_RETURN_IF_ERROR(RunDispatch(caller, dispatch));
          ++caller.key.position;
          GpuCombine combine = CombineOf(one, rank, own, true);
          combine.scratch = own.scratch[1].as();
          TB_RETURN_IF_ERROR(RunCombine(caller, combine));
          ++caller.key.position;
          GpuCombineGrad grad = CombineGradOf(one, rank, own);
          grad.scratch = own.scratch[2].as();
          TB_RETURN_IF_ERROR(RunCombineGrad(caller, grad));
        }
        return OkStatus();
      }));
      position += 3 * count;
      EXPECT_EQ(testing::Synchronize(), cudaSuccess);
    };
    // How many are under way at once is up to the host's threads.
    calls(100);
    const auto before = InUse();
    calls(num_calls);
    const auto after = InUse();
    EXPECT_LE(std::get<0>(after), std::get<0>(before) + (1 << 20))
        << HowName(how);
    EXPECT_LE(std::get<1>(after), std::get<1>(before) + (1 << 20));
    EXPECT_LE(std::get<2>(after), std::get<2>(before) + 32);
    EXPECT_LE(std::get<3>(after), std::get<3>(before) + (4 << 20));
  }
}

TEST_F(PackedExchange, ARankThatDoesNotComeIsNamedByAllInTime) {
  const Case one = {.name = "", .num_ranks = 3, .num_experts = 6};
  for (const How how : {How::kMail, How::kRing, How::kBroadcast}) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::milliseconds(300));
    std::vector<RankMemory> memory;
    for (int r = 0; r < one.num_ranks; ++r) {
      memory.push_back(MemoryOf(one, ranks, r, 0x5a));
    }
    const auto start = std::chrono::steady_clock::now();
    const std::vector<Status> said = ranks.Call([&](const Caller& caller) {
      if (caller.rank == 1) return OkStatus();
      RankMemory& own = memory[caller.rank];
      GpuDispatch call = DispatchOf(one, caller.rank, own);
      call.scratch = ScratchFor(caller, call, own);
      return RunDispatch(caller, call);
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(5));
    for (const int rank : {0, 2}) {
      EXPECT_EQ(said[rank].code(), StatusCode::kDeadlineExceeded);
      EXPECT_NE(said[rank].message().find("rank(s) 1"), std::string::npos)
          << said[rank];
    }
  }
}

TEST_F(PackedExchange, AGpuThatDoesNotGetToItFailsAllRanksInTime) {
  const Case one = {.name = ""};
  Ranks ranks(WiringOf(one.num_ranks, How::kRing),
              std::chrono::milliseconds(300));
  std::vector<RankMemory> memory;
  for (int r = 0; r < one.num_ranks; ++r) {
    memory.push_back(MemoryOf(one, ranks, r, 0x5a));
  }
  const auto dispatch = [&](const Caller& caller) {
    RankMemory& own = memory[caller.rank];
    GpuDispatch call = DispatchOf(one, caller.rank, own);
    call.scratch = ScratchFor(caller, call, own);
    return RunDispatch(caller, call);
  };
  const std::vector<Status> said = ranks.Call([&](const Caller& caller) {
    if (caller.rank == 0) {
      (void)cudaLaunchHostFunc(
          caller.stream,
          [](void*) { std::this_thread::sleep_for(std::chrono::seconds(1)); },
          nullptr);
    }
    return dispatch(caller);
  });
  for (const Status& status : said) {
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  }
  ExpectOk(ranks.Call(dispatch));
}

TEST(RingSize, RefusesWhatIsNoSize) {
  setenv("JAX_TURBOBUS_EXCHANGE_SLOTS", "many", 1);
  const auto size = RingSize::FromEnvironment();
  unsetenv("JAX_TURBOBUS_EXCHANGE_SLOTS");
  ASSERT_FALSE(size.ok());
  EXPECT_EQ(size.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(size.status().message().find("JAX_TURBOBUS_EXCHANGE_SLOTS"),
            std::string::npos);
}

}  // namespace
}  // namespace turbobus::moe::cuda
