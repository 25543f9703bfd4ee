#include <benchmark/benchmark.h>

#include "layer.h"

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  anchorkv::bench::RegisterAttention();
  anchorkv::bench::RegisterCompression();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
