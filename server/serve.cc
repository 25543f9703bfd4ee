// `anchorkv serve`: an HTTP server with OpenAI's API over compressed caches.
#include <fmt/format.h>
#include <malloc.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>

#include "cli/byte_count.h"
#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/report.h"
#include "runtime/engine.h"
#include "runtime/fingerprint.h"
#include "server/http_server.h"
#include "server/serve_options.h"
#include "server/service.h"
#ifdef ANCHORKV_HAS_REDIS
#include "store/redis_store.h"
#endif

namespace anchorkv::server {
namespace {

using cli::Fail;
using cli::FailUsage;
using cli::FormatBytes;
using cli::Note;

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  return signals;
}

// The next of the signals within the time, or 0.
int WaitForSignal(const sigset_t& signals, std::chrono::milliseconds time) {
  const timespec limit = {time.count() / 1000, (time.count() % 1000) * 1000000};
  return std::max(0, sigtimedwait(&signals, nullptr, &limit));
}

// Waits for a signal, then lets the answers finish and ends the server. A second signal ends the answers too.
void EndOnSignal(Scheduler* scheduler, HttpServer* http, int grace_s, const std::atomic<bool>& ended) {
  const sigset_t signals = StopSignals();
  while (WaitForSignal(signals, std::chrono::milliseconds(200)) == 0) {
    if (ended) return;
  }
  Note(fmt::format("shutting down: answers may take {} s to finish; signal again to stop them now", grace_s));
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    scheduler->Shutdown(std::chrono::seconds(grace_s));
    drained = true;
  });
  while (!drained) {
    if (WaitForSignal(signals, std::chrono::milliseconds(50)) != 0) scheduler->Hurry();
  }
  drain.join();
  http->Stop();
}

struct Limits {
  int64_t pool = 0;
  int64_t live = 0;
  int64_t body = 0;
};

Result<Limits> ResolveLimits(const ServeOptions& o) {
  Limits limits;
  AKV_ASSIGN_OR_RETURN(limits.pool, cli::ParseBytes("--kv-pool-bytes", o.pool_bytes));
  AKV_ASSIGN_OR_RETURN(limits.live, cli::ParseBytes("--kv-live-bytes", o.live_bytes));
  AKV_ASSIGN_OR_RETURN(limits.body, cli::ParseBytes("--max-body", o.max_body));
  if (limits.body < 1024) return InvalidArgument("--max-body is " + o.max_body + "; at least 1K is needed");
  if (!o.directory.empty() && !o.redis.empty()) {
    return InvalidArgument("--kv-dir and --kv-redis are both places for contexts; give one of them");
  }
  return limits;
}

Result<std::unique_ptr<ContextStore>> OpenSecondStore(const ServeOptions& o) {
  if (!o.directory.empty()) return MakeDirectoryStore(o.directory, 0);
#ifdef ANCHORKV_HAS_REDIS
  if (!o.redis.empty()) return MakeRedisStore(o.redis, 0);
#else
  if (!o.redis.empty()) return Unsupported("--kv-redis: this build has no Redis client; build it with hiredis");
#endif
  return std::unique_ptr<ContextStore>();
}

int Serve(const ServeOptions& o) {
  SetModelLogs(o.run.verbose);
  const Result<Limits> limits = ResolveLimits(o);
  if (!limits.ok()) return FailUsage(limits.status());
  const Result<std::string> key = ResolveApiKey(o);
  if (!key.ok()) return FailUsage(key.status());
  const Result<CacheConfig> asked = ResolveCache(o.run, {});
  if (!asked.ok()) return FailUsage(asked.status());
  const Result<ModelInfo> info = ReadModelInfo(o.run.model);
  if (!info.ok()) return Fail(info.status());
  if (const Status status = CheckContextSize(o.run, *info); !status.ok()) return FailUsage(status);
  const int64_t context = o.run.context > 0 ? o.run.context : info->context;

#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, 4);  // a heap per connection's thread would keep what their requests once needed
#endif
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file that grows beyond a limit is an error of its write, not the end
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // every thread inherits it; one waits for them

  Result<ModelFingerprint> model = FingerprintModel(o.run.model);
  if (!model.ok()) return Fail(model.status());
  const Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(o.run.model);
  if (!tokenizer.ok()) return Fail(tokenizer.status());
  Result<std::unique_ptr<ContextStore>> second = OpenSecondStore(o);
  if (!second.ok()) return Fail(second.status());
  EngineOptions engine_options;
  const Result<Device> device = ResolveDevice(o.run.device, info->layers);
  if (!device.ok()) return FailUsage(device.status());
  engine_options.device = *device;
  engine_options.threads = o.run.threads;
  engine_options.chunk = o.run.chunk;
  engine_options.max_context = context;
  const Result<std::unique_ptr<Engine>> engine = Engine::Load(o.run.model, engine_options);
  if (!engine.ok()) return Fail(engine.status());

  ServiceOptions service_options;
  service_options.model_name = o.alias.empty() ? std::filesystem::path(o.run.model).stem().string() : o.alias;
  service_options.chat_template = o.run.chat_template;
  const Result<CacheConfig> config = ResolveCache(o.run, (*engine)->cache_config());
  if (!config.ok()) return FailUsage(config.status());
  if (config->tail_limit > 0) {
    // Not every device compresses tails.
    if (const Status status = (*engine)->MakeCache(*config).status(); !status.ok()) return FailUsage(status);
  }
  service_options.config = *config;
  service_options.default_ratio = o.run.budget.ratio || o.run.budget.theta ? 1.0 / config->codec.theta : 1.0;
  service_options.context = context;
  service_options.pool_bytes = limits->pool;
  service_options.defaults.sampling = o.run.sampling;
  if (o.run.seed >= 0) service_options.defaults.seed = static_cast<uint32_t>(o.run.seed);
  service_options.defaults.max_tokens = o.run.predict;

  const std::string second_name = o.redis.empty() ? o.directory : o.redis;
  Metrics metrics(service_options.model_name);
  ContextPool pool(std::move(*model), limits->pool, std::move(*second), second_name,
                   [](const std::string& line) { Note(line); });
  Scheduler scheduler(engine->get(), tokenizer->get(), &pool, &metrics,
                      {o.parallel, o.queue, o.batch, limits->live, o.run.chunk});
  Service service(service_options, *info, tokenizer->get(), &pool, &scheduler, &metrics);

  HttpOptions http_options;
  http_options.host = o.host;
  http_options.port = o.port;
  http_options.api_key = *key;
  http_options.max_body_bytes = limits->body;
  // Whoever waits has a thread, and some are left to tell the next ones that the queue is full.
  http_options.threads = o.http_threads > 0 ? o.http_threads : o.parallel + o.queue + 32;
  http_options.timeout_s = o.timeout_s;
  http_options.log_requests = o.run.verbose;
  const Result<std::unique_ptr<HttpServer>> http = HttpServer::Bind(http_options, &service);
  if (!http.ok()) return Fail(http.status());

  if (!IsLoopback(o.host) && key->empty()) {
    Note("warning: everybody who reaches " + o.host + " can use this server; give it an --api-key");
  }
  const double per_token = 4.0 * info->kv_heads * info->head_dim * info->layers;
  Note(fmt::format(
      "{}: {} on {}, context {} tokens; keys and values take {} per token, {}", service_options.model_name,
      Describe(pool.model()), (*engine)->device_name(), context, FormatBytes(per_token),
      service_options.default_ratio > 1
          ? fmt::format("{} at the default kv_ratio {:g}", FormatBytes(per_token / service_options.default_ratio),
                        service_options.default_ratio)
          : std::string("kv_ratio of a request compresses them")));
  Note(fmt::format("listening on http://{}:{}", o.host, (*http)->port()));

  std::atomic<bool> ended{false};
  std::thread end([&] { EndOnSignal(&scheduler, http->get(), o.grace_s, ended); });
  (*http)->Listen();
  ended = true;
  end.join();
  Note("stopped");
  return cli::kExitOk;
}

}  // namespace
}  // namespace anchorkv::server

namespace anchorkv::cli {

void AddServeCommand(CLI::App* app, Action* action) {
  CLI::App* serve = app->add_subcommand("serve", "Serve OpenAI's API and a web page over compressed caches");
  const auto options = std::make_shared<server::ServeOptions>();
  server::AddServeOptions(serve, options.get());
  serve->callback([options, action] { *action = [options] { return server::Serve(*options); }; });
}

}  // namespace anchorkv::cli
