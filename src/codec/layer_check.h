// What every way of compressing a layer asks of its input.
#pragma once

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "segment/observations.h"

namespace anchorkv {

// kInvalidArgument when options are out of range, shapes do not fit each other or the window, or positions exceed the
// RoPE table; kInternal for keys, values and queries that are not finite, naming the first one.
Status CheckLayer(const LayerInput& input, const CodecOptions& options);

}  // namespace anchorkv
