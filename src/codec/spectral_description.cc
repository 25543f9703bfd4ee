#include "codec/spectral_description.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

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

// Both coordinates of a rotary pair get their mean: rotation mixes them.
void ShareInPairs(const RopeTable& rope, std::vector<double>* x) {
  for (int i = 0; i < rope.pairs(); ++i) {
    double& a = (*x)[static_cast<size_t>(rope.first(i))];
    double& b = (*x)[static_cast<size_t>(rope.second(i))];
    a = b = (a + b) / 2;
  }
}

std::vector<uint8_t> AllCoordinates(size_t count) {
  std::vector<uint8_t> order(count);
  std::iota(order.begin(), order.end(), uint8_t{0});
  return order;
}

// Coordinates are those of the rounded axes.
void SetBasis(const Eigen::MatrixXd& moments, SideCode* code) {
  const auto dims = static_cast<int>(moments.rows());
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
  SetOrder(AllCoordinates(static_cast<size_t>(dims)), std::vector<double>(spread.data(), spread.data() + dims),
           std::vector<double>(static_cast<size_t>(dims), 1.0), code);
  code->analysis.resize(static_cast<size_t>(dims * dims));
  code->transposed.resize(static_cast<size_t>(dims * dims));
  for (int i = 0; i < dims; ++i) {
    const auto at = static_cast<size_t>(i);
    const int axis = code->order[at];
    for (int d = 0; d < dims; ++d) {
      const float x = static_cast<float>(coordinates(axis, d)) * code->units[at];
      code->analysis[static_cast<size_t>(i * dims + d)] = x;
      code->transposed[static_cast<size_t>(d * dims + i)] = x;
    }
    code->deviations[at] *= static_cast<float>(rounding[axis]);
    code->basis.insert(code->basis.end(), steps.begin() + axis * dims, steps.begin() + (axis + 1) * dims);
  }
  code->order.clear();
  code->units.clear();
}

}  // namespace

SideCode DescribeKeys(const RopeTable& rope, SideStatistics statistics, const double* query_energies) {
  SideCode code;
  code.mean = std::move(statistics.mean);
  std::vector<double> variance = std::move(statistics.moments);
  ShareInPairs(rope, &variance);
  // Scaled to mean 1.
  std::vector<double> weights(query_energies, query_energies + variance.size());
  ShareInPairs(rope, &weights);
  double mean = 0.0;
  for (const double w : weights) mean += w / static_cast<double>(weights.size());
  for (double& w : weights) w = mean > 0.0 ? std::max(w / mean, kLeastQueryWeight) : 1.0;
  // Pairs stay together: equal energies keep the order of this list.
  std::vector<uint8_t> order;
  std::vector<char> rotates(variance.size(), 0);
  for (int i = 0; i < rope.pairs(); ++i) {
    for (const int d : {rope.first(i), rope.second(i)}) {
      order.push_back(static_cast<uint8_t>(d));
      rotates[static_cast<size_t>(d)] = 1;
    }
  }
  for (size_t d = 0; d < rotates.size(); ++d) {
    if (rotates[d] == 0) order.push_back(static_cast<uint8_t>(d));
  }
  SetOrder(order, variance, weights, &code);
  return code;
}

SideCode DescribeValues(SideStatistics statistics) {
  SideCode code;
  code.mean = std::move(statistics.mean);
  const size_t dims = code.mean.size();
  if (statistics.moments.size() > dims) {
    const auto n = static_cast<Eigen::Index>(dims);
    SetBasis(Eigen::Map<const Eigen::MatrixXd>(statistics.moments.data(), n, n), &code);
    return code;
  }
  SetOrder(AllCoordinates(dims), statistics.moments, std::vector<double>(dims, 1.0), &code);
  return code;
}

void WriteDescription(const SpectralLayout& layout, Side side, int head, const SideCode& code, std::byte* out) {
  const auto dims = static_cast<size_t>(layout.head_dim);
  const auto h = static_cast<size_t>(head);
  const size_t side_head = static_cast<size_t>(side) * static_cast<size_t>(layout.kv_heads) + h;
  std::memcpy(out + layout.means[side] + h * dims * sizeof(float), code.mean.data(), dims * sizeof(float));
  std::memcpy(out + layout.deviations + side_head * dims * sizeof(float), code.deviations.data(), dims * sizeof(float));
  if (!code.order.empty()) std::memcpy(out + layout.orders[side] + h * dims, code.order.data(), dims);
  if (!code.basis.empty()) std::memcpy(out + layout.basis + h * dims * dims, code.basis.data(), code.basis.size());
  std::memcpy(out + layout.runs + side_head * sizeof(code.runs), code.runs, sizeof(code.runs));
}

}  // namespace anchorkv
