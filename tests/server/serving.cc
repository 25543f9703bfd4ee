#include "server/serving.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "runtime/fingerprint.h"

namespace anchorkv::server {

Serving::Serving(const ServingOptions& o, std::unique_ptr<ContextStore> second) {
  model_ = test::WriteTinyChatModel(directory_, "tiny", 4096, o.poisoned);
  tokenizer_ = std::move(Tokenizer::Load(model_)).value();
  EngineOptions engine_options;
  engine_options.threads = o.threads;
  engine_options.chunk = 64;
  engine_options.max_context = o.context;
  engine_ = std::move(Engine::Load(model_, engine_options)).value();
  config_ = engine_->cache_config();
  config_.min_tokens = o.min_tokens;
  config_.codec = CodecOptions::ForProfile(Profile::kBlend);
  config_.LimitTail(o.tail);
  config_.codec.theta = 1.0 / (o.default_ratio > 1 ? o.default_ratio : 4.0);
  pool_ = std::make_unique<ContextPool>(std::move(FingerprintModel(model_)).value(), o.pool_bytes, std::move(second),
                                        "the second store", nullptr);
  SchedulerOptions scheduler = o.scheduler;
  scheduler.chunk = 64;
  scheduler_ = std::make_unique<Scheduler>(engine_.get(), tokenizer_.get(), pool_.get(), &metrics_, scheduler);
  ServiceOptions service;
  service.model_name = "tiny";
  service.config = config_;
  service.default_ratio = o.default_ratio;
  service.context = o.context;
  service.pool_bytes = o.pool_bytes;
  service_ =
      std::make_unique<Service>(service, engine_->info(), tokenizer_.get(), pool_.get(), scheduler_.get(), &metrics_);
}

Serving::Answer Serving::Collect(Job* job) {
  Answer answer;
  while (true) {
    std::optional<Event> event = job->Wait(std::chrono::seconds(60));
    if (!event) {
      answer.failure = Failure{500, "", "", "", "no event within a minute"};
      return answer;
    }
    answer.text += event->text;
    answer.logprobs.insert(answer.logprobs.end(), event->logprobs.begin(), event->logprobs.end());
    if (event->kind == Event::Kind::kDone) answer.outcome = event->outcome;
    if (event->kind == Event::Kind::kFailed) answer.failure = event->failure;
    if (answer.outcome || answer.failure) return answer;
  }
}

Serving::Answer Serving::Run(Parsed<std::shared_ptr<Job>> job) {
  Answer answer;
  if (!job.ok()) {
    answer.failure = job.failure();
    return answer;
  }
  if (auto failure = scheduler_->Submit(*job)) {
    answer.failure = failure;
    return answer;
  }
  return Collect(job->get());
}

Serving::Answer Serving::Chat(const std::string& body) { return Run(service_->ChatJob(body)); }
Serving::Answer Serving::Complete(const std::string& body) { return Run(service_->CompletionJob(body)); }

std::string Serving::Upload(const std::string& body) {
  Parsed<ContextRequest> request = ParseContext(body);
  EXPECT_TRUE(request.ok());
  const Answer answer = Run(service_->UploadJob(*request));
  EXPECT_TRUE(answer.outcome) << (answer.failure ? answer.failure->message : "");
  if (!answer.outcome) return "";
  Parsed<OrderedJson> json = service_->FinishUpload(*answer.outcome);
  EXPECT_TRUE(json.ok()) << json.failure().message;
  return json.ok() ? json->at("id").get<std::string>() : "";
}

std::string Words(int words, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::string text;
  for (int i = 0; i < words; ++i) {
    if (i > 0) text += ' ';
    for (unsigned letters = 1 + random() % 6; letters > 0; --letters) text += static_cast<char>('a' + random() % 26);
  }
  return text;
}

std::string ChatBody(const std::string& system, const std::string& user, const std::string& more) {
  nlohmann::json messages = nlohmann::json::array();
  if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
  messages.push_back({{"role", "user"}, {"content", user}});
  return R"({"messages": )" + messages.dump() + R"(, "temperature": 0, "max_tokens": 12)" +
         (more.empty() ? "" : ", " + more) + "}";
}

}  // namespace anchorkv::server
