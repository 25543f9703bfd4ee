#include "anchorkv/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "base/alloc_guard.h"

namespace anchorkv {
namespace {

// Position counts stay far below what the tables' index arithmetic and memory allow.
constexpr int64_t kMaxPositions = int64_t{1} << 26;

Status Check(const RopeSpec& spec, int head_dim, int64_t max_position) {
  const auto positive = [](double x) { return std::isfinite(x) && x > 0.0; };
  if (head_dim < 1) return InvalidArgument("head_dim is " + std::to_string(head_dim) + "; it must be at least 1");
  if (spec.rotary_dim < 0 || spec.rotary_dim > head_dim || spec.rotary_dim % 2 != 0) {
    return InvalidArgument("rotary_dim is " + std::to_string(spec.rotary_dim) +
                           "; it must be even and from 0 to head_dim " + std::to_string(head_dim));
  }
  if (max_position < 1 || max_position > kMaxPositions) {
    return InvalidArgument("max_position is " + std::to_string(max_position) + "; it must be from 1 to " +
                           std::to_string(kMaxPositions));
  }
  if (!positive(spec.freq_base)) {
    return InvalidArgument("RoPE freq_base is " + std::to_string(spec.freq_base) + "; it must be finite and above 0");
  }
  if (!positive(spec.freq_scale)) {
    return InvalidArgument("RoPE freq_scale is " + std::to_string(spec.freq_scale) + "; it must be finite and above 0");
  }
  if (!positive(spec.attn_factor)) {
    return InvalidArgument("RoPE attn_factor is " + std::to_string(spec.attn_factor) +
                           "; it must be finite and above 0");
  }
  if (!std::isfinite(spec.ext_factor)) return InvalidArgument("RoPE ext_factor must be finite");
  if (spec.ext_factor != 0.0) {
    if (spec.original_context < 1) {
      return InvalidArgument("RoPE original_context is " + std::to_string(spec.original_context) +
                             "; YaRN needs at least 1");
    }
    if (!positive(spec.beta_fast) || !positive(spec.beta_slow)) {
      return InvalidArgument("RoPE beta_fast and beta_slow must be finite and above 0");
    }
    if (spec.freq_base == 1.0) return InvalidArgument("RoPE freq_base is 1; YaRN needs another value");
  }
  if (!spec.freq_factors.empty() && spec.freq_factors.size() != static_cast<size_t>(spec.rotary_dim / 2)) {
    return InvalidArgument("RoPE has " + std::to_string(spec.freq_factors.size()) +
                           " freq_factors; it must have none or " + std::to_string(spec.rotary_dim / 2));
  }
  if (!std::all_of(spec.freq_factors.begin(), spec.freq_factors.end(), positive)) {
    return InvalidArgument("RoPE freq_factors must be finite and above 0");
  }
  return {};
}

// The pair index whose wavelength makes `turns` full turns within the original context.
double CorrectionPair(const RopeSpec& spec, double turns) {
  return spec.rotary_dim * std::log(spec.original_context / (turns * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(spec.freq_base));
}

// Radians per position of every pair. YaRN keeps fast pairs as they are (extrapolation), slows down the
// slow ones by freq_scale (interpolation) and ramps linearly between the two correction pairs.
std::vector<double> Frequencies(const RopeSpec& spec) {
  std::vector<double> frequencies(static_cast<size_t>(spec.rotary_dim / 2));
  double low = 0.0;
  double high = 0.0;
  if (spec.ext_factor != 0.0) {
    low = std::max(0.0, std::floor(CorrectionPair(spec, spec.beta_fast)));
    high = std::min(spec.rotary_dim - 1.0, std::ceil(CorrectionPair(spec, spec.beta_slow)));
  }
  constexpr double kMinRampWidth = 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double factor = spec.freq_factors.empty() ? 1.0 : static_cast<double>(spec.freq_factors[i]);
    const double extrapolated = std::pow(spec.freq_base, -2.0 * static_cast<double>(i) / spec.rotary_dim) / factor;
    const double interpolated = spec.freq_scale * extrapolated;
    const double ramp = (static_cast<double>(i) - low) / std::max(kMinRampWidth, high - low);
    const double mix = spec.ext_factor == 0.0 ? 0.0 : (1.0 - std::clamp(ramp, 0.0, 1.0)) * spec.ext_factor;
    frequencies[i] = interpolated * (1.0 - mix) + extrapolated * mix;
  }
  return frequencies;
}

double Magnitude(const RopeSpec& spec) {
  if (spec.ext_factor == 0.0) return spec.attn_factor;
  return spec.attn_factor * (1.0 + 0.1 * std::log(1.0 / spec.freq_scale));
}

// Calls visit(pair, cos, sin) with the product of the position's two factors, unfused.
template <typename Visit>
void ForEachPair(const RopeTable& table, int64_t position, Visit visit) noexcept {
  const int64_t tile = position / RopeTable::kTile;
  const int offset = static_cast<int>(position % RopeTable::kTile);
  const float* tile_cos = table.tile_cos(tile);
  const float* tile_sin = table.tile_sin(tile);
  const float* offset_cos = table.offset_cos(offset);
  const float* offset_sin = table.offset_sin(offset);
  for (int i = 0; i < table.pairs(); ++i) {
    visit(i, tile_cos[i] * offset_cos[i] - tile_sin[i] * offset_sin[i],
          tile_sin[i] * offset_cos[i] + tile_cos[i] * offset_sin[i]);
  }
}

}  // namespace

Result<std::shared_ptr<const RopeTable>> RopeTable::Make(const RopeSpec& spec, int head_dim, int64_t max_position) {
  return GuardAllocation("a RoPE table", [&]() -> Result<std::shared_ptr<const RopeTable>> {
    AKV_RETURN_IF_ERROR(Check(spec, head_dim, max_position));
    const double magnitude = Magnitude(spec);
    if (!(magnitude > 0.0)) {
      return InvalidArgument("RoPE freq_scale " + std::to_string(spec.freq_scale) + " gives a magnitude of " +
                             std::to_string(magnitude) + "; it must be above 0");
    }
    std::shared_ptr<RopeTable> table(new RopeTable());
    table->spec_ = spec;
    table->head_dim_ = head_dim;
    table->max_position_ = max_position;
    table->magnitude_ = static_cast<float>(magnitude);

    const std::vector<double> frequencies = Frequencies(spec);
    const auto fill = [&](int64_t rows, int64_t step, double factor, std::vector<float>* cos, std::vector<float>* sin) {
      cos->reserve(static_cast<size_t>(rows) * frequencies.size());
      sin->reserve(static_cast<size_t>(rows) * frequencies.size());
      for (int64_t row = 0; row < rows; ++row) {
        for (const double frequency : frequencies) {
          const double angle = static_cast<double>(row * step) * frequency;
          cos->push_back(static_cast<float>(std::cos(angle) * factor));
          sin->push_back(static_cast<float>(std::sin(angle) * factor));
        }
      }
    };
    fill((max_position + kTile - 1) / kTile, kTile, magnitude, &table->tile_cos_, &table->tile_sin_);
    fill(kTile, 1, 1.0, &table->offset_cos_, &table->offset_sin_);
    return std::shared_ptr<const RopeTable>(std::move(table));
  });
}

void RopeTable::CosSin(int64_t position, float* cos, float* sin) const noexcept {
  ForEachPair(*this, position, [&](int i, float c, float s) {
    cos[i] = c;
    sin[i] = s;
  });
}

void RopeTable::Rotate(int64_t position, float* x) const noexcept {
  ForEachPair(*this, position, [&](int i, float c, float s) {
    const float a = x[first(i)];
    const float b = x[second(i)];
    x[first(i)] = a * c - b * s;
    x[second(i)] = a * s + b * c;
  });
}

void RopeTable::Unrotate(int64_t position, float* x) const noexcept {
  const float inverse = 1.0f / (magnitude_ * magnitude_);
  ForEachPair(*this, position, [&](int i, float c, float s) {
    const float a = x[first(i)];
    const float b = x[second(i)];
    x[first(i)] = (a * c + b * s) * inverse;
    x[second(i)] = (b * c - a * s) * inverse;
  });
}

}  // namespace anchorkv
