#include <cstring>

#include "ffi/moe_call.h"
#include "ffi/moe_targets.h"
#include "ffi/targets.h"

namespace turbobus::ffi {
namespace {

/// Writes a key that no other call has, and which process made it. It has a
/// side effect as far as XLA knows, so that two are never one.
xla::ffi::Error NewKey(xla::ffi::ResultBuffer<xla::ffi::S32> key) {
  const uint64_t words[] = {moe::Rendezvous::NewKey(),
                            moe::Rendezvous::ProcessTag()};
  static_assert(sizeof(words) == kKeySize * sizeof(int32_t));
  std::memcpy(key->untyped_data(), words, sizeof(words));
  return xla::ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kNewKey, NewKey,
    xla::ffi::Ffi::Bind().Ret<xla::ffi::Buffer<xla::ffi::S32>>());

}  // namespace

std::vector<Target> MoeTargets() {
  std::vector<Target> targets = {{"turbobus_moe_key", kNewKey}};
  for (const Target& target : MoeExchangeTargets()) targets.push_back(target);
  return targets;
}

}  // namespace turbobus::ffi
