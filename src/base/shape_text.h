// A tensor's shape for messages.
#pragma once

#include <string>

namespace anchorkv {

// "[heads, tokens, head_dim]" of any view with these members.
template <typename View>
std::string ShapeText(const View& view) {
  return "[" + std::to_string(view.heads) + ", " + std::to_string(view.tokens) + ", " + std::to_string(view.head_dim) +
         "]";
}

}  // namespace anchorkv
