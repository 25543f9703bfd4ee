// Prints what our eviction methods keep of tensors dumped by tools/cross-check-kvpress:
//
//     baseline_select DUMP RATIO
//
// RATIO is kvpress's compression_ratio, the share that is evicted. One line per method, layer and kv head: the three,
// then the kept positions. DUMP: int64 layers, kv_heads, q_heads, head_dim, tokens, window and a double RoPE base; then
// per layer as f32 keys before RoPE and values [kv_heads, tokens, head_dim], queries after RoPE
// [q_heads, window, head_dim], query mean [q_heads, head_dim] and covariance [q_heads, head_dim, head_dim], attention
// mass and reconstruction [kv_heads, tokens].
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

#include "baseline/eviction.h"

namespace anchorkv {
namespace {

struct Header {
  int64_t layers, kv_heads, q_heads, head_dim, tokens, window;
  double rope_base;
};

struct Dump {
  std::vector<std::vector<float>> arrays;
  std::shared_ptr<const RopeTable> rope;
  std::vector<LayerInput> layers;
};

bool Read(const char* path, Dump* dump) {
  std::ifstream in(path, std::ios::binary);
  Header h;
  if (!in.read(reinterpret_cast<char*>(&h), sizeof h)) return false;
  RopeSpec spec;
  spec.rotary_dim = static_cast<int>(h.head_dim);
  spec.freq_base = h.rope_base;
  auto rope = RopeTable::Make(spec, spec.rotary_dim, h.tokens + 1024);
  if (!rope.ok()) return false;
  dump->rope = rope.value();
  const auto next = [&](int64_t n) {
    std::vector<float>& array = dump->arrays.emplace_back(static_cast<size_t>(n));
    in.read(reinterpret_cast<char*>(array.data()), static_cast<std::streamsize>(array.size() * sizeof(float)));
    return array.data();
  };
  for (int64_t l = 0; l < h.layers; ++l) {
    LayerInput& input = dump->layers.emplace_back();
    input.layer = static_cast<int>(l);
    input.keys = HeadMajor<const float>(next(h.kv_heads * h.tokens * h.head_dim), h.kv_heads, h.tokens, h.head_dim);
    input.values = HeadMajor<const float>(next(h.kv_heads * h.tokens * h.head_dim), h.kv_heads, h.tokens, h.head_dim);
    input.queries = HeadMajor<const float>(next(h.q_heads * h.window * h.head_dim), h.q_heads, h.window, h.head_dim);
    input.query_mean = next(h.q_heads * h.head_dim);
    input.query_covariance = next(h.q_heads * h.head_dim * h.head_dim);
    input.attention_mass = next(h.kv_heads * h.tokens);
    input.reconstruction = next(h.kv_heads * h.tokens);
    input.rope = dump->rope.get();
  }
  return static_cast<bool>(in);
}

void Print(const char* method, const LayerInput& input, const HeadPositions& kept) {
  for (size_t h = 0; h < kept.size(); ++h) {
    std::cout << method << ' ' << input.layer << ' ' << h;
    for (const uint32_t t : kept[h]) std::cout << ' ' << t;
    std::cout << '\n';
  }
}

bool PrintSelected(const char* method, const LayerInput& input, const Result<HeadPositions>& kept) {
  if (!kept.ok()) {
    std::cerr << method << ": " << kept.status().message() << '\n';
    return false;
  }
  Print(method, input, *kept);
  return true;
}

int Run(const Dump& dump, double ratio) {
  static constexpr struct {
    const char* name;
    Select select;
  } kMethods[] = {{"streamingllm", &SelectStreamingLlm},
                  {"observed", &SelectObserved},
                  {"snapkv", &SelectSnapKv},
                  {"adakv", &SelectAdaKv},
                  {"tova", &SelectTova},
                  {"keydiff", &SelectKeyDiff},
                  {"knorm", &SelectKeyNorm},
                  {"expected", &SelectExpected},
                  {"ada-expected", &SelectAdaExpected}};
  const Backend& backend = CpuBackend() != nullptr ? *CpuBackend() : ReferenceBackend();
  const int layers = static_cast<int>(dump.layers.size());
  const HeadsView<const float>& keys = dump.layers[0].keys;
  // The arithmetic of kvpress, in double as in Python.
  const double rows = static_cast<double>(keys.tokens) * (1 - ratio);
  for (const LayerInput& input : dump.layers) {
    for (const auto& [name, select] : kMethods) {
      if (!PrintSelected(name, input, select(input, static_cast<int64_t>(rows), backend))) return 1;
    }
    const int64_t pyramid = PyramidRows(input.layer, layers, keys.tokens, rows);
    if (!PrintSelected("pyramidkv", input, SelectSnapKv(input, pyramid, backend))) return 1;
  }
  const int64_t all = layers * keys.heads * keys.tokens;
  const auto kept = SelectKvZip(dump.layers, all - static_cast<int64_t>(static_cast<double>(all) * ratio));
  for (const LayerInput& input : dump.layers) Print("kvzip", input, kept[static_cast<size_t>(input.layer)]);
  return 0;
}

}  // namespace
}  // namespace anchorkv

int main(int argc, char** argv) {
  anchorkv::Dump dump;
  if (argc != 3 || !anchorkv::Read(argv[1], &dump)) {
    std::cerr << "usage: baseline_select DUMP RATIO; the dump must be complete\n";
    return 2;
  }
  return anchorkv::Run(dump, std::atof(argv[2]));
}
