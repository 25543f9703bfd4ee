// Stores find what was put, drop the least recently used and never lose what is in use.
#include "store/context_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "support/stored_contexts.h"

namespace anchorkv::test {
namespace {

namespace fs = std::filesystem;

// Context number i: the same layers, another first token.
std::shared_ptr<const StoredContext> Numbered(int i) {
  static const StoredContext base = CompressedContext(Profile::kBlend);
  auto context = std::make_shared<StoredContext>(base);
  context->tokens[0] = i;
  return context;
}

ContextKey Key(const StoredContext& context) { return KeyOf(context.model, context.config, context.tokens); }
ContextKey Key(int i) { return Key(*Numbered(i)); }

TEST(ContextKey, IsOfModelOptionsAndTokens) {
  const StoredContext context = *Numbered(0);
  const ContextKey key = Key(context);
  EXPECT_EQ(key.Text().size(), 32u);
  const auto changed = [&](const std::function<void(StoredContext*)>& change) {
    StoredContext other = context;
    change(&other);
    return !(Key(other) == key);
  };
  EXPECT_FALSE(changed([](StoredContext*) {}));
  EXPECT_FALSE(changed([](StoredContext* c) { c->model.name = "renamed"; }));
  EXPECT_FALSE(changed([](StoredContext* c) { c->source = "moved"; }));
  EXPECT_FALSE(changed([](StoredContext* c) { c->config.tail_limit = 9; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->model.weights ^= 1; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->model.metadata ^= 1; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->config.codec.theta *= 1.0000001; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->config.codec.profile = Profile::kPaper; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->config.min_tokens = 17; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->config.tail_type = DenseType::kF32; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->tokens.back() += 1; }));
  EXPECT_TRUE(changed([](StoredContext* c) { c->tokens.pop_back(); }));
  EXPECT_TRUE(changed([](StoredContext* c) { std::swap(c->tokens[1], c->tokens[2]); }));
}

class StoreTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "anchorkv-store-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  void TearDown() override { fs::remove_all(folder_); }

  bool in_memory() const { return GetParam(); }
  // A store with room for `contexts` of the numbered ones.
  std::unique_ptr<ContextStore> Make(int contexts) const {
    const auto one = Numbered(0);
    const int64_t bytes = in_memory()
                              ? one->segment_bytes() + static_cast<int64_t>(one->tokens.size() * sizeof(int32_t))
                              : static_cast<int64_t>(ContextImage::Make(*one)->total_bytes());
    return in_memory() ? MakeMemoryStore(contexts * bytes)
                       : MakeDirectoryStore(folder_.string(), contexts * bytes).value();
  }
  // Times of files have to differ.
  void Tick() const {
    if (!in_memory()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  static bool Has(ContextStore* store, int i) {
    const std::vector<StoredEntry> list = store->List().value();
    for (const StoredEntry& entry : list) {
      if (entry.key == Key(i)) return true;
    }
    return false;
  }

  fs::path folder_;
};

TEST_P(StoreTest, FindsWhatWasPut) {
  const auto store = Make(3);
  const auto one = Numbered(1);
  EXPECT_EQ(store->Get(Key(1)).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(store->Remove(Key(1)).code(), StatusCode::kNotFound);
  ASSERT_TRUE(store->Put(Key(1), one).ok());
  const auto found = Find(store.get(), one->model, one->config, one->tokens);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ((*found)->tokens, one->tokens);
  for (size_t l = 0; l < one->layers.size(); ++l) {
    const auto a = (*found)->layers[l].bytes, b = one->layers[l].bytes;
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()));
  }
  const auto list = store->List().value();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_GT(list[0].bytes, one->segment_bytes());
  ASSERT_TRUE(store->Remove(Key(1)).ok());
  EXPECT_TRUE(store->List()->empty());
  EXPECT_EQ((*found)->layers[0].bytes[0], one->layers[0].bytes[0]);  // still there for whoever holds it
}

TEST_P(StoreTest, DropsTheLeastRecentlyUsed) {
  const auto store = Make(3);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(store->Put(Key(i), Numbered(i)).ok());
    Tick();
  }
  ASSERT_TRUE(store->Get(Key(0)).ok());
  Tick();
  ASSERT_TRUE(store->Put(Key(3), Numbered(3)).ok());
  EXPECT_TRUE(Has(store.get(), 0) && Has(store.get(), 2) && Has(store.get(), 3));
  EXPECT_FALSE(Has(store.get(), 1));
  EXPECT_EQ(store->List()->front().key, Key(3));
  Tick();
  ASSERT_TRUE(store->Put(Key(2), Numbered(2)).ok());  // in place of itself: nothing has to go
  EXPECT_EQ(store->List()->size(), 3u);
  EXPECT_EQ(store->List()->front().key, Key(2));
}

TEST_P(StoreTest, RefusesWhatCannotFit) {
  const auto store = Make(0);
  EXPECT_TRUE(store->Put(Key(1), Numbered(1)).ok());  // 0: no limit
  const auto small = in_memory() ? MakeMemoryStore(1000) : MakeDirectoryStore(folder_.string(), 1000).value();
  const Status status = small->Put(Key(2), Numbered(2));
  EXPECT_EQ(status.code(), StatusCode::kInfeasible);
  EXPECT_NE(status.message().find("a pool of 1000"), std::string::npos) << status.message();
}

// Something else under the key is no answer.
TEST_P(StoreTest, ContentsAreComparedAndNotKeysAlone) {
  const auto store = Make(3);
  ASSERT_TRUE(store->Put(Key(1), Numbered(2)).ok());
  const auto one = Numbered(1);
  EXPECT_EQ(Find(store.get(), one->model, one->config, one->tokens).status().code(), StatusCode::kNotFound);
}

TEST_P(StoreTest, ManyThreads) {
  const auto store = Make(3);
  std::atomic<int> wrong{0}, found{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 40; ++round) {
        const int i = (round * (t + 1)) % 6;
        const auto expected = Numbered(i);
        const auto context = Find(store.get(), expected->model, expected->config, expected->tokens);
        if (context.ok()) {
          ++found;
          wrong += (*context)->tokens != expected->tokens;
        } else if (context.status().code() == StatusCode::kNotFound) {
          const Status put = store->Put(Key(i), expected);
          wrong += !put.ok() && put.code() != StatusCode::kInfeasible;
        } else {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(found, 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "Memory" : "Directory"; });

TEST(MemoryStoreTest, WhatIsInUseStays) {
  const auto one = Numbered(1);
  const int64_t bytes = one->segment_bytes() + static_cast<int64_t>(one->tokens.size() * sizeof(int32_t));
  const auto store = MakeMemoryStore(2 * bytes);
  ASSERT_TRUE(store->Put(Key(1), one).ok());
  ASSERT_TRUE(store->Put(Key(2), Numbered(2)).ok());
  ASSERT_TRUE(store->Put(Key(3), Numbered(3)).ok());  // 2 goes: 1 is older and held
  EXPECT_TRUE(store->Get(Key(1)).ok());
  EXPECT_FALSE(store->Get(Key(2)).ok());
  const auto three = store->Get(Key(3)).value();
  const Status status = store->Put(Key(4), Numbered(4));
  EXPECT_EQ(status.code(), StatusCode::kInfeasible);
  EXPECT_NE(status.message().find("of which " + std::to_string(2 * bytes) + " are in use"), std::string::npos);
  EXPECT_TRUE(store->Get(Key(1)).ok() && store->Get(Key(3)).ok());  // nothing was dropped in vain
}

TEST(DirectoryStoreTest, OtherFilesAreLeftAloneAndDamagedOnesAreSaid) {
  std::string name = (fs::temp_directory_path() / "anchorkv-store-XXXXXX").string();
  const fs::path folder = mkdtemp(name.data());
  std::ofstream(folder / "notes.txt") << "mine";
  std::ofstream(folder / "0123.akv") << "mine too";
  const auto store = MakeDirectoryStore(folder.string(), 0).value();
  ASSERT_TRUE(store->Put(Key(1), Numbered(1)).ok());
  EXPECT_EQ(store->List()->size(), 1u);
  // A second process sees it.
  EXPECT_TRUE(MakeDirectoryStore(folder.string(), 0).value()->Get(Key(1)).ok());
  fs::resize_file(folder / (Key(1).Text() + ".akv"), 5000);
  EXPECT_EQ(store->Get(Key(1)).status().code(), StatusCode::kDataLoss);
  ASSERT_TRUE(store->Put(Key(1), Numbered(1)).ok());
  EXPECT_TRUE(store->Get(Key(1)).ok());
  EXPECT_TRUE(fs::exists(folder / "notes.txt") && fs::exists(folder / "0123.akv"));
  EXPECT_EQ(MakeDirectoryStore((folder / "no").string(), 0).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(MakeDirectoryStore((folder / "notes.txt").string(), 0).status().code(), StatusCode::kInvalidArgument);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace anchorkv::test
