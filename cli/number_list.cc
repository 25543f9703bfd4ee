#include "cli/number_list.h"

#include <fmt/format.h>

#include <charconv>

namespace anchorkv::cli {
namespace {

constexpr size_t kMaxNumbers = 1000;

// Takes a number off the front of `text`.
bool TakeNumber(std::string_view* text, int64_t* value) {
  if (text->empty() || text->front() == '-') return false;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *value);
  if (error != std::errc()) return false;
  text->remove_prefix(static_cast<size_t>(end - text->data()));
  return true;
}

bool Take(std::string_view* text, char c) {
  if (text->empty() || text->front() != c) return false;
  text->remove_prefix(1);
  return true;
}

struct Range {
  int64_t first = 0, last = 0, step = 1;
  bool multiply = false;
};

// first[-last[+step|*factor]], all of `text`.
bool ParseRange(std::string_view text, Range* range) {
  if (!TakeNumber(&text, &range->first)) return false;
  range->last = range->first;
  if (text.empty()) return true;
  if (!Take(&text, '-') || !TakeNumber(&text, &range->last)) return false;
  if (text.empty()) return true;
  range->multiply = Take(&text, '*');
  if (!range->multiply && !Take(&text, '+')) return false;
  return TakeNumber(&text, &range->step) && text.empty();
}

}  // namespace

Result<std::vector<int64_t>> ParseNumberList(std::string_view text, int64_t min, int64_t max,
                                             const std::string& option) {
  const auto wrong = [&](std::string_view part, const std::string& why) {
    return InvalidArgument(fmt::format("{} '{}': {}", option, part, why));
  };
  std::vector<int64_t> numbers;
  while (true) {
    const size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    Range range;
    if (!ParseRange(part, &range)) {
      return wrong(part, "give whole numbers and ranges, such as 512,1024 or 1-8+1 or 128-1024*2");
    }
    if (range.first < min || range.last > max) return wrong(part, fmt::format("allowed are {} to {}", min, max));
    if (range.first > range.last) return wrong(part, "the range ends before it begins");
    if (range.multiply ? range.step < 2 || range.first == 0 : range.step < 1) {
      return wrong(part, "the range does not get on");
    }
    for (int64_t i = range.first; i <= range.last;) {
      if (numbers.size() == kMaxNumbers) return wrong(part, fmt::format("the list is longer than {}", kMaxNumbers));
      numbers.push_back(i);
      // Compared before it is added to, so that nothing overflows.
      if (range.multiply ? i > range.last / range.step : range.step > range.last - i) break;
      i = range.multiply ? i * range.step : i + range.step;
    }
    if (comma == std::string_view::npos) return numbers;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace anchorkv::cli
