// Files that are part of the program.
#pragma once

#include <string_view>

namespace anchorkv::server {

// The web page at "/": one HTML file without any other asset.
std::string_view Page();

// docs/openapi.yaml: what the server answers.
std::string_view OpenApiFile();

}  // namespace anchorkv::server
