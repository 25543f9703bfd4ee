// One layer from dense keys and values to bytes of the adaptive profile. docs/adaptive.md.
//
// Memory beside the input and the segment: per vector 4 bytes of scores, 4 of importance, and one float per rate for
// the error it would leave; sums over chunks of positions. Coordinates are formed chunk by chunk, once to measure and
// once to pack, and never held for the whole layer.
#include "codec/spectral.h"

#include <Eigen/Dense>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/half.h"
#include "codec/alloc_guard.h"
#include "codec/layer_check.h"
#include "codec/spectral_segment.h"
#include "format/spectral_code.h"

namespace anchorkv {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int64_t kChunk = 512;  // positions
// Share of the mean weight that every key coordinate has at least: the observed queries do not know the next ones.
constexpr double kLeastQueryWeight = 0.01;

// Everything that is fixed for one side of one head before vectors are coded.
struct SideCode {
  std::vector<float> mean;        // [D] in the domain that is stored: keys before RoPE
  std::vector<float> deviations;  // [D] of code coordinates, as stored
  std::vector<float> energy;      // [D] cost of code coordinate i per unit of u_i^2, times its mean square
  std::vector<uint8_t> order;     // [D], or empty with a basis
  std::vector<int8_t> basis;      // [D, D], or empty
  Matrix analysis;                // u = analysis (x - mean), with a basis
  std::vector<float> units;       // [D] else: u_i = units[i] (x - mean)[order[i]]
  CodeRuns runs[kSpectralRates];
};

class SpectralCoder {
 public:
  SpectralCoder(const LayerInput& input, const CodecOptions& options, const Backend& backend, SpectralBudget budget)
      : input_(input),
        options_(options),
        backend_(backend),
        budget_(std::move(budget)),
        shape_{static_cast<int>(input.keys.heads), static_cast<int>(input.keys.head_dim), input.keys.tokens},
        chunks_((shape_.tokens + kChunk - 1) / kChunk) {}

  Result<std::shared_ptr<const Segment>> Run() {
    {
      AttentionStats stats;
      HeadScores scores;
      AKV_RETURN_IF_ERROR(backend_.Score(input_, &stats, &scores));
      exact_ = ChooseAnchors(scores, shape_.kv_heads, options_, budget_.layout.exact, input_.layer);
      AKV_RETURN_IF_ERROR(backend_.Importance(input_, options_, stats, importance_));
    }
    is_exact_.assign(static_cast<size_t>(shape_.kv_heads * shape_.tokens), 0);
    for (int h = 0; h < shape_.kv_heads; ++h) {
      for (int64_t i = 0; i < budget_.layout.exact; ++i) is_exact_[At(h, ExactPosition(h, i))] = 1;
    }
    rates_ = ChooseRates(budget_);
    for (const Side side : {kKeys, kValues}) {
      errors_[side].assign(static_cast<size_t>(shape_.kv_heads * shape_.tokens * kSpectralRates), 0.0f);
      rate_of_[side].assign(static_cast<size_t>(shape_.kv_heads * shape_.tokens), 0);
      codes_[side].resize(static_cast<size_t>(shape_.kv_heads));
      for (int head = 0; head < shape_.kv_heads; ++head) {
        SideCode& code = codes_[side][static_cast<size_t>(head)];
        code.mean = Mean(side, head);
        if (side == kKeys) {
          DescribeKeys(head, &code);
        } else {
          DescribeValues(head, &code);
        }
        for (int r = 1; r < kSpectralRates; ++r) {
          code.runs[r] = SpendBits(code.energy.data(), shape_.head_dim, rates_.bits[r]);
        }
        Measure(side, head);
      }
    }
    ChooseRatesOfVectors();
    return Pack();
  }

 private:
  size_t At(int head, int64_t t) const { return static_cast<size_t>(head * shape_.tokens + t); }
  int64_t ExactPosition(int head, int64_t i) const {
    return exact_[static_cast<size_t>(head * budget_.layout.exact + i)];
  }
  // How much a vector's error matters when the coordinates are chosen: the root mean square weight it may get.
  float SampleWeight(int head, int64_t t) const {
    return is_exact_[At(head, t)] != 0 ? 0.0f : std::sqrt(importance_[kValues].head(head)[t]);
  }

  template <typename Body>
  void ForEachChunk(const Body& body) const {
#pragma omp parallel for schedule(dynamic)
    for (int64_t c = 0; c < chunks_; ++c) body(c, c * kChunk, std::min(shape_.tokens, (c + 1) * kChunk));
  }

  // Mean of the vectors that are not exact, zero where there are none.
  std::vector<float> Mean(Side side, int head) const {
    const HeadsView<const float>& vectors = side == kKeys ? input_.keys : input_.values;
    const auto dims = static_cast<size_t>(shape_.head_dim);
    std::vector<double> sums(static_cast<size_t>(chunks_) * dims, 0.0);
    ForEachChunk([&](int64_t c, int64_t first, int64_t last) {
      double* sum = sums.data() + static_cast<size_t>(c) * dims;
      for (int64_t t = first; t < last; ++t) {
        if (is_exact_[At(head, t)] != 0) continue;
        const float* x = vectors.row(head, t);
        for (size_t d = 0; d < dims; ++d) sum[d] += x[d];
      }
    });
    const int64_t count = shape_.tokens - budget_.layout.exact;
    std::vector<float> mean(dims, 0.0f);
    for (size_t d = 0; d < dims && count > 0; ++d) {
      double sum = 0.0;
      for (size_t c = 0; c < static_cast<size_t>(chunks_); ++c) sum += sums[c * dims + d];
      mean[d] = static_cast<float>(sum / static_cast<double>(count));
    }
    return mean;
  }

  // Centred vectors of [first, last) in the coordinates that are coded: keys after RoPE.
  void Centred(Side side, int head, int64_t first, int64_t last, const std::vector<float>& mean, Matrix* x) const {
    x->resize(last - first, shape_.head_dim);
    for (int64_t t = first; t < last; ++t) {
      const float* from = (side == kKeys ? input_.keys : input_.values).row(head, t);
      float* row = x->data() + (t - first) * shape_.head_dim;
      for (int d = 0; d < shape_.head_dim; ++d) row[d] = from[d] - mean[static_cast<size_t>(d)];
      if (side == kKeys) input_.rope->Rotate(input_.first_position + t, row);
    }
  }

  // Second moments of centred vectors, weighted by what their errors cost: [D, D], or the diagonal [D, 1].
  Eigen::MatrixXd Moments(Side side, int head, const std::vector<float>& mean, bool diagonal) const {
    const int dims = shape_.head_dim;
    std::vector<Eigen::MatrixXd> sums(static_cast<size_t>(chunks_));
    std::vector<double> weights(static_cast<size_t>(chunks_), 0.0);
    ForEachChunk([&](int64_t c, int64_t first, int64_t last) {
      Matrix x;
      Centred(side, head, first, last, mean, &x);
      Eigen::VectorXf w(last - first);
      for (int64_t t = first; t < last; ++t) w[t - first] = SampleWeight(head, t);
      weights[static_cast<size_t>(c)] = w.cast<double>().sum();
      Eigen::MatrixXd& sum = sums[static_cast<size_t>(c)];
      if (diagonal) {
        sum = (x.array().square().colwise() * w.array()).colwise().sum().transpose().matrix().cast<double>();
      } else {
        const Matrix weighted = w.asDiagonal() * x;
        sum = (weighted.transpose() * x).cast<double>();
      }
    });
    Eigen::MatrixXd total = Eigen::MatrixXd::Zero(dims, diagonal ? 1 : dims);
    double weight = 0.0;
    for (size_t c = 0; c < sums.size(); ++c) {
      total += sums[c];
      weight += weights[c];
    }
    return weight > 0.0 ? Eigen::MatrixXd(total / weight) : total;
  }

  // E q_i^2 per coordinate over the observed queries, equal within a rotary pair, scaled to mean 1.
  std::vector<double> QueryWeights(int head) const {
    const int dims = shape_.head_dim;
    std::vector<double> weight(static_cast<size_t>(dims), 0.0);
    const int group = input_.gqa_ratio();
    for (int h = head * group; h < (head + 1) * group; ++h) {
      for (int64_t w = 0; w < input_.queries.tokens; ++w) {
        const float* q = input_.queries.row(h, w);
        for (int d = 0; d < dims; ++d) weight[static_cast<size_t>(d)] += double{q[d]} * q[d];
      }
    }
    ShareInPairs(&weight);
    double mean = 0.0;
    for (const double w : weight) mean += w / dims;
    for (double& w : weight) w = mean > 0.0 ? std::max(w / mean, kLeastQueryWeight) : 1.0;
    return weight;
  }

  // Both coordinates of a rotary pair get their mean: rotation mixes them.
  void ShareInPairs(std::vector<double>* x) const {
    for (int i = 0; i < input_.rope->pairs(); ++i) {
      double& a = (*x)[static_cast<size_t>(input_.rope->first(i))];
      double& b = (*x)[static_cast<size_t>(input_.rope->second(i))];
      a = b = (a + b) / 2;
    }
  }

  // Keys: the model's own coordinates after RoPE, those of most energy first.
  void DescribeKeys(int head, SideCode* code) const {
    const std::vector<double> weights = QueryWeights(head);
    const Eigen::MatrixXd moments = Moments(kKeys, head, code->mean, /*diagonal=*/true);
    std::vector<double> variance(moments.data(), moments.data() + shape_.head_dim);
    ShareInPairs(&variance);
    // Pairs stay together: equal energies keep the order of this list.
    std::vector<uint8_t> order;
    std::vector<char> rotates(variance.size(), 0);
    for (int i = 0; i < input_.rope->pairs(); ++i) {
      for (const int d : {input_.rope->first(i), input_.rope->second(i)}) {
        order.push_back(static_cast<uint8_t>(d));
        rotates[static_cast<size_t>(d)] = 1;
      }
    }
    for (size_t d = 0; d < rotates.size(); ++d) {
      if (rotates[d] == 0) order.push_back(static_cast<uint8_t>(d));
    }
    SetOrder(std::move(order), variance, weights, code);
  }

  void DescribeValues(int head, SideCode* code) const {
    const int dims = shape_.head_dim;
    if (budget_.layout.value_basis) return SetBasis(Moments(kValues, head, code->mean, /*diagonal=*/false), code);
    const Eigen::MatrixXd moments = Moments(kValues, head, code->mean, /*diagonal=*/true);
    std::vector<uint8_t> order(static_cast<size_t>(dims));
    for (int d = 0; d < dims; ++d) order[static_cast<size_t>(d)] = static_cast<uint8_t>(d);
    SetOrder(std::move(order), std::vector<double>(moments.data(), moments.data() + dims),
             std::vector<double>(static_cast<size_t>(dims), 1.0), code);
  }

  static void SetOrder(std::vector<uint8_t> order, const std::vector<double>& variance,
                       const std::vector<double>& weights, SideCode* code) {
    std::stable_sort(order.begin(), order.end(),
                     [&](uint8_t a, uint8_t b) { return weights[a] * variance[a] > weights[b] * variance[b]; });
    for (const uint8_t d : order) {
      const auto deviation = static_cast<float>(std::sqrt(variance[d]));
      code->deviations.push_back(deviation);
      code->units.push_back(deviation > 0.0f ? 1.0f / deviation : 0.0f);
      code->energy.push_back(static_cast<float>(weights[d] * variance[d]));
    }
    code->order = std::move(order);
  }

  // Values: their principal axes, rounded to 8 bits each; coordinates are those of the rounded axes.
  void SetBasis(const Eigen::MatrixXd& moments, SideCode* code) const {
    const int dims = shape_.head_dim;
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(moments);
    Eigen::MatrixXd axes(dims, dims);  // rows
    Eigen::VectorXd rounding(dims);
    code->basis.resize(static_cast<size_t>(dims * dims));
    for (int i = 0; i < dims; ++i) {
      const Eigen::VectorXd axis = solver.eigenvectors().col(dims - 1 - i);
      rounding[i] = axis.cwiseAbs().maxCoeff() / 127.0;
      for (int d = 0; d < dims; ++d) {
        const auto step = static_cast<int8_t>(std::lround(axis[d] / rounding[i]));
        code->basis[static_cast<size_t>(i * dims + d)] = step;
        axes(i, d) = step * rounding[i];
      }
    }
    // x = axes^T c
    const Eigen::MatrixXd coordinates = axes.transpose().inverse();
    const Eigen::MatrixXd spread = coordinates * moments * coordinates.transpose();
    code->analysis = coordinates.cast<float>();
    for (int i = 0; i < dims; ++i) {
      const double deviation = std::sqrt(std::max(spread(i, i), 0.0));
      code->deviations.push_back(static_cast<float>(deviation * rounding[i]));
      code->energy.push_back(static_cast<float>(deviation * deviation));
      code->analysis.row(i) *= deviation > 0.0 ? static_cast<float>(1.0 / deviation) : 0.0f;
    }
    // Rounding the axes disturbs the order a little; widths must not rise along it.
    for (size_t i = 1; i < code->energy.size(); ++i) code->energy[i] = std::min(code->energy[i], code->energy[i - 1]);
  }

  // u of [first, last), one row per position.
  void Coordinates(Side side, int head, int64_t first, int64_t last, Matrix* u) const {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    Matrix x;
    Centred(side, head, first, last, code.mean, &x);
    if (code.order.empty()) {
      u->noalias() = x * code.analysis.transpose();
      return;
    }
    u->resize(x.rows(), x.cols());
    for (Eigen::Index i = 0; i < x.cols(); ++i) {
      u->col(i) = x.col(code.order[static_cast<size_t>(i)]) * code.units[static_cast<size_t>(i)];
    }
  }

  // About what every rate would leave of every vector's error, times its importance.
  void Measure(Side side, int head) {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    ForEachChunk([&](int64_t, int64_t first, int64_t last) {
      Matrix u;
      Coordinates(side, head, first, last, &u);
      for (int64_t t = first; t < last; ++t) {
        if (is_exact_[At(head, t)] != 0) continue;
        const float importance = importance_[side].head(head)[t];
        float* errors = errors_[side].data() + At(head, t) * kSpectralRates;
        for (int r = 0; r < kSpectralRates; ++r) {
          errors[r] = importance * EstimateSpectralError(u.data() + (t - first) * shape_.head_dim, code.energy.data(),
                                                         shape_.head_dim, code.runs[r]);
        }
      }
    });
  }

  int64_t RateCost(Side side, int head, int rate) const {
    return rate == 0 ? 0 : codes_[side][static_cast<size_t>(head)].runs[rate].code_bytes() + 1;
  }

  // Every vector takes the rate of least error + lambda bytes; the bytes of all of them.
  int64_t Choose(double lambda) {
    int64_t total = 0;
    for (const Side side : {kKeys, kValues}) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        double price[kSpectralRates];
        int64_t bytes[kSpectralRates];
        for (int r = 0; r < kSpectralRates; ++r) {
          bytes[r] = RateCost(side, head, r);
          price[r] = lambda * static_cast<double>(bytes[r]);
        }
        const float* errors = errors_[side].data() + At(head, 0) * kSpectralRates;
        uint8_t* rate_of = rate_of_[side].data() + At(head, 0);
        const uint8_t* exact = is_exact_.data() + At(head, 0);
#pragma omp parallel for schedule(static) reduction(+ : total)
        for (int64_t t = 0; t < shape_.tokens; ++t) {
          if (exact[t] != 0) continue;
          int best = 0;
          double least = errors[t * kSpectralRates];
          for (int r = 1; r < kSpectralRates; ++r) {
            const double cost = errors[t * kSpectralRates + r] + price[r];
            if (cost < least) {
              least = cost;
              best = r;
            }
          }
          rate_of[t] = static_cast<uint8_t>(best);
          total += bytes[best];
        }
      }
    }
    return total;
  }

  // The smallest price of a byte at which everything fits.
  void ChooseRatesOfVectors() {
    // A tile's scales are filled up to kCodeAlign.
    const int64_t filling = 2 * shape_.kv_heads * budget_.layout.tiles() * (kCodeAlign - 1);
    const int64_t available = budget_.code_bytes - filling - kSectionAlign;
    if (Choose(0.0) <= available) return;
    float most = 0.0f;
    for (const Side side : {kKeys, kValues}) {
      for (const float error : errors_[side]) most = std::max(most, error);
    }
    // At a price of `most` per byte nothing is bought. Prices differ by orders of magnitude: bisect their logarithm.
    constexpr int kSteps = 40;
    constexpr double kSpan = 60.0;  // natural logarithm of the range of prices
    double high = std::log(std::max(double{most}, 1e-300));
    double low = high - kSpan;
    for (int step = 0; step < kSteps; ++step) {
      const double middle = (low + high) / 2;
      (Choose(std::exp(middle)) > available ? low : high) = middle;
    }
    if (Choose(std::exp(high)) > available) {
      for (auto& rate_of : rate_of_) std::fill(rate_of.begin(), rate_of.end(), uint8_t{0});
    }
  }

  // Bytes of a tile's block.
  int64_t BlockBytes(Side side, int head, int64_t tile) const {
    int64_t bytes = 0;
    int coded = 0;
    for (int64_t t = tile * kTileTokens; t < std::min(shape_.tokens, (tile + 1) * kTileTokens); ++t) {
      const int rate = rate_of_[side][At(head, t)];
      if (is_exact_[At(head, t)] != 0 || rate == 0) continue;
      bytes += codes_[side][static_cast<size_t>(head)].runs[rate].code_bytes();
      ++coded;
    }
    return bytes + ScaleBytes(coded);
  }

  Result<std::shared_ptr<const Segment>> Pack() {
    SpectralLayout layout = budget_.layout;
    std::vector<uint32_t> offsets;
    int64_t code_bytes = 0;
    for (const Side side : {kKeys, kValues}) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
          offsets.push_back(static_cast<uint32_t>(code_bytes / kCodeAlign));
          code_bytes += BlockBytes(side, head, tile);
        }
      }
    }
    layout.Place(static_cast<size_t>(code_bytes));
    const double limit = options_.theta * static_cast<double>(shape_.dense_bytes());
    if (static_cast<double>(layout.total_bytes) > limit) {
      return Internal("layer " + std::to_string(input_.layer) + " needs " + std::to_string(layout.total_bytes) +
                      " bytes; its budget is " + std::to_string(static_cast<int64_t>(limit)));
    }
    AKV_ASSIGN_OR_RETURN(AlignedBuffer bytes, AlignedBuffer::Make(layout.total_bytes, "a segment"));
    std::byte* const out = bytes.data();
    std::memcpy(out + layout.exact_positions, exact_.data(), exact_.size() * sizeof(uint32_t));
    std::memcpy(out + layout.offsets, offsets.data(), offsets.size() * sizeof(uint32_t));
    PackExact(layout, out);
    for (const Side side : {kKeys, kValues}) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        PackDescription(layout, side, head, out);
        PackTiles(layout, side, head, out);
      }
    }
    return std::shared_ptr<const Segment>(
        std::make_shared<SpectralSegment>(layout, std::move(bytes), input_.first_position, backend_, *input_.rope));
  }

  void PackExact(const SpectralLayout& layout, std::byte* out) const {
    const int dims = shape_.head_dim;
    auto* keys = reinterpret_cast<uint16_t*>(out + layout.exact_keys);
    auto* values = reinterpret_cast<uint16_t*>(out + layout.exact_values);
    float key[kMaxHeadDim];
    for (int head = 0; head < shape_.kv_heads; ++head) {
      for (int64_t i = 0; i < layout.exact; ++i) {
        const int64_t t = ExactPosition(head, i);
        std::copy_n(input_.keys.row(head, t), dims, key);
        input_.rope->Rotate(input_.first_position + t, key);
        const float* value = input_.values.row(head, t);
        for (int d = 0; d < dims; ++d) {
          *keys++ = FloatToFiniteHalf(key[d]);
          *values++ = FloatToFiniteHalf(value[d]);
        }
      }
    }
  }

  void PackDescription(const SpectralLayout& layout, Side side, int head, std::byte* out) const {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    const auto dims = static_cast<size_t>(shape_.head_dim);
    const auto h = static_cast<size_t>(head);
    const size_t side_head = static_cast<size_t>(side) * static_cast<size_t>(shape_.kv_heads) + h;
    std::memcpy(out + layout.means[side] + h * dims * sizeof(float), code.mean.data(), dims * sizeof(float));
    std::memcpy(out + layout.deviations + side_head * dims * sizeof(float), code.deviations.data(),
                dims * sizeof(float));
    if (!code.order.empty()) std::memcpy(out + layout.orders[side] + h * dims, code.order.data(), dims);
    if (!code.basis.empty()) std::memcpy(out + layout.basis + h * dims * dims, code.basis.data(), code.basis.size());
    std::memcpy(out + layout.runs + side_head * sizeof(code.runs), code.runs, sizeof(code.runs));
  }

  // Codes of the chunk's vectors, rate by rate, each rate in ascending position.
  struct ChunkCodes {
    std::vector<uint8_t> codes[kSpectralRates];
    std::vector<uint8_t> scales[kSpectralRates];
  };

  ChunkCodes QuantizeChunk(Side side, int head, int64_t first, int64_t last) const {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    Matrix u;
    Coordinates(side, head, first, last, &u);
    ChunkCodes out;
    std::vector<float> errors;
    for (int rate = 1; rate < kSpectralRates; ++rate) {
      std::vector<const float*> vectors;
      for (int64_t t = first; t < last; ++t) {
        if (is_exact_[At(head, t)] == 0 && rate_of_[side][At(head, t)] == rate) vectors.push_back(&u(t - first, 0));
      }
      const CodeRuns& runs = code.runs[rate];
      out.codes[rate].resize(vectors.size() * static_cast<size_t>(runs.coordinates()));
      out.scales[rate].resize(vectors.size());
      errors.resize(vectors.size());
      QuantizeSpectral(vectors.data(), static_cast<int>(vectors.size()), code.energy.data(), shape_.head_dim, runs,
                       out.codes[rate].data(), out.scales[rate].data(), errors.data());
    }
    return out;
  }

  void PackTiles(const SpectralLayout& layout, Side side, int head, std::byte* out) const {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    const int64_t side_head = int64_t{side} * shape_.kv_heads + head;
    auto* tags = reinterpret_cast<uint64_t*>(out + layout.tags) + side_head * layout.tiles() * kTagPlanes;
    const auto* offsets = reinterpret_cast<const uint32_t*>(out + layout.offsets) + side_head * layout.tiles();
    static_assert(kChunk % kTileTokens == 0);
    ForEachChunk([&](int64_t, int64_t first, int64_t last) {
      const ChunkCodes chunk = QuantizeChunk(side, head, first, last);
      size_t packed[kSpectralRates] = {};
      for (int64_t tile = first / kTileTokens; tile * kTileTokens < last; ++tile) {
        const int64_t start = tile * kTileTokens;
        const int count = static_cast<int>(std::min<int64_t>(kTileTokens, last - start));
        uint8_t tag[kTileTokens];
        int coded = 0;
        for (int j = 0; j < kTileTokens; ++j) {
          const bool exact = j >= count || is_exact_[At(head, start + j)] != 0;
          tag[j] = exact ? uint8_t{kExactTag} : rate_of_[side][At(head, start + j)];
          coded += !exact && tag[j] != 0 ? 1 : 0;
          for (int p = 0; p < kTagPlanes; ++p) tags[tile * kTagPlanes + p] |= uint64_t{(tag[j] >> p & 1u)} << j;
        }
        auto* scales = reinterpret_cast<uint8_t*>(out + layout.codes) + size_t{offsets[tile]} * kCodeAlign;
        uint8_t* at = scales + ScaleBytes(coded);
        for (int rate = 1; rate < kSpectralRates; ++rate) {
          const CodeRuns& runs = code.runs[rate];
          const size_t end = packed[rate] + static_cast<size_t>(std::count(tag, tag + count, rate));
          for (; packed[rate] < end; ++packed[rate]) {
            *scales++ = chunk.scales[rate][packed[rate]];
            PackSpectral(chunk.codes[rate].data() + packed[rate] * static_cast<size_t>(runs.coordinates()), runs, at);
            at += runs.code_bytes();
          }
        }
      }
    });
  }

  const LayerInput& input_;
  const CodecOptions& options_;
  const Backend& backend_;
  SpectralBudget budget_;
  LayerShape shape_;
  int64_t chunks_;
  RateBits rates_;
  std::vector<uint32_t> exact_;    // [H, k]
  std::vector<uint8_t> is_exact_;  // [H, S]
  HeadScores importance_[2];
  std::vector<SideCode> codes_[2];   // [H]
  std::vector<float> errors_[2];     // [H, S, rates]
  std::vector<uint8_t> rate_of_[2];  // [H, S]
};

}  // namespace

Result<std::shared_ptr<const Segment>> CompressSpectral(const LayerInput& full_input, const CodecOptions& options,
                                                        const Backend& backend) {
  return GuardAllocation("compressing a layer", [&]() -> Result<std::shared_ptr<const Segment>> {
    AKV_RETURN_IF_ERROR(CheckLayer(full_input, options));
    const LayerInput input = NarrowWindow(full_input, options.window);
    const LayerShape shape{static_cast<int>(input.keys.heads), static_cast<int>(input.keys.head_dim),
                           input.keys.tokens};
    AKV_RETURN_IF_ERROR(PlanBudget(shape, options).status());
    return SpectralCoder(input, options, backend, PlanSpectralBudget(shape, options)).Run();
  });
}

}  // namespace anchorkv
