#include "codec/spectral_coordinates.h"

#include <Eigen/Dense>
#include <cmath>
#include <numeric>

#include "format/spectral_code.h"

namespace anchorkv {
namespace {

// Share of the mean weight that every key coordinate has at least: the observed queries do not know the next ones.
constexpr double kLeastQueryWeight = 0.01;
// What a refinement counts against a coordinate of the same energy, which vectors unlike the average may need.
constexpr double kRefinementWorth = 0.3;

// The D code coordinates that are worth most: the vector's own, `order` of them, and refinements of the strongest,
// which displace coordinates that hold a small share of what they do. `order` decides between equal energies.
void SetOrder(const std::vector<uint8_t>& order, const std::vector<double>& variance,
              const std::vector<double>& weights, SideCode* code) {
  struct Coordinate {
    double energy;
    uint8_t of;
    bool refinement;
    double worth() const { return refinement ? kRefinementWorth * energy : energy; }
  };
  std::vector<Coordinate> list;
  for (const uint8_t d : order) {
    const double energy = weights[d] * variance[d];
    list.push_back({energy, d, false});
    if (energy > 0.0) list.push_back({double{kRefinement} * kRefinement * energy, d, true});
  }
  std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.worth() > b.worth(); });
  list.resize(order.size());
  std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.energy > b.energy; });
  std::vector<int16_t> place(variance.size(), -1);
  for (const Coordinate& c : list) {
    const auto deviation = static_cast<float>(std::sqrt(variance[c.of]));
    code->deviations.push_back(c.refinement ? kRefinement * deviation : deviation);
    code->units.push_back(c.refinement || !(deviation > 0.0f) ? 0.0f : 1.0f / deviation);
    code->energy.push_back(static_cast<float>(c.energy));
    code->refines.push_back(c.refinement ? place[c.of] : int16_t{-1});
    if (!c.refinement) place[c.of] = static_cast<int16_t>(code->order.size());
    code->order.push_back(c.of);
  }
}

}  // namespace

// Mean of the vectors that are not exact, zero where there are none.
std::vector<float> SpectralCoordinates::Mean(Side side, int head) const {
  const HeadsView<const float>& vectors = side == kKeys ? input_.keys : input_.values;
  const auto dims = static_cast<size_t>(head_dim_);
  std::vector<double> sums(static_cast<size_t>(chunks()) * dims, 0.0);
  std::vector<int64_t> counts(static_cast<size_t>(chunks()), 0);
  ForEachChunk([&](int64_t c, int64_t first, int64_t last) {
    double* sum = sums.data() + static_cast<size_t>(c) * dims;
    for (int64_t t = first; t < last; ++t) {
      if (IsExact(head, t)) continue;
      const float* x = vectors.row(head, t);
      for (size_t d = 0; d < dims; ++d) sum[d] += x[d];
      ++counts[static_cast<size_t>(c)];
    }
  });
  const int64_t count = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  std::vector<float> mean(dims, 0.0f);
  for (size_t d = 0; d < dims && count > 0; ++d) {
    double sum = 0.0;
    for (size_t c = 0; c < static_cast<size_t>(chunks()); ++c) sum += sums[c * dims + d];
    mean[d] = static_cast<float>(sum / static_cast<double>(count));
  }
  return mean;
}

// Centred vectors of [first, last) in the coordinates that are coded: keys after RoPE.
void SpectralCoordinates::Centred(Side side, int head, int64_t first, int64_t last, const std::vector<float>& mean,
                                  Matrix* x) const {
  x->resize(last - first, head_dim_);
  for (int64_t t = first; t < last; ++t) {
    const float* from = (side == kKeys ? input_.keys : input_.values).row(head, t);
    float* row = x->data() + (t - first) * head_dim_;
    for (int d = 0; d < head_dim_; ++d) row[d] = from[d] - mean[static_cast<size_t>(d)];
    if (side == kKeys) input_.rope->Rotate(input_.first_position + t, row);
  }
}

// Second moments of centred vectors, weighted by what their errors cost: [D, D], or the diagonal [D, 1].
Eigen::MatrixXd SpectralCoordinates::Moments(Side side, int head, const std::vector<float>& mean, bool diagonal) const {
  const int dims = head_dim_;
  std::vector<Eigen::MatrixXd> sums(static_cast<size_t>(chunks()));
  std::vector<double> weights(static_cast<size_t>(chunks()), 0.0);
  ForEachChunk([&](int64_t c, int64_t first, int64_t last) {
    Matrix x;
    Centred(side, head, first, last, mean, &x);
    Eigen::VectorXf w(last - first);
    for (int64_t t = first; t < last; ++t) {
      // How much its error matters: the root mean square weight it may get.
      w[t - first] = IsExact(head, t) ? 0.0f : std::sqrt(importance_.head(head)[t]);
    }
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
std::vector<double> SpectralCoordinates::QueryWeights(int head) const {
  const int dims = head_dim_;
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
void SpectralCoordinates::ShareInPairs(std::vector<double>* x) const {
  for (int i = 0; i < input_.rope->pairs(); ++i) {
    double& a = (*x)[static_cast<size_t>(input_.rope->first(i))];
    double& b = (*x)[static_cast<size_t>(input_.rope->second(i))];
    a = b = (a + b) / 2;
  }
}

// Keys: the model's own coordinates after RoPE, those of most energy first.
void SpectralCoordinates::DescribeKeys(int head, SideCode* code) const {
  const std::vector<double> weights = QueryWeights(head);
  const Eigen::MatrixXd moments = Moments(kKeys, head, code->mean, /*diagonal=*/true);
  std::vector<double> variance(moments.data(), moments.data() + head_dim_);
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
  SetOrder(order, variance, weights, code);
}

void SpectralCoordinates::DescribeValues(int head, SideCode* code) const {
  const Eigen::MatrixXd moments = Moments(kValues, head, code->mean, /*diagonal=*/true);
  std::vector<uint8_t> order(static_cast<size_t>(head_dim_));
  std::iota(order.begin(), order.end(), uint8_t{0});
  SetOrder(order, std::vector<double>(moments.data(), moments.data() + head_dim_),
           std::vector<double>(static_cast<size_t>(head_dim_), 1.0), code);
}

// Values: their principal axes, rounded to 8 bits each; coordinates are those of the rounded axes.
void SpectralCoordinates::SetBasis(const Eigen::MatrixXd& moments, SideCode* code) const {
  const int dims = head_dim_;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(moments);
  Eigen::MatrixXd axes(dims, dims);  // rows
  Eigen::VectorXd rounding(dims);
  std::vector<int8_t> steps(static_cast<size_t>(dims * dims));
  for (int i = 0; i < dims; ++i) {
    const Eigen::VectorXd axis = solver.eigenvectors().col(dims - 1 - i);
    rounding[i] = axis.cwiseAbs().maxCoeff() / 127.0;
    for (int d = 0; d < dims; ++d) {
      const auto step = static_cast<int8_t>(std::lround(axis[d] / rounding[i]));
      steps[static_cast<size_t>(i * dims + d)] = step;
      axes(i, d) = step * rounding[i];
    }
  }
  // x = axes^T c
  const Eigen::MatrixXd coordinates = axes.transpose().inverse();
  const Eigen::VectorXd spread = (coordinates * moments * coordinates.transpose()).diagonal().cwiseMax(0.0);
  std::vector<uint8_t> order(static_cast<size_t>(dims));
  std::iota(order.begin(), order.end(), uint8_t{0});
  SetOrder(order, std::vector<double>(spread.data(), spread.data() + dims),
           std::vector<double>(static_cast<size_t>(dims), 1.0), code);
  code->analysis.resize(dims, dims);
  for (int i = 0; i < dims; ++i) {
    const auto at = static_cast<size_t>(i);
    const int axis = code->order[at];
    code->analysis.row(i) = coordinates.row(axis).cast<float>() * code->units[at];
    code->deviations[at] *= static_cast<float>(rounding[axis]);
    code->basis.insert(code->basis.end(), steps.begin() + axis * dims, steps.begin() + (axis + 1) * dims);
  }
  code->order.clear();
  code->units.clear();
}

SideCode SpectralCoordinates::Describe(Side side, int head, bool basis) const {
  SideCode code;
  code.mean = Mean(side, head);
  if (side == kKeys) {
    DescribeKeys(head, &code);
  } else if (basis) {
    SetBasis(Moments(kValues, head, code.mean, /*diagonal=*/false), &code);
  } else {
    DescribeValues(head, &code);
  }
  return code;
}

void SpectralCoordinates::Form(Side side, int head, const SideCode& code, int64_t first, int64_t last,
                               Matrix* u) const {
  Matrix x;
  Centred(side, head, first, last, code.mean, &x);
  if (code.order.empty()) {
    u->noalias() = x * code.analysis.transpose();
    return;
  }
  u->resize(x.rows(), x.cols());
  for (Eigen::Index t = 0; t < x.rows(); ++t) {
    const float* from = x.data() + t * head_dim_;
    float* row = u->data() + t * head_dim_;
    for (size_t i = 0; i < code.order.size(); ++i) row[i] = from[code.order[i]] * code.units[i];
  }
}

}  // namespace anchorkv
