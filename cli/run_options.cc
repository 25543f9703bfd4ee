#include "cli/run_options.h"

#include "cli/document.h"
#include "cli/validators.h"

namespace anchorkv::cli {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxChunk = 65536;
constexpr int64_t kMaxRepeatWindow = int64_t{1} << 20;
constexpr int64_t kMaxSeed = 0xFFFFFFFF;

}  // namespace

void AddRunOptions(CLI::App* app, RunOptions* o) {
  app->add_option("-m,--model", o->model, "GGUF model file, or the first part of a split one")
      ->required()
      ->type_name("FILE");
  app->add_option("-f,--file", o->document, "The document (UTF-8 text; - reads standard input)")->type_name("FILE");
  app->add_option("-p,--prompt", o->questions,
                  "A question; repeat it for more. Without -p and --chat the question is read from standard input")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->take_all();
  app->add_option("--system-prompt", o->system, "System message (-sys)")->type_name("TEXT");
  app->add_flag("--chat", o->chat, "Keep the dialogue; without -p, read questions line by line");

  const char* kv = "KV cache";
  app->add_option("--kv", o->kv, "anchorkv (compressed, default) | full (exact)")
      ->type_name("METHOD")
      ->check(OneOf({"anchorkv", "full"}))
      ->group(kv);
  app->add_flag("--question-aware", o->question_aware,
                "Compress document and question together; every question prefills again")
      ->group(kv);
  app->add_option("--kv-tail", o->tail_limit, "Compress new tokens when there are more than N; 0 never (default)")
      ->type_name("N")
      ->check(Integer(0, kNoLimit))
      ->group(kv);
  app->add_option("--cache-type", o->tail_type, "Element type of what stays exact: f16 (default) | f32")
      ->type_name("TYPE")
      ->check(OneOf({"f16", "f32"}))
      ->group(kv);
  AddBudgetOptions(app, &o->budget);
  AddMethodOptions(app, &o->method);

  const char* run = "Running";
  const auto add = [app](const char* name, auto& target, const char* help, const char* type, const char* group) {
    return app->add_option(name, target, help)->type_name(type)->group(group);
  };
  add("-c,--ctx-size", o->context, "Context in tokens; 0 as the model says (default)", "N", run)
      ->check(Integer(0, kNoLimit));
  add("-n,--predict,--n-predict", o->predict, "Tokens to generate; -1 until the answer ends (default)", "N", run)
      ->check(IntegerOr(-1, 1, kNoLimit));
  add("-t,--threads", o->threads, "Threads; 0 all cores (default)", "N", run)->check(Integer(0, kMaxThreads));
  add("--ubatch-size", o->chunk, "Prefill chunk on the CPU in tokens (-ub, default 512)", "N", run)
      ->check(Integer(1, kMaxChunk));
  AddDeviceOptions(app, &o->device);
  add("--chat-template", o->chat_template, "A built-in chat template, or none for plain text (default: the model's)",
      "NAME", run);

  const char* sampling = "Sampling";
  SamplerOptions& s = o->sampling;
  add("-s,--seed", o->seed, "Seed; -1 random (default)", "N", sampling)->check(IntegerOr(-1, 0, kMaxSeed));
  add("--temp", s.temperature, "Temperature; 0 greedy (default 0.8)", "X", sampling)->check(Number(0, kUnbounded));
  add("--top-k", s.top_k, "Keep the K likeliest; 0 all (default 40)", "K", sampling)->check(Integer(0, 1 << 30));
  add("--top-p", s.top_p, "Keep the likeliest up to this mass; 1 off (default 0.95)", "X", sampling)
      ->check(Number(0, 1));
  add("--min-p", s.min_p, "Drop below this share of the likeliest; 0 off (default 0.05)", "X", sampling)
      ->check(Number(0, 1));
  add("--repeat-penalty", s.repeat_penalty, "Penalty on repeated tokens; 1 off (default)", "X", sampling)
      ->check(Number(0, kUnbounded, LowerBound::kExcluded));
  add("--repeat-last-n", s.repeat_last_n, "Tokens looked back at for it; 0 off (default 64)", "N", sampling)
      ->check(Integer(0, kMaxRepeatWindow));

  const char* output = "Output";
  app->add_flag("--json", o->json, "One JSON object per question on standard output")->group(output);
  app->add_flag("--no-progress", o->no_progress, "No progress bar")->group(output);
  app->add_flag("-v,--verbose", o->verbose, "Show the messages of ggml and libllama")->group(output);
}

Status CheckRunOptions(const RunOptions& o) {
  if (o.chat && o.question_aware) {
    return InvalidArgument("--question-aware compresses the document for one question; it cannot be used with --chat");
  }
  if (o.document == "-" && o.questions.empty()) {
    return InvalidArgument("-f - takes standard input for the document; give the questions with -p");
  }
  for (const std::string& question : o.questions)
    AKV_RETURN_IF_ERROR(CheckText(question, "the question given with -p"));
  if (!o.system.empty()) AKV_RETURN_IF_ERROR(CheckText(o.system, "the system message"));
  return {};
}

Result<CacheConfig> ResolveCache(const RunOptions& o, CacheConfig config) {
  config.compress = o.kv == "anchorkv";
  AKV_ASSIGN_OR_RETURN(const double theta, ResolveTheta(o.budget));
  AKV_ASSIGN_OR_RETURN(const Profile profile, ResolveProfile(o.method));
  AKV_ASSIGN_OR_RETURN(config.codec, ResolveCodec(o.method, profile, theta));
  config.tail_type = o.tail_type == "f32" ? DenseType::kF32 : DenseType::kF16;
  config.tail_limit = o.tail_limit;
  config.min_tokens = o.method.min_tokens;
  return config;
}

}  // namespace anchorkv::cli
