#include "cache/dense_tail.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "base/half.h"

namespace anchorkv {
namespace {

// The vector form against the contract's scalar one: every half, its neighbours as floats, the midpoints
// between halves, and the same bits of every exponent. Finite numbers stay finite.
TEST(DenseTail, RoundsToHalfLikeFloatToHalf) {
  std::vector<float> inputs;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    const float value = HalfToFloat(static_cast<uint16_t>(high));
    for (const int32_t step : {-0x1001, -0x1000, -0xfff, -1, 0, 1, 0xfff, 0x1000, 0x1001}) {
      inputs.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(value) + static_cast<uint32_t>(step)));
    }
    for (const uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0xffffu}) {
      inputs.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  std::vector<uint16_t> stored(inputs.size());
  StoreElements(inputs.data(), static_cast<int64_t>(inputs.size()), DenseType::kF16, stored.data());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const uint16_t half = FloatToHalf(inputs[i]);
    const bool overflow = (half & 0x7fff) == 0x7c00 && std::isfinite(inputs[i]);
    ASSERT_EQ(stored[i], overflow ? half - 1 : half) << std::hex << std::bit_cast<uint32_t>(inputs[i]);
  }
}

TEST(DenseTail, GrowthKeepsRowsAndStaysBounded) {
  for (const DenseType type : {DenseType::kF16, DenseType::kF32}) {
    DenseTail tail(type, 2, 8);
    std::vector<float> key(8), value(8), back(8);
    for (int64_t t = 0; t < 5000; ++t) {
      ASSERT_TRUE(tail.Reserve(t + 1, t).ok());
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < 8; ++d) {
          key[static_cast<size_t>(d)] = static_cast<float>(t % 1000 + h) + static_cast<float>(d) / 16;
          value[static_cast<size_t>(d)] = -key[static_cast<size_t>(d)];
        }
        tail.StoreRow(h, t, key.data(), value.data());
      }
    }
    EXPECT_LE(tail.capacity(), 5000 + 512 + 64);
    EXPECT_EQ(tail.buffer_bytes(), tail.capacity() * tail.row_bytes());
    EXPECT_EQ(tail.row_bytes(), type == DenseType::kF16 ? 64 : 128);
    for (int64_t t = 0; t < 5000; ++t) {
      for (int h = 0; h < 2; ++h) {
        tail.LoadRow(kKeys, h, t, back.data());
        const float want = static_cast<float>(t % 1000 + h) + 3.0f / 16;
        ASSERT_EQ(back[3], type == DenseType::kF16 ? HalfToFloat(FloatToHalf(want)) : want) << t;
        tail.LoadRow(kValues, h, t, back.data());
        ASSERT_EQ(back[3], -(type == DenseType::kF16 ? HalfToFloat(FloatToHalf(want)) : want)) << t;
      }
    }
    tail.Release();
    EXPECT_EQ(tail.buffer_bytes(), 0);
  }
}

TEST(QueryRing, HoldsTheLastWindow) {
  QueryRing ring(4, 2, 8);
  ASSERT_TRUE(ring.Allocate().ok());
  std::vector<float> query(16);
  for (int64_t position = 0; position < 11; ++position) {
    for (size_t i = 0; i < 16; ++i) query[i] = static_cast<float>(position * 100 + static_cast<int64_t>(i));
    ring.Store(position, query.data(), 8);
  }
  std::vector<float> out(2 * 4 * 8);
  ring.Load(7, HeadMajor(out.data(), 2, 4, 8));
  for (int h = 0; h < 2; ++h) {
    for (int w = 0; w < 4; ++w) EXPECT_EQ(out[static_cast<size_t>((h * 4 + w) * 8 + 5)], (7 + w) * 100 + h * 8 + 5);
  }
}

}  // namespace
}  // namespace anchorkv
