// Small GGUF models with random weights, written by the tests themselves: every architecture and RoPE
// variant in a few hundred kilobytes, and every kind of damage.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "ggml.h"
#include "gguf.h"

namespace anchorkv::test {

struct TinyTensor {
  std::string name;
  int64_t ne0 = 0;
  int64_t ne1 = 1;
  ggml_type type = GGML_TYPE_F32;
  bool poisoned = false;  // its element poison_at is `poison`
  int64_t poison_at = 0;
  float poison = std::numeric_limits<float>::quiet_NaN();
};

struct TinySpec {
  std::string architecture = "llama";
  int layers = 2;
  int hidden = 64;
  int feed_forward = 128;
  int q_heads = 4;
  int kv_heads = 2;
  int head_dim = 16;
  int vocab = 96;
  int context = 4096;
  ggml_type type = GGML_TYPE_F32;  // of matrices
  bool qkv_bias = false;
  bool other_bias = false;   // attention output and feed-forward
  bool own_output = false;   // output.weight beside the embedding
  int sliding_window = 0;    // gemma3
  float logit_softcap = 0;   // gemma3
  std::string rope_scaling;  // rope.scaling.type, "" = no key
  float rope_factor = 0.0f;  // 0 = no key
  float rope_attn_factor = 0.0f;
  int original_context = 0;
  std::vector<float> freq_factors;
  float freq_base = 10000.0f;
  uint64_t seed = 1;
  int parts = 1;  // > 1: split as -00001-of-0000N.gguf
  // Last changes before the file is written.
  std::function<void(gguf_context*)> edit_metadata;
  std::function<void(std::vector<TinyTensor>*)> edit_tensors;
};

// A directory that is removed with the object.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  std::string File(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// Writes the model as `stem`.gguf, or its parts, and returns the path to give to a loader.
std::string WriteTinyModel(const ScratchDirectory& directory, const std::string& stem, const TinySpec& spec);

// The same for models of any size, one file: a tensor is made and written at a time, on all threads, from fewer random
// numbers than it has elements. `path` is replaced. kInternal where it cannot be written.
Status WriteLargeModel(const std::string& path, const TinySpec& spec);

// Seeded tokens below `vocab`.
std::vector<int32_t> RandomTokens(int count, int vocab, uint64_t seed);

}  // namespace anchorkv::test
