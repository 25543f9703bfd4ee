#include "runtime/prompt_statistics.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/aligned_buffer.h"
#include "base/alloc_guard.h"

// Plain loops, compiled for several instruction sets; the best one is taken at run time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define ANCHORKV_CLONES __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define ANCHORKV_CLONES
#endif

namespace anchorkv {
namespace {

constexpr int kTile = 32;       // columns whose logits are formed together
constexpr int kRows = 4;        // query rows whose logits are formed together
constexpr int kStripRows = 32;  // query rows of one strip
constexpr int kGroups = 16;     // strips that are reduced independently of each other, per head
constexpr int kBlock = 64;      // vectors whose products are summed in float before they go to a double

// e^x for -inf <= x <= 0 with a relative error below 3e-7; below -87 it stays at e^-87. No branches or calls, so that
// it vectorises: x = n ln 2 + r, the last bits of x log2(e) + 1.5 * 2^23 are n, and e^r is its Taylor polynomial.
inline float ExpOfNegative(float x) noexcept {
  constexpr float kShift = 12582912.0f;
  x = x > -87.0f ? x : -87.0f;
  const float shifted = x * 1.44269504f + kShift;
  const float n = shifted - kShift;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  const float e =
      1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720))))));
  const uint32_t power = (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kShift) + 127u) << 23;
  return e * std::bit_cast<float>(power);
}

// out[r][c] = queries[r] . column c of a tile of keys [head_dim, kTile].
ANCHORKV_CLONES void TileLogits(const float* const* queries, const float* keys, int64_t head_dim, float* const* out) {
  float sum[kRows][kTile] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int r = 0; r < kRows; ++r) {
      const float q = queries[r][d];
      for (int c = 0; c < kTile; ++c) sum[r][c] += q * keys[d * kTile + c];
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(out[r], sum[r], sizeof(sum[r]));
}

// Softmax of scale * x over the first `seen` of n columns, in place; the others get zero. n: a multiple of kTile.
ANCHORKV_CLONES void SoftmaxRow(float* x, int64_t seen, int64_t n, float scale) {
  for (int64_t c = seen; c < n; ++c) x[c] = -std::numeric_limits<float>::infinity();
  float largest[kTile], sum[kTile] = {};
  std::memcpy(largest, x, sizeof(largest));
  for (int64_t c = kTile; c < n; c += kTile) {
    for (int j = 0; j < kTile; ++j) largest[j] = x[c + j] > largest[j] ? x[c + j] : largest[j];
  }
  const float m = *std::max_element(largest, largest + kTile);
  for (int64_t c = 0; c < n; c += kTile) {
    for (int j = 0; j < kTile; ++j) {
      x[c + j] = ExpOfNegative((x[c + j] - m) * scale);
      sum[j] += x[c + j];
    }
  }
  double total = 0.0;
  for (int j = 0; j < kTile; ++j) total += sum[j];
  const float inverse = static_cast<float>(1.0 / total);
  for (int64_t c = 0; c < n; ++c) x[c] *= inverse;
  std::fill(x + seen, x + n, 0.0f);
}

// lower triangle of products += x x^T over n <= kBlock vectors x [n, dim].
ANCHORKV_CLONES void AddProducts(const float* x, int64_t n, int64_t dim, double* products) {
  float sum[512];
  for (int64_t i = 0; i < dim; ++i) {
    std::fill(sum, sum + i + 1, 0.0f);
    for (int64_t t = 0; t < n; ++t) {
      const float xi = x[t * dim + i];
      for (int64_t j = 0; j <= i; ++j) sum[j] += xi * x[t * dim + j];
    }
    for (int64_t j = 0; j <= i; ++j) products[i * dim + j] += double{sum[j]};
  }
}

double Reduced(ColumnReduce reduce, double a, double b) noexcept {
  return reduce == ColumnReduce::kSum ? a + b : std::max(a, b);
}

// The columns of all kv heads, and what one thread needs to reduce strips of them.
struct Columns {
  HeadsView<const float> queries;
  int64_t kv_heads = 0, head_dim = 0, ratio = 1;
  int64_t count = 0, tiles = 0;
  int64_t visible = 0;
  ColumnReduce reduce = ColumnReduce::kSum;
  AlignedBuffer packed;  // [kv_heads, tiles, head_dim, kTile]; columns beyond the last are zero

  float* Tile(int64_t head, int64_t tile) noexcept {
    return packed.as<float>() + (head * tiles + tile) * head_dim * kTile;
  }
  int64_t strip_tokens() const noexcept { return std::max<int64_t>(1, kStripRows / ratio); }
  size_t strip_floats() const noexcept { return static_cast<size_t>(strip_tokens() * ratio * tiles * kTile); }

  Status Pack(HeadsView<const float> keys, const std::vector<int64_t>& positions, int threads);
  void AddStrip(int64_t head, int64_t first, float* strip, double* out) noexcept;
};

Status Columns::Pack(HeadsView<const float> keys, const std::vector<int64_t>& positions, int threads) {
  const size_t floats = static_cast<size_t>(kv_heads * tiles * head_dim * kTile);
  AKV_ASSIGN_OR_RETURN(packed, AlignedBuffer::Make(sizeof(float) * floats, "packed keys"));
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
  for (int64_t head = 0; head < kv_heads; ++head) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      float* to = Tile(head, tile);
      const int64_t columns = std::min<int64_t>(kTile, count - tile * kTile);
      for (int64_t c = 0; c < columns; ++c) {
        const float* key = keys.row(head, positions[static_cast<size_t>(tile * kTile + c)]);
        for (int64_t d = 0; d < head_dim; ++d) to[d * kTile + c] = key[d];
      }
    }
  }
  return Status();
}

// Reduces the weights of the query tokens from `first` on, as many as a strip takes, into out [count].
void Columns::AddStrip(int64_t head, int64_t first, float* strip, double* out) noexcept {
  const int64_t rows = std::min(strip_tokens(), queries.tokens - first) * ratio;
  auto seen = [&](int64_t row) { return std::min(count, visible + first + row / ratio); };
  const int64_t width = (seen(rows - 1) + kTile - 1) / kTile * kTile;
  for (int64_t begin = 0; begin < width; begin += kTile) {
    for (int64_t r = 0; r < rows; r += kRows) {
      const float* from[kRows];
      float* to[kRows];
      for (int i = 0; i < kRows; ++i) {  // rows beyond the last repeat it
        const int64_t row = std::min(r + i, rows - 1);
        from[i] = queries.row(head * ratio + row % ratio, first + row / ratio);
        to[i] = strip + row * width + begin;
      }
      TileLogits(from, Tile(head, begin / kTile), head_dim, to);
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (int64_t r = 0; r < rows; ++r) {
    float* row = strip + r * width;
    SoftmaxRow(row, seen(r), width, scale);
    for (int64_t c = 0; c < seen(r); ++c) out[c] = Reduced(reduce, out[c], double{row[c]});
  }
}

}  // namespace

Result<std::vector<double>> ReduceColumns(HeadsView<const float> queries, HeadsView<const float> keys,
                                          std::span<const PositionRange> columns, int64_t visible, ColumnReduce reduce,
                                          int threads) {
  return GuardAllocation("the weights of attention columns", [&]() -> Result<std::vector<double>> {
    std::vector<int64_t> positions;
    for (const PositionRange& range : columns) {
      for (int64_t t = range.first; t < range.last; ++t) positions.push_back(t);
    }
    Columns all;
    all.queries = queries;
    all.kv_heads = keys.heads;
    all.head_dim = keys.head_dim;
    all.ratio = queries.heads / keys.heads;
    all.count = static_cast<int64_t>(positions.size());
    all.tiles = (all.count + kTile - 1) / kTile;
    all.visible = visible;
    all.reduce = reduce;
    AKV_RETURN_IF_ERROR(all.Pack(keys, positions, threads));

    // Strips are dealt out to a fixed number of groups per head, whatever the threads: each group reduces its own in
    // order, and the groups are reduced in order.
    AKV_ASSIGN_OR_RETURN(
        AlignedBuffer strips,
        AlignedBuffer::Make(sizeof(float) * all.strip_floats() * static_cast<size_t>(threads), "strips of attention"));
    const int64_t per_head = kGroups * all.count;
    std::vector<double> groups(static_cast<size_t>(keys.heads * per_head));
#pragma omp parallel for collapse(2) num_threads(threads) schedule(dynamic)
    for (int64_t head = 0; head < keys.heads; ++head) {
      for (int64_t group = 0; group < kGroups; ++group) {
        float* strip = strips.as<float>() + all.strip_floats() * static_cast<size_t>(omp_get_thread_num());
        double* out = groups.data() + head * per_head + group * all.count;
        const int64_t step = all.strip_tokens();
        for (int64_t t = group * step; t < queries.tokens; t += kGroups * step) all.AddStrip(head, t, strip, out);
      }
    }

    std::vector<double> out(static_cast<size_t>(keys.heads * all.count));
    for (int64_t head = 0; head < keys.heads; ++head) {
      for (int64_t i = 0; i < per_head; ++i) {
        double& to = out[static_cast<size_t>(head * all.count + i % all.count)];
        to = Reduced(reduce, to, groups[static_cast<size_t>(head * per_head + i)]);
      }
    }
    if (reduce == ColumnReduce::kSum) {
      for (double& sum : out) sum /= static_cast<double>(all.ratio);
    }
    return out;
  });
}

Result<Moments> AddMoments(const Moments& before, HeadsView<const float> queries, int64_t first, const RopeTable& rope,
                           int threads) {
  return GuardAllocation("the moments of queries", [&]() -> Result<Moments> {
    const int64_t dim = queries.head_dim;
    const int64_t n = queries.tokens;
    if (n == 0) return before;
    Moments after;
    after.count = before.count + n;
    after.mean.resize(static_cast<size_t>(queries.heads * dim));
    after.covariance.resize(static_cast<size_t>(queries.heads * dim * dim));
    // Per head: the mean, then the products, of the queries alone; and a block of queries.
    std::vector<double> sums(static_cast<size_t>(queries.heads * dim * (dim + 1)));
    std::vector<float> blocks(static_cast<size_t>(queries.heads * dim * kBlock));
    const double share = static_cast<double>(n) / static_cast<double>(after.count);

#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t head = 0; head < queries.heads; ++head) {
      double* mean = sums.data() + head * dim * (dim + 1);
      double* products = mean + dim;
      float* block = blocks.data() + head * dim * kBlock;
      auto load = [&](int64_t t, float* x) {
        std::copy_n(queries.row(head, t), dim, x);
        rope.Unrotate(first + t, x);
      };
      for (int64_t t = 0; t < n; ++t) {
        load(t, block);
        for (int64_t d = 0; d < dim; ++d) mean[d] += double{block[d]};
      }
      for (int64_t d = 0; d < dim; ++d) mean[d] /= static_cast<double>(n);
      for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t count = std::min<int64_t>(kBlock, n - begin);
        for (int64_t t = 0; t < count; ++t) {
          float* x = block + t * dim;
          load(begin + t, x);
          for (int64_t d = 0; d < dim; ++d) x[d] = static_cast<float>(double{x[d]} - mean[d]);
        }
        AddProducts(block, count, dim, products);
      }

      // Two groups together: the weighted covariances, and what their means differ by.
      auto old_mean = [&](int64_t d) {
        return before.count == 0 ? mean[d] : double{before.mean[static_cast<size_t>(head * dim + d)]};
      };
      for (int64_t i = 0; i < dim; ++i) {
        const double difference = mean[i] - old_mean(i);
        after.mean[static_cast<size_t>(head * dim + i)] = static_cast<float>(old_mean(i) + difference * share);
        for (int64_t j = 0; j <= i; ++j) {
          const auto at = static_cast<size_t>((head * dim + i) * dim + j);
          const double old = before.count == 0 ? 0.0 : double{before.covariance[at]};
          const double value = (1.0 - share) * old + share * products[i * dim + j] / static_cast<double>(n) +
                               share * (1.0 - share) * difference * (mean[j] - old_mean(j));
          after.covariance[at] = static_cast<float>(value);
          after.covariance[static_cast<size_t>((head * dim + j) * dim + i)] = static_cast<float>(value);
        }
      }
    }
    return after;
  });
}

}  // namespace anchorkv
