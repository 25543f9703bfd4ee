// What every baseline expects of the layers it is given.
#pragma once

#include <cstdint>
#include <span>

#include "anchorkv/status.h"
#include "segment/observations.h"

namespace anchorkv {

// kInvalidArgument unless the layers are a whole prompt of one shape and show what `wanted` asks for (a window of as
// many queries as the prompt has when it is shorter).
Status CheckPrompt(std::span<const LayerInput> layers, const Observations& wanted);

}  // namespace anchorkv
