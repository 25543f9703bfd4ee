// attention_dump PROFILE RATIO IN OUT: what the C++ cache makes of one layer's tensors that Python wrote, for the tests
// that compare the two. IN: seven int32 (query heads, kv heads, head dim, tokens, window, new tokens, 0), a double
// (RoPE base), then floats: keys before RoPE [H, S, D], values [H, S, D], queries after RoPE [Q, W, D]; of the new
// tokens keys after RoPE and values [n, H, D] and queries [n, Q, D]. OUT: attention of the new tokens [n, Q, D].
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "cache/host_kv_cache.h"

namespace anchorkv {
namespace {

void OrExit(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "attention_dump: %s\n", status.message().c_str());
  std::exit(1);
}

template <typename T>
T OrExit(Result<T> result) {
  OrExit(result.status());
  return std::move(result).value();
}

std::vector<float> ReadFloats(std::istream& in, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  in.read(reinterpret_cast<char*>(out.data()), count * static_cast<int64_t>(sizeof(float)));
  if (!in) OrExit(DataLoss("the input ends too early"));
  return out;
}

void Run(const char* profile, double ratio, const char* from, const char* to) {
  std::ifstream in(from, std::ios::binary);
  int32_t shape[7] = {};
  double base = 0.0;
  in.read(reinterpret_cast<char*>(shape), sizeof shape);
  in.read(reinterpret_cast<char*>(&base), sizeof base);
  const auto [q_heads, kv_heads, dim, tokens, window, fresh, unused] = shape;
  const auto keys = ReadFloats(in, int64_t{kv_heads} * tokens * dim);
  const auto values = ReadFloats(in, int64_t{kv_heads} * tokens * dim);
  const auto queries = ReadFloats(in, int64_t{q_heads} * window * dim);
  const auto new_keys = ReadFloats(in, int64_t{fresh} * kv_heads * dim);
  const auto new_values = ReadFloats(in, int64_t{fresh} * kv_heads * dim);
  const auto new_queries = ReadFloats(in, int64_t{fresh} * q_heads * dim);

  RopeSpec spec;
  spec.rotary_dim = dim;
  spec.freq_base = base;
  CacheConfig config;
  config.layers = 1;
  config.q_heads = q_heads;
  config.kv_heads = kv_heads;
  config.head_dim = dim;
  config.codec = CodecOptions::ForProfile(OrExit(ParseProfile(profile)));
  config.codec.theta = 1.0 / ratio;
  config.tail_type = DenseType::kF32;
  config.min_tokens = 0;
  const Backend* backend = CpuBackend() != nullptr ? CpuBackend() : &ReferenceBackend();
  const auto cache = OrExit(HostKvCache::Make(config, OrExit(RopeTable::Make(spec, dim, tokens + fresh)), backend));

  LayerInput input;
  input.keys = HeadMajor(keys.data(), kv_heads, tokens, dim);
  input.values = HeadMajor(values.data(), kv_heads, tokens, dim);
  input.queries = HeadMajor(queries.data(), q_heads, window, dim);
  OrExit(cache->AddPromptLayer(input));
  std::vector<float> out(new_queries.size());
  OrExit(cache->PrepareStep(fresh, 1));
  cache->Store(0, new_keys.data(), new_values.data(), new_queries.data(), 0, 1);
  cache->Attend(0, new_queries.data(), 0, 1);
  cache->Merge(0, out.data(), 0, 1);
  cache->CommitStep();
  std::ofstream(to, std::ios::binary)
      .write(reinterpret_cast<const char*>(out.data()), static_cast<int64_t>(out.size() * sizeof(float)));
}

}  // namespace
}  // namespace anchorkv

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: attention_dump PROFILE RATIO IN OUT\n");
    return 2;
  }
  anchorkv::Run(argv[1], std::strtod(argv[2], nullptr), argv[3], argv[4]);
  return 0;
}
