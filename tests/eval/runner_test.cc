// Answers in lockstep against answers one configuration after another, on a tiny model.
#include "eval/runner.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <map>

#include "runtime/tiny_model.h"
#include "server/tiny_chat_model.h"

namespace anchorkv {
namespace {

class RunnerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    omp_set_num_threads(1);  // the work is too small for more
    const std::string path = test::WriteTinyChatModel(directory_, "tiny");
    EngineOptions options;
    options.threads = 1;
    options.backend = backend_;
    engine_ = std::move(Engine::Load(path, options)).value();
    tokenizer_ = std::move(Tokenizer::Load(path)).value();

    sample_.suite = "documents";
    sample_.task = "letters";
    for (int i = 0; i < 260; ++i) sample_.context += static_cast<char>('a' + i * i % 23);
    sample_.questions = {{"Which letter?", "It is", {"q"}, {}, Metric::kMatchAll, 9, false},
                         {"How many?", "", {"ab"}, {}, Metric::kMatchAll, 5, false},
                         {"Where?", "At", {}, {}, Metric::kMatchAll, 12, true}};
  }

  // Rows by identity, and their order. `skip`: rows that need not be made.
  std::vector<std::pair<std::string, Row>> Run(int together, std::vector<Protocol> protocols,
                                               const std::string& skip = {}) {
    RunnerOptions options;
    options.protocols = std::move(protocols);
    const std::vector<std::string> names = {"full",   "anchorkv:blend", "anchorkv:adaptive",
                                            "snapkv", "q8_0",           "turboquant-3"};
    const std::vector<double> ratios = {2, 400};  // the second is out of everyone's reach
    options.configurations = ParseConfigurations(names, ratios, {}, nlohmann::json::object()).value();
    options.kl_positions = 7;
    options.columns = {{"seed", 0}};
    options.together = together;
    auto runner = Runner::Make(engine_.get(), tokenizer_.get(), backend_, options);
    EXPECT_TRUE(runner.ok()) << runner.status().message();
    const auto identity = [](const Row& row) {
      std::string text;
      for (const char* name : {"protocol", "question", "method", "profile", "ratio"}) text += row.at(name).dump() + " ";
      return text;
    };
    std::vector<std::pair<std::string, Row>> rows;
    Runner::Hooks hooks;
    hooks.wanted = [&](const Row& row) { return skip.empty() || identity(row).find(skip) == std::string::npos; };
    hooks.emit = [&](const Row& row) {
      rows.emplace_back(identity(row), row);
      return Status();
    };
    const Status status = (*runner)->Run(sample_, hooks);
    EXPECT_TRUE(status.ok()) << status.message();
    return rows;
  }

  const test::ScratchDirectory directory_;
  const Backend* const backend_ = CpuBackend() != nullptr ? CpuBackend() : &ReferenceBackend();
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Tokenizer> tokenizer_;
  Sample sample_;
};

// Configurations that answer together get the rows that each gets alone, within what AppendEach may differ by.
TEST_F(RunnerTest, TogetherAsOneAfterAnother) {
  const std::vector<Protocol> both = {Protocol::kAgnostic, Protocol::kAware};
  const auto alone = Run(1, both);
  int answered = 0, ended_apart = 0, failed = 0;
  for (const auto& [identity, row] : alone) {
    failed += row.contains("error") ? 1 : 0;
    answered += row.contains("error") ? 0 : 1;
    ended_apart += !row.contains("error") && row["top1"].get<double>() < 1 ? 1 : 0;
  }
  EXPECT_GE(answered, 24);
  EXPECT_GE(ended_apart, 3) << "answers that leave the full cache's";
  EXPECT_GE(failed, 6);
  for (const int together : {3, 32}) {
    const auto rows = Run(together, both);
    std::map<std::string, Row> by_identity(rows.begin(), rows.end());
    ASSERT_EQ(rows.size(), alone.size());
    ASSERT_EQ(by_identity.size(), alone.size());
    for (const auto& [identity, expected] : alone) {
      ASSERT_EQ(by_identity.count(identity), 1u) << identity;
      const Row& row = by_identity[identity];
      const std::string what = identity + "of " + std::to_string(together) + " together";
      ASSERT_EQ(row.size(), expected.size()) << what;
      for (const auto& [column, value] : expected.items()) {
        if (column == "seconds") {
          EXPECT_GT(row[column].get<double>(), 0) << what;
        } else if (value.is_number_float()) {
          EXPECT_NEAR(row[column].get<double>(), value.get<double>(), 1e-4) << what << " " << column;
        } else {
          EXPECT_EQ(row[column], value) << what << " " << column;
        }
      }
    }
  }
}

// One at a time every configuration's rows come before the next one's; together a question's come before the next
// one's. Rows that are there already are not asked for.
TEST_F(RunnerTest, RowsComeInOrderAndOnce) {
  const auto questions = [](const std::vector<std::pair<std::string, Row>>& rows) {
    std::vector<int> out;
    for (const auto& [identity, row] : rows) {
      const std::string method = row["method"];
      if (!row.contains("error") && (method == "snapkv" || method == "turboquant-3")) {
        out.push_back(row["question"]);
      }
    }
    return out;
  };
  EXPECT_EQ(questions(Run(1, {Protocol::kAgnostic})), (std::vector<int>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(questions(Run(32, {Protocol::kAgnostic})), (std::vector<int>{0, 0, 1, 1, 2, 2}));
  const auto rest = Run(32, {Protocol::kAgnostic}, "1 \"snapkv\"");
  EXPECT_EQ(questions(rest), (std::vector<int>{0, 0, 1, 2, 2}));
}

}  // namespace
}  // namespace anchorkv
