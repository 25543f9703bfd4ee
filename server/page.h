// The web page at "/": one HTML file without any other asset, part of the program.
#pragma once

#include <string_view>

namespace anchorkv::server {

std::string_view Page();

}  // namespace anchorkv::server
