// Writes the tiny model for tests that are not written in C++: write_tiny_chat_model FILE.
#include <cstdio>
#include <filesystem>

#include "server/tiny_chat_model.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const anchorkv::test::ScratchDirectory directory;
  const std::string path = anchorkv::test::WriteTinyChatModel(directory, "tiny");
  std::error_code error;
  std::filesystem::copy_file(path, argv[1], std::filesystem::copy_options::overwrite_existing, error);
  if (error) std::fprintf(stderr, "%s: %s\n", argv[1], error.message().c_str());
  return error ? 1 : 0;
}
