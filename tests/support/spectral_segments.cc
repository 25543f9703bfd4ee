#include "support/spectral_segments.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "base/half.h"
#include "format/spectral_code.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

constexpr int kAllOnes = 0xff;

// The same coordinates with a few more or less bits where these are not whole bytes: one group of an odd width gets 2.
CodeRuns WholeBytes(CodeRuns runs) {
  if (runs.bits() % 8 == 0) return runs;
  --(runs.groups[3] > 0 ? runs.groups[3] : runs.groups[1]);
  ++runs.groups[2];
  return runs;
}

// `groups` groups split at random over the four widths.
CodeRuns SplitGroups(int groups, Random* random) {
  CodeRuns runs;
  for (int g = 0; g < groups; ++g) ++runs.groups[random->Below(kMaxCodeBits)];
  return WholeBytes(runs);
}

CodeRuns MakeRuns(const SpectralSpec& spec, int side_head, int rate, Random* random) {
  const int groups = spec.head_dim / kCodeGroup;
  CodeRuns runs;
  if (rate == 0) return runs;
  if (spec.runs == SpectralRuns::kShort) {
    return SplitGroups(1 + static_cast<int>(random->Below(std::max(1, groups / 4))), random);
  }
  if (spec.runs == SpectralRuns::kRising) {
    constexpr double kShares[kMaxCodeBits] = {0.2, 0.25, 0.3, 0.25};  // of the bits
    for (int i = 0, left = groups; i < kMaxCodeBits; ++i) {
      const double group_bits = kCodeGroup * (kMaxCodeBits - i);
      runs.groups[i] =
          static_cast<uint8_t>(std::min<int>(left, static_cast<int>(30 * rate * kShares[i] / group_bits + 0.5)));
      left -= runs.groups[i];
    }
    return WholeBytes(runs);
  }
  if (spec.runs == SpectralRuns::kLastEmpty) {
    return rate < 4 ? SplitGroups(1 + static_cast<int>(random->Below(groups)), random) : runs;
  }
  // Every rate of every head meets another of the cases.
  switch ((rate + side_head) % (kSpectralRates - 1)) {
    case 0:
      break;
    case 1:
      runs.groups[kMaxCodeBits - 1] = 1;
      return WholeBytes(runs);
    case 2:
      runs.groups[0] = static_cast<uint8_t>(groups);
      break;
    case 3:
      runs.groups[1 + random->Below(kMaxCodeBits - 1)] = static_cast<uint8_t>(groups);
      return WholeBytes(runs);
    case 4:
      return SplitGroups(groups, random);
    default:
      return SplitGroups(1 + static_cast<int>(random->Below(groups)), random);
  }
  return runs;
}

std::vector<uint32_t> ExactPositions(const SpectralSpec& spec, Random* random) {
  std::vector<uint32_t> order(static_cast<size_t>(spec.tokens));
  std::iota(order.begin(), order.end(), 0u);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random->Below(static_cast<int64_t>(i))]);
  if (spec.exact_tile) {
    std::stable_partition(order.begin(), order.end(), [](uint32_t t) { return t / kTileTokens == 1; });
  }
  order.resize(static_cast<size_t>(spec.exact));
  std::sort(order.begin(), order.end());
  return order;
}

uint8_t ScaleByte(const SpectralSpec& spec, Random* random) {
  if (!spec.extreme_scales) return static_cast<uint8_t>(112 + random->Below(24));  // a quarter to two
  const int64_t pick = random->Below(4);
  return static_cast<uint8_t>(pick == 0 ? 0 : pick == 1 ? 255 : 240 + random->Below(16));
}

std::shared_ptr<const RopeTable> MakeRope(const SpectralSpec& spec) {
  RopeSpec rope;
  rope.pairing = spec.pairing;
  rope.rotary_dim = spec.rotary_dim < 0 ? spec.head_dim : spec.rotary_dim;
  if (spec.yarn) {
    rope.ext_factor = 1.0;
    rope.freq_scale = 0.25;
    rope.original_context = 4096;
  }
  return RopeTable::Make(rope, spec.head_dim, spec.first_position + spec.tokens).value();
}

class Maker {
 public:
  explicit Maker(const SpectralSpec& spec) : random_(spec.seed) { data_.spec = spec; }

  SpectralSegmentData Make() {
    const SpectralSpec& spec = data_.spec;
    data_.rope = MakeRope(spec);
    for (int side_head = 0; side_head < 2 * spec.kv_heads; ++side_head) {
      for (int rate = 0; rate < kSpectralRates; ++rate) runs_.push_back(MakeRuns(spec, side_head, rate, &random_));
    }
    for (int head = 0; head < spec.kv_heads; ++head) exact_.push_back(ExactPositions(spec, &random_));
    ChooseVectors();
    PackBlocks();

    SpectralLayout& layout = data_.layout;
    layout.kv_heads = spec.kv_heads;
    layout.head_dim = spec.head_dim;
    layout.tokens = spec.tokens;
    layout.exact = spec.exact;
    layout.value_basis = spec.value_basis;
    layout.Place(codes_.size());
    data_.bytes = AlignedBuffer::Make(layout.total_bytes, "a test segment").value();
    std::memset(data_.bytes.data(), kAllOnes, layout.total_bytes);
    WriteSections();
    return std::move(data_);
  }

 private:
  const CodeRuns& runs(int side, int head, int rate) const {
    return runs_[static_cast<size_t>((side * data_.spec.kv_heads + head) * kSpectralRates + rate)];
  }
  bool IsExact(int head, int64_t t) const {
    return std::binary_search(exact_[head].begin(), exact_[head].end(), static_cast<uint32_t>(t));
  }

  void ChooseVectors() {
    const SpectralSpec& spec = data_.spec;
    const int rates = spec.uncoded ? 1 : spec.runs == SpectralRuns::kLastEmpty ? 4 : kSpectralRates;
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < spec.kv_heads; ++head) {
        for (int64_t t = 0; t < spec.tokens; ++t) {
          SpectralVector vector;
          vector.rate = IsExact(head, t) ? kExactTag : static_cast<int>(random_.Below(rates));
          if (vector.rate != kExactTag && vector.rate > 0) {
            vector.scale = ScaleByte(spec, &random_);
            const CodeRuns& of = runs(side, head, vector.rate);
            for (int bits = kMaxCodeBits; bits >= 1; --bits) {
              for (int i = 0; i < kCodeGroup * of.groups[kMaxCodeBits - bits]; ++i) {
                vector.codes.push_back(static_cast<uint8_t>(random_.Below(int64_t{1} << bits)));
              }
            }
          }
          data_.vectors[side].push_back(std::move(vector));
        }
      }
    }
  }

  // Tags, offsets and codes, written down from the description in spectral_layout.h.
  void PackBlocks() {
    const SpectralSpec& spec = data_.spec;
    const int64_t tiles = (spec.tokens + kTileTokens - 1) / kTileTokens;
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < spec.kv_heads; ++head) {
        for (int64_t tile = 0; tile < tiles; ++tile) {
          uint64_t planes[kTagPlanes] = {};
          std::vector<uint8_t> scales, codes;
          for (int64_t j = 0; j < kTileTokens; ++j) {
            const int64_t t = tile * kTileTokens + j;
            const int tag = t < spec.tokens ? data_.vector(static_cast<Side>(side), head, t).rate : kExactTag;
            for (int p = 0; p < kTagPlanes; ++p) planes[p] |= uint64_t{static_cast<unsigned>(tag) >> p & 1u} << j;
          }
          for (int rate = 1; rate < kSpectralRates; ++rate) {
            const CodeRuns& of = runs(side, head, rate);
            for (int64_t t = tile * kTileTokens; t < std::min(spec.tokens, (tile + 1) * kTileTokens); ++t) {
              const SpectralVector& vector = data_.vector(static_cast<Side>(side), head, t);
              if (vector.rate != rate) continue;
              scales.push_back(vector.scale);
              std::vector<uint8_t> code(static_cast<size_t>(of.code_bytes()));
              PackSpectral(vector.codes.data(), of, code.data());
              for (int bit = of.bits(); bit < 8 * of.code_bytes(); ++bit) {
                code[bit / 8] = static_cast<uint8_t>(code[bit / 8] | 1u << bit % 8);
              }
              codes.insert(codes.end(), code.begin(), code.end());
            }
          }
          while (scales.size() % kCodeAlign != 0) scales.push_back(kAllOnes);
          tags_.insert(tags_.end(), planes, planes + kTagPlanes);
          offsets_.push_back(static_cast<uint32_t>(codes_.size() / kCodeAlign));
          codes_.insert(codes_.end(), scales.begin(), scales.end());
          codes_.insert(codes_.end(), codes.begin(), codes.end());
        }
      }
    }
  }

  template <typename T>
  void Write(size_t offset, const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(data_.bytes.data() + offset, values.data(), values.size() * sizeof(T));
  }

  void WriteSections() {
    const SpectralSpec& spec = data_.spec;
    const SpectralLayout& layout = data_.layout;
    const int64_t rows = spec.kv_heads * spec.exact;
    std::vector<uint32_t> positions;
    for (const std::vector<uint32_t>& of_head : exact_)
      positions.insert(positions.end(), of_head.begin(), of_head.end());
    Write(layout.exact_positions, positions);
    for (const size_t offset : {layout.exact_keys, layout.exact_values}) {
      std::vector<uint16_t> halves;
      for (int64_t i = 0; i < rows * spec.head_dim; ++i) halves.push_back(FloatToHalf(random_.Gaussian()));
      Write(offset, halves);
    }
    std::vector<float> deviations;
    for (int side = 0; side < 2; ++side) {
      Write(layout.means[side], random_.Gaussians(int64_t{spec.kv_heads} * spec.head_dim, 0.5f));
      std::vector<uint8_t> order;
      for (int head = 0; head < spec.kv_heads; ++head) {
        std::vector<uint8_t> of_head(static_cast<size_t>(spec.head_dim));
        std::iota(of_head.begin(), of_head.end(), uint8_t{0});
        for (size_t i = of_head.size(); i > 1; --i) {
          std::swap(of_head[i - 1], of_head[random_.Below(static_cast<int64_t>(i))]);
        }
        for (int i = 0; spec.repeats && i < spec.head_dim / 3; ++i) of_head[of_head.size() - 1 - i] = of_head[i];
        if (spec.repeats) std::rotate(of_head.begin(), of_head.begin() + spec.head_dim / 5, of_head.end());
        order.insert(order.end(), of_head.begin(), of_head.end());
      }
      if (side == kKeys || !spec.value_basis) Write(layout.orders[side], order);
      float unit = spec.extreme_scales ? 1.0f / SpectralScale(255) : 1.0f;
      if (side == kValues && spec.value_basis) unit /= 100.0f;  // of directions of int8
      for (int i = 0; i < spec.kv_heads * spec.head_dim; ++i) {
        deviations.push_back(unit * static_cast<float>(0.1 + 1.2 * random_.Uniform()));
      }
    }
    Write(layout.deviations, deviations);
    if (spec.value_basis) {
      std::vector<int8_t> basis;
      for (int i = 0; i < spec.kv_heads * spec.head_dim * spec.head_dim; ++i) {
        basis.push_back(static_cast<int8_t>(random_.Below(255) - 127));
      }
      Write(layout.basis, basis);
    }
    Write(layout.runs, runs_);
    Write(layout.tags, tags_);
    Write(layout.offsets, offsets_);
    Write(layout.codes, codes_);
  }

  SpectralSegmentData data_;
  Random random_;
  std::vector<CodeRuns> runs_;  // [2, H, R]
  std::vector<std::vector<uint32_t>> exact_;
  std::vector<uint64_t> tags_;
  std::vector<uint32_t> offsets_;
  std::vector<uint8_t> codes_;
};

}  // namespace

SpectralSegmentData MakeSpectralSegment(const SpectralSpec& spec) { return Maker(spec).Make(); }

std::vector<SpectralSpec> SpectralSpecs() {
  constexpr RopePairing kInterleaved = RopePairing::kInterleaved;
  std::vector<SpectralSpec> specs = {
      {.name = "plain"},
      {.name = "basis", .value_basis = true},
      {.name = "interleaved", .pairing = kInterleaved},
      {.name = "repeats", .repeats = true},
      {.name = "repeats_d128", .kv_heads = 1, .head_dim = 128, .tokens = 130, .repeats = true},
      {.name = "d8", .kv_heads = 3, .head_dim = 8, .tokens = 90, .exact = 4, .value_basis = true},
      {.name = "d40", .head_dim = 40, .tokens = 130},
      {.name = "d40_basis_interleaved",
       .head_dim = 40,
       .tokens = 65,
       .value_basis = true,
       .pairing = kInterleaved,
       .first_position = 7},
      {.name = "d80_partial_rotation", .head_dim = 80, .tokens = 150, .rotary_dim = 32, .first_position = 33},
      {.name = "d80_partial_interleaved",
       .head_dim = 80,
       .tokens = 129,
       .value_basis = true,
       .pairing = kInterleaved,
       .rotary_dim = 24},
      {.name = "d128", .kv_heads = 1, .head_dim = 128, .tokens = 200, .value_basis = true},
      {.name = "d128_interleaved", .head_dim = 128, .tokens = 70, .pairing = kInterleaved, .first_position = 4000},
      {.name = "d256", .kv_heads = 1, .head_dim = 256, .tokens = 130},
      {.name = "d256_basis", .kv_heads = 1, .head_dim = 256, .tokens = 66, .value_basis = true, .rotary_dim = 64},
      {.name = "one_token", .tokens = 1, .exact = 0},
      {.name = "one_exact_token", .tokens = 1, .exact = 1},
      {.name = "tile_minus_one", .tokens = 63, .value_basis = true},
      {.name = "tile", .tokens = 64},
      {.name = "tile_plus_one", .tokens = 65, .exact = 1},
      {.name = "all_exact", .exact = 200},
      {.name = "exact_tile", .exact = 70, .exact_tile = true, .value_basis = true},
      {.name = "no_exact", .exact = 0},
      {.name = "uncoded", .uncoded = true},
      {.name = "uncoded_basis", .tokens = 100, .value_basis = true, .uncoded = true},
      {.name = "extreme_scales", .extreme_scales = true},
      {.name = "extreme_scales_basis", .value_basis = true, .extreme_scales = true},
      {.name = "short_codes", .exact = 0, .runs = SpectralRuns::kShort},
      {.name = "rising", .value_basis = true, .runs = SpectralRuns::kRising},
      {.name = "last_rates_empty", .value_basis = true, .runs = SpectralRuns::kLastEmpty},
      {.name = "yarn", .yarn = true},
      {.name = "later", .value_basis = true, .first_position = 1000},
  };
  for (size_t i = 0; i < specs.size(); ++i) specs[i].seed = 300 + i;
  return specs;
}

}  // namespace anchorkv::test
