#include "cache/dense_tail.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/half.h"

namespace anchorkv {
namespace {

constexpr int64_t kRowBlock = 64;    // capacities are multiples of this
constexpr int64_t kMaxGrowth = 512;  // rows added at most beyond what is asked for

// FloatToHalf without branches, so that the loop over a row becomes vector code. A value below 2^-14 is
// rounded by adding 1/2: the sum's last place is then worth 2^-24, one unit of a subnormal half. Numbers too
// large for a half become the largest one: an infinite key would make its rows of attention meaningless.
uint16_t RoundToHalf(float x) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? tiny : normal;
  half = magnitude >= 0x477ff000u ? 0x7bffu : half;
  half = magnitude >= 0x7f800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(sign | half);
}

}  // namespace

size_t ElementBytes(DenseType type) noexcept { return type == DenseType::kF16 ? sizeof(uint16_t) : sizeof(float); }

void StoreElements(const float* in, int64_t n, DenseType type, void* out) noexcept {
  if (type == DenseType::kF32) {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* half = static_cast<uint16_t*>(out);
  for (int64_t i = 0; i < n; ++i) half[i] = RoundToHalf(in[i]);
}

void LoadElements(const void* in, int64_t n, DenseType type, float* out) noexcept {
  if (type == DenseType::kF32) {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const auto* half = static_cast<const uint16_t*>(in);
  for (int64_t i = 0; i < n; ++i) out[i] = HalfToFloat(half[i]);
}

Status DenseTail::Reserve(int64_t rows, int64_t used, int64_t most) {
  if (rows <= capacity_) return {};
  const int64_t spare = std::min(std::max(capacity_, kRowBlock), kMaxGrowth);
  const int64_t wanted = std::max(rows, std::min(capacity_ + spare, most));
  DenseTail grown(type_, static_cast<int>(heads_), static_cast<int>(dim_));
  grown.capacity_ = (wanted + kRowBlock - 1) / kRowBlock * kRowBlock;
  AKV_ASSIGN_OR_RETURN(grown.buffer_, AlignedBuffer::Make(static_cast<size_t>(grown.capacity_ * row_bytes()),
                                                          "the uncompressed tail of a cache"));
  if (used > 0) {
    for (const Side side : {kKeys, kValues}) {
      for (int h = 0; h < heads_; ++h) {
        std::memcpy(grown.buffer_.data() + grown.offset(side, h, 0), row(side, h, 0),
                    static_cast<size_t>(used * dim_) * ElementBytes(type_));
      }
    }
  }
  *this = std::move(grown);
  return {};
}

Status DenseTail::ReserveExactly(int64_t rows) {
  AKV_ASSIGN_OR_RETURN(buffer_, AlignedBuffer::Make(static_cast<size_t>(rows * row_bytes()), "rows of a cache"));
  capacity_ = rows;
  return {};
}

void DenseTail::MoveToFront(int64_t first, int64_t count) noexcept {
  if (first == 0) return;
  for (const Side side : {kKeys, kValues}) {
    for (int h = 0; h < heads_; ++h) {
      std::memmove(buffer_.data() + offset(side, h, 0), row(side, h, first),
                   static_cast<size_t>(count * dim_) * ElementBytes(type_));
    }
  }
}

void DenseTail::CopyFrom(const DenseTail& from, int64_t first, int64_t count) noexcept {
  for (const Side side : {kKeys, kValues}) {
    for (int h = 0; h < heads_; ++h) {
      std::memcpy(buffer_.data() + offset(side, h, 0), from.row(side, h, first),
                  static_cast<size_t>(count * dim_) * ElementBytes(type_));
    }
  }
}

void DenseTail::StoreRow(int head, int64_t t, const float* key, const float* value) noexcept {
  StoreElements(key, dim_, type_, buffer_.data() + offset(kKeys, head, t));
  StoreElements(value, dim_, type_, buffer_.data() + offset(kValues, head, t));
}

void DenseTail::LoadRow(Side side, int head, int64_t t, float* out) const noexcept {
  LoadElements(row(side, head, t), dim_, type_, out);
}

void DenseTail::StoreRows(int64_t first, int64_t count, const std::byte* in) noexcept {
  const size_t bytes = static_cast<size_t>(count * dim_) * ElementBytes(type_);
  for (const Side side : {kKeys, kValues}) {
    for (int h = 0; h < heads_; ++h, in += bytes) std::memcpy(buffer_.data() + offset(side, h, first), in, bytes);
  }
}

void DenseTail::LoadRows(int64_t first, int64_t count, std::byte* out) const noexcept {
  if (count == 0) return;
  const size_t bytes = static_cast<size_t>(count * dim_) * ElementBytes(type_);
  for (const Side side : {kKeys, kValues}) {
    for (int h = 0; h < heads_; ++h, out += bytes) std::memcpy(out, row(side, h, first), bytes);
  }
}

Status QueryRing::Allocate() {
  AKV_ASSIGN_OR_RETURN(
      buffer_, AlignedBuffer::Make(static_cast<size_t>(window_ * heads_ * dim_) * sizeof(float), "window queries"));
  return {};
}

void QueryRing::Store(int64_t position, const float* query, int64_t head_stride) noexcept {
  float* out = buffer_.as<float>() + position % window_ * heads_ * dim_;
  for (int64_t h = 0; h < heads_; ++h) std::copy_n(query + h * head_stride, dim_, out + h * dim_);
}

void QueryRing::Load(int64_t first, HeadsView<float> out) const noexcept {
  for (int64_t w = 0; w < window_; ++w) {
    const float* in = buffer_.as<float>() + (first + w) % window_ * heads_ * dim_;
    for (int64_t h = 0; h < heads_; ++h) std::copy_n(in + h * dim_, dim_, out.row(h, w));
  }
}

}  // namespace anchorkv
