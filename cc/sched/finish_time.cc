#include "sched/finish_time.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace turbobus::sched {
namespace {

/// Relays are not let into a cap of which less than this part is left.
constexpr int64_t kMinResidualParts = 20;
/// How much faster than promised a cap's clock runs.
constexpr double kCapHeadroom = 1.05;
/// Queues with more lanes than any node has skip the comparison with others.
constexpr size_t kMaxCompared = 64;

double Ns(int64_t size_bytes, int64_t rate_bytes_per_s) {
  return 1e9 * static_cast<double>(size_bytes) /
         static_cast<double>(rate_bytes_per_s);
}

/// Bytes that the direct lane would copy before it came to `transfer`'s chunk.
int64_t BytesAhead(const Tables& tables, const Queue& queue,
                   const TransferState& transfer) {
  int64_t bytes = 0;
  for (int i = queue.queued.front(); i != kNone;
       i = decltype(queue.queued)::Next(tables.transfers, i)) {
    const TransferState& other = tables.transfers[i];
    if (&other == &transfer) break;
    bytes += other.chunk_left_bytes;
  }
  return bytes;
}

/// When one of a queue's lanes is free, and how fast it is.
struct Offer {
  double free_ns;
  double ns_per_byte;
};

/// When lanes that share `bytes` ideally are through with them, and the fastest
/// of the lanes that get a share. `offers` loses those that would be free too
/// late.
struct Drained {
  double at_ns;
  double min_ns_per_byte;
};

Drained Drain(std::array<Offer, kMaxCompared>& offers, size_t num_offers,
              double bytes) {
  while (true) {
    double rate = 0;
    double done = 0;
    double min_ns_per_byte = offers[0].ns_per_byte;
    for (size_t i = 0; i < num_offers; ++i) {
      rate += 1 / offers[i].ns_per_byte;
      done += offers[i].free_ns / offers[i].ns_per_byte;
      min_ns_per_byte = std::min(min_ns_per_byte, offers[i].ns_per_byte);
    }
    const double at_ns = (bytes + done) / rate;
    size_t num_kept = 0;
    for (size_t i = 0; i < num_offers; ++i) {
      if (offers[i].free_ns <= at_ns) offers[num_kept++] = offers[i];
    }
    if (num_kept == num_offers || num_kept == 0)
      return {at_ns, min_ns_per_byte};
    num_offers = num_kept;
  }
}

}  // namespace

void CountOwnRates(Tables& tables) {
  const auto for_waiting = [&](auto body) {
    for (const Queue& queue : tables.queues) {
      if (queue.is_waiting) body(tables.lanes[queue.direct]);
    }
  };
  for (Cap& cap : tables.caps) cap.asked_rate = cap.own_rate = 0;
  for_waiting([&](const Lane& lane) {
    for (int c : lane.caps) tables.caps[c].asked_rate += lane.rate_bytes_per_s;
  });
  for_waiting([&](const Lane& lane) {
    double stretch = 1;
    for (int c : lane.caps) {
      const Cap& cap = tables.caps[c];
      stretch =
          std::max(stretch, static_cast<double>(cap.asked_rate) /
                                static_cast<double>(cap.bandwidth_bytes_per_s));
    }
    for (int c : lane.caps) {
      tables.caps[c].own_rate += static_cast<int64_t>(
          static_cast<double>(lane.rate_bytes_per_s) / stretch);
    }
  });
}

int64_t CapsOpenNs(const Tables& tables, const Lane& lane, int64_t size_bytes,
                   int64_t now_ns) {
  int64_t open_ns = now_ns;
  for (int c : lane.caps) {
    const Cap& cap = tables.caps[c];
    const int64_t residual = cap.residual();
    if (residual < cap.bandwidth_bytes_per_s / kMinResidualParts) return kNever;
    const int64_t wanted =
        cap.relay_rate + (lane.num_in_flight > 0 ? 0 : lane.rate_bytes_per_s);
    if (wanted <= residual) continue;
    const double lead_ns =
        Ns(lane.in_flight_bytes + size_bytes, residual) / kCapHeadroom;
    open_ns =
        std::max(open_ns, cap.relay_free_ns - static_cast<int64_t>(lead_ns));
  }
  return open_ns;
}

void ChargeCaps(Tables& tables, const Lane& lane, int64_t size_bytes,
                int64_t now_ns) {
  for (int c : lane.caps) {
    Cap& cap = tables.caps[c];
    const int64_t residual =
        std::max(cap.residual(), cap.bandwidth_bytes_per_s / kMinResidualParts);
    cap.relay_free_ns =
        std::max(cap.relay_free_ns, now_ns) +
        static_cast<int64_t>(Ns(size_bytes, residual) / kCapHeadroom);
  }
}

double CapShare(const Tables& tables, const Lane& lane) {
  double share = 1;
  for (int c : lane.caps) {
    const Cap& cap = tables.caps[c];
    share =
        std::min(share, static_cast<double>(cap.residual() - cap.relay_rate) /
                            static_cast<double>(lane.rate_bytes_per_s));
  }
  return std::max(share, 0.0);
}

double CapStretch(const Tables& tables, const Lane& lane) {
  double stretch = 1;
  for (int c : lane.caps) {
    const Cap& cap = tables.caps[c];
    const int64_t active_rate =
        cap.active_rate + (lane.num_in_flight > 0 ? 0 : lane.rate_bytes_per_s);
    stretch =
        std::max(stretch, static_cast<double>(active_rate) /
                              static_cast<double>(cap.bandwidth_bytes_per_s));
  }
  return stretch;
}

double Stretch(const Tables& tables, const Lane& lane) {
  const double cap_stretch = CapStretch(tables, lane);
  if (!lane.is_relay) return cap_stretch;
  const HostLink& link = tables.links[lane.host_link];
  const int num_borrowing = link.num_borrowing + (lane.num_in_flight == 0);
  return std::max(cap_stretch,
                  num_borrowing * link.ns_per_byte / lane.ns_per_byte);
}

int64_t StartNs(const Tables& tables, const Lane& lane, int64_t now_ns) {
  return std::max(lane.backlog.FreeAtIfLate(now_ns),
                  tables.links[lane.host_link].backlog.FreeAt(now_ns));
}

int64_t FinishNs(const Tables& tables, const Lane& lane, int64_t size_bytes,
                 int64_t now_ns) {
  return StartNs(tables, lane, now_ns) +
         lane.ServiceNs(size_bytes, Stretch(tables, lane)) +
         lane.NextLatencyNs();
}

bool FinishesBeforeDirect(const Tables& tables, const TransferState& transfer,
                          int64_t finish_ns, int64_t now_ns) {
  const Queue& queue = tables.queues[transfer.queue];
  const Lane& direct = tables.lanes[queue.direct];
  const int64_t idle_ns =
      StartNs(tables, direct, now_ns) + direct.NextLatencyNs();
  const double stretch = Stretch(tables, direct);
  const auto done_ns = [&](int64_t bytes) {
    return idle_ns + direct.ServiceNs(bytes, stretch);
  };
  if (finish_ns < done_ns(transfer.left_bytes)) return true;
  // The queue behind the transfer does not matter, but its length bounds what
  // is ahead, and mostly settles the question.
  if (finish_ns >= done_ns(queue.queued_bytes)) return false;
  const int64_t ahead = BytesAhead(tables, queue, transfer);
  return finish_ns < done_ns(ahead + transfer.left_bytes);
}

bool OthersFinishBefore(const Tables& tables, const TransferState& transfer,
                        int lane, int64_t size_bytes, int64_t finish_ns,
                        int64_t now_ns) {
  const Queue& queue = tables.queues[transfer.queue];
  const auto rest = static_cast<double>(transfer.left_bytes - size_bytes);
  // Far from the end nothing else needs to be looked at.
  if (rest >= static_cast<double>(queue.total_rate_bytes_per_s) * 1e-9 *
                  static_cast<double>(finish_ns - now_ns)) {
    return false;
  }
  std::array<Offer, kMaxCompared> offers;
  size_t num_offers = 0;
  const auto add = [&](int other, int64_t open_ns) {
    if (other == lane || num_offers == kMaxCompared) return;
    const Lane& l = tables.lanes[other];
    const int64_t free_ns = std::max(StartNs(tables, l, now_ns), open_ns);
    offers[num_offers++] = {static_cast<double>(free_ns + l.NextLatencyNs()),
                            l.ns_per_byte * l.late.lateness()};
  };
  if (!queue.is_orphan()) add(queue.direct, now_ns);
  for (int relay : queue.relays) {
    const Lane& l = tables.lanes[relay];
    if (l.late.is_backed_off()) continue;
    if (tables.links[l.host_link].num_own_waiting > 0) continue;
    const int64_t open_ns = CapsOpenNs(tables, l, size_bytes, now_ns);
    if (open_ns != kNever) add(relay, open_ns);
  }
  if (num_offers == 0) return false;
  // Blocks are whole: the last one may start when an ideal split would end.
  const Drained drained = Drain(offers, num_offers, rest);
  const double others_ns =
      drained.at_ns + static_cast<double>(size_bytes) * drained.min_ns_per_byte;
  return others_ns < static_cast<double>(finish_ns);
}

}  // namespace turbobus::sched
