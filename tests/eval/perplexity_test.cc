#include "eval/perplexity.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

namespace anchorkv {
namespace {

// A file as llama-perplexity writes it, without log-probabilities.
std::string Header(uint32_t chunk, int32_t vocab, int32_t chunks, size_t tokens) {
  std::string bytes = "_logits_";
  const auto add = [&](auto value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); };
  add(chunk);
  add(vocab);
  add(chunks);
  for (size_t i = 0; i < tokens; ++i) add(static_cast<int32_t>(i));
  return bytes;
}

class BaseFile : public testing::Test {
 protected:
  ~BaseFile() override { std::filesystem::remove(path_); }
  Result<PerplexityInput> Read(const std::string& bytes, int vocab, int64_t max_chunks) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return ReadBase(path_, vocab, max_chunks);
  }
  std::string path_ = testing::TempDir() + "base.kld";
};

TEST_F(BaseFile, TokensAndOffset) {
  const auto input = Read(Header(8, 5, 3, 24), 5, 2);
  ASSERT_TRUE(input.ok()) << input.status().message();
  EXPECT_EQ(input->chunk, 8);
  EXPECT_EQ(input->chunks, 2);
  ASSERT_EQ(input->tokens.size(), 24u);
  EXPECT_EQ(input->tokens[23], 23);
  EXPECT_EQ(input->base_offset, 8 + 12 + 24 * 4);
}

TEST_F(BaseFile, DamageIsRefused) {
  const std::string good = Header(8, 5, 3, 24);
  EXPECT_EQ(Read("hello", 5, 0).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(Read("_logitz_" + good.substr(8), 5, 0).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(Read(good.substr(0, good.size() - 1), 5, 0).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(Read(Header(2, 5, 3, 6), 5, 0).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(Read(Header(8, 5, -1, 24), 5, 0).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(Read(Header(1 << 20, 5, 1 << 20, 24), 5, 0).status().code(), StatusCode::kDataLoss);
  const auto other = Read(good, 6, 0);
  EXPECT_EQ(other.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(other.status().message().find("vocabulary of 5; the model has 6"), std::string::npos);
  EXPECT_EQ(ReadBase(path_ + ".missing", 5, 0).status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace anchorkv
