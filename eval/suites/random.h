// Seeded choices that are the same on every platform and with every standard library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/hash.h"

namespace anchorkv {

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(MixBits(seed)) {}
  // A stream of its own for each sample, whatever else is made.
  Random(uint64_t seed, std::string_view task, int64_t length, int64_t index) : seed_(MixBits(seed)) {
    for (const char c : task) Add(static_cast<unsigned char>(c));
    Add(static_cast<uint64_t>(length));
    Add(static_cast<uint64_t>(index));
  }

  uint64_t Bits() { return MixBits(seed_ ^ counter_++); }
  // In [0, n), n > 0. The bias of the remainder is below n / 2^64.
  int64_t Below(int64_t n) { return static_cast<int64_t>(Bits() % static_cast<uint64_t>(n)); }
  char Of(std::string_view alphabet) {
    return alphabet[static_cast<size_t>(Below(static_cast<int64_t>(alphabet.size())))];
  }
  std::string Word(std::string_view alphabet, int letters) {
    std::string word;
    for (int i = 0; i < letters; ++i) word += Of(alphabet);
    return word;
  }

  template <typename T>
  void Shuffle(std::vector<T>* items) {
    for (size_t i = items->size(); i > 1; --i)
      std::swap((*items)[i - 1], (*items)[static_cast<size_t>(Below(static_cast<int64_t>(i)))]);
  }

  // `count` different numbers of [0, n) in ascending order; count <= n.
  std::vector<int64_t> Distinct(int64_t count, int64_t n) {
    std::set<int64_t> chosen;
    while (static_cast<int64_t>(chosen.size()) < count) chosen.insert(Below(n));
    return {chosen.begin(), chosen.end()};
  }

 private:
  void Add(uint64_t x) { seed_ = MixBits(seed_ ^ x); }

  uint64_t seed_;
  uint64_t counter_ = 0;
};

}  // namespace anchorkv
