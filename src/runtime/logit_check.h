// What every engine asks of the logits before it hands them out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "anchorkv/status.h"

namespace anchorkv {

// kInternal, naming the position, for logits that are not all finite: weights or activations were not.
inline Status CheckLogits(std::span<const float> logits, int64_t position) {
  if (std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) return {};
  return Internal("the model produced a logit that is not a finite number at position " + std::to_string(position));
}

}  // namespace anchorkv
