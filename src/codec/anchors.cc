// Who is an anchor. docs/algorithm.md, "Anchors".
#include <algorithm>
#include <cmath>
#include <numeric>

#include "codec/codec.h"
#include "format/hash.h"

namespace anchorkv {
namespace {

// Keeps the `count` best entries of `positions` (strict order `better`) in front, in unspecified order.
template <typename Better>
void SelectFront(std::vector<uint32_t>* positions, size_t begin, size_t count, const Better& better) {
  if (begin + count < positions->size()) {
    std::nth_element(positions->begin() + static_cast<ptrdiff_t>(begin),
                     positions->begin() + static_cast<ptrdiff_t>(begin + count), positions->end(), better);
  }
}

// Mean over the neighbours of t within [0, end), `width` of them away from the borders. Added in
// position order in double, where sums of equal scores are exact: equal scores stay equal.
std::vector<double> AveragePool(const float* score, int64_t end, int width) {
  std::vector<double> pooled(static_cast<size_t>(end));
  const int64_t reach = width / 2;
  for (int64_t t = 0; t < end; ++t) {
    const int64_t first = std::max<int64_t>(0, t - reach);
    const int64_t last = std::min(end, t + reach + 1);
    double sum = 0.0;
    for (int64_t i = first; i < last; ++i) sum += score[i];
    pooled[static_cast<size_t>(t)] = sum / static_cast<double>(last - first);
  }
  return pooled;
}

}  // namespace

std::vector<uint32_t> ChooseAnchors(const HeadScores& scores, int kv_heads, const CodecOptions& options,
                                    int64_t anchors, int layer) {
  const int64_t tokens = scores.tokens;
  const int64_t k = std::min(anchors, tokens);
  const int64_t window = std::min<int64_t>(options.window, k);
  const int64_t before_window = tokens - window;
  const int64_t sinks = std::min<int64_t>(options.sinks, k - window);
  // Products such as .7 * 90 end a hair below the whole number they mean.
  constexpr double kRoundingSlack = 1e-9;
  const auto wanted = static_cast<int64_t>(std::floor(options.rho * static_cast<double>(k - window) + kRoundingSlack));
  const int64_t scored = std::min(wanted, k - window - sinks);
  const int64_t random = k - window - sinks - scored;

  std::vector<uint32_t> chosen(static_cast<size_t>(kv_heads * k));
  for (int h = 0; h < kv_heads; ++h) {
    // Candidates in front of the window: sinks, then the best scores, then the smallest hashes.
    std::vector<uint32_t> candidates(static_cast<size_t>(before_window));
    std::iota(candidates.begin(), candidates.end(), 0u);
    if (scored > 0) {
      const std::vector<double> pooled = AveragePool(scores.head(h), before_window, options.pool);
      SelectFront(&candidates, static_cast<size_t>(sinks), static_cast<size_t>(scored),
                  [&](uint32_t a, uint32_t b) { return pooled[a] != pooled[b] ? pooled[a] > pooled[b] : a < b; });
    }
    if (random > 0) {
      std::vector<uint64_t> hash(static_cast<size_t>(before_window));
      for (int64_t t = 0; t < before_window; ++t) {
        hash[static_cast<size_t>(t)] = PositionHash(options.seed, layer, h, t);
      }
      SelectFront(&candidates, static_cast<size_t>(sinks + scored), static_cast<size_t>(random),
                  [&](uint32_t a, uint32_t b) { return hash[a] != hash[b] ? hash[a] < hash[b] : a < b; });
    }
    uint32_t* out = chosen.data() + h * k;
    std::copy_n(candidates.begin(), k - window, out);
    std::iota(out + (k - window), out + k, static_cast<uint32_t>(before_window));
    std::sort(out, out + k);
  }
  return chosen;
}

}  // namespace anchorkv
