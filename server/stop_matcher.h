// Stop strings in a stream of text: what could be the start of one is held back until it is clear.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace anchorkv::server {

class StopMatcher {
 public:
  // Texts that are not empty.
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // What can be shown now. Nothing comes after a stop string, and it is not shown itself.
  std::string Push(std::string_view text);
  // What was held back, at the end of the text.
  std::string Flush();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace anchorkv::server
