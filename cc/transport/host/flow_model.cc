#include "transport/host/flow_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace turbobus::transport::host {
namespace {

constexpr double kNsPerSecond = 1e9;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

FlowModel::FlowModel(std::vector<double> rates_bytes_per_s)
    : rates_(std::move(rates_bytes_per_s)) {}

FlowId FlowModel::Start(std::span<const int> resources, int64_t size_bytes,
                        double max_bytes_per_s, int64_t now_ns) {
  AdvanceTo(now_ns);
  const FlowId id = next_id_++;
  flows_[id] = Flow{.resources = {resources.begin(), resources.end()},
                    .max_bytes_per_s = max_bytes_per_s,
                    .left_bytes = static_cast<double>(size_bytes),
                    .end_ns = now_ns_};
  ShareOut();
  return id;
}

void FlowModel::SetMaxRate(FlowId flow, double max_bytes_per_s,
                           int64_t now_ns) {
  const auto it = flows_.find(flow);
  if (it == flows_.end()) return;
  AdvanceTo(now_ns);
  it->second.max_bytes_per_s = max_bytes_per_s;
  ShareOut();
}

void FlowModel::Remove(FlowId flow, int64_t now_ns) {
  AdvanceTo(now_ns);
  if (flows_.erase(flow) > 0) ShareOut();
}

std::optional<FlowModel::End> FlowModel::NextEnd() const {
  std::optional<End> next;
  for (const auto& [id, flow] : flows_) {
    if (!next || flow.end_ns < next->time_ns) next = End{id, flow.end_ns};
  }
  return next;
}

double FlowModel::RateOf(FlowId flow) const {
  const auto it = flows_.find(flow);
  return it == flows_.end() ? 0 : it->second.bytes_per_s;
}

void FlowModel::AdvanceTo(int64_t now_ns) {
  if (now_ns <= now_ns_) return;
  const double seconds = static_cast<double>(now_ns - now_ns_) / kNsPerSecond;
  for (auto& [id, flow] : flows_) {
    if (flow.end_ns <= now_ns) {
      flow.left_bytes = 0;
    } else {
      flow.left_bytes -= flow.bytes_per_s * seconds;
      flow.left_bytes = std::max(flow.left_bytes, 0.0);
    }
  }
  now_ns_ = now_ns;
}

// Progressive filling: the resource that gives its flows the least settles
// their rate; what they take is taken off everywhere, and the rest is shared
// again.
void FlowModel::ShareOut() {
  std::vector<double> left = rates_;
  std::vector<int> num_unsettled(rates_.size(), 0);
  std::vector<Flow*> unsettled;
  for (auto& [id, flow] : flows_) {
    // A flow whose last byte has arrived takes nothing until it is removed.
    if (flow.left_bytes <= 0) {
      flow.bytes_per_s = 0;
      flow.end_ns = std::min(flow.end_ns, now_ns_);
      continue;
    }
    for (const int resource : flow.resources) ++num_unsettled[resource];
    unsettled.push_back(&flow);
  }
  while (!unsettled.empty()) {
    double share = kInfinity;
    for (size_t i = 0; i < left.size(); ++i) {
      if (num_unsettled[i] > 0)
        share = std::min(share, left[i] / num_unsettled[i]);
    }
    for (const Flow* flow : unsettled) {
      share = std::min(share, flow->max_bytes_per_s);
    }
    share = std::max(share, 1.0);  // Rounding must not stop a flow.
    const auto is_bottleneck = [&](int resource) {
      return left[resource] / num_unsettled[resource] <= share * (1 + 1e-12);
    };
    std::vector<Flow*> settled;
    std::erase_if(unsettled, [&](Flow* flow) {
      if (flow->max_bytes_per_s > share &&
          std::ranges::none_of(flow->resources, is_bottleneck)) {
        return false;
      }
      settled.push_back(flow);
      return true;
    });
    for (Flow* flow : settled) {
      flow->bytes_per_s = share;
      for (const int resource : flow->resources) {
        left[resource] = std::max(left[resource] - share, 0.0);
        --num_unsettled[resource];
      }
      if (share == kInfinity) {
        flow->end_ns = now_ns_;
      } else {
        const double ns = flow->left_bytes / share * kNsPerSecond;
        flow->end_ns = now_ns_ + std::llround(std::ceil(ns));
      }
    }
  }
}

}  // namespace turbobus::transport::host
