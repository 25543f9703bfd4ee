#include "runtime/special_cuts.h"

#include <algorithm>
#include <utility>

namespace anchorkv {

SpecialCuts::SpecialCuts(std::vector<Special> specials) : specials_(std::move(specials)) {
  for (size_t i = 0; i < specials_.size(); ++i) {
    if (specials_[i].text.empty()) continue;
    by_first_byte_[static_cast<unsigned char>(specials_[i].text[0])].push_back(static_cast<uint32_t>(i));
  }
}

std::vector<size_t> SpecialCuts::Find(std::string_view text, bool parse_special, int every) const {
  std::vector<size_t> cuts;
  // Occurrences that overlap form a run [begin, end). Where one of them is the whole run, it is longer than the others
  // and found before them: the text behind it begins anew.
  size_t begin = 0, end = 0;
  bool whole = false;
  int seen = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (at >= end) {
      if (end > begin && at == end && ++seen >= every && whole) {
        cuts.push_back(at);
        seen = 0;
      }
      begin = end = at;
      whole = false;
    }
    for (const uint32_t i : by_first_byte_[static_cast<unsigned char>(text[at])]) {
      const Special& special = specials_[i];
      if ((special.control && !parse_special) || text.compare(at, special.text.size(), special.text) != 0) continue;
      const size_t last = at + special.text.size();
      if (last < end) continue;
      if (last > end) whole = false;
      end = last;
      whole |= at == begin && !special.strips_right;
      if (at == begin && special.strips_right) whole = false;
    }
  }
  return cuts;
}

}  // namespace anchorkv
