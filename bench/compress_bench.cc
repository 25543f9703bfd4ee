// The steps of compressing one layer, on all threads. Correctness is the conformance tests' subject; here
// each step's Status is checked.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "codec/codec.h"
#include "format/anchor_rounding.h"
#include "layer.h"

namespace anchorkv::bench {
namespace {

constexpr int kRatio = 8;

// Runs `step` until it has been timed; the first error ends the case.
template <typename Step>
void Run(benchmark::State& state, int64_t tokens, const Step& step) {
  for (auto _ : state) {
    const Status status = step();
    if (!status.ok()) {
      state.SkipWithError(status.message().c_str());
      return;
    }
  }
  state.counters["per_token"] = benchmark::Counter(static_cast<double>(state.iterations() * tokens),
                                                   benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

CodecOptions Options(Ranking ranking) {
  CodecOptions options;
  options.theta = 1.0 / kRatio;
  options.ranking = ranking;
  return options;
}

void Score(benchmark::State& state, const Backend& backend, const Layer& layer) {
  AttentionStats stats;
  HeadScores scores;
  Run(state, layer.tokens(), [&] { return backend.Score(layer.input(), &stats, &scores); });
}

void Assign(benchmark::State& state, const Backend& backend, const Layer& layer) {
  const auto plan = PlanLayer(layer.input(), Options(Ranking::kBlend), backend);
  if (!plan.ok()) return state.SkipWithError(plan.status().message().c_str());
  const RoundedAnchors anchors = RoundAnchors(layer.input().keys, plan.value().anchors);
  std::vector<uint16_t> assignment;
  Run(state, layer.tokens(),
      [&] { return backend.Assign(layer.input().keys, anchors, plan.value().anchors, &assignment); });
}

void Utility(benchmark::State& state, const Backend& backend, const Layer& layer, Ranking ranking) {
  const CodecOptions options = Options(ranking);
  const auto plan = PlanLayer(layer.input(), options, backend);
  if (!plan.ok()) return state.SkipWithError(plan.status().message().c_str());
  const RoundedAnchors anchors[2] = {RoundAnchors(layer.input().keys, plan.value().anchors),
                                     RoundAnchors(layer.input().values, plan.value().anchors)};
  AttentionStats stats;
  HeadScores scores;
  const Status scored = backend.Score(layer.input(), &stats, &scores);
  if (!scored.ok()) return state.SkipWithError(scored.message().c_str());
  HeadScores utility[2];
  Run(state, layer.tokens(), [&] {
    return backend.Utility(layer.input(), options, stats, plan.value().anchors, anchors, plan.value().assignment,
                           utility);
  });
}

void Pack(benchmark::State& state, const Backend& backend, const Layer& layer) {
  const auto plan = PlanLayer(layer.input(), Options(Ranking::kBlend), backend);
  if (!plan.ok()) return state.SkipWithError(plan.status().message().c_str());
  std::vector<std::byte> out(plan.value().layout.total_bytes);
  Run(state, layer.tokens(), [&] {
    std::fill(out.begin(), out.end(), std::byte{0});
    return backend.Pack(layer.input(), plan.value(), out.data());
  });
}

void Compress(benchmark::State& state, const Backend& backend, const Layer& layer, Profile profile) {
  CodecOptions options = CodecOptions::ForProfile(profile);
  options.theta = 1.0 / kRatio;
  Run(state, layer.tokens(), [&] { return CompressLayer(layer.input(), options, backend).status(); });
}

}  // namespace

void RegisterCompression() {
  constexpr int64_t kTokens = 8192;
  for (const std::string& target : CpuTargets()) {
    const Backend* backend = CpuBackend(target);
    for (const Shape& shape : kShapes) {
      const auto add = [&](const std::string& name, auto run) {
        const std::string full = name + "/" + target + "/" + shape.name + "/S" + std::to_string(kTokens);
        const Shape* s = &shape;
        benchmark::RegisterBenchmark(full.c_str(),
                                     [=](benchmark::State& state) { run(state, *backend, GetLayer(*s, kTokens)); })
            ->Unit(benchmark::kMillisecond)
            ->UseRealTime();
      };
      add("Score", Score);
      add("Assign", Assign);
      for (const Ranking ranking : {Ranking::kUtility, Ranking::kBlend}) {
        add("Utility_" + std::string(Name(ranking)),
            [ranking](benchmark::State& state, const Backend& b, const Layer& layer) {
              Utility(state, b, layer, ranking);
            });
      }
      add("Pack", Pack);
      for (const Profile profile : {Profile::kBlend, Profile::kAdaptive}) {
        add("CompressLayer_" + std::string(Name(profile)),
            [profile](benchmark::State& state, const Backend& b, const Layer& layer) {
              Compress(state, b, layer, profile);
            });
      }
    }
  }
}

}  // namespace anchorkv::bench
