// Runs one sample through every configuration: one dense prefill of the context, then each configuration
// compresses the same keys and values and answers the same questions. docs/evaluation.md, "Protocols".
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "eval/answer.h"
#include "eval/configuration.h"
#include "eval/suites/sample.h"
#include "runtime/chat_frame.h"
#include "runtime/engine.h"
#include "runtime/prompt_record.h"
#include "runtime/text.h"

namespace anchorkv {

// Whether the question is inside the compressed prompt.
enum class Protocol { kAgnostic, kAware };
std::string_view Name(Protocol protocol);

struct RunnerOptions {
  std::vector<Protocol> protocols;
  std::vector<Configuration> configurations;  // the full cache is run in any case
  int kl_positions = 48;
  // Configurations that are compressed before any of them is asked, to answer in steps of all of them; fewer where the
  // GPU has no room. For devices on which such steps cost less than each one's own.
  int together = 1;
  std::string chat_template;       // "" the model's
  nlohmann::ordered_json columns;  // of every row: model, model_hash, seed
};

using Row = nlohmann::ordered_json;

// Compresses one prompt with one configuration after the other, at equal bytes: baselines may hold what the first
// anchorkv configuration of their ratio achieved; without one, or where it is infeasible, 1 / ratio of the dense bytes.
// So anchorkv configurations are compressed even where their own rows are not wanted.
class EqualBytes {
 public:
  // The engine, which made the record, and the backend outlive this; the record does not change.
  EqualBytes(const Engine* engine, const PromptRecord* record, const Backend* backend)
      : engine_(engine), record_(record), backend_(backend) {}

  // See Compress in configuration.h.
  Result<StoredSegments> Compress(const Configuration& configuration);

 private:
  std::vector<int64_t> Budget(const Configuration& configuration) const;

  const Engine* engine_;
  const PromptRecord* record_;
  const Backend* backend_;

  std::vector<std::pair<double, std::vector<int64_t>>> achieved_;  // ratio, bytes per layer
};

class Runner {
 public:
  // Engine and tokenizer outlive the runner. The engine's backend is `backend`.
  static Result<std::unique_ptr<Runner>> Make(Engine* engine, const Tokenizer* tokenizer, const Backend* backend,
                                              RunnerOptions options);

  // Tokens of a whole prompt, for suites that fill a length.
  Result<int64_t> PromptLength(const Sample& sample, const Question& question) const;

  // wanted(row): whether the row, which holds its identity only, is still missing. emit(row): a finished row.
  // progress(done, total) of the dense prefill; false cancels, as kCancelled.
  struct Hooks {
    std::function<bool(const Row&)> wanted;
    std::function<Status(const Row&)> emit;
    std::function<bool(int64_t, int64_t)> progress;
  };
  Status Run(const Sample& sample, const Hooks& hooks);
  // Whether a row of this question is missing; of the sample only its names and numbers are read.
  bool Wants(const Sample& sample, size_t question, Protocol protocol, const Hooks& hooks) const;

  // A record that observes what the configurations need and holds the sample's context.
  struct Prompt {
    std::unique_ptr<PromptRecord> record;
    std::vector<int32_t> tokens;  // of the record
  };
  Result<Prompt> Prefill(const Sample& sample, const std::function<bool(int64_t, int64_t)>& progress);
  // The question's own tokens behind a context, and what opens the answer.
  Result<TurnTokens> QuestionTokens(const Sample& sample, const Question& question) const;
  const RunnerOptions& options() const noexcept { return options_; }

 private:
  Runner() = default;
  const ChatFrame& frame(const Sample& sample) const { return sample.chat ? chat_ : plain_; }
  Result<Turn> MakeTurn(const Question& question, std::span<const int32_t> asked) const;
  Row Identity(const Sample& sample, size_t question, Protocol protocol, const Configuration& configuration) const;
  // Whether the GPU, if there is one, can hold one more cache of the prompt.
  bool HasRoom(const PromptRecord& record) const;
  // questions[i] belongs to turns[i].
  Status RunProtocol(const Sample& sample, Protocol protocol, Prompt* prompt, std::span<const size_t> questions,
                     std::span<const Turn> turns, const Hooks& hooks);

  Engine* engine_ = nullptr;
  const Tokenizer* tokenizer_ = nullptr;
  const Backend* backend_ = nullptr;
  RunnerOptions options_;
  ChatFrame chat_, plain_;
};

// KVzip's second pass over a record that holds `tokens`.
Status ObserveReconstruction(Engine* engine, const Tokenizer& tokenizer, const std::string& answer_opening,
                             std::span<const int32_t> tokens, PromptRecord* record);

}  // namespace anchorkv
