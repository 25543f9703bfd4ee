#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace anchorkv {
namespace {

// What the bits mean, by the definition of the format.
double Meaning(uint16_t h) {
  const double sign = (h & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = (h >> 10) & 0x1f;
  const int mantissa = h & 0x3ff;
  if (exponent == 0x1f) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  return exponent == 0 ? sign * std::ldexp(mantissa, -24) : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Half, EveryValueDecodes) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t h = static_cast<uint16_t>(bits);
    const double expected = Meaning(h);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(h))) << bits;
    } else {
      ASSERT_EQ(HalfToFloat(h), expected) << bits;
      ASSERT_EQ(std::signbit(HalfToFloat(h)), (h & 0x8000) != 0) << bits;
    }
  }
}

TEST(Half, EveryValueEncodesToItself) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t h = static_cast<uint16_t>(bits);
    const float f = HalfToFloat(h);
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(f)))) << bits;
    } else {
      ASSERT_EQ(FloatToHalf(f), h) << bits;
    }
  }
}

// Around the midpoint of every two neighbours, subnormal ones included.
TEST(Half, RoundsToNearestAndTiesToEven) {
  for (uint16_t low = 0; low < 0x7bff; ++low) {
    const uint16_t high = static_cast<uint16_t>(low + 1);
    const float middle = static_cast<float>((Meaning(low) + Meaning(high)) / 2);
    const uint16_t even = (low & 1) == 0 ? low : high;
    ASSERT_EQ(FloatToHalf(middle), even) << low;
    ASSERT_EQ(FloatToHalf(-middle), even | 0x8000) << low;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, 0.0f)), low);
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, INFINITY)), high);
  }
}

TEST(Half, RangeEnds) {
  EXPECT_EQ(FloatToHalf(65519.996f), 0x7bff);  // the last float that rounds down to 65504
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToHalf(-1e30f), 0xfc00);
  EXPECT_EQ(FloatToHalf(INFINITY), 0x7c00);
  EXPECT_EQ(FloatToHalf(0x1p-25f), 0);  // a tie with zero, which is even
  EXPECT_EQ(FloatToHalf(std::nextafter(0x1p-25f, 1.0f)), 1);
  EXPECT_EQ(FloatToHalf(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(FloatToHalf(-0.0f), 0x8000);
}

TEST(Half, FiniteHalvesSaturate) {
  EXPECT_EQ(FloatToFiniteHalf(65520.0f), 0x7bff);
  EXPECT_EQ(FloatToFiniteHalf(-INFINITY), 0xfbff);
  for (const float x : {0.0f, -0.0f, 1.5f, -65504.0f, 0x1p-24f}) EXPECT_EQ(FloatToFiniteHalf(x), FloatToHalf(x)) << x;
}

}  // namespace
}  // namespace anchorkv
