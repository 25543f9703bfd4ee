// Steps of several sequences at once against a step for each: batch_bench MODEL [PROMPT_TOKENS] [RATIO] [STEPS]
// [THREADS].
//
// All sequences attend to one stored prompt of random tokens. The two kinds of steps take turns, so that whatever else
// the machine does concerns both; printed are medians over the steps and the median of the paired quotients. Logits of
// both kinds are compared before anything is timed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "runtime/engine.h"

namespace anchorkv {
namespace {

double Seconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

int Fail(const Status& status) {
  std::fprintf(stderr, "batch_bench: %s\n", status.message().c_str());
  return 1;
}

// The largest difference of the logits over their largest size.
double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0;
  double size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - b[i]));
    size = std::max(size, std::fabs(static_cast<double>(b[i])));
  }
  return worst / size;
}

int Run(const char* model, int64_t prompt, double ratio, int rounds, int threads) {
  EngineOptions options;
  options.threads = threads;
  auto engine = Engine::Load(model, options);
  if (!engine.ok()) return Fail(engine.status());
  CacheConfig config = (*engine)->cache_config();
  config.compress = ratio > 1;
  config.codec.theta = 1 / ratio;
  auto first = (*engine)->MakeCache(config);
  if (!first.ok()) return Fail(first.status());
  std::mt19937 random(1);
  std::vector<int32_t> tokens(static_cast<size_t>(prompt));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<unsigned>((*engine)->info().vocab));
  KvCache* const cache = first->get();
  std::vector<float> logits;
  if (const Status read = (*engine)->Prefill(tokens, {&cache, 1}, &logits); !read.ok()) return Fail(read);
  const auto stored = (*engine)->Save(*cache);
  if (!stored.ok()) return Fail(stored.status());

  std::printf("| sequences | one step for all, t/s | a step for each, t/s | |\n|---|---|---|---|\n");
  for (const int count : {1, 2, 4, 8}) {
    std::vector<std::unique_ptr<KvCache>> caches;
    std::vector<std::vector<float>> together(static_cast<size_t>(count)), alone(together);
    std::vector<Engine::SequenceStep> steps;
    for (int i = 0; i < count; ++i) {
      auto restored = (*engine)->Restore(config, *stored);
      if (!restored.ok()) return Fail(restored.status());
      caches.push_back(std::move(*restored));
      steps.push_back({caches.back().get(), 100 + i, &together[static_cast<size_t>(i)], {}});
    }
    const auto all = [&] { (*engine)->AppendEach(steps); };
    Status status;
    const auto each = [&] {
      for (int i = 0; i < count; ++i) {
        const int32_t token = 100 + i;
        const Status step =
            (*engine)->Append(caches[static_cast<size_t>(i)].get(), {&token, 1}, &alone[static_cast<size_t>(i)]);
        if (!step.ok()) status = step;
      }
    };
    const auto back = [&] {
      for (const auto& each_cache : caches) {
        if (const Status cut = each_cache->Truncate(prompt); !cut.ok()) status = cut;
      }
    };
    all();
    back();
    each();
    back();
    for (size_t i = 0; i < together.size(); ++i) {
      if (!steps[i].status.ok()) return Fail(steps[i].status);
      const double difference = Difference(together[i], alone[i]);
      if (!(difference < 0.1)) {
        return Fail(Internal("logits of sequence " + std::to_string(i) + " differ by " + std::to_string(difference)));
      }
    }
    std::vector<double> batched, single, quotients;
    for (int round = 0; round < rounds; ++round) {
      batched.push_back(Seconds(all));
      back();
      single.push_back(Seconds(each));
      back();
      quotients.push_back(single.back() / batched.back());
    }
    if (!status.ok()) return Fail(status);
    std::printf("| %d | %.0f | %.0f | %.2fx |\n", count, count / Median(batched), count / Median(single),
                Median(quotients));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace anchorkv

int main(int argc, char** argv) {
  if (argc < 2 || argc > 6) {
    std::fprintf(stderr, "usage: batch_bench MODEL [PROMPT_TOKENS] [RATIO] [STEPS] [THREADS]\n");
    return 2;
  }
  const auto number = [&](int i, double otherwise) { return argc > i ? std::atof(argv[i]) : otherwise; };
  return anchorkv::Run(argv[1], static_cast<int64_t>(number(2, 3000)), number(3, 4), static_cast<int>(number(4, 60)),
                       static_cast<int>(number(5, 0)));
}
