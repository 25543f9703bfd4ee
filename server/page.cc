#include "server/page.h"

namespace anchorkv::server {
namespace {

constexpr unsigned char kPage[] = {
#include "page_bytes.inc"
};

}  // namespace

std::string_view Page() { return {reinterpret_cast<const char*>(kPage), sizeof(kPage)}; }

}  // namespace anchorkv::server
