// Answers of the service on the tiny model against what the engine says when it is asked directly, and everything that
// may happen to a request on its way.
#include "server/service.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "server/prompt.h"
#include "server/serving.h"

namespace anchorkv::server {
namespace {

using namespace std::chrono_literals;

constexpr char kCompressed[] = R"("kv_ratio": 2)";
constexpr double kTheta = 0.5;

// The plain version: one cache, read to the prefix's end and then to the question's, greedy tokens one by one.
std::string PlainAnswer(const Serving& serving, const Tokenizer& tokenizer, const Prompt& prompt, CacheConfig config,
                        int tokens) {
  EngineOptions options;
  options.threads = 1;
  options.chunk = 64;
  const auto engine = std::move(Engine::Load(serving.model(), options)).value();
  auto cache = std::move(engine->MakeCache(config)).value();
  KvCache* const pointer = cache.get();
  std::vector<float> logits;
  if (prompt.prefix.empty()) {
    EXPECT_TRUE(engine->Prefill(prompt.rest, {&pointer, 1}, &logits).ok());
  } else {
    EXPECT_TRUE(engine->Prefill(prompt.prefix, {&pointer, 1}, &logits).ok());
    EXPECT_TRUE(engine->Append(pointer, prompt.rest, &logits).ok());
  }
  std::string bytes;
  for (int i = 0; i < tokens; ++i) {
    const auto token = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (tokenizer.IsEndOfGeneration(token)) break;
    bytes += tokenizer.Piece(token);
    EXPECT_TRUE(cache->MaybeCompressTail().ok());
    EXPECT_TRUE(engine->Append(pointer, {&token, 1}, &logits).ok());
  }
  Utf8Stream text;
  std::string out = text.Push(bytes);
  return out + text.Flush();
}

std::vector<ChatMessage> Messages(const std::string& system, const std::string& user) {
  return {{"system", system}, {"user", user}};
}

TEST(Service, AnswersAreThoseOfTheEngine) {
  Serving serving({});
  const std::string document = Words(60, 1);
  for (const double ratio : {1.0, 2.0}) {
    const auto prompt = std::move(ChatPrompt(serving.tokenizer(), "", Messages(document, "What is it?"), 64)).value();
    ASSERT_FALSE(prompt.prefix.empty());
    CacheConfig config = serving.config();
    config.compress = ratio > 1;
    config.codec.theta = 1 / ratio;
    const auto answer = serving.Chat(ChatBody(document, "What is it?", R"("kv_ratio": )" + std::to_string(ratio)));
    ASSERT_TRUE(answer.outcome) << answer.failure->message;
    EXPECT_EQ(answer.text, PlainAnswer(serving, serving.tokenizer(), prompt, config, 12));
    EXPECT_EQ(answer.outcome->bill.layers_compressed, ratio > 1 ? 2 : 0);
    EXPECT_EQ(answer.outcome->prompt_tokens, prompt.tokens());
  }
  const auto brief = std::move(ChatPrompt(serving.tokenizer(), "", Messages("", "Hello"), 64)).value();
  ASSERT_TRUE(brief.prefix.empty());
  CacheConfig exact = serving.config();
  exact.compress = false;
  EXPECT_EQ(serving
                .Chat(R"({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hello"}],
                             "temperature": 0, "max_tokens": 12})")
                .text,
            PlainAnswer(serving, serving.tokenizer(), brief, exact, 12));
}

// Long answers (--kv-tail): what they say is what the engine says, their bytes stay within theta times dense and a
// tail, in the answer, in the promise that admits them and in /metrics; a prefix that was found behaves like one just
// read.
TEST(Service, LongAnswersCompressTheirTails) {
  constexpr int kTail = 800, kTokens = 3000;
  ServingOptions options;
  options.tail = kTail;
  Serving serving(options);
  const std::string document = Words(60, 1);
  nlohmann::json body = nlohmann::json::parse(ChatBody(document, "What is it?", kCompressed));
  body["max_tokens"] = kTokens;
  const auto prompt = std::move(ChatPrompt(serving.tokenizer(), "", Messages(document, "What is it?"), 64)).value();
  CacheConfig config = serving.config();
  config.codec.theta = kTheta;
  Serving::Answer cold;
  std::atomic<bool> done{false};
  std::thread asking([&] {
    cold = serving.Chat(body.dump());
    done = true;
  });
  double shown = 0;
  while (!done) {
    shown = std::max(shown, serving.metrics().live_bytes->Value());
    std::this_thread::yield();
  }
  asking.join();
  const auto warm = serving.Chat(body.dump());
  ASSERT_TRUE(cold.outcome && warm.outcome) << cold.failure->message;
  ASSERT_GT(cold.outcome->generated_tokens, 2 * kTail) << "the answer is too short for this test";
  EXPECT_EQ(cold.text, PlainAnswer(serving, serving.tokenizer(), prompt, config, kTokens));
  EXPECT_EQ(warm.text, cold.text);
  EXPECT_GT(warm.outcome->cached_tokens, 0);
  const ByteBill& bill = cold.outcome->bill;
  EXPECT_GT(bill.tokens, prompt.tokens() + kTail);
  EXPECT_LE(bill.tail_bytes, config.dense_bytes(kTail + 1));
  EXPECT_LE(static_cast<double>(bill.segment_bytes), kTheta * static_cast<double>(bill.dense_bytes));
  auto job = serving.service().ChatJob(body.dump());
  EXPECT_LE(bill.resident_bytes(), (*job)->live_bytes);
  EXPECT_GT(shown, 0);
  EXPECT_LE(shown, static_cast<double>((*job)->live_bytes));
  EXPECT_LT((*job)->live_bytes, config.dense_bytes(prompt.tokens() + kTokens) * 4 / 5);
}

TEST(Service, ColdAndWarmAnswersAreTheSame) {
  const std::string document = Words(80, 2);
  for (const char* more : {kCompressed, R"("kv_ratio": 1)"}) {
    Serving serving({});
    const std::string body = ChatBody(document, "Why?", more);
    const auto cold = serving.Chat(body);
    const auto warm = serving.Chat(body);
    const auto other = serving.Chat(ChatBody(document, "And what else is there?", more));
    ASSERT_TRUE(cold.outcome && warm.outcome && other.outcome);
    EXPECT_EQ(cold.outcome->cached_tokens, 0);
    EXPECT_GT(warm.outcome->cached_tokens, 300);
    EXPECT_EQ(other.outcome->cached_tokens, warm.outcome->cached_tokens);
    EXPECT_EQ(cold.text, warm.text);
    EXPECT_EQ(cold.outcome->key, warm.outcome->key);
    EXPECT_EQ(cold.outcome->bill.resident_bytes(), warm.outcome->bill.resident_bytes());
    const auto alone = serving.Chat(ChatBody(document, "Why?", std::string(more) + R"(, "cache_prompt": false)"));
    ASSERT_TRUE(alone.outcome);
    EXPECT_EQ(alone.outcome->cached_tokens, 0);
    EXPECT_EQ(alone.text, cold.text);
  }
}

TEST(Service, PrefixesStayTheSameWhileAConversationGrows) {
  Serving serving({});
  const Tokenizer& tokenizer = serving.tokenizer();
  std::vector<ChatMessage> messages = Messages(Words(30, 3), "First?");
  std::vector<int32_t> last;
  size_t changes = 0;
  for (int turn = 0; turn < 40; ++turn) {
    const Prompt prompt = std::move(ChatPrompt(tokenizer, "", messages, 64)).value();
    std::vector<int32_t> all = prompt.prefix;
    all.insert(all.end(), prompt.rest.begin(), prompt.rest.end());
    // The pieces are the whole prompt, tokenised as it stands.
    std::string text;
    for (const int32_t token : all) text += tokenizer.Piece(token, true);
    EXPECT_EQ(text, std::move(RenderChat(tokenizer, "", messages, true)).value());
    ASSERT_TRUE(std::equal(last.begin(), last.end(), prompt.prefix.begin()));
    changes += prompt.prefix != last;
    EXPECT_GE(prompt.prefix.size() * 2 + 200, all.size());  // the last turns and at most half of the rest
    last = prompt.prefix;
    messages.push_back({"assistant", Words(10, turn)});
    messages.push_back({"user", Words(5, 100 + turn)});
  }
  EXPECT_GE(changes, 3u);
  EXPECT_LE(changes, 6u);
}

TEST(Service, SpecialTokensOfUsersAreText) {
  Serving serving({});
  const Prompt plain = std::move(ChatPrompt(serving.tokenizer(), "", Messages("s", "<|im_end|>"), 64)).value();
  EXPECT_EQ(std::count(plain.rest.begin(), plain.rest.end(), 258), 2);  // of the template: system and user
}

TEST(Service, UploadedContextsAnswerAsTheEngineDoes) {
  Serving serving({});
  const std::string document = Words(70, 4);
  const std::string id = serving.Upload(R"({"text": ")" + document + R"(", "name": "d.txt", "kv_ratio": 2})");
  ASSERT_EQ(id.size(), 32u);
  const auto frame = std::move(MakeChatFrame(serving.tokenizer(), "", "")).value();
  Prompt prompt;
  prompt.prefix = std::move(EncodeDocument(serving.tokenizer(), frame, document)).value();
  prompt.rest = std::move(EncodeDocumentQuestion(serving.tokenizer(), frame, "Where?")).value().tokens;
  CacheConfig config = serving.config();
  config.codec.theta = kTheta;
  const std::string first = PlainAnswer(serving, serving.tokenizer(), prompt, config, 12);
  const std::string body = R"({"context": ")" + id + R"(", "temperature": 0, "max_tokens": 12, "messages": )";
  const auto answer = serving.Chat(body + R"([{"role": "user", "content": "Where?"}]})");
  ASSERT_TRUE(answer.outcome) << answer.failure->message;
  EXPECT_EQ(answer.text, first);
  EXPECT_EQ(answer.outcome->cached_tokens, static_cast<int64_t>(prompt.prefix.size()));
  // A second turn: what was said, then the question in a turn of its own.
  const auto next = std::move(EncodeNextQuestion(serving.tokenizer(), frame, "When?")).value().tokens;
  const auto said = serving.tokenizer().Encode("Here.", false, false);
  prompt.rest.insert(prompt.rest.end(), said.begin(), said.end());
  prompt.rest.insert(prompt.rest.end(), next.begin(), next.end());
  const auto second = serving.Chat(body + R"([{"role": "user", "content": "Where?"},
      {"role": "assistant", "content": "Here."}, {"role": "user", "content": "When?"}]})");
  ASSERT_TRUE(second.outcome) << second.failure->message;
  EXPECT_EQ(second.text, PlainAnswer(serving, serving.tokenizer(), prompt, config, 12));

  EXPECT_EQ(serving.service().ListContexts()["data"].size(), 1u);
  const auto refused =
      serving.Chat(body + R"([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]})");
  EXPECT_NE(refused.failure->message.find("must alternate"), std::string::npos);
  EXPECT_TRUE(serving.service().DeleteContext(id).ok());
  EXPECT_EQ(serving.Chat(body + R"([{"role": "user", "content": "Where?"}]})").failure->http_status, 404);
  EXPECT_EQ(serving.service().DeleteContext(id).failure().http_status, 404);
  EXPECT_EQ(serving.service().DeleteContext("../../x").failure().http_status, 404);
}

TEST(Service, AContextTravelsAsAFile) {
  Serving from({});
  const std::string id = from.Upload(R"({"text": ")" + Words(70, 4) + R"(", "kv_ratio": 2})");
  Parsed<SharedContext> context = from.service().GetContext(id);
  ASSERT_TRUE(context.ok());
  const auto image = std::move(ContextImage::Make(**context)).value();
  std::string bytes;
  for (const auto piece : image.pieces()) bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  Serving to({});
  Parsed<OrderedJson> taken = to.service().TakeContext(bytes);
  ASSERT_TRUE(taken.ok()) << taken.failure().message;
  EXPECT_EQ(taken->at("id"), id);
  const std::string body = R"({"context": ")" + id +
                           R"(", "temperature": 0, "messages": [{"role": "user", "content": "Hm?"}], "max_tokens": 9})";
  EXPECT_EQ(to.Chat(body).text, from.Chat(body).text);
  bytes[bytes.size() / 2] ^= 1;
  EXPECT_FALSE(to.service().TakeContext(bytes).ok());
  EXPECT_FALSE(to.service().TakeContext("").ok());
  EXPECT_FALSE(to.service().TakeContext(R"({"text": "x"})").ok());
}

TEST(Service, TwoServersShareWhatOneHasRead) {
  const test::ScratchDirectory folder;
  std::filesystem::create_directory(folder.File("store"));
  const auto store = [&] { return std::move(MakeDirectoryStore(folder.File("store"), 0)).value(); };
  const std::string body = ChatBody(Words(80, 5), "Why?", kCompressed);
  std::string text;
  {
    Serving one({}, store());
    text = one.Chat(body).text;
  }  // what is on its way to the folder is written
  Serving two({}, store());
  const auto answer = two.Chat(body);
  ASSERT_TRUE(answer.outcome);
  EXPECT_GT(answer.outcome->cached_tokens, 300);
  EXPECT_EQ(answer.text, text);
}

TEST(Service, ThePoolDropsTheLeastRecentlyUsedAndKeepsUploads) {
  ServingOptions options;
  options.pool_bytes = 250 << 10;  // two prefixes of about 380 tokens, 256 bytes each
  Serving serving(options);
  const std::string upload = serving.Upload(R"({"text": ")" + Words(80, 1) + R"("})");
  const int64_t one = serving.pool().memory_bytes();
  ASSERT_LE(2 * one, options.pool_bytes);
  for (int i = 10; i < 20; ++i) {
    const auto answer = serving.Chat(ChatBody(Words(80, i), "Why?"));
    ASSERT_TRUE(answer.outcome) << answer.failure->message;
    EXPECT_LE(serving.pool().memory_bytes(), options.pool_bytes);
  }
  EXPECT_GT(serving.Chat(ChatBody(Words(80, 19), "Why?")).outcome->cached_tokens, 0);
  EXPECT_EQ(serving.Chat(ChatBody(Words(80, 10), "Why?")).outcome->cached_tokens, 0);
  EXPECT_TRUE(serving.service().GetContext(upload).ok());
  // What is larger than the pool is answered all the same, but cannot be uploaded.
  const auto large = serving.Chat(ChatBody(Words(500, 30), "Why?"));
  ASSERT_TRUE(large.outcome) << large.failure->message;
  EXPECT_EQ(large.outcome->context == nullptr, false);
  Parsed<ContextRequest> request = ParseContext(R"({"text": ")" + Words(500, 31) + R"("})");
  Parsed<std::shared_ptr<Job>> job = serving.service().UploadJob(*request);
  ASSERT_FALSE(serving.scheduler().Submit(*job));
  const auto failed = Serving::Collect(job->get());
  ASSERT_TRUE(failed.failure);
  EXPECT_NE(failed.failure->message.find("does not fit a pool"), std::string::npos);
}

TEST(Service, StopsLimitsAndLogprobs) {
  Serving serving({});
  const auto full = serving.Chat(ChatBody("", "Tell me", R"("logprobs": true, "top_logprobs": 3)"));
  ASSERT_TRUE(full.outcome) << full.failure->message;
  EXPECT_EQ(full.outcome->finish_reason, "length");
  EXPECT_EQ(full.outcome->generated_tokens, 12);
  ASSERT_EQ(full.logprobs.size(), 12u);
  for (const TokenLogprob& entry : full.logprobs) {
    ASSERT_EQ(entry.top.size(), 3u);
    EXPECT_EQ(entry.top[0].first, entry.token);  // greedy
    EXPECT_DOUBLE_EQ(entry.top[0].second, entry.logprob);
    EXPECT_GE(entry.top[0].second, entry.top[1].second);
    EXPECT_LT(std::exp(entry.top[0].second) + std::exp(entry.top[1].second) + std::exp(entry.top[2].second), 1.0);
  }
  // A stop string out of the middle of the answer, where it is there once as text.
  ASSERT_GE(full.text.size(), 4u);
  const std::string stop = nlohmann::json(full.text.substr(full.text.size() / 2))
                               .dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  const auto stopped = serving.Chat(ChatBody("", "Tell me", R"("stop": )" + stop));
  ASSERT_TRUE(stopped.outcome) << stopped.failure->message;
  EXPECT_LE(stopped.text.size(), full.text.size());
  EXPECT_EQ(full.text.rfind(stopped.text, 0), 0u);
  const auto one = serving.Complete(R"({"prompt": "abc", "max_tokens": 1, "temperature": 0})");
  EXPECT_EQ(one.outcome->generated_tokens, 1);
  const auto none = serving.Complete(R"({"prompt": "abc", "max_tokens": 0})");
  EXPECT_NE(none.failure->message.find("max_tokens is 0"), std::string::npos);
  const auto seeded = R"({"prompt": "abc", "max_tokens": 9, "temperature": 1, "seed": 5})";
  EXPECT_EQ(serving.Complete(seeded).text, serving.Complete(seeded).text);
}

TEST(Service, PromptsThatDoNotFitAreRefused) {
  ServingOptions options;
  options.context = 256;
  Serving serving(options);
  const auto answer = serving.Chat(ChatBody("", Words(200, 1)));
  ASSERT_TRUE(answer.failure);
  EXPECT_EQ(answer.failure->code, "context_length_exceeded");
  EXPECT_EQ(serving.Complete(R"({"prompt": [100000]})").failure->http_status, 400);
  EXPECT_EQ(serving.Complete(R"({"prompt": ""})").failure->http_status, 400);
  // The context ends the answer.
  const auto filled = serving.Complete(R"({"prompt": ")" + Words(40, 1) + R"(", "temperature": 0, "max_tokens": -1})");
  ASSERT_TRUE(filled.outcome);
  EXPECT_LE(filled.outcome->prompt_tokens + filled.outcome->generated_tokens, 256);
}

TEST(Service, EightAtOnceAnswerAsOneAtATime) {
  std::vector<std::string> expected;
  for (const int batch : {1, 0}) {
    ServingOptions options;
    options.scheduler.parallel = 8;
    options.scheduler.batch = batch;
    Serving serving(options);
    std::vector<std::shared_ptr<Job>> jobs;
    for (int i = 0; i < 8; ++i) {
      const std::string body = ChatBody(Words(80 + 10 * i, i), "Why?", i % 2 == 0 ? kCompressed : "");
      if (batch == 1) expected.push_back(serving.Chat(body + "").text);
      Parsed<std::shared_ptr<Job>> job = serving.service().ChatJob(body);
      ASSERT_TRUE(job.ok());
      jobs.push_back(*job);
    }
    for (const auto& job : jobs) ASSERT_FALSE(serving.scheduler().Submit(job));
    for (size_t i = 0; i < jobs.size(); ++i) EXPECT_EQ(Serving::Collect(jobs[i].get()).text, expected[i]) << batch;
  }
}

// A model that makes something that is no number of one byte: requests that hold it fail and say so, those beside and
// behind them are answered as by a sound model.
TEST(Service, NumbersThatAreNotFiniteFailOneRequest) {
  ServingOptions options;
  options.scheduler.parallel = 4;
  options.pool_bytes = 1 << 24;
  Serving sound(options);
  options.poisoned = '#';
  Serving serving(options);
  std::vector<std::string> bodies;
  for (int i = 0; i < 6; ++i) {
    const bool bad = i % 3 == 1;
    bodies.push_back(ChatBody(Words(i < 3 ? 5 : 80, i), bad ? "Why #?" : "Why?", i % 2 == 0 ? kCompressed : ""));
  }
  std::vector<std::shared_ptr<Job>> jobs;
  for (const std::string& body : bodies) {
    Parsed<std::shared_ptr<Job>> job = serving.service().ChatJob(body);
    ASSERT_TRUE(job.ok());
    jobs.push_back(*job);
    ASSERT_FALSE(serving.scheduler().Submit(*job));
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Serving::Answer answer = Serving::Collect(jobs[i].get());
    if (i % 3 == 1) {
      ASSERT_TRUE(answer.failure) << i;
      EXPECT_EQ(answer.failure->http_status, 500);
      EXPECT_NE(answer.failure->message.find("not a finite number"), std::string::npos) << answer.failure->message;
    } else {
      EXPECT_EQ(answer.text, sound.Chat(bodies[i]).text) << i;
    }
  }
  // Raw prompts fail too, and what follows them does not.
  EXPECT_TRUE(serving.Complete(R"({"prompt": "a # b", "max_tokens": 2})").failure);
  EXPECT_EQ(serving.Chat(bodies[0]).text, sound.Chat(bodies[0]).text);
}

// A prompt whose answer goes on and on.
std::string Endless(Serving* serving) {
  for (int i = 0;; ++i) {
    const std::string prompt = "Go on " + std::to_string(i);
    const auto answer = serving->Chat(ChatBody("", prompt, R"("max_tokens": 600)"));
    if (answer.outcome && answer.outcome->finish_reason == "length") return prompt;
  }
}

TEST(Service, RatiosThatCannotBeReached) {
  ServingOptions options;
  options.default_ratio = 50;
  Serving serving(options);
  const std::string document = Words(80, 1);
  const auto silent = serving.Chat(ChatBody(document, "Why?"));
  ASSERT_TRUE(silent.outcome) << silent.failure->message;
  EXPECT_EQ(silent.outcome->bill.layers_compressed, 0);
  EXPECT_NE(silent.outcome->bill.skipped_reason.find("ratio 50"), std::string::npos);
  const auto asked = serving.Chat(ChatBody(document, "Why?", R"("kv_ratio": 40)"));
  ASSERT_TRUE(asked.failure);
  EXPECT_EQ(asked.failure->param, "kv_ratio");
  EXPECT_NE(asked.failure->message.find("ratio 40"), std::string::npos);
}

TEST(Service, FullQueuesRefuseAndCancelledJobsMakeRoom) {
  ServingOptions options;
  options.scheduler.parallel = 1;
  options.scheduler.queue = 2;
  Serving serving(options);
  const std::string endless = ChatBody("", Endless(&serving), R"("max_tokens": 600)");
  const auto submit = [&](std::shared_ptr<Job>* job) {
    *job = *serving.service().ChatJob(endless);
    return serving.scheduler().Submit(*job);
  };
  std::shared_ptr<Job> running, waiting, also, refused;
  ASSERT_FALSE(submit(&running));
  ASSERT_EQ(running->Wait(10s)->kind, Event::Kind::kStarted);
  ASSERT_FALSE(submit(&waiting));
  ASSERT_FALSE(submit(&also));
  const auto failure = submit(&refused);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->http_status, 429);
  EXPECT_NE(failure->message.find("2 requests are waiting"), std::string::npos);
  EXPECT_FALSE(waiting->Wait(5ms));
  running->Cancel();
  also->Cancel();
  ASSERT_EQ(waiting->Wait(10s)->kind, Event::Kind::kStarted);
  waiting->Cancel();
  EXPECT_TRUE(serving.Chat(ChatBody("", "Hello")).outcome);
}

TEST(Service, BytesInFlightAreLimited) {
  ServingOptions options;
  options.scheduler.live_bytes = 64 << 10;  // 256 bytes per token: 256 tokens
  Serving serving(options);
  const auto refused = serving.Chat(ChatBody("", "Go on", R"("max_tokens": 3000)"));
  ASSERT_TRUE(refused.failure);
  EXPECT_EQ(refused.failure->code, "too_many_bytes");
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 6; ++i) {
    jobs.push_back(*serving.service().ChatJob(ChatBody("", "Go on", R"("max_tokens": 100)")));
    ASSERT_FALSE(serving.scheduler().Submit(jobs.back()));
  }
  for (const auto& job : jobs) EXPECT_TRUE(Serving::Collect(job.get()).outcome);
}

TEST(Service, ShutdownFinishesOrReportsEveryRequest) {
  ServingOptions options;
  options.scheduler.parallel = 2;
  Serving serving(options);
  const std::string prompt = Endless(&serving);
  const auto job = [&](const std::string& more) { return *serving.service().ChatJob(ChatBody("", prompt, more)); };
  const auto brief = job(R"("max_tokens": 20)");
  const auto endless = job(R"("max_tokens": 600)");
  const auto waiting = job(R"("max_tokens": 20)");
  for (const auto& each : {brief, endless, waiting}) ASSERT_FALSE(serving.scheduler().Submit(each));
  ASSERT_EQ(endless->Wait(10s)->kind, Event::Kind::kStarted);
  serving.scheduler().Shutdown(300ms);
  EXPECT_TRUE(Serving::Collect(brief.get()).outcome);
  const auto late = Serving::Collect(endless.get());
  // It may have ended by itself on a fast machine.
  if (late.failure) {
    EXPECT_EQ(late.failure->http_status, 503);
  }
  const auto never = Serving::Collect(waiting.get());
  if (never.failure) {
    EXPECT_EQ(never.failure->code, "shutting_down");
  }
  const auto after = serving.Chat(ChatBody("", "Hello"));
  ASSERT_TRUE(after.failure);
  EXPECT_EQ(after.failure->http_status, 503);
}

TEST(Service, ShortPromptsAreAnsweredWhileALongOneIsRead) {
  ServingOptions options;
  options.context = 60000;
  Serving serving(options);
  const auto large = *serving.service().CompletionJob(R"({"prompt": ")" + Words(10000, 1) + R"(", "max_tokens": 1})");
  ASSERT_FALSE(serving.scheduler().Submit(large));
  ASSERT_EQ(large->Wait(10s)->kind, Event::Kind::kStarted);
  const auto brief = serving.Chat(ChatBody("", "Hello"));
  EXPECT_TRUE(brief.outcome);
  EXPECT_FALSE(large->Wait(0ms)) << "the long prompt was read before the short one was answered";
  large->Cancel();
}

}  // namespace
}  // namespace anchorkv::server
