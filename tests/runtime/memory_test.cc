// The promise of layer-major prefill, measured on the process: above what the loaded model needs, the peak
// holds the hidden states, one layer's dense keys and values, the compressed cache and the declared
// workspace, and little else.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "runtime/engine_runs.h"
#include "runtime/oracle.h"

namespace anchorkv::test {
namespace {

constexpr int kTokens = 7500;

// A field of /proc/self/status in bytes, -1 where there is none.
int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return -1;
}

// Makes the peak start over from what is resident now; false where the kernel does not allow it.
bool ResetPeak() {
  std::ofstream clear("/proc/self/clear_refs");
  clear << "5";
  clear.flush();
  return clear.good();
}

TEST(PrefillMemory, PeakIsWhatIsDeclared) {
  SilenceLlama();
  const std::string path = ModelPath("smollm2-135m-instruct-q4_1.gguf");
  if (path.empty()) GTEST_SKIP() << "the model is not in the model directory (tools/get-model smollm2-135m)";
  const std::vector<int32_t> tokens = TextTokens(path, kTokens);
  if (tokens.size() < kTokens) GTEST_SKIP() << "the text is missing on this machine";
  const std::unique_ptr<Engine> engine = LoadEngine(path);
  ASSERT_NE(engine, nullptr);
  CacheConfig config = engine->cache_config();
  config.codec = CodecOptions::ForProfile(Profile::kBlend);
  config.codec.theta = 0.25;
  const std::unique_ptr<KvCache> cache = NewCache(*engine, config);
  KvCache* caches[] = {cache.get()};

  malloc_trim(0);
  if (!ResetPeak()) GTEST_SKIP() << "this kernel does not let the peak be reset";
  const int64_t loaded = StatusBytes("VmRSS");
  std::vector<float> logits;
  const Status status = engine->Prefill(tokens, caches, &logits);
  ASSERT_TRUE(status.ok()) << status.message();
  const int64_t grown = StatusBytes("VmHWM") - loaded;

  const Engine::MemoryUse use = engine->prefill_memory();
  const ByteBill bill = cache->bill();
  const int64_t held = bill.resident_bytes() + bill.reserved_bytes + bill.workspace_bytes;
  const int64_t declared = use.total() + held;
  constexpr double kMiB = 1024.0 * 1024.0;
  std::printf(
      "loaded %.1f MiB, peak %.1f above; declared %.1f = hidden %.1f + layer %.1f + workspace %.1f + cache %.1f; "
      "dense cache %.1f\n",
      loaded / kMiB, grown / kMiB, declared / kMiB, use.hidden_bytes / kMiB, use.layer_dense_bytes / kMiB,
      use.workspace_bytes / kMiB, held / kMiB, bill.dense_bytes / kMiB);
  EXPECT_EQ(bill.layers_compressed, bill.layers_total);
  EXPECT_LE(bill.resident_bytes() * 4, bill.dense_bytes);
  EXPECT_LE(grown, declared + declared / 10);
  EXPECT_GE(grown, use.hidden_bytes + use.layer_dense_bytes) << "the measurement does not see the prefill";
}

}  // namespace
}  // namespace anchorkv::test
