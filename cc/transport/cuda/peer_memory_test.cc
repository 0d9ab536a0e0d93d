#include "transport/cuda/peer_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "transport/cuda/process_peer_access.h"

namespace turbobus::transport::cuda {
namespace {

int NumGpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  (void)cudaGetLastError();
  return count;
}

template <typename Function>
Function* Driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  (void)cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault,
                                         &result);
#else
  (void)cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  return reinterpret_cast<Function*>(found);
}

/// Memory as XLA's default allocator makes it, on GPU 0, which nobody may touch
/// before `Open`.
class MappedMemory {
 public:
  MappedMemory() {
    CUmemAllocationProp of = {};
    of.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    of.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    is_made_ = Driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(
                   &address_, kSize, 0, 0, 0) == CUDA_SUCCESS &&
               Driver<decltype(cuMemCreate)>("cuMemCreate")(
                   &handle_, kSize, &of, 0) == CUDA_SUCCESS &&
               Driver<decltype(cuMemMap)>("cuMemMap")(
                   address_, kSize, 0, handle_, 0) == CUDA_SUCCESS;
  }
  ~MappedMemory() {
    (void)Driver<decltype(cuMemUnmap)>("cuMemUnmap")(address_, kSize);
    (void)Driver<decltype(cuMemRelease)>("cuMemRelease")(handle_);
    (void)Driver<decltype(cuMemAddressFree)>("cuMemAddressFree")(address_,
                                                                 kSize);
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  bool is_made() const { return is_made_; }
  /// Somewhere in it.
  const void* inside() const {
    return reinterpret_cast<const void*>(address_ + kSize / 2 + 512);
  }
  bool Open(int gpu) {
    CUmemAccessDesc to = {};
    to.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu};
    to.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return Driver<decltype(cuMemSetAccess)>("cuMemSetAccess")(
               address_, kSize, &to, 1) == CUDA_SUCCESS;
  }

 private:
  static constexpr size_t kSize = size_t{4} << 20;
  CUdeviceptr address_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  bool is_made_ = false;
};

/// The GPU that is asked about: another one's where there is one.
int Peer() { return NumGpus() - 1; }

constexpr const char* kClosed = "its allocator gives peers no access";

TEST(PeerMemoryTest, MappedMemoryIsOpenToWhomItWasOpenedFor) {
  if (NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  ASSERT_EQ(cudaFree(nullptr), cudaSuccess);  // Makes the context.
  MappedMemory memory;
  ASSERT_TRUE(memory.is_made());
  const int gpus[] = {Peer()};
  for (int i = 0; i < 2; ++i) {
    // What is closed is asked about anew.
    const Status closed = CheckPeerMemory(gpus, memory.inside());
    EXPECT_EQ(closed.code(), StatusCode::kUnavailable);
    EXPECT_NE(closed.message().find(kClosed), std::string::npos) << closed;
  }
  ASSERT_TRUE(memory.Open(Peer()));
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(CheckPeerMemory(gpus, memory.inside()).ok());
  }
  int device = -1;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0) << "the thread's device is left alone";
}

TEST(PeerMemoryTest, WhatCudaMallocGivesIsOpenToWhoReachesTheGpu) {
  if (NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  if (!ProcessPeerAccess().Has(Peer(), 0)) {
    GTEST_SKIP() << ProcessPeerAccess().Check(Peer(), 0);
  }
  const int gpus[] = {Peer()};
  for (const size_t size_bytes : {size_t{256}, size_t{64} << 20}) {
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, size_bytes), cudaSuccess);
    EXPECT_TRUE(CheckPeerMemory(gpus, memory).ok());
    const void* const last = static_cast<uint8_t*>(memory) + size_bytes - 1;
    EXPECT_TRUE(CheckPeerMemory(gpus, last).ok());
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
  }
}

TEST(PeerMemoryTest, PoolsAreClosedToPeers) {
  if (NumGpus() < 2) GTEST_SKIP() << "there is one GPU at most";
  const int gpus[] = {Peer()};
  void* memory = nullptr;
  ASSERT_EQ(cudaMallocAsync(&memory, 4096, cudaStreamPerThread), cudaSuccess);
  EXPECT_EQ(CheckPeerMemory(gpus, memory).code(), StatusCode::kUnavailable);
  EXPECT_EQ(cudaFreeAsync(memory, cudaStreamPerThread), cudaSuccess);
}

TEST(PeerMemoryTest, WhatIsNoDeviceMemoryIsNobodys) {
  if (NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  const int gpus[] = {Peer()};
  const int here = 0;
  EXPECT_FALSE(CheckPeerMemory(gpus, &here).ok());
}

TEST(KnownMemoryTest, ARangeIsKnownForTheGpusItWasAskedFor) {
  KnownMemory known;
  EXPECT_FALSE(known.Has(0, 0b1));
  known.Add(1000, 100, 0b011);
  EXPECT_TRUE(known.Has(1000, 0b011));
  EXPECT_TRUE(known.Has(1099, 0b010));
  EXPECT_FALSE(known.Has(1099, 0b110));
  EXPECT_FALSE(known.Has(999, 0b001));
  EXPECT_FALSE(known.Has(1100, 0b001));
}

TEST(KnownMemoryTest, TheOldestRangeGoes) {
  KnownMemory known;
  for (size_t i = 0; i <= KnownMemory::kNumRanges; ++i) {
    known.Add(i * 100, 100, 1);
  }
  EXPECT_FALSE(known.Has(50, 1));
  EXPECT_TRUE(known.Has(150, 1));
  EXPECT_TRUE(known.Has(KnownMemory::kNumRanges * 100 + 50, 1));
}

}  // namespace
}  // namespace turbobus::transport::cuda
