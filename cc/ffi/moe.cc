#include <cstring>
#include <string>
#include <string_view>

#include "ffi/error.h"
#include "ffi/moe_call.h"
#include "ffi/moe_targets.h"
#include "ffi/targets.h"
#include "moe/roll_call.h"

namespace turbobus::ffi {
namespace {

using xla::ffi::AnyBuffer;

bool Read(const AnyBuffer& buffer, int32_t& value) {
  if (buffer.element_type() != xla::ffi::S32 || buffer.element_count() != 1) {
    return false;
  }
  std::memcpy(&value, buffer.untyped_data(), sizeof(value));
  return true;
}

/// Writes a key that no other call has, and which process made it. It has a
/// side effect as far as XLA knows, so that two are never one. Calls the roll
/// too: XLA's all-gather of the keys, which follows, waits for all ranks.
xla::ffi::Error NewKey(xla::ffi::RunId run, AnyBuffer rank, AnyBuffer group,
                       xla::ffi::ResultBuffer<xla::ffi::S32> key,
                       std::string_view call, int64_t num_ranks, int64_t site) {
  int32_t my_rank = 0;
  int32_t my_group = 0;
  if (!Read(rank, my_rank) || !Read(group, my_group) ||
      key->element_count() != kKeySize) {
    return ToError(InvalidArgument(
        "turbobus_moe_key: rank and group must be one s32 each, the key four"));
  }
  if (num_ranks > 1) {
    moe::RollCall::Process().Come({.run = run.run_id,
                                   .site = site,
                                   .group = my_group,
                                   .op = std::string(call)},
                                  my_rank, static_cast<int>(num_ranks));
  }
  const uint64_t words[] = {moe::Rendezvous::NewKey(),
                            moe::Rendezvous::ProcessTag()};
  static_assert(sizeof(words) == kKeySize * sizeof(int32_t));
  std::memcpy(key->untyped_data(), words, sizeof(words));
  return xla::ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kNewKey, NewKey,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::RunId>()
                           .Arg<AnyBuffer>()  // rank
                           .Arg<AnyBuffer>()  // group
                           .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                           .Attr<std::string_view>("call")
                           .Attr<int64_t>("num_ranks")
                           .Attr<int64_t>("site"));

}  // namespace

std::vector<Target> MoeTargets() {
  std::vector<Target> targets = {{"turbobus_moe_key", kNewKey}};
  for (const Target& target : MoeExchangeTargets()) targets.push_back(target);
  return targets;
}

}  // namespace turbobus::ffi
