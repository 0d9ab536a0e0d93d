#include "offload/plain_traffic.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/fork.h"

namespace turbobus::offload {
namespace {

using engine::LivePage;
using topo::Direction;

/// Those beyond share the last row.
constexpr int kMaxDevices = 64;

struct Page {
  uint64_t generation = 0;
  LivePage* page = nullptr;
};

// Never destroyed: threads of XLA copy while the process exits.
std::atomic<Page*> g_page = nullptr;

LivePage* MakePage() {
  std::vector<LivePage::Row> rows;
  for (int device = 0; device < kMaxDevices; ++device) {
    for (const auto direction : {Direction::kH2d, Direction::kD2h}) {
      rows.push_back({.name = "device" + std::to_string(device) +
                              (direction == Direction::kH2d ? " h2d" : " d2h"),
                      .gpu = device,
                      .direction = direction});
    }
  }
  auto page = LivePage::Create(LivePage::Kind::kPlain, rows);
  if (!page.ok()) return nullptr;
  (*page)->RemoveAtExit();
  return std::move(page).value().release();
}

/// Without a lock, which a fork could leave taken for ever.
LivePage* ProcessPage() {
  const uint64_t generation = engine::ForkGeneration();
  Page* seen = g_page.load(std::memory_order_acquire);
  if (seen != nullptr && seen->generation == generation) return seen->page;
  auto* const made = new Page{generation, MakePage()};
  if (g_page.compare_exchange_strong(seen, made)) return made->page;
  delete made->page;
  delete made;
  return seen->page;
}

size_t RowOf(Direction direction, int device) {
  return 2 * static_cast<size_t>(std::clamp(device, 0, kMaxDevices - 1)) +
         static_cast<size_t>(direction);
}

}  // namespace

PlainTraffic::PlainTraffic(Direction direction, int device, int64_t size_bytes)
    : page_(ProcessPage()),
      row_(RowOf(direction, device)),
      size_bytes_(size_bytes) {
  if (page_ == nullptr) return;
  page_->AddTransfers(1);
  page_->AddBytes(row_, 0, 0, size_bytes_);
}

PlainTraffic::~PlainTraffic() {
  if (page_ == nullptr) return;
  page_->AddBytes(row_, size_bytes_, 1, -size_bytes_);
  page_->AddTransfers(-1, 1);
}

}  // namespace turbobus::offload
