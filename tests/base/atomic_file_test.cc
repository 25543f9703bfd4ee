#include "base/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>

#include "base/mapped_file.h"

namespace anchorkv {
namespace {

namespace fs = std::filesystem;

class AtomicFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "anchorkv-atomic-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  void TearDown() override { fs::remove_all(folder_); }

  static Status Replace(const fs::path& path, const std::string& text) {
    const auto bytes = std::as_bytes(std::span(text));
    const std::span<const std::byte> pieces[] = {bytes.first(text.size() / 2), bytes.subspan(text.size() / 2)};
    return ReplaceFile(path.string(), pieces);
  }
  static std::string Read(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  int Files() const { return static_cast<int>(std::distance(fs::directory_iterator(folder_), {})); }

  fs::path folder_;
};

TEST_F(AtomicFileTest, WritesAndReplaces) {
  const fs::path path = folder_ / "out";
  ASSERT_TRUE(Replace(path, "first").ok());
  EXPECT_EQ(Read(path), "first");
  ASSERT_TRUE(Replace(path, "").ok());
  EXPECT_EQ(Read(path), "");
  ASSERT_TRUE(Replace(path, "third, longer").ok());
  EXPECT_EQ(Read(path), "third, longer");
  EXPECT_EQ(Files(), 1);  // no temporary file stays
  const mode_t mask = umask(0);
  umask(mask);
  EXPECT_EQ(static_cast<mode_t>(fs::status(path).permissions()), 0666 & ~mask);
}

// What was mapped before stays what it was.
TEST_F(AtomicFileTest, ReadersOfTheOldFileKeepIt) {
  const fs::path path = folder_ / "out";
  ASSERT_TRUE(Replace(path, "old text").ok());
  const MappedFile mapped = MappedFile::Map(path.string()).value();
  ASSERT_TRUE(Replace(path, "new").ok());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(mapped.data()), 8), "old text");
}

TEST_F(AtomicFileTest, RefusesWhatCannotBeReplacedAndNamesIt) {
  const auto message = [](const fs::path& path) {
    const Status check = CheckReplaceable(path.string());
    EXPECT_FALSE(check.ok());
    EXPECT_EQ(Replace(path, "x").message(), check.message());
    EXPECT_NE(check.message().find(path.string()), std::string::npos) << check.message();
    return check.message();
  };
  EXPECT_NE(message(folder_ / "no" / "out").find("No such file"), std::string::npos);
  EXPECT_NE(message("/dev/null").find("not a regular file"), std::string::npos);
  EXPECT_NE(message(folder_).find("not a regular file"), std::string::npos);
  ASSERT_TRUE(Replace(folder_ / "file", "x").ok());
  EXPECT_NE(message(folder_ / "file" / "out").find("not a folder"), std::string::npos);
  EXPECT_FALSE(CheckReplaceable("").ok());
  EXPECT_EQ(Files(), 1);
}

// A process that replaces one file over and over is killed in the middle of it.
TEST_F(AtomicFileTest, AKilledProcessLeavesTheOldFileOrTheNewOne) {
  const fs::path path = folder_ / "out";
  const std::string first(3 << 20, 'a'), second((3 << 20) + 5, 'b');
  ASSERT_TRUE(Replace(path, first).ok());
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      for (bool odd = true;; odd = !odd) {
        if (!Replace(path, odd ? second : first).ok()) _exit(1);
      }
    }
    usleep(static_cast<useconds_t>(1000 + 1700 * round));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
    const std::string now = Read(path);
    EXPECT_TRUE(now == first || now == second) << round << ": " << now.size();
  }
  ASSERT_TRUE(Replace(path, "last").ok());  // and takes what the killed ones left along
  EXPECT_EQ(Files(), 1);
}

TEST_F(AtomicFileTest, LeftoversAreToldFromOtherFiles) {
  const auto write = [&](const char* name) { std::ofstream(folder_ / name) << "x"; };
  for (const char* name : {"a.akv", "a.akv.abc123.part", "a.akv.abc123", "a.akv.abc1234.part", "b.akv.000000.part",
                           ".part", "a.abc123.part", "a.akv-abc123.part"}) {
    write(name);
  }
  fs::create_directory(folder_ / "a.akv.folder.part");
  fs::create_symlink(folder_ / "a.akv", folder_ / "a.akv.symlnk.part");
  EXPECT_EQ(RemoveLeftovers(folder_.string(), [](std::string_view name) { return name == "a.akv"; }), 1);
  EXPECT_EQ(Files(), 9);
  EXPECT_FALSE(fs::exists(folder_ / "a.akv.abc123.part"));
  EXPECT_EQ(RemoveLeftovers((folder_ / "none").string(), [](std::string_view) { return true; }), 0);
}

// What another process is writing at the moment is no leftover.
TEST_F(AtomicFileTest, FilesThatAreBeingWrittenStay) {
  const fs::path path = folder_ / "out";
  const std::string text(64 << 20, 'a');
  const pid_t child = fork();
  if (child == 0) _exit(Replace(path, text).ok() ? 0 : 1);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    EXPECT_EQ(RemoveLeftovers(folder_.string(), [](std::string_view name) { return name == "out"; }), 0);
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(Read(path).size(), text.size());
}

TEST_F(AtomicFileTest, AnErrorLeavesTheOldFile) {
  const fs::path path = folder_ / "out";
  ASSERT_TRUE(Replace(path, "old").ok());
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = Replace(path, std::string(1000, 'x'));
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("too large"), std::string::npos) << status.message();
  EXPECT_EQ(Read(path), "old");
  EXPECT_EQ(Files(), 1);
}

}  // namespace
}  // namespace anchorkv
