// Texts that are cut before libllama tokenises them, against the same texts in one piece.
#include "runtime/special_cuts.h"

#include <gtest/gtest.h>

#include <random>

#include "runtime/oracle.h"
#include "runtime/text.h"
#include "server/tiny_chat_model.h"

namespace anchorkv::test {
namespace {

using Cuts = std::vector<size_t>;

TEST(SpecialCuts, AreBehindOccurrencesThatNothingOverlaps) {
  const SpecialCuts simple({{"<x>", true}, {"  ", false}, {"<rstrip>", true, true}});
  EXPECT_EQ(simple.Find("a<x>b<x>c", true, 1), (Cuts{4, 8}));
  EXPECT_EQ(simple.Find("a<x>b<x>c", true, 2), (Cuts{8}));
  EXPECT_EQ(simple.Find("a<x>b<x>c", false, 1), Cuts{});
  EXPECT_EQ(simple.Find("a  b", false, 1), Cuts{3});
  EXPECT_EQ(simple.Find("a   b", false, 1), Cuts{});  // two ways to take two of three blanks
  EXPECT_EQ(simple.Find("<rstrip>  a", true, 1), Cuts{10});
  EXPECT_EQ(simple.Find("", true, 1), Cuts{});
  EXPECT_EQ(simple.Find("<x>", true, 1), Cuts{});  // nothing behind it
  const SpecialCuts overlapping({{"ab", true}, {"bc", true}, {"bcdef", true}, {"d", true}});
  EXPECT_EQ(overlapping.Find("abc!", true, 1), Cuts{});
  EXPECT_EQ(overlapping.Find("ab!bcdef!", true, 1), (Cuts{2, 8}));
  EXPECT_EQ(overlapping.Find("abcdef!", true, 1), Cuts{});
}

void Compare(const Tokenizer& tokenizer, unsigned seed) {
  const std::string pieces[] = {"<|im_end|>",
                                "<|im_start|>",
                                "<|endoftext|>",
                                "<|im_",
                                "end|>",
                                "<bos>",
                                "<eos>",
                                "<start_of_turn>",
                                "<unused7>",
                                "<think>",
                                "</tool_call>",
                                " ",
                                "  ",
                                "\n",
                                "\n\n",
                                "\n\n\n",
                                "\t",
                                "he",
                                "word",
                                " word",
                                "é",
                                "漢",
                                "7",
                                "<",
                                ">",
                                "|"};
  std::mt19937 random(seed);
  std::string text;
  while (text.size() < 1000) text += pieces[random() % std::size(pieces)];
  for (const bool special : {true, false}) {
    const std::vector<int32_t> whole = tokenizer.Encode(text, false, special);  // too short to be cut
    for (const int every : {1, 2, 5}) {
      std::vector<int32_t> parts;
      size_t from = 0;
      Cuts cuts = tokenizer.SafeCuts(text, special, every);
      cuts.push_back(text.size());
      for (const size_t cut : cuts) {
        const std::vector<int32_t> part = tokenizer.Encode(text.substr(from, cut - from), false, special);
        parts.insert(parts.end(), part.begin(), part.end());
        from = cut;
      }
      EXPECT_EQ(parts, whole) << "seed " << seed << ", special " << special << ", every " << every;
      if (special && every == 1) {
        EXPECT_GT(cuts.size(), 10u);
      }
    }
  }
}

TEST(SpecialCuts, PartsGiveTheTokensOfTheWhole) {
  const ScratchDirectory directory;
  const auto tokenizer = std::move(Tokenizer::Load(WriteTinyChatModel(directory, "tiny"))).value();
  for (unsigned seed = 0; seed < 50; ++seed) Compare(*tokenizer, seed);
}

TEST(SpecialCuts, PartsGiveTheTokensOfTheWholeForRealVocabularies) {
  int models = 0;
  for (const char* name :
       {"smollm2-135m-instruct-q4_1.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "gemma-3-270m-q4_k_m.gguf"}) {
    const std::string path = ModelPath(name);
    if (path.empty()) continue;
    ++models;
    const auto tokenizer = std::move(Tokenizer::Load(path)).value();
    for (unsigned seed = 0; seed < 10; ++seed) Compare(*tokenizer, seed);
  }
  if (models == 0) GTEST_SKIP() << "no model is in the model directory";
}

// A megabyte of special tokens is as many tokens, in no more time than other text. In one piece it takes minutes.
TEST(SpecialCuts, ManySpecialTokens) {
  const ScratchDirectory directory;
  const auto tokenizer = std::move(Tokenizer::Load(WriteTinyChatModel(directory, "tiny"))).value();
  constexpr size_t kCount = 100000;
  std::string text;
  for (size_t i = 0; i < kCount; ++i) text += i % 2 == 0 ? "<|im_end|>" : "<|im_start|>";
  EXPECT_EQ(tokenizer->Encode(text, false, true).size(), kCount);
  EXPECT_EQ(tokenizer->Encode(text, false, false).size(), text.size());
}

}  // namespace
}  // namespace anchorkv::test
