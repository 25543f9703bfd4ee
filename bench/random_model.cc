// A GGUF model with random weights and the shape of a known one, for measurements of speed and memory where the model
// itself is out of reach: random_model SHAPE FILE [TYPE] [LAYERS].
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "runtime/tiny_model.h"

namespace anchorkv {
namespace {

test::TinySpec Shape(int layers, int hidden, int feed_forward, int q_heads, int kv_heads, int vocab) {
  test::TinySpec spec;
  spec.layers = layers;
  spec.hidden = hidden;
  spec.feed_forward = feed_forward;
  spec.q_heads = q_heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = 128;
  spec.vocab = vocab;
  spec.context = 1 << 20;
  spec.own_output = true;
  spec.freq_base = 500000.0f;
  return spec;
}

int Run(int argc, char** argv) {
  const std::map<std::string, test::TinySpec> shapes = {
      {"llama-3.1-8b", Shape(32, 4096, 14336, 32, 8, 128256)},
      {"llama-3.1-70b", Shape(80, 8192, 28672, 64, 8, 128256)},
      {"llama-3.2-1b-d128", Shape(16, 2048, 8192, 16, 4, 128256)},
  };
  const std::map<std::string, ggml_type> types = {
      {"f16", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}};
  const auto shape = argc > 2 ? shapes.find(argv[1]) : shapes.end();
  const auto type = types.find(argc > 3 ? argv[3] : "f16");
  if (argc < 3 || argc > 5 || shape == shapes.end() || type == types.end()) {
    std::string known;
    for (const auto& [name, spec] : shapes) known += " " + name;
    std::fprintf(stderr, "usage: random_model SHAPE FILE [f16|q8_0|q4_0] [LAYERS]; shapes:%s\n", known.c_str());
    return 2;
  }
  test::TinySpec spec = shape->second;
  spec.type = type->second;
  if (argc > 4) spec.layers = std::atoi(argv[4]);
  if (spec.layers < 1 || spec.layers > 1000) {
    std::fprintf(stderr, "random_model: %s layers; allowed are 1 to 1000\n", argv[4]);
    return 2;
  }
  const Status status = test::WriteLargeModel(argv[2], spec);
  if (!status.ok()) std::fprintf(stderr, "random_model: %s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace anchorkv

int main(int argc, char** argv) { return anchorkv::Run(argc, argv); }
