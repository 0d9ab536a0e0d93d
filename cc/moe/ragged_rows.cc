#include "moe/ragged_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace turbobus::moe {
namespace {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

float Load(float value) { return value; }
double Load(double value) { return value; }

float Load(Bfloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

float Load(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const int exponent = (value.bits >> 10) & 0x1f;
  const int mantissa = value.bits & 0x3ff;
  if (exponent == 0x1f) {
    return std::bit_cast<float>(sign | 0x7f800000 |
                                static_cast<uint32_t>(mantissa) << 13);
  }
  const float magnitude =
      exponent == 0
          ? std::ldexp(static_cast<float>(mantissa), -24)
          : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return sign ? -magnitude : magnitude;
}

void Store(float value, float& to) { to = value; }
void Store(double value, double& to) { to = value; }

// Both round to nearest, ties to even, as XLA does.
void Store(float value, Bfloat16& to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) {
    to.bits = static_cast<uint16_t>(bits >> 16 | 0x40);
  } else {
    to.bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

void Store(float value, Float16& to) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    to.bits = sign | 0x7e00;
    return;
  }
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) {  // rounds to 2^16, which has no place
    to.bits = sign | 0x7c00;
    return;
  }
  if (magnitude == 0) {
    to.bits = sign;
    return;
  }
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude < 2^exponent
  // The unit in the last place: 2^-24 for subnormals, else 11 bits down.
  const int unit = std::max(exponent - 11, -24);
  const auto steps =
      static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // 1024 steps start the next binade: the carry runs into the exponent.
  to.bits = static_cast<uint16_t>(
      sign + static_cast<uint32_t>(unit + 24) * 1024 + steps);
}

template <typename T>
void AddUp(std::span<const std::byte* const> rows, int64_t row_bytes,
           std::byte* result) {
  const auto count = row_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    T value;
    const int64_t at = i * static_cast<int64_t>(sizeof(T));
    std::memcpy(&value, rows[0] + at, sizeof(T));
    auto sum = Load(value);
    for (const std::byte* row : rows.subspan(1)) {
      std::memcpy(&value, row + at, sizeof(T));
      sum += Load(value);
    }
    Store(sum, value);
    std::memcpy(result + at, &value, sizeof(T));
  }
}

void AddUp(RowElement element, std::span<const std::byte* const> rows,
           int64_t row_bytes, std::byte* result) {
  switch (element) {
    case RowElement::kFloat64:
      return AddUp<double>(rows, row_bytes, result);
    case RowElement::kFloat32:
      return AddUp<float>(rows, row_bytes, result);
    case RowElement::kFloat16:
      return AddUp<Float16>(rows, row_bytes, result);
    case RowElement::kBfloat16:
      return AddUp<Bfloat16>(rows, row_bytes, result);
  }
}

int64_t End(const RaggedRun& run) { return run.operand_row + run.num_rows; }

/// The order of addition. A slice has a row once at most.
bool IsBefore(const RaggedRun* a, const RaggedRun* b) {
  return a->slice < b->slice;
}

}  // namespace

int64_t ElementBytes(RowElement element) {
  switch (element) {
    case RowElement::kFloat64:
      return 8;
    case RowElement::kFloat32:
      return 4;
    case RowElement::kFloat16:
    case RowElement::kBfloat16:
      return 2;
  }
  return 0;
}

void PullRows(std::span<const RaggedRun> runs, int64_t row_bytes,
              std::span<const std::byte* const> operands, std::byte* result) {
  if (row_bytes == 0) return;
  for (const RaggedRun& run : runs) {
    std::memcpy(result + run.output_row * row_bytes,
                operands[run.source] + run.operand_row * row_bytes,
                static_cast<size_t>(run.num_rows * row_bytes));
  }
}

void SumRows(std::span<const RaggedRun> runs, RowElement element,
             int64_t row_bytes, int64_t begin, int64_t end,
             std::span<const std::byte* const> cotangents, std::byte* result) {
  if (row_bytes == 0) return;
  std::vector<const RaggedRun*> active;
  std::vector<const std::byte*> rows;
  size_t next = 0;
  // Between two places where a run begins or ends, every row has the same runs.
  for (int64_t row = begin; row < end;) {
    std::erase_if(active,
                  [&](const RaggedRun* run) { return End(*run) <= row; });
    for (; next < runs.size() && runs[next].operand_row <= row; ++next) {
      if (End(runs[next]) <= row) continue;
      active.insert(
          std::upper_bound(active.begin(), active.end(), &runs[next], IsBefore),
          &runs[next]);
    }
    int64_t stop =
        next < runs.size() ? std::min(end, runs[next].operand_row) : end;
    for (const RaggedRun* run : active) stop = std::min(stop, End(*run));
    std::byte* to = result + row * row_bytes;
    const auto source = [&](const RaggedRun& run, int64_t r) {
      return cotangents[run.destination] +
             (run.output_row + r - run.operand_row) * row_bytes;
    };
    if (active.empty()) {
      std::memset(to, 0, static_cast<size_t>((stop - row) * row_bytes));
    } else if (active.size() == 1) {
      std::memcpy(to, source(*active[0], row),
                  static_cast<size_t>((stop - row) * row_bytes));
    } else {
      for (int64_t r = row; r < stop; ++r) {
        rows.clear();
        for (const RaggedRun* run : active) rows.push_back(source(*run, r));
        AddUp(element, rows, row_bytes, result + r * row_bytes);
      }
    }
    row = stop;
  }
}

}  // namespace turbobus::moe
