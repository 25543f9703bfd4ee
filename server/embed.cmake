# Writes a source file that defines the function NAME (embedded.h) with INPUT's bytes to OUTPUT.
file(READ ${INPUT} bytes HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
file(WRITE ${OUTPUT} "#include \"server/embedded.h\"

namespace anchorkv::server {

static constexpr unsigned char kBytes[] = {${bytes}};

std::string_view ${NAME}() { return {reinterpret_cast<const char*>(kBytes), sizeof(kBytes)}; }

}  // namespace anchorkv::server
")
