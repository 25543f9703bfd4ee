// In what coordinates the keys and values of a layer are coded by the adaptive profile. docs/adaptive.md.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "format/spectral_layout.h"
#include "segment/observations.h"

namespace anchorkv {

// Everything that is fixed for one side of one head before its vectors are coded.
struct SideCode {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  std::vector<float> mean;        // [D] in the domain that is stored: keys before RoPE
  std::vector<float> deviations;  // [D] of code coordinates, as stored
  std::vector<float> energy;      // [D] cost of code coordinate i per unit of u_i^2, times its mean square
  std::vector<int16_t> refines;   // [D] the code coordinate that this one refines, or -1 (QuantizeSpectral)
  std::vector<uint8_t> order;     // [D], or empty with a basis
  std::vector<int8_t> basis;      // [D, D], or empty
  Matrix analysis;                // u = analysis (x - mean), with a basis
  std::vector<float> units;       // [D] else: u_i = units[i] (x - mean)[order[i]]
  CodeRuns runs[kSpectralRates];
};

class SpectralCoordinates {
 public:
  using Matrix = SideCode::Matrix;
  static constexpr int64_t kChunk = 512;  // positions

  // is_exact [kv_heads, tokens]: positions that take no part; what errors of values cost [kv_heads, tokens]. All
  // borrowed.
  SpectralCoordinates(const LayerInput& input, const std::vector<uint8_t>& is_exact, const HeadScores& importance)
      : input_(input), is_exact_(is_exact), importance_(importance), head_dim_(static_cast<int>(input.keys.head_dim)) {}

  // Mean, order or basis, deviations. Without `basis`, values are described in the model's coordinates.
  SideCode Describe(Side side, int head, bool basis) const;

  // u of [first, last), one row per position; refinements are 0.
  void Form(Side side, int head, const SideCode& code, int64_t first, int64_t last, Matrix* u) const;

  // body(chunk, first position, last position), in parallel.
  template <typename Body>
  void ForEachChunk(const Body& body) const {
    const int64_t tokens = input_.keys.tokens;
#pragma omp parallel for schedule(dynamic)
    for (int64_t c = 0; c < chunks(); ++c) body(c, c * kChunk, std::min(tokens, (c + 1) * kChunk));
  }

 private:
  int64_t chunks() const { return (input_.keys.tokens + kChunk - 1) / kChunk; }
  bool IsExact(int head, int64_t t) const { return is_exact_[static_cast<size_t>(head * input_.keys.tokens + t)] != 0; }
  std::vector<float> Mean(Side side, int head) const;
  void Centred(Side side, int head, int64_t first, int64_t last, const std::vector<float>& mean, Matrix* x) const;
  Eigen::MatrixXd Moments(Side side, int head, const std::vector<float>& mean, bool diagonal) const;
  std::vector<double> QueryWeights(int head) const;
  void ShareInPairs(std::vector<double>* x) const;
  void DescribeKeys(int head, SideCode* code) const;
  void DescribeValues(int head, SideCode* code) const;
  void SetBasis(const Eigen::MatrixXd& moments, SideCode* code) const;

  const LayerInput& input_;
  const std::vector<uint8_t>& is_exact_;
  const HeadScores& importance_;
  int head_dim_;
};

}  // namespace anchorkv
