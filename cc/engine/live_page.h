#ifndef TURBOBUS_ENGINE_LIVE_PAGE_H_
#define TURBOBUS_ENGINE_LIVE_PAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "topo/path.h"

namespace turbobus::engine {

/// What an engine moves, for other processes to see: a file of counters in a
/// folder of the user's, mapped into memory (docs/engine.md has the layout;
/// `python -m jax_turbobus top` reads it).
///
/// Counting is an atomic addition: no lock, no system call, nothing that can
/// fail. Thread-safe. In the child of a fork everything does nothing: the page
/// is the parent's. The file goes with the object, or, of one that lives as
/// long as the process, when that exits. Those of killed processes are removed
/// by the next process that makes one.
class LivePage {
 public:
  enum class Kind : uint32_t {
    /// Copies on streams: a transfer is issued at once, and seen to be over
    /// when the engine next looks.
    kStreams = 0,
    kHost = 1,
    kEmulated = 2,
    /// Copies that no engine makes.
    kPlain = 3,
  };
  /// One lane, or one direction of a link that lanes share.
  struct Row {
    std::string name;
    /// -1: of no single GPU.
    int gpu = -1;
    int relay = topo::kNoRelay;
    topo::Direction direction = topo::Direction::kH2d;
    bool is_link = false;
    double bandwidth_bytes_per_s = 0;
  };
  enum State : uint32_t {
    kBackedOff = 1,
    kDropped = 2,
    kHasRival = 4,
  };
  static constexpr size_t kMaxRows = 16384;

  /// FAILED_PRECONDITION if JAX_TURBOBUS_TOP=0, INVALID_ARGUMENT if it is no
  /// switch; else UNAVAILABLE, with the file, if it cannot be made. Transfers
  /// do without.
  static StatusOr<std::unique_ptr<LivePage>> Create(
      Kind kind, const std::vector<Row>& rows);
  ~LivePage();
  LivePage(const LivePage&) = delete;
  LivePage& operator=(const LivePage&) = delete;

  /// Where this user's pages are: in JAX_TURBOBUS_LOCK_DIR (default /tmp).
  static std::string Folder();

  /// Changes of what is in flight, and what has come to an end.
  void AddTransfers(int64_t in_flight, int64_t ended = 0);
  void AddBytes(size_t row, int64_t bytes, int64_t blocks, int64_t in_flight);
  /// `states`: of `State`.
  void SetStates(size_t row, uint32_t states);
  /// The engine has looked for what is over, at `now_ns` of the monotonic
  /// clock.
  void SetLooked(int64_t now_ns);

  /// Removes the file when the process exits, for a page that is not destroyed
  /// before.
  void RemoveAtExit();

  const std::string& path() const { return path_; }

 private:
  struct Header;
  struct Counters;

  LivePage(std::string path, void* memory, size_t size_bytes, size_t num_rows);
  bool is_mine() const;
  void Remove() const;
  Header& header() const;
  Counters& counters(size_t row) const;

  const std::string path_;
  void* const memory_;
  const size_t size_bytes_;
  const size_t num_rows_;
  const uint64_t generation_;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_LIVE_PAGE_H_
