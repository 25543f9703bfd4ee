// Where a text may be cut so that its parts, tokenised one by one, give the tokens of the whole. libllama takes time
// that grows with the square of the special tokens in a text (a megabyte of "<|im_end|>": two minutes); in parts it
// does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace anchorkv {

class SpecialCuts {
 public:
  // A token that the tokenizer looks for in a text before anything else, longer ones first.
  struct Special {
    std::string text;
    bool control = false;       // looked for only where special tokens are parsed
    bool strips_right = false;  // takes the white space behind it along
  };
  explicit SpecialCuts(std::vector<Special> specials);

  // Ascending offsets, each behind a special token that no other one overlaps, with at least `every` special tokens
  // between two of them.
  std::vector<size_t> Find(std::string_view text, bool parse_special, int every) const;

 private:
  std::vector<Special> specials_;
  std::vector<uint32_t> by_first_byte_[256];  // indices into specials_
};

}  // namespace anchorkv
