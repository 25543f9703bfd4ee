// Tiles of a segment of the adaptive profile, rebuilt in shared memory (docs/adaptive.md).
#pragma once

#include "backend/cuda/tile.cuh"
#include "format/spectral_code.h"
#include "format/spectral_layout.h"

namespace anchorkv::cuda {

// Coded positions: keys as they are, values as code coordinates, to be turned into the model's after the sum. Exact
// positions are hidden and have rows of their own. Tiles start at multiples of kTileTokens.
struct SpectralSource {
  DeviceSpectralSegment segment;
  DeviceRope rope;
  CodeTables tables;
  float scales[256];  // SpectralScale of format/spectral_code.h

  __device__ void Prepare(CodeTables* shared) const { CopyTables(tables, shared); }
  __device__ uint64_t Hidden(int head, int64_t start) const {
    return TagMask(View().tags(kKeys, head, start / kTileTokens), kExactTag);
  }

  // What DecodeSpectralKey and DecodeCoordinates of format/spectral_code.h do, for the rows of a tile.
  template <int N>
  __device__ void LoadRows(Side side, int head, int64_t start, int count, int rows, const CodeTables* shared,
                           float* tile) const {
    const SpectralView view = View();
    const int head_dim = segment.layout.head_dim;
    const int64_t at_tile = start / kTileTokens;
    const Place places = FindPlaces(view, side, head, at_tile, count);
    const uint8_t* block = view.block(side, head, at_tile);
    WarpVector<N> deviations;
    int target[N];   // of a code coordinate in the row
    bool second[N];  // a lower lane has the same one: two code coordinates may stand for one of the model's
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int i = LaneId() + kWarpSize * j;
      deviations.x[j] = i < head_dim ? view.deviations(side, head)[i] : 0.0f;
      target[j] = side == kKeys && i < head_dim ? view.order(side, head)[i] : i;
      second[j] = (__match_any_sync(kAllLanes, target[j]) & ((1u << LaneId()) - 1)) != 0;
    }
    if (side == kKeys) {
      StoreRotatedMeans<N>(view, head, start, count, rows, tile);
      __syncwarp();  // the scattered sums below are of other lanes' elements
    }
    for (int first = 0; first < rows / kBlockWarps; first += kBatchRows) {
      WarpVector<N> batch[kBatchRows];
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        const int rate = __shfl_sync(kAllLanes, places.rate, first + b);
        const int code = __shfl_sync(kAllLanes, places.code, first + b);
        const float scale = __shfl_sync(kAllLanes, places.scale, first + b);
        batch[b] = WarpVector<N>{};
        if (rate == 0 || rate == kExactTag) continue;
        batch[b] = Decode<N>(reinterpret_cast<const uint32_t*>(block + code), view.runs(side, head)[rate], scale,
                             deviations, *shared);
      }
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        float* row = tile + (WarpId() + (first + b) * kBlockWarps) * kRowStride<N>;
        if (side == kValues) {
          StoreShared(batch[b], row);
          continue;
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (!second[j]) row[target[j]] += batch[b].x[j];
          __syncwarp();
          if (second[j]) row[target[j]] += batch[b].x[j];
          __syncwarp();
        }
      }
    }
  }

 private:
  // Where codes are (PlaceOf of format/spectral_layout.h): lane r has the place of row WarpId() + r * kBlockWarps.
  struct Place {
    int rate = kExactTag;  // also of rows beyond `count`
    int code = 0;          // bytes from the tile's block
    float scale = 0.0f;
  };

  __device__ SpectralView View() const { return {&segment.layout, segment.base, segment.first_position}; }

  __device__ Place FindPlaces(const SpectralView& view, Side side, int head, int64_t tile, int count) const {
    Place place;
    const int at = WarpId() + LaneId() * kBlockWarps;
    if (at >= count) return place;
    const uint64_t* planes = view.tags(side, head, tile);
    place.rate = 0;
    for (int p = 0; p < kTagPlanes; ++p) place.rate |= static_cast<int>(planes[p] >> at & 1) << p;
    if (place.rate == 0 || place.rate == kExactTag) return place;
    const CodeRuns* runs = view.runs(side, head);
    int coded = 0;  // vectors in the tile
    int index = 0;  // of this one among them
    for (int rate = 1; rate < kSpectralRates; ++rate) {
      const uint64_t mask = TagMask(planes, rate);
      const int all = __popcll(mask);
      coded += all;
      if (rate > place.rate) continue;
      const int before = rate == place.rate ? __popcll(mask & ((uint64_t{1} << at) - 1)) : all;
      index += before;
      place.code += before * runs[rate].code_bytes();
    }
    place.code += ScaleBytes(coded);
    place.scale = scales[view.block(side, head, tile)[index]];
    return place;
  }

  // scale x level x deviation of every code coordinate; 0 where there is no code.
  template <int N>
  __device__ static WarpVector<N> Decode(const uint32_t* code, const CodeRuns& runs, float scale,
                                         const WarpVector<N>& deviations, const CodeTables& tables) {
    // Coordinates with at least 4, 3, 2 and 1 bits.
    const int of4 = kCodeGroup * runs.groups[0];
    const int of3 = of4 + kCodeGroup * runs.groups[1];
    const int of2 = of3 + kCodeGroup * runs.groups[2];
    const int of1 = of2 + kCodeGroup * runs.groups[3];
    WarpVector<N> v = {};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int i = LaneId() + kWarpSize * j;
      if (i >= of1) continue;
      const int bits = 1 + (i < of2 ? 1 : 0) + (i < of3 ? 1 : 0) + (i < of4 ? 1 : 0);
      // The coordinate's window: the last bits up to the end of its own; the end of the code comes before its
      // beginning.
      const int end = i + min(i, of2) + min(i, of3) + min(i, of4) + bits;
      const int begin = end - kTrellisBits;
      uint32_t window;
      if (begin < 0) {
        const int total = runs.bits();  // whole bytes
        const uint32_t last = code[(total - 1) / 32] >> ((total - 1) % 32 + 1 + begin);
        window = code[0] << -begin | (last & ((1u << -begin) - 1));
      } else {
        const uint32_t high = (end - 1) / 32 > begin / 32 ? code[begin / 32 + 1] : 0;
        window = __funnelshift_r(code[begin / 32], high, begin % 32);
      }
      const float level = tables.trellis.levels[window % kTrellisWindows] * tables.trellis.factors[bits];
      v.x[j] = level * (scale * deviations.x[j]);
    }
    return v;
  }

  // The mean of all keys, rotated to the position of each row; zero from `count` on, where positions may end.
  template <int N>
  __device__ void StoreRotatedMeans(const SpectralView& view, int head, int64_t start, int count, int rows,
                                    float* tile) const {
    const float* mean = view.mean(kKeys, head);
    for (int first = WarpId(); first < rows; first += kBatchRows * kBlockWarps) {
      WarpVector<N> batch[kBatchRows];
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        const int i = first + b * kBlockWarps;
        batch[b] = i < count ? RotatedMean<N>(mean, view.first_position + start + i) : WarpVector<N>{};
      }
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) StoreShared(batch[b], tile + (first + b * kBlockWarps) * kRowStride<N>);
    }
  }

  template <int N>
  __device__ WarpVector<N> RotatedMean(const float* mean, int64_t position) const {
    const RotaryRow rotary(rope, position);
    WarpVector<N> v = {};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = LaneId() + kWarpSize * j;
      if (d >= segment.layout.head_dim) continue;
      v.x[j] = mean[d];
      if (d >= 2 * rope.pairs) continue;
      const RotaryRow::Coordinate at = rotary.at(d);
      v.x[j] = at.Rotated(v.x[j], mean[at.partner]);
    }
    return v;
  }
};

inline SpectralSource MakeSpectralSource(const DeviceSpectralSegment& segment, const DeviceRope& rope) {
  SpectralSource source{segment, rope, MakeCodeTables(segment.layout.head_dim, /*uniform=*/false), {}};
  for (int b = 0; b < 256; ++b) source.scales[b] = SpectralScale(static_cast<uint8_t>(b));
  return source;
}

}  // namespace anchorkv::cuda
