#include "cli/run_options.h"

#include "cli/document.h"
#include "cli/validators.h"

namespace anchorkv::cli {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxChunk = 65536;
constexpr int64_t kMaxRepeatWindow = int64_t{1} << 20;
constexpr int64_t kMaxSeed = 0xFFFFFFFF;

constexpr char kCache[] = "KV cache";
constexpr char kRunning[] = "Running";
constexpr char kSampling[] = "Sampling";
constexpr char kOutput[] = "Output";

template <typename T>
CLI::Option* Add(CLI::App* app, const char* name, T& target, const char* help, const char* type, const char* group) {
  return app->add_option(name, target, help)->type_name(type)->group(group);
}

void AddModel(CLI::App* app, RunOptions* o) {
  app->add_option("-m,--model", o->model, "GGUF model file, or the first part of a split one")
      ->required()
      ->type_name("FILE");
}

CLI::Option* AddDocument(CLI::App* app, RunOptions* o) {
  return app->add_option("-f,--file", o->document, "The document (UTF-8 text; - reads standard input)")
      ->type_name("FILE");
}

void AddQuestions(CLI::App* app, RunOptions* o) {
  app->add_option("-p,--prompt", o->questions,
                  "A question; repeat it for more. Without -p and --chat the question is read from standard input")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->take_all();
}

void AddSystemPrompt(CLI::App* app, RunOptions* o) {
  app->add_option("--system-prompt", o->system, "System message (-sys)")->type_name("TEXT");
}

void AddChat(CLI::App* app, RunOptions* o) {
  app->add_flag("--chat", o->chat, "Keep the dialogue; without -p, read questions line by line");
}

void AddCacheMethod(CLI::App* app, RunOptions* o) {
  Add(app, "--kv", o->kv, "anchorkv (compressed, default) | full (exact)", "METHOD", kCache)
      ->check(OneOf({"anchorkv", "full"}));
}

void AddTailLimit(CLI::App* app, RunOptions* o) {
  Add(app, "--kv-tail", o->tail_limit, "Compress new tokens when there are more than N; 0 never (default)", "N", kCache)
      ->check(Integer(0, kNoLimit));
}

void AddCacheType(CLI::App* app, RunOptions* o) {
  Add(app, "--cache-type", o->tail_type, "Element type of what stays exact: f16 (default) | f32", "TYPE", kCache)
      ->check(OneOf({"f16", "f32"}));
}

void AddContext(CLI::App* app, RunOptions* o) {
  Add(app, "-c,--ctx-size", o->context, "Context in tokens; 0 as the model says (default)", "N", kRunning)
      ->check(Integer(0, kNoLimit));
}

void AddPredict(CLI::App* app, RunOptions* o) {
  Add(app, "-n,--predict,--n-predict", o->predict, "Tokens to generate; -1 until the answer ends (default)", "N",
      kRunning)
      ->check(IntegerOr(-1, 1, kNoLimit));
}

void AddMachine(CLI::App* app, RunOptions* o) {
  Add(app, "-t,--threads", o->threads, "Threads; 0 all cores (default)", "N", kRunning)->check(Integer(0, kMaxThreads));
  Add(app, "--ubatch-size", o->chunk, "Prefill chunk on the CPU in tokens (-ub, default 512)", "N", kRunning)
      ->check(Integer(1, kMaxChunk));
  AddDeviceOptions(app, &o->device);
}

void AddTemplate(CLI::App* app, RunOptions* o) {
  Add(app, "--chat-template", o->chat_template,
      "A built-in chat template, or none for plain text (default: the model's)", "NAME", kRunning);
}

void AddSampling(CLI::App* app, RunOptions* o) {
  SamplerOptions& s = o->sampling;
  Add(app, "-s,--seed", o->seed, "Seed; -1 random (default)", "N", kSampling)->check(IntegerOr(-1, 0, kMaxSeed));
  Add(app, "--temp", s.temperature, "Temperature; 0 greedy (default 0.8)", "X", kSampling)
      ->check(Number(0, kUnbounded));
  Add(app, "--top-k", s.top_k, "Keep the K likeliest; 0 all (default 40)", "K", kSampling)->check(Integer(0, 1 << 30));
  Add(app, "--top-p", s.top_p, "Keep the likeliest up to this mass; 1 off (default 0.95)", "X", kSampling)
      ->check(Number(0, 1));
  Add(app, "--min-p", s.min_p, "Drop below this share of the likeliest; 0 off (default 0.05)", "X", kSampling)
      ->check(Number(0, 1));
  Add(app, "--repeat-penalty", s.repeat_penalty, "Penalty on repeated tokens; 1 off (default)", "X", kSampling)
      ->check(Number(0, kUnbounded, LowerBound::kExcluded));
  Add(app, "--repeat-last-n", s.repeat_last_n, "Tokens looked back at for it; 0 off (default 64)", "N", kSampling)
      ->check(Integer(0, kMaxRepeatWindow));
}

void AddOutput(CLI::App* app, RunOptions* o, const char* json) {
  app->add_flag("--json", o->json, json)->group(kOutput);
  app->add_flag("--no-progress", o->no_progress, "No progress bar")->group(kOutput);
  app->add_flag("-v,--verbose", o->verbose, "Show the messages of ggml and libllama")->group(kOutput);
}

constexpr char kJsonPerQuestion[] = "One JSON object per question on standard output";

}  // namespace

void AddRunOptions(CLI::App* app, RunOptions* o) {
  AddModel(app, o);
  AddDocument(app, o);
  AddQuestions(app, o);
  AddSystemPrompt(app, o);
  AddChat(app, o);
  AddCacheMethod(app, o);
  app->add_flag("--question-aware", o->question_aware,
                "Compress document and question together; every question prefills again")
      ->group(kCache);
  AddTailLimit(app, o);
  AddCacheType(app, o);
  AddBudgetOptions(app, &o->budget);
  AddMethodOptions(app, &o->method);
  AddContext(app, o);
  AddPredict(app, o);
  AddMachine(app, o);
  AddTemplate(app, o);
  AddSampling(app, o);
  AddOutput(app, o, kJsonPerQuestion);
}

void AddCompressOptions(CLI::App* app, RunOptions* o) {
  AddModel(app, o);
  AddDocument(app, o)->required();
  app->add_option("-o,--output", o->output,
                  "The file to write; one that is there is replaced when the new one is complete")
      ->required()
      ->type_name("FILE");
  AddSystemPrompt(app, o);
  AddCacheMethod(app, o);
  AddCacheType(app, o);
  AddBudgetOptions(app, &o->budget);
  AddMethodOptions(app, &o->method);
  AddContext(app, o);
  AddMachine(app, o);
  AddTemplate(app, o);
  AddOutput(app, o, "One JSON object on standard output");
}

void AddAskOptions(CLI::App* app, RunOptions* o) {
  app->add_option("file", o->stored, "A file that anchorkv compress wrote")->required()->type_name("FILE");
  AddModel(app, o);
  AddQuestions(app, o);
  AddChat(app, o);
  AddTailLimit(app, o);
  AddContext(app, o);
  AddPredict(app, o);
  AddMachine(app, o);
  AddSampling(app, o);
  AddOutput(app, o, kJsonPerQuestion);
}

void AddServeOptions(CLI::App* app, RunOptions* o) {
  AddModel(app, o);
  AddCacheType(app, o);
  AddBudgetOptions(app, &o->budget);
  app->get_option("--kv-ratio")
      ->description("Compress prompts this much unless a request says otherwise (kv_ratio); default 1: exact");
  AddTailLimit(app, o);
  AddMethodOptions(app, &o->method);
  AddContext(app, o);
  AddPredict(app, o);
  AddMachine(app, o);
  AddTemplate(app, o);
  AddSampling(app, o);
  app->add_flag("-v,--verbose", o->verbose, "Show the messages of ggml and libllama, and a line per request")
      ->group(kOutput);
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

Status CheckContextSize(const RunOptions& o, const ModelInfo& info) {
  if (o.context <= info.context) return {};
  return InvalidArgument("-c " + std::to_string(o.context) + ": the model was trained for a context of " +
                         std::to_string(info.context) + " tokens; give at most that");
}

Result<CacheConfig> ResolveCache(const RunOptions& o, CacheConfig config) {
  config.compress = o.kv == "anchorkv";
  AKV_ASSIGN_OR_RETURN(const double theta, ResolveTheta(o.budget));
  AKV_ASSIGN_OR_RETURN(const Profile profile, ResolveProfile(o.method));
  AKV_ASSIGN_OR_RETURN(config.codec, ResolveCodec(o.method, profile, theta));
  config.tail_type = o.tail_type == "f32" ? DenseType::kF32 : DenseType::kF16;
  config.LimitTail(o.tail_limit);
  config.min_tokens = o.method.min_tokens;
  return config;
}

}  // namespace anchorkv::cli
