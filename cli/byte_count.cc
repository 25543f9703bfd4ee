#include "cli/byte_count.h"

#include <charconv>
#include <cmath>

namespace anchorkv::cli {

Result<int64_t> ParseBytes(const char* option, const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  std::string unit(parsed.ptr, end);
  if (unit.size() > 1 && unit.back() == 'B') unit.pop_back();
  if (unit.size() > 1 && unit.back() == 'i') unit.pop_back();
  constexpr char kUnits[] = "KMGT";
  double factor = 1;
  bool known = unit.empty();
  for (int i = 0; i < 4; ++i) {
    factor *= 1024;
    if (unit.size() == 1 && unit[0] == kUnits[i]) {
      number *= factor;
      known = true;
    }
  }
  if (parsed.ec != std::errc() || !known || !(number >= 0 && number < 9e18)) {
    return InvalidArgument(std::string(option) + " is '" + text + "'; allowed are bytes as 1048576, 512K, 64M or 1.5G");
  }
  return static_cast<int64_t>(std::floor(number));
}

}  // namespace anchorkv::cli
