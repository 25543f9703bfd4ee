// CodecOptions as properties "codec.NAME", with the values that the command line knows.
#pragma once

#include "anchorkv/options.h"
#include "store/properties.h"

namespace anchorkv {

void SetOptions(const CodecOptions& options, Properties* out);
// Names that are missing keep the profile's value. kUnsupported for a value that this program does not know.
Status ReadOptions(const Properties& in, CodecOptions* options);

}  // namespace anchorkv
