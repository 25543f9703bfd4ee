// Attention over a compressed cache must not rebuild it: everything that a step allocates, by whatever
// means, is counted and is a small share of the dense keys and values.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "cache/cache_driver.h"

namespace {
std::atomic<int64_t> g_allocated{0};  // bytes handed out by operator new so far
std::atomic<int64_t> g_live{0};       // of these, not given back
std::atomic<int64_t> g_live_peak{0};

void* CountedAllocate(std::size_t bytes, std::size_t align) {
  void* memory = align > __STDCPP_DEFAULT_NEW_ALIGNMENT__
                     ? std::aligned_alloc(align, (bytes + align - 1) / align * align)
                     : std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  g_allocated.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  const auto held = static_cast<int64_t>(malloc_usable_size(memory));
  const int64_t live = g_live.fetch_add(held) + held;
  for (int64_t peak = g_live_peak.load(); live > peak && !g_live_peak.compare_exchange_weak(peak, live);) {
  }
  return memory;
}

void CountedFree(void* memory) noexcept {
  g_live.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)));
  std::free(memory);
}
}  // namespace

void* operator new(std::size_t bytes) { return CountedAllocate(bytes, 1); }
void* operator new[](std::size_t bytes) { return CountedAllocate(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t align) {
  return CountedAllocate(bytes, static_cast<std::size_t>(align));
}
void* operator new[](std::size_t bytes, std::align_val_t align) {
  return CountedAllocate(bytes, static_cast<std::size_t>(align));
}
void operator delete(void* p) noexcept { CountedFree(p); }
void operator delete[](void* p) noexcept { CountedFree(p); }
void operator delete(void* p, std::size_t) noexcept { CountedFree(p); }
void operator delete[](void* p, std::size_t) noexcept { CountedFree(p); }
void operator delete(void* p, std::align_val_t) noexcept { CountedFree(p); }
void operator delete[](void* p, std::align_val_t) noexcept { CountedFree(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { CountedFree(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { CountedFree(p); }

namespace anchorkv {
namespace {

struct Peak {
  int64_t buffers = 0;     // highest AlignedBuffer bytes above the start
  int64_t allocated = 0;   // all bytes that operator new handed out meanwhile
  int64_t in_kernels = 0;  // of these, between Store and Merge
};

Peak MeasureStep(HostKvCache* cache, const CacheConfig& config, int tokens, int threads) {
  const std::vector<float> rows(static_cast<size_t>(tokens * config.kv_heads * config.head_dim), .5f);
  const std::vector<float> queries(static_cast<size_t>(tokens * config.q_heads * config.head_dim), .5f);
  std::vector<float> out(queries.size());
  Peak peak;
  ResetAllocationPeak();
  const int64_t buffers = GetAllocationStats().current_bytes;
  const int64_t allocated = g_allocated.load();
  EXPECT_TRUE(cache->PrepareStep(tokens, threads).ok());
  const int64_t prepared = g_allocated.load();
  for (int l = 0; l < config.layers; ++l) {
    for (int t = 0; t < threads; ++t) cache->Store(l, rows.data(), rows.data(), queries.data(), t, threads);
    for (int t = 0; t < threads; ++t) cache->Attend(l, queries.data(), t, threads);
    for (int t = 0; t < threads; ++t) cache->Merge(l, out.data(), t, threads);
  }
  peak.in_kernels = g_allocated.load() - prepared;
  cache->CommitStep();
  peak.allocated = g_allocated.load() - allocated;
  peak.buffers = GetAllocationStats().peak_bytes - buffers;
  return peak;
}

TEST(StepMemory, DecodeAndFollowUpStayFarBelowDense) {
  std::vector<const Backend*> backends = {&ReferenceBackend()};
  if (CpuBackend() != nullptr) backends.push_back(CpuBackend());
  for (const Backend* backend : backends) {
    CacheConfig config = SmallConfig(2, 4, 2, 64);
    config.codec.theta = .15;
    config.tail_type = DenseType::kF16;
    CacheDriver driver(config, 40, *backend);
    ASSERT_TRUE(driver.AddPrompt(10000).ok());
    HostKvCache& cache = driver.cache();
    ASSERT_EQ(cache.compressed_tokens(), 10000);
    const ByteBill before = cache.bill();
    EXPECT_LE(before.resident_bytes(), before.dense_bytes * 15 / 100);

    // Rebuilding the keys of a single head, even in half precision, would take more than this.
    const int64_t limit = before.dense_bytes / 10;
    // The first step after the prompt, a follow-up question, and steps after it.
    for (const int tokens : {1, 1, 64, 1}) {
      const Peak peak = MeasureStep(&cache, config, tokens, 2);
      EXPECT_LT(peak.buffers, limit) << backend->name() << ", " << tokens << " queries";
      EXPECT_LT(peak.allocated, limit / 10) << backend->name() << ", " << tokens << " queries";
      EXPECT_EQ(peak.in_kernels, 0) << backend->name() << ", " << tokens << " queries";
    }
    EXPECT_LT(cache.bill().workspace_bytes, limit) << backend->name();
  }
}

// Compressing a layer takes less beside its input than the input itself; without the rotated copy of the
// keys that the projection after RoPE needs, far less.
TEST(CompressMemory, StaysBelowTheLayersOwnKeysAndValues) {
  const Backend* backend = CpuBackend();  // the oracle keeps doubles and is not meant to be lean
  if (backend == nullptr) GTEST_SKIP() << "built without the cpu backend";
  for (const bool pre_rope : {true, false}) {
    CacheConfig config = SmallConfig(1, 4, 2, 64);
    config.codec.theta = .15;
    config.codec.pre_rope = pre_rope;
    CacheDriver driver(config, 42, *backend);
    const int64_t tokens = 4000;
    const int64_t input_bytes = 2 * 2 * 64 * tokens * static_cast<int64_t>(sizeof(float));
    const std::vector<float> keys = driver.Normal(2 * tokens * 64), values = driver.Normal(2 * tokens * 64);
    const std::vector<float> queries = driver.Normal(4 * 32 * 64);
    LayerInput input;
    input.keys = HeadMajor(keys.data(), 2, tokens, 64);
    input.values = HeadMajor(values.data(), 2, tokens, 64);
    input.queries = HeadMajor(queries.data(), 4, 32, 64);
    ResetAllocationPeak();
    const int64_t buffers = GetAllocationStats().current_bytes;
    const int64_t live = g_live.load();
    g_live_peak.store(live);
    ASSERT_TRUE(driver.cache().AddPromptLayer(input).ok());
    const int64_t peak = GetAllocationStats().peak_bytes - buffers + g_live_peak.load() - live;
    EXPECT_LT(peak, pre_rope ? input_bytes / 2 : input_bytes) << backend->name() << ", pre_rope " << pre_rope;
  }
}

// Twice the prompt must not cost a step twice the memory.
TEST(StepMemory, DoesNotGrowWithTheLengthOfTheSegment) {
  int64_t workspace[2];
  for (int i = 0; i < 2; ++i) {
    CacheConfig config = SmallConfig(1, 4, 2, 32);
    config.codec.anchors = 64;
    CacheDriver driver(config, 41);
    ASSERT_TRUE(driver.AddPrompt(i == 0 ? 3000 : 6000).ok());
    ASSERT_TRUE(driver.cache().PrepareStep(2048, 2).ok());  // enough blocks of queries: segments are not cut
    workspace[i] = driver.cache().bill().workspace_bytes;
  }
  EXPECT_EQ(workspace[0], workspace[1]);
}

}  // namespace
}  // namespace anchorkv
