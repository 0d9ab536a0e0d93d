#ifndef TURBOBUS_FFI_MOE_CALL_H_
#define TURBOBUS_FFI_MOE_CALL_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "moe/rendezvous.h"
#include "xla/ffi/api/ffi.h"

// What every exchange handler on CPU devices shares: its first two operands say
// who calls and which call it is, and its result is a future.

namespace turbobus::ffi {

/// Elements that `turbobus_moe_key` writes: a key and a process tag, two s32
/// each.
inline constexpr int64_t kKeySize = 4;

/// A member whose `Done` completes an XLA future.
class FutureMember : public moe::Member {
 public:
  /// To be called once.
  xla::ffi::Future future() { return xla::ffi::Future(promise_); }
  void Done(const Status& status) override;

 private:
  xla::ffi::Promise promise_;
};

/// Reads the operands that every exchange begins with: `keys` s32[num_ranks,
/// 4], what `turbobus_moe_key` wrote on every rank, gathered by XLA; `rank`
/// s32[]. `op` and `axis` name the call in messages. Refuses ranks that live in
/// several processes.
StatusOr<moe::Meeting> DecodeMeeting(const xla::ffi::AnyBuffer& keys,
                                     const xla::ffi::AnyBuffer& rank,
                                     std::string_view op,
                                     std::string_view axis);

/// Takes `member` to the process's rendezvous and returns its future.
xla::ffi::Future Arrive(const moe::Meeting& meeting,
                        std::unique_ptr<FutureMember> member,
                        moe::MakeWork make_work);

/// A future that has failed with `status` already.
xla::ffi::Future FailedFuture(const Status& status);

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_MOE_CALL_H_
