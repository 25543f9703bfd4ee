#include "base/aligned_buffer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

namespace anchorkv {
namespace {

TEST(AlignedBuffer, IsAlignedZeroFilledAndCounted) {
  const int64_t before = GetAllocationStats().current_bytes;
  {
    for (size_t bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{1000}}) {
      AlignedBuffer buffer = AlignedBuffer::Make(bytes, "test").value();
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
      EXPECT_EQ(buffer.size_bytes(), bytes);
      EXPECT_EQ(GetAllocationStats().current_bytes - before, static_cast<int64_t>(bytes));
      for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(buffer.as<uint8_t>()[i], 0);
      buffer.as<uint8_t>()[bytes - 1] = 1;  // dirties memory that the next one may get
    }
  }
  EXPECT_EQ(GetAllocationStats().current_bytes, before);
}

TEST(AlignedBuffer, MovesOwnership) {
  const int64_t before = GetAllocationStats().current_bytes;
  AlignedBuffer a = AlignedBuffer::Make(100, "test").value();
  const std::byte* data = a.data();
  AlignedBuffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  AlignedBuffer c = AlignedBuffer::Make(50, "test").value();
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.size_bytes(), 100u);
  b = AlignedBuffer();
  c = AlignedBuffer();
  a = AlignedBuffer();
  EXPECT_EQ(GetAllocationStats().current_bytes, before);
}

TEST(AlignedBuffer, SharedMemoryIsCountedAndKeptWithoutACopy) {
  const int64_t before = GetAllocationStats().current_bytes;
  auto owner = std::make_shared<std::vector<std::byte>>(128);
  const std::weak_ptr<std::vector<std::byte>> watch = owner;
  {
    AlignedBuffer first = AlignedBuffer::Share(owner, {owner->data(), 100});
    AlignedBuffer second = AlignedBuffer::Share(owner, {owner->data(), 28});
    EXPECT_EQ(first.data(), owner->data());
    EXPECT_EQ(first.size_bytes(), 100u);
    EXPECT_EQ(GetAllocationStats().current_bytes - before, 128);
    owner.reset();
    AlignedBuffer moved = std::move(first);
    second = AlignedBuffer::Make(64, "test").value();
    EXPECT_FALSE(watch.expired());
    EXPECT_EQ(moved.size_bytes(), 100u);
  }
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(GetAllocationStats().current_bytes, before);
}

TEST(AlignedBuffer, PeakIsTheHighestSinceReset) {
  AlignedBuffer kept = AlignedBuffer::Make(1000, "test").value();
  ResetAllocationPeak();
  const int64_t base = GetAllocationStats().peak_bytes;
  EXPECT_EQ(base, GetAllocationStats().current_bytes);
  { AlignedBuffer temporary = AlignedBuffer::Make(5000, "test").value(); }
  EXPECT_EQ(GetAllocationStats().peak_bytes, base + 5000);
  EXPECT_EQ(GetAllocationStats().current_bytes, base);
  ResetAllocationPeak();
  EXPECT_EQ(GetAllocationStats().peak_bytes, base);
}

TEST(AlignedBuffer, ImpossibleSizesAreErrorsThatNameTheBuffer) {
  for (size_t bytes : {std::numeric_limits<size_t>::max(), std::numeric_limits<size_t>::max() / 2}) {
    const auto result = AlignedBuffer::Make(bytes, "the tail of layer 7");
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), StatusCode::kOutOfMemory);
    EXPECT_NE(result.status().message().find("the tail of layer 7"), std::string::npos);
  }
}

TEST(AlignedBuffer, EmptyIsFine) {
  const auto result = AlignedBuffer::Make(0, "nothing");
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.value().size_bytes(), 0u);
}

TEST(AlignedBuffer, CountsFromManyThreads) {
  const int64_t before = GetAllocationStats().current_bytes;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int j = 0; j < 500; ++j) AlignedBuffer buffer = AlignedBuffer::Make(64, "test").value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(GetAllocationStats().current_bytes, before);
}

}  // namespace
}  // namespace anchorkv
