// The program when things around it fail: it is killed while it stores an upload, the disk is full, the folder of its
// contexts goes away or cannot be written. Redis that stops is in shared_test.py.
#include <gtest/gtest.h>
#include <httplib.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/files.h"
#include "server/server_process.h"
#include "server/serving.h"
#include "server/tiny_chat_model.h"
#include "store/context.h"

namespace anchorkv::server {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;
using Json = nlohmann::json;

class FaultsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    signal(SIGPIPE, SIG_IGN);  // servers are killed while they are written to
    models_ = new test::ScratchDirectory();
    model_ = test::WriteTinyChatModel(*models_, "tiny", 60000);
  }
  static void TearDownTestSuite() { delete models_; }

  void SetUp() override {
    folder_ = directory_.Path("contexts");
    fs::create_directory(folder_);
  }
  void Start() {
    server_ = std::make_unique<ServerProcess>(
        model_, std::vector<std::string>{"-t", "1", "--kv-min-tokens", "64", "--kv-dir", folder_});
    ASSERT_NE(server_->port(), 0) << server_->Messages();
  }
  httplib::Client Client() const {
    httplib::Client client("127.0.0.1", server_->port());
    client.set_read_timeout(60);
    return client;
  }
  // The id, or "" for what went wrong.
  std::string Upload(const std::string& text) const {
    const auto result = Client().Post("/v1/contexts?kv_ratio=2", text, "text/plain");
    return result && result->status == 200 ? Json::parse(result->body)["id"].get<std::string>() : "";
  }
  std::string Ask(const std::string& id) const {
    const auto result = Client().Post("/v1/chat/completions",
                                      R"({"context": ")" + id + R"(", "messages": [{"role": "user", "content": "Q"}],
                                          "temperature": 0, "max_tokens": 8})",
                                      "application/json");
    if (!result || result->status != 200) return "no answer";
    return Json::parse(result->body)["choices"].dump();
  }
  // How often a text is in what the server has said.
  int Said(const std::string& text) const {
    const std::string messages = server_->Messages();
    int count = 0;
    for (size_t at = 0; (at = messages.find(text, at)) != std::string::npos; ++at) ++count;
    return count;
  }
  template <typename Condition>
  static bool Becomes(const Condition& condition) {
    for (int i = 0; i < 200; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(50ms);
    }
    return false;
  }

  static test::ScratchDirectory* models_;
  static std::string model_;
  const cli::TemporaryDirectory directory_;
  std::string folder_;
  std::unique_ptr<ServerProcess> server_;
};

test::ScratchDirectory* FaultsTest::models_ = nullptr;
std::string FaultsTest::model_;

// The folder has whole contexts and leftovers of the killed server; the next one removes those and serves the others.
// The moments of the kills are parts of what one upload takes here: builds with sanitizers need ten times as long.
TEST_F(FaultsTest, KilledWhileUploading) {
  const std::string leftover = folder_ + "/0123456789abcdef0123456789abcdef.akv.AbCd12.part";
  std::ofstream(leftover) << "half a context";
  std::ofstream(folder_ + "/notes.txt") << "not the server's";
  int document = 0;
  Start();
  const auto began = std::chrono::steady_clock::now();
  const std::string first = Upload(Words(400, ++document));
  ASSERT_TRUE(Becomes([&] { return fs::exists(folder_ + "/" + first + ".akv"); }));
  const auto one_upload = std::chrono::steady_clock::now() - began;
  for (int round = 0; round < 8; ++round) {
    if (round > 0) Start();
    EXPECT_FALSE(fs::exists(leftover));
    std::atomic<bool> stop{false};
    std::thread uploads([&] {
      while (!stop) Upload(Words(400, ++document));
    });
    std::this_thread::sleep_for(one_upload * (2 + round) / 4);
    server_->Signal(SIGKILL);
    server_->Wait();
    stop = true;
    uploads.join();
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() != ".akv") continue;
      const auto context = ReadContextFile(entry.path().string());
      EXPECT_TRUE(context.ok()) << context.status().message();
    }
  }
  Start();
  std::vector<std::string> ids;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    EXPECT_NE(entry.path().extension(), ".part") << entry.path();
    if (entry.path().extension() == ".akv") ids.push_back(entry.path().stem());
  }
  EXPECT_TRUE(fs::exists(folder_ + "/notes.txt"));
  EXPECT_TRUE(fs::exists(folder_ + "/" + first + ".akv"));
  for (const std::string& id : ids) EXPECT_NE(Ask(id), "no answer");
}

// Files that cannot grow, as on a full disk: uploads stay in memory, the reason is said once, and once that it is over.
TEST_F(FaultsTest, FullDisk) {
  Start();
  const std::string first = Upload(Words(50, 1));
  ASSERT_TRUE(Becomes([&] { return fs::exists(folder_ + "/" + first + ".akv"); }));
  rlimit before = {};
  ASSERT_EQ(prlimit(server_->pid(), RLIMIT_FSIZE, nullptr, &before), 0);
  rlimit small = before;
  small.rlim_cur = 4096;
  ASSERT_EQ(prlimit(server_->pid(), RLIMIT_FSIZE, &small, nullptr), 0);
  std::vector<std::string> ids;
  for (int i = 2; i < 5; ++i) ids.push_back(Upload(Words(50, i)));
  ASSERT_TRUE(Becomes([&] { return Said("contexts are not shared for now") > 0; })) << server_->Messages();
  for (const std::string& id : ids) {
    EXPECT_NE(Ask(id), "no answer");
    EXPECT_FALSE(fs::exists(folder_ + "/" + id + ".akv"));
  }
  EXPECT_NE(Ask(first), "no answer");
  EXPECT_EQ(Said("contexts are not shared for now"), 1) << server_->Messages();
  EXPECT_EQ(Said("File too large"), 1) << server_->Messages();
  EXPECT_EQ(Said("can be used again"), 0) << server_->Messages();
  ASSERT_EQ(prlimit(server_->pid(), RLIMIT_FSIZE, &before, nullptr), 0);
  const std::string last = Upload(Words(50, 9));
  EXPECT_TRUE(Becomes([&] { return Said("can be used again") > 0; })) << server_->Messages();
  EXPECT_TRUE(fs::exists(folder_ + "/" + last + ".akv"));
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    EXPECT_EQ(entry.path().extension(), ".akv") << entry.path();
  }
}

TEST_F(FaultsTest, TheFolderGoesAndComesBack) {
  Start();
  const std::string kept = Upload(Words(50, 1));
  ASSERT_TRUE(Becomes([&] { return fs::exists(folder_ + "/" + kept + ".akv"); }));
  const std::string answer = Ask(kept);
  fs::rename(folder_, folder_ + "-gone");
  const std::string id = Upload(Words(50, 2));
  ASSERT_NE(id, "");
  EXPECT_TRUE(Becomes([&] { return Said("contexts are not shared for now") > 0; })) << server_->Messages();
  EXPECT_NE(Ask(id), "no answer");
  EXPECT_EQ(Ask(kept), answer);  // still in memory
  const auto list = Client().Get("/v1/contexts");
  ASSERT_TRUE(list);
  EXPECT_EQ(list->status, 200);
  fs::rename(folder_ + "-gone", folder_);
  const std::string last = Upload(Words(50, 3));
  EXPECT_TRUE(Becomes([&] { return fs::exists(folder_ + "/" + last + ".akv"); })) << server_->Messages();
}

TEST_F(FaultsTest, ReadOnlyFolder) {
  Start();
  const std::string kept = Upload(Words(50, 1));
  ASSERT_TRUE(Becomes([&] { return fs::exists(folder_ + "/" + kept + ".akv"); }));
  const std::string answer = Ask(kept);
  ASSERT_EQ(chmod(folder_.c_str(), 0555), 0);
  if (access(folder_.c_str(), W_OK) == 0) {
    chmod(folder_.c_str(), 0755);
    GTEST_SKIP() << "this user writes into read-only folders";
  }
  server_.reset();
  Start();
  EXPECT_EQ(Ask(kept), answer);
  const std::string id = Upload(Words(50, 2));
  EXPECT_TRUE(Becomes([&] { return Said("contexts are not shared for now") == 1; })) << server_->Messages();
  EXPECT_NE(Ask(id), "no answer");
  chmod(folder_.c_str(), 0755);
}

}  // namespace
}  // namespace anchorkv::server
