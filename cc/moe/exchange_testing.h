#ifndef TURBOBUS_MOE_EXCHANGE_TESTING_H_
#define TURBOBUS_MOE_EXCHANGE_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "moe/exchange.h"
#include "moe/together.h"

// Layers of ranks in one place, for tests.

namespace turbobus::moe::testing {

/// Runs all pieces, on several threads.
inline void RunAll(StatusOr<std::unique_ptr<Work>> work) {
  ASSERT_TRUE(work.ok()) << work.status();
  constexpr int kWorkers = 3;
  Together together(std::move(*work), kWorkers);
  std::vector<std::thread> threads;
  for (int w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] { together.RunAs(w); });
  }
  for (std::thread& thread : threads) thread.join();
}

/// What `Make…` takes.
template <typename Call>
std::vector<const Call*> Pointers(const std::vector<Call>& calls) {
  std::vector<const Call*> pointers;
  for (const Call& call : calls) pointers.push_back(&call);
  return pointers;
}

/// A layer of ranks in one place, its arrays by rank, float32.
struct Layer {
  ExchangeConfig config;
  int64_t hidden;
  std::vector<std::vector<float>> tokens, rows, sums, weights;
  std::vector<std::vector<int32_t>> ids, slots, group_sizes, wanted;

  Layer(ExchangeShape shape, int64_t hidden, int64_t num_batches,
        std::mt19937& random)
      : hidden(hidden) {
    config.shape = shape;
    config.num_batches = num_batches;
    config.row_bytes = hidden * sizeof(float);
    const size_t num_tokens = num_batches * shape.num_tokens;
    const auto integer = [&](int low, int high) {
      return low + static_cast<int>(random() % (high - low + 1));
    };
    for (int r = 0; r < shape.num_ranks; ++r) {
      auto& t = tokens.emplace_back(num_tokens * hidden);
      for (float& x : t) x = integer(-3, 3);
      auto& w = weights.emplace_back(num_tokens * shape.top_k);
      for (float& x : w) x = integer(-3, 3);
      auto& i = ids.emplace_back(num_tokens * shape.top_k);
      for (int32_t& x : i) x = integer(-1, shape.num_experts);
      slots.emplace_back(i.size());
      // NaN, so that what is not written is found out.
      rows.emplace_back(num_batches * shape.recv_capacity * hidden,
                        std::nanf(""));
      sums.emplace_back(t.size(), std::nanf(""));
      group_sizes.emplace_back(num_batches * shape.num_local_experts());
      wanted.emplace_back(group_sizes.back().size());
    }
  }

  void Dispatch() {
    std::vector<DispatchCall> calls(config.shape.num_ranks);
    for (size_t r = 0; r < calls.size(); ++r) {
      calls[r].config = config;
      calls[r].tokens = tokens[r].data();
      calls[r].expert_ids = ids[r].data();
      calls[r].rows = rows[r].data();
      calls[r].group_sizes = group_sizes[r].data();
      calls[r].wanted = wanted[r].data();
      calls[r].slots = slots[r].data();
      CountDispatch(calls[r]);
    }
    RunAll(MakeDispatch(Pointers(calls)));
  }

  /// The same in two exchanges: one plans, one moves.
  void DispatchInTwo() {
    std::vector<DispatchCall> plans(config.shape.num_ranks);
    std::vector<DeliverCall> calls(config.shape.num_ranks);
    for (size_t r = 0; r < calls.size(); ++r) {
      plans[r].config = config;
      plans[r].config.row_bytes = 0;
      plans[r].expert_ids = ids[r].data();
      plans[r].group_sizes = group_sizes[r].data();
      plans[r].wanted = wanted[r].data();
      plans[r].slots = slots[r].data();
      CountDispatch(plans[r]);
      calls[r] = {.config = config,
                  .tokens = tokens[r].data(),
                  .expert_ids = ids[r].data(),
                  .slots = slots[r].data(),
                  .group_sizes = group_sizes[r].data(),
                  .rows = rows[r].data()};
    }
    RunAll(MakeDispatch(Pointers(plans)));
    RunAll(MakeDeliver(Pointers(calls)));
  }

  void Combine(bool is_weighted) {
    std::vector<CombineCall> calls(config.shape.num_ranks);
    for (size_t r = 0; r < calls.size(); ++r) {
      calls[r].config = config;
      calls[r].rows = rows[r].data();
      calls[r].expert_ids = ids[r].data();
      calls[r].slots = slots[r].data();
      calls[r].weights = is_weighted ? weights[r].data() : nullptr;
      calls[r].sums = sums[r].data();
    }
    RunAll(MakeCombine(Pointers(calls)));
  }

  /// The gradients of `Combine(true)`: of the rows, and of the weights.
  std::pair<std::vector<std::vector<float>>, std::vector<std::vector<float>>>
  CombineGrad(const std::vector<std::vector<float>>& sum_grads) {
    auto row_grads = rows;
    auto weight_grads = weights;
    for (auto* grads : {&row_grads, &weight_grads}) {
      for (auto& of_rank : *grads) {
        std::fill(of_rank.begin(), of_rank.end(), std::nanf(""));
      }
    }
    std::vector<CombineGradCall> calls(config.shape.num_ranks);
    for (size_t r = 0; r < calls.size(); ++r) {
      calls[r].config = config;
      calls[r].sum_grads = sum_grads[r].data();
      calls[r].rows = rows[r].data();
      calls[r].expert_ids = ids[r].data();
      calls[r].slots = slots[r].data();
      calls[r].weights = weights[r].data();
      calls[r].group_sizes = group_sizes[r].data();
      calls[r].row_grads = row_grads[r].data();
      calls[r].weight_grads = weight_grads[r].data();
    }
    RunAll(MakeCombineGrad(Pointers(calls)));
    return {row_grads, weight_grads};
  }
};

/// A shape of random sizes, often with fewer rows than are wanted.
inline ExchangeShape RandomShape(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  ExchangeShape shape;
  shape.num_ranks = 1 + below(4);
  shape.num_experts = shape.num_ranks * (1 + below(3));
  shape.num_tokens = below(9);
  shape.top_k = 1 + below(3);
  if (below(2) == 0) {
    shape.expert_capacity = 1 + below(9);
    shape.recv_capacity = shape.num_local_experts() * shape.expert_capacity;
  } else {
    shape.recv_capacity = below(40);
  }
  return shape;
}

}  // namespace turbobus::moe::testing

#endif  // TURBOBUS_MOE_EXCHANGE_TESTING_H_
