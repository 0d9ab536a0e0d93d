#include "moe/cuda/gpu_exchange.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/gpu_reference.h"

// Exchanges on GPUs give what those on CPU devices do, bit for bit.

namespace turbobus::moe::cuda {
namespace {

using testing::DeviceBytes;
using testing::Ranks;
using testing::ToBytes;

/// What results are full of before they are written: no small integer, and NaN
/// in no dtype of ours but fp8.
constexpr int kUnwritten = 0xA5;

/// One rank's arrays on the current GPU, and the four exchanges over them.
struct OnGpu {
  OnGpu(const Case& c, int rank, const Rank& from)
      : shape(ToShape(ToConfig(c), rank)),
        dtype(c.dtype),
        tokens(from.tokens),
        weights(from.weights),
        outputs(from.outputs),
        sum_grads(from.sum_grads),
        ids(ToBytes(from.ids)),
        rows(Like(from.rows)),
        sums(Like(from.sums)),
        token_grads(Like(from.token_grads)),
        row_grads(Like(from.row_grads)),
        weight_grads(Like(from.weight_grads)),
        group_sizes(Like(from.group_sizes)),
        wanted(Like(from.wanted)),
        slots(Like(from.slots)),
        dispatch_scratch(DeviceBytes::Scratch(
            ScratchBytes({}, GpuDispatch{.shape = shape}))),
        combine_scratch(DeviceBytes::Scratch(
            ScratchBytes({}, GpuCombine{.shape = shape}))) {}

  template <typename T>
  static DeviceBytes Like(const std::vector<T>& values) {
    return {static_cast<int64_t>(values.size() * sizeof(T)), kUnwritten};
  }

  Status Run(Ranks& ranks, bool is_deduplicated) {
    const int r = shape.rank;
    const GpuDispatch dispatch = {.shape = shape,
                                  .is_deduplicated = is_deduplicated,
                                  .tokens = tokens.as(),
                                  .expert_ids = ids.as<int32_t>(),
                                  .rows = rows.as(),
                                  .group_sizes = group_sizes.as<int32_t>(),
                                  .wanted = wanted.as<int32_t>(),
                                  .slots = slots.as<int32_t>(),
                                  .scratch = dispatch_scratch.as()};
    TB_RETURN_IF_ERROR(RunDispatch(ranks.Next(r), dispatch));
    GpuCombine combine = {.shape = shape,
                          .dtype = dtype,
                          .rows = outputs.as(),
                          .expert_ids = ids.as<int32_t>(),
                          .slots = slots.as<int32_t>(),
                          .has_weights = true,
                          .weights = weights.as(),
                          .sums = sums.as(),
                          .scratch = combine_scratch.as()};
    TB_RETURN_IF_ERROR(RunCombine(ranks.Next(r), combine));
    combine.has_weights = false;
    combine.weights = nullptr;
    combine.sums = token_grads.as();
    TB_RETURN_IF_ERROR(RunCombine(ranks.Next(r), combine));
    return RunCombineGrad(ranks.Next(r),
                          {.shape = shape,
                           .dtype = dtype,
                           .sum_grads = sum_grads.as(),
                           .rows = outputs.as(),
                           .expert_ids = ids.as<int32_t>(),
                           .slots = slots.as<int32_t>(),
                           .weights = weights.as(),
                           .group_sizes = group_sizes.as<int32_t>(),
                           .row_grads = row_grads.as(),
                           .weight_grads = weight_grads.as(),
                           .scratch = nullptr});
  }

  void ExpectSame(const Rank& want) const {
    EXPECT_EQ(rows.Read<uint8_t>(), want.rows);
    EXPECT_EQ(group_sizes.Read<int32_t>(), want.group_sizes);
    EXPECT_EQ(wanted.Read<int32_t>(), want.wanted);
    EXPECT_EQ(slots.Read<int32_t>(), want.slots);
    EXPECT_EQ(sums.Read<uint8_t>(), want.sums);
    EXPECT_EQ(token_grads.Read<uint8_t>(), want.token_grads);
    EXPECT_EQ(row_grads.Read<uint8_t>(), want.row_grads);
    EXPECT_EQ(weight_grads.Read<uint8_t>(), want.weight_grads);
  }

  Shape shape;
  DType dtype;
  DeviceBytes tokens, weights, outputs, sum_grads, ids;
  DeviceBytes rows, sums, token_grads, row_grads, weight_grads;
  DeviceBytes group_sizes, wanted, slots;
  DeviceBytes dispatch_scratch, combine_scratch;
};

/// Work that a stream has before an exchange: so the others' streams, if they
/// do not wait for it, read what is not there yet.
void Delay(cudaStream_t stream) {
  EXPECT_EQ(cudaLaunchHostFunc(
                stream,
                [](void*) {
                  std::this_thread::sleep_for(std::chrono::milliseconds(2));
                },
                nullptr),
            cudaSuccess);
}

class GpuExchangeTest : public testing::GpuTest {
 protected:
  /// The arrays of all ranks, each on its GPU.
  static std::vector<std::unique_ptr<OnGpu>> Arrays(
      const Case& c, const Ranks& ranks, const std::vector<Rank>& from) {
    std::vector<std::unique_ptr<OnGpu>> arrays;
    for (int r = 0; r < c.num_ranks; ++r) {
      EXPECT_EQ(cudaSetDevice(ranks.devices()[r]), cudaSuccess);
      arrays.push_back(std::make_unique<OnGpu>(c, r, from[r]));
    }
    return arrays;
  }
};

class GpuExchangeCases : public GpuExchangeTest,
                         public ::testing::WithParamInterface<Case> {};

TEST_P(GpuExchangeCases, GiveWhatThoseOnCpuDevicesDo) {
  const Case& c = GetParam();
  const std::vector<Rank> want = Reference(c, 1);
  Ranks ranks(c.num_ranks);
  for (const bool is_deduplicated : {true, false}) {
    const auto arrays = Arrays(c, ranks, want);
    const std::vector<Status> statuses = ranks.Run([&](int r) {
      if (r == c.num_ranks - 1) Delay(ranks.stream(r));
      return arrays[r]->Run(ranks, is_deduplicated);
    });
    for (int r = 0; r < c.num_ranks; ++r) {
      SCOPED_TRACE("rank " + std::to_string(r) +
                   (is_deduplicated ? "" : ", a row a copy"));
      ASSERT_TRUE(statuses[r].ok()) << statuses[r];
      arrays[r]->ExpectSame(want[r]);
    }
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const std::vector<std::pair<std::string, Kind>> kinds = {
      {"Distinct", Kind::kDistinct},   {"Repeated", Kind::kRepeated},
      {"Masked", Kind::kMasked},       {"One", Kind::kOne},
      {"FirstRank", Kind::kFirstRank}, {"None", Kind::kNone}};
  for (const auto& [name, kind] : kinds) {
    for (const int num_ranks : {2, 4}) {
      Case c = {.num_ranks = num_ranks, .kind = kind};
      const std::string at = name + std::to_string(num_ranks);
      c.name = at;
      cases.push_back(c);
      c.name = at + "Dropped";
      c.recv_capacity = 50;
      cases.push_back(c);
      c.name = at + "Padded";
      c.recv_capacity = 0;
      c.expert_capacity = 21;
      cases.push_back(c);
    }
  }
  const std::vector<std::pair<std::string, DType>> dtypes = {
      {"F32", DType::kF32},
      {"F64", DType::kF64},
      {"F16", DType::kF16},
      {"BF16", DType::kBF16}};
  for (const auto& [name, dtype] : dtypes) {
    for (const int64_t hidden : {1, 7, 520, 1543, 4104}) {
      cases.push_back({.name = name + "Hidden" + std::to_string(hidden),
                       .kind = Kind::kMasked,
                       .dtype = dtype,
                       .hidden = hidden});
    }
  }
  cases.push_back({.name = "Alone", .num_ranks = 1});
  cases.push_back({.name = "NoTokens", .num_tokens = 0, .recv_capacity = 5});
  cases.push_back({.name = "OneToken", .num_tokens = 1});
  cases.push_back({.name = "ManyChoices",
                   .kind = Kind::kRepeated,
                   .num_tokens = 70,
                   .top_k = kMaxTopK,
                   .num_experts = 64});
  cases.push_back({.name = "ManyExperts",
                   .kind = Kind::kMasked,
                   .num_tokens = 3000,
                   .num_experts = kMaxExperts,
                   .hidden = 8});
  cases.push_back({.name = "ManyRanks",
                   .num_ranks = kMaxRanks,
                   .num_tokens = 30,
                   .num_experts = 2 * kMaxRanks});
  cases.push_back({.name = "MuchPadding",
                   .dtype = DType::kF16,
                   .hidden = 24,
                   .recv_capacity = 9000});
  cases.push_back({.name = "ManyTokens",
                   .dtype = DType::kBF16,
                   .num_tokens = 5000,
                   .top_k = 2,
                   .hidden = 64,
                   .recv_capacity = 9000});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, GpuExchangeCases, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

TEST_F(GpuExchangeTest, CallsOnTheSameMemoryFollowEachOther) {
  const Case c = {.num_ranks = 3, .kind = Kind::kMasked, .num_experts = 6};
  const std::vector<Rank> want = Reference(c, 2);
  Ranks ranks(c.num_ranks);
  const auto arrays = Arrays(c, ranks, want);
  // Nobody waits between the calls: each writes what the last one still reads.
  const std::vector<Status> statuses = ranks.Run([&](int r) {
    for (int i = 0; i < 30; ++i) {
      if (i % c.num_ranks == r) Delay(ranks.stream(r));
      TB_RETURN_IF_ERROR(arrays[r]->Run(ranks, /*is_deduplicated=*/true));
    }
    return OkStatus();
  });
  for (int r = 0; r < c.num_ranks; ++r) {
    ASSERT_TRUE(statuses[r].ok()) << statuses[r];
    arrays[r]->ExpectSame(want[r]);
  }
}

TEST_F(GpuExchangeTest, AKernelThatCannotBeLaunchedFailsAllRanks) {
  const Case c = {.num_ranks = 3, .num_experts = 6};
  const std::vector<Rank> want = Reference(c, 3);
  Ranks ranks(c.num_ranks);
  const auto arrays = Arrays(c, ranks, want);
  arrays[1]->dtype = DType::kOther;  // No sums of it.
  for (const Status& status :
       ranks.Run([&](int r) { return arrays[r]->Run(ranks, true); })) {
    EXPECT_EQ(status.code(), StatusCode::kInternal) << status;
    EXPECT_NE(status.message().find("cudaErrorInvalidValue"), std::string::npos)
        << status;
  }
  EXPECT_EQ(ranks.meeting().num_open(), 0);
}

/// What a rank that fails gives back to its program is not written by others
/// behind its back: the program's stream waits for what they have enqueued.
TEST_F(GpuExchangeTest, NothingIsWrittenIntoMemoryOfACallThatHasFailed) {
  const Case c = {.num_tokens = 20000, .top_k = 2, .hidden = 2048};
  const Shape shape = ToShape(ToConfig(c), 0);
  Ranks ranks(c.num_ranks);
  std::vector<DeviceBytes> rows, ids, slots, weights, boxes, sums;
  const int64_t num_choices = int64_t{c.num_tokens} * c.top_k;
  for (int r = 0; r < c.num_ranks; ++r) {
    ASSERT_EQ(cudaSetDevice(ranks.devices()[r]), cudaSuccess);
    rows.emplace_back(shape.num_rows * shape.row_bytes, 1);
    // Every token has the row of its number on both ranks.
    std::vector<int32_t> experts(num_choices);
    std::vector<int32_t> places(num_choices);
    for (int64_t i = 0; i < num_choices; ++i) {
      experts[i] = i % 2 == 0 ? 0 : c.num_experts - 1;
      places[i] = static_cast<int32_t>(i / 2);
    }
    ids.emplace_back(ToBytes(experts));
    slots.emplace_back(ToBytes(places));
    weights.emplace_back(num_choices * 4, 0);
    sums.emplace_back(c.num_tokens * shape.row_bytes, 0);
    boxes.push_back(
        DeviceBytes::Scratch(ScratchBytes({}, GpuCombine{.shape = shape})));
  }
  // The last row that rank 0 writes into the memory of rank 1.
  uint8_t* const last_row =
      boxes[1].as() + (c.num_tokens - 1) * shape.row_bytes;
  const std::vector<Status> said = ranks.Run([&](int r) {
    GpuCombine call = {.shape = ToShape(ToConfig(c), r),
                       .dtype = r == 1 ? DType::kOther : DType::kF32,
                       .rows = rows[r].as(),
                       .expert_ids = ids[r].as<int32_t>(),
                       .slots = slots[r].as<int32_t>(),
                       .has_weights = true,
                       .weights = weights[r].as(),
                       .sums = sums[r].as(),
                       .scratch = boxes[r].as()};
    const Status status = RunCombine(ranks.Next(r), call);
    // The next program has the memory.
    if (r == 1) {
      EXPECT_EQ(cudaMemsetAsync(last_row, kUnwritten, shape.row_bytes,
                                ranks.stream(r)),
                cudaSuccess);
    }
    return status;
  });
  for (const Status& status : said) {
    EXPECT_EQ(status.code(), StatusCode::kInternal) << status;
  }
  std::vector<uint8_t> got(shape.row_bytes);
  ASSERT_EQ(
      cudaMemcpy(got.data(), last_row, got.size(), cudaMemcpyDeviceToHost),
      cudaSuccess);
  EXPECT_EQ(got, std::vector<uint8_t>(shape.row_bytes, kUnwritten));
}

TEST_F(GpuExchangeTest, ARankThatStaysAwayIsNamedByAllOthers) {
  const Case c = {.num_ranks = 3, .num_experts = 6};
  const std::vector<Rank> want = Reference(c, 4);
  Ranks ranks(c.num_ranks, std::chrono::milliseconds(50));
  const auto arrays = Arrays(c, ranks, want);
  const std::vector<Status> statuses = ranks.Run(
      [&](int r) { return r == 1 ? OkStatus() : arrays[r]->Run(ranks, true); });
  for (const int r : {0, 2}) {
    EXPECT_EQ(statuses[r].code(), StatusCode::kDeadlineExceeded);
    EXPECT_NE(statuses[r].message().find("rank(s) 1 of 3"), std::string::npos)
        << statuses[r];
  }
}

TEST_F(GpuExchangeTest, ThousandsOfCallsKeepNoMemory) {
  const Case c = {.num_tokens = 32, .hidden = 8};
  const std::vector<Rank> want = Reference(c, 5);
  Ranks ranks(c.num_ranks);
  const auto arrays = Arrays(c, ranks, want);
  const auto run = [&](int times) {
    for (const Status& status : ranks.Run([&](int r) {
           for (int i = 0; i < times; ++i) {
             TB_RETURN_IF_ERROR(arrays[r]->Run(ranks, true));
           }
           return OkStatus();
         })) {
      ASSERT_TRUE(status.ok()) << status;
    }
  };
  const auto free_bytes = [] {
    size_t free = 0;
    size_t total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
  };
  run(200);
  const size_t before = free_bytes();
  run(2500);  // Four calls each.
  // Other processes may use the GPU as well. A leak of 4 KiB a call is more.
  EXPECT_GT(free_bytes() + (32 << 20), before);
  arrays[0]->ExpectSame(want[0]);
}

}  // namespace
}  // namespace turbobus::moe::cuda
