#ifndef TURBOBUS_SCHED_BIT_SET_H_
#define TURBOBUS_SCHED_BIT_SET_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace turbobus::sched {

/// A set of small integers whose number is known from the start.
class BitSet {
 public:
  BitSet() = default;
  explicit BitSet(int size) : words_((static_cast<size_t>(size) + 63) / 64) {}

  void Add(int i) { words_[Word(i)] |= Mask(i); }
  void Remove(int i) { words_[Word(i)] &= ~Mask(i); }
  void Add(const BitSet& other) {
    for (size_t w = 0; w < words_.size(); ++w) words_[w] |= other.words_[w];
  }
  void Clear() {
    for (uint64_t& word : words_) word = 0;
  }

  /// The smallest member, or -1.
  int First() const {
    for (size_t w = 0; w < words_.size(); ++w) {
      if (words_[w] != 0) {
        return static_cast<int>(w * 64) + std::countr_zero(words_[w]);
      }
    }
    return -1;
  }

 private:
  static size_t Word(int i) { return static_cast<size_t>(i) / 64; }
  static uint64_t Mask(int i) { return uint64_t{1} << (i % 64); }

  std::vector<uint64_t> words_;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_BIT_SET_H_
