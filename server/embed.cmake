# Writes a source file that defines Page() (page.h) with INPUT's bytes to OUTPUT.
file(READ ${INPUT} bytes HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
file(WRITE ${OUTPUT} "#include \"server/page.h\"

namespace anchorkv::server {

static constexpr unsigned char kPage[] = {${bytes}};

std::string_view Page() { return {reinterpret_cast<const char*>(kPage), sizeof(kPage)}; }

}  // namespace anchorkv::server
")
