#include "ffi/moe_call.h"

#include <cstring>
#include <string>
#include <utility>

#include "ffi/error.h"

namespace turbobus::ffi {

void FutureMember::Done(const Status& status) {
  if (status.ok()) {
    promise_.SetAvailable();
  } else {
    promise_.SetError(ToError(status));
  }
}

StatusOr<moe::Meeting> DecodeMeeting(const xla::ffi::AnyBuffer& keys,
                                     const xla::ffi::AnyBuffer& rank,
                                     std::string_view op,
                                     std::string_view axis) {
  const std::string name = std::string(op) + " over axis " + std::string(axis);
  const auto dims = keys.dimensions();
  if (keys.element_type() != xla::ffi::S32 || dims.size() != 2 || dims[0] < 1 ||
      dims[1] != kKeySize) {
    return InvalidArgument(name + ": keys must be s32[num_ranks, 4]");
  }
  if (rank.element_type() != xla::ffi::S32 || rank.element_count() != 1) {
    return InvalidArgument(name + ": rank must be one s32");
  }
  const auto* first = static_cast<const unsigned char*>(keys.untyped_data());
  moe::Meeting meeting;
  std::memcpy(&meeting.key, first, sizeof(meeting.key));
  for (int64_t r = 0; r < dims[0]; ++r) {
    uint64_t tag;
    std::memcpy(&tag, first + (r * 2 + 1) * sizeof(uint64_t), sizeof(tag));
    if (tag != moe::Rendezvous::ProcessTag()) {
      return Unimplemented(
          name +
          ": its ranks live in several processes; exchange along a mesh "
          "axis inside one process, and cross processes with XLA's "
          "collectives");
    }
  }
  int32_t index;
  std::memcpy(&index, rank.untyped_data(), sizeof(index));
  meeting.op = name;
  meeting.rank = index;
  meeting.num_ranks = static_cast<int>(dims[0]);
  return meeting;
}

xla::ffi::Future Arrive(const moe::Meeting& meeting,
                        std::unique_ptr<FutureMember> member,
                        moe::MakeWork make_work) {
  xla::ffi::Future future = member->future();
  moe::Rendezvous::Process().Arrive(meeting, std::move(member), make_work);
  return future;
}

xla::ffi::Future FailedFuture(const Status& status) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(ToError(status));
  return future;
}

}  // namespace turbobus::ffi
