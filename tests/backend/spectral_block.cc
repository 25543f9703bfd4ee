#include "backend/spectral_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/half.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

constexpr int kUnitScaleByte = 128;
constexpr float kMaxDirection = 127.0f;

// The first n of 0 .. of - 1 in random order.
template <typename T>
std::vector<T> Shuffled(int64_t of, int64_t n, Random* random) {
  std::vector<T> out(static_cast<size_t>(of));
  std::iota(out.begin(), out.end(), T{0});
  for (int64_t i = 0; i + 1 < of; ++i) std::swap(out[i], out[i + random->Below(of - i)]);
  out.resize(static_cast<size_t>(n));
  return out;
}

template <typename T>
void Write(const std::vector<T>& from, size_t at, std::vector<std::byte>* to) {
  std::memcpy(to->data() + at, from.data(), from.size() * sizeof(T));
}

// Up to all groups of coordinates, in runs of random lengths, some of them empty.
CodeRuns RandomRuns(int head_dim, Random* random) {
  CodeRuns runs;
  int64_t left = head_dim / kCodeGroup;
  for (uint8_t& groups : runs.groups) {
    const int64_t n = random->Below(4) == 0 ? 0 : random->Below(left + 1);
    groups = static_cast<uint8_t>(n);
    left -= n;
  }
  return runs;
}

std::vector<uint16_t> Halves(int64_t n, Random* random) {
  std::vector<uint16_t> out(static_cast<size_t>(n));
  for (uint16_t& half : out) half = FloatToHalf(random->Gaussian());
  return out;
}

}  // namespace

std::string SpectralBlockSpec::Text() const {
  return "head dim " + std::to_string(head_dim) + ", " + std::to_string(tokens) + " tokens, " + std::to_string(exact) +
         " exact, " + (value_basis ? "a basis" : "no basis") + ", rotary dim " + std::to_string(rotary_dim);
}

SpectralBlock::SpectralBlock(const SpectralBlockSpec& spec) : first_position(spec.first_position) {
  Random random(spec.seed);
  RopeSpec rope_spec;
  rope_spec.pairing = spec.pairing;
  rope_spec.rotary_dim = spec.rotary_dim < 0 ? spec.head_dim : spec.rotary_dim;
  rope = RopeTable::Make(rope_spec, spec.head_dim, first_position + spec.tokens).value();

  layout.kv_heads = spec.kv_heads;
  layout.head_dim = spec.head_dim;
  layout.tokens = spec.tokens;
  layout.exact = spec.exact;
  layout.value_basis = spec.value_basis;
  const int64_t side_heads = int64_t{2} * spec.kv_heads;
  const int64_t dim = spec.head_dim;

  std::vector<uint32_t> positions;
  for (int head = 0; head < spec.kv_heads; ++head) {
    auto of_head = Shuffled<uint32_t>(spec.tokens, spec.exact, &random);
    std::sort(of_head.begin(), of_head.end());
    positions.insert(positions.end(), of_head.begin(), of_head.end());
  }
  std::vector<CodeRuns> runs;
  for (int64_t i = 0; i < side_heads * kSpectralRates; ++i) runs.push_back(RandomRuns(spec.head_dim, &random));

  // Tags, and blocks whose bytes are as many as the tags and runs say.
  std::vector<uint64_t> tags;
  std::vector<uint32_t> offsets;
  std::vector<uint8_t> codes;
  for (int64_t side_head = 0; side_head < side_heads; ++side_head) {
    const uint32_t* exact = positions.data() + side_head % spec.kv_heads * spec.exact;
    for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
      uint64_t planes[kTagPlanes] = {};
      int vectors[kSpectralRates] = {};
      for (int64_t j = 0; j < kTileTokens; ++j) {
        const int64_t t = tile * kTileTokens + j;
        const bool hidden = t >= spec.tokens || std::binary_search(exact, exact + spec.exact, t);
        const int tag = hidden ? kExactTag : static_cast<int>(random.Below(kSpectralRates));
        if (!hidden) ++vectors[tag];
        for (int p = 0; p < kTagPlanes; ++p) planes[p] |= static_cast<uint64_t>(tag >> p & 1) << j;
      }
      tags.insert(tags.end(), planes, planes + kTagPlanes);
      offsets.push_back(static_cast<uint32_t>(codes.size() / kCodeAlign));
      const int coded = std::accumulate(vectors + 1, vectors + kSpectralRates, 0);
      for (int i = 0; i < ScaleBytes(coded); ++i) {
        const int64_t step = random.Below(10) == 0 ? -kUnitScaleByte : random.Below(33) - 16;
        codes.push_back(static_cast<uint8_t>(kUnitScaleByte + step));
      }
      for (int rate = 1; rate < kSpectralRates; ++rate) {
        const int bytes_of_rate = vectors[rate] * runs[side_head * kSpectralRates + rate].code_bytes();
        for (int i = 0; i < bytes_of_rate; ++i) codes.push_back(static_cast<uint8_t>(random.Bits()));
      }
    }
  }

  layout.Place(codes.size());
  std::vector<std::byte> out(layout.total_bytes);
  Write(positions, layout.exact_positions, &out);
  Write(Halves(spec.kv_heads * spec.exact * dim, &random), layout.exact_keys, &out);
  Write(Halves(spec.kv_heads * spec.exact * dim, &random), layout.exact_values, &out);
  for (const Side side : {kKeys, kValues}) {
    Write(random.Gaussians(spec.kv_heads * dim), layout.means[side], &out);
    std::vector<uint8_t> orders;
    for (int head = 0; head < spec.kv_heads; ++head) {
      const auto order = Shuffled<uint8_t>(dim, dim, &random);
      orders.insert(orders.end(), order.begin(), order.end());
    }
    Write(orders, layout.orders[side], &out);
  }
  // With a basis a value's deviations bring directions of length about 127 back to 1.
  std::vector<float> deviations;
  for (int64_t i = 0; i < side_heads * dim; ++i) {
    const bool of_basis = spec.value_basis && i >= spec.kv_heads * dim;
    deviations.push_back(static_cast<float>(0.5 + random.Uniform()) * (of_basis ? 1.0f / kMaxDirection : 1.0f));
  }
  Write(deviations, layout.deviations, &out);
  if (spec.value_basis) {
    const float scale = kMaxDirection / std::sqrt(static_cast<float>(dim));
    std::vector<int8_t> basis;
    for (int64_t i = 0; i < spec.kv_heads * dim * dim; ++i) {
      basis.push_back(static_cast<int8_t>(std::clamp(scale * random.Gaussian(), -kMaxDirection, kMaxDirection)));
    }
    Write(basis, layout.basis, &out);
  }
  Write(runs, layout.runs, &out);
  Write(tags, layout.tags, &out);
  Write(offsets, layout.offsets, &out);
  Write(codes, layout.codes, &out);
  bytes = AlignedBuffer::Make(out.size(), "a random segment").value();
  std::memcpy(bytes.data(), out.data(), out.size());
}

std::vector<SpectralBlockSpec> SpectralBlockSpecs() {
  std::vector<SpectralBlockSpec> specs;
  const auto add = [&](SpectralBlockSpec spec) {
    spec.seed = specs.size() + 1;
    specs.push_back(spec);
  };
  for (const int head_dim : {8, 24, 64, 72, 128, 256}) {
    add({.head_dim = head_dim, .value_basis = head_dim != 24});
    add({.head_dim = head_dim, .value_basis = head_dim == 24, .pairing = RopePairing::kInterleaved});
  }
  add({.head_dim = 128, .rotary_dim = 32});
  add({.tokens = 1, .exact = 0});
  add({.tokens = 1, .exact = 1});
  add({.tokens = 64, .exact = 64});
  add({.tokens = 65, .exact = 0, .value_basis = false});
  add({.kv_heads = 1, .tokens = 300, .exact = 150});
  add({.kv_heads = 3, .tokens = 127, .exact = 1, .first_position = 1000});
  return specs;
}

}  // namespace anchorkv::test
