#include "moe/rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

// One copy of each loop for AVX2-class CPUs, chosen when the library is loaded.
// Sanitizers cannot run the code that chooses.
#if defined(__x86_64__) && defined(__linux__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TB_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define TB_CLONES
#endif
#define TB_INLINE inline __attribute__((always_inline))

namespace turbobus::moe {
namespace {

struct BF16 {
  uint16_t bits;
};

TB_INLINE float Load(float x) { return x; }
TB_INLINE double Load(double x) { return x; }
TB_INLINE float Load(BF16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
TB_INLINE float Load(_Float16 x) { return static_cast<float>(x); }

TB_INLINE void Store(float x, float& out) { out = x; }
TB_INLINE void Store(double x, double& out) { out = x; }
TB_INLINE void Store(float x, BF16& out) {
  // To nearest, ties to even; a NaN keeps its upper bits and stays one.
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const uint32_t nan = bits | 0x00400000;
  out.bits = static_cast<uint16_t>((x != x ? nan : rounded) >> 16);
}
TB_INLINE void Store(float x, _Float16& out) { out = static_cast<_Float16>(x); }

template <typename T>
using Accumulator = decltype(Load(T{}));

// Sums of this many elements stay in the first-level cache.
constexpr int64_t kBlock = 1024;

template <typename T>
TB_INLINE void Sum(const void* const* rows, const void* weights, int num_rows,
                   int64_t size, void* out) {
  using A = Accumulator<T>;
  const A* w = static_cast<const A*>(weights);
  A sums[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t n = std::min(kBlock, size - begin);
    std::fill(sums, sums + n, A{0});
    for (int i = 0; i < num_rows; ++i) {
      const T* row = static_cast<const T*>(rows[i]) + begin;
      const A weight = w == nullptr ? A{1} : w[i];
      for (int64_t h = 0; h < n; ++h) sums[h] += weight * Load(row[h]);
    }
    T* result = static_cast<T*>(out) + begin;
    for (int64_t h = 0; h < n; ++h) Store(sums[h], result[h]);
  }
}

template <typename T>
TB_INLINE double Dot(const void* in, const void* row, double weight,
                     int64_t size, void* out) {
  using A = Accumulator<T>;
  constexpr int kLanes = 16;  // Independent sums, so that the loop vectorizes.
  const T* x = static_cast<const T*>(in);
  const T* y = static_cast<const T*>(row);
  T* z = static_cast<T*>(out);
  const A w = static_cast<A>(weight);
  A sums[kLanes] = {};
  int64_t h = 0;
  for (; h + kLanes <= size; h += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const A a = Load(x[h + lane]);
      sums[lane] += a * Load(y[h + lane]);
      Store(w * a, z[h + lane]);
    }
  }
  for (; h < size; ++h) {
    const A a = Load(x[h]);
    sums[0] += a * Load(y[h]);
    Store(w * a, z[h]);
  }
  A sum{0};
  for (A part : sums) sum += part;
  return static_cast<double>(sum);
}

#define TB_ROW_LOOPS(NAME, TYPE)                                             \
  TB_CLONES void Sum##NAME(const void* const* rows, const void* weights,     \
                           int num_rows, int64_t size, void* out) {          \
    Sum<TYPE>(rows, weights, num_rows, size, out);                           \
  }                                                                          \
  TB_CLONES double Dot##NAME(const void* in, const void* row, double weight, \
                             int64_t size, void* out) {                      \
    return Dot<TYPE>(in, row, weight, size, out);                            \
  }

TB_ROW_LOOPS(F32, float)
TB_ROW_LOOPS(F64, double)
TB_ROW_LOOPS(BF16, BF16)
TB_ROW_LOOPS(F16, _Float16)

#undef TB_ROW_LOOPS

}  // namespace

int64_t SizeOf(Element element) {
  switch (element) {
    case Element::kF64:
      return 8;
    case Element::kF32:
      return 4;
    case Element::kBF16:
    case Element::kF16:
      return 2;
  }
  return 0;
}

WeightedSumFn WeightedSum(Element element) {
  switch (element) {
    case Element::kF64:
      return &SumF64;
    case Element::kBF16:
      return &SumBF16;
    case Element::kF16:
      return &SumF16;
    case Element::kF32:
      break;
  }
  return &SumF32;
}

ScaleAndDotFn ScaleAndDot(Element element) {
  switch (element) {
    case Element::kF64:
      return &DotF64;
    case Element::kBF16:
      return &DotBF16;
    case Element::kF16:
      return &DotF16;
    case Element::kF32:
      break;
  }
  return &DotF32;
}

}  // namespace turbobus::moe
