#include "server/serve_options.h"

#include <fstream>

#include "cli/validators.h"

namespace anchorkv::server {

void AddServeOptions(CLI::App* app, ServeOptions* o) {
  cli::AddServeOptions(app, &o->run);
  const auto add = [app](const char* name, auto* target, const char* help, const char* type, const char* group) {
    return app->add_option(name, *target, help)->type_name(type)->group(group);
  };
  constexpr char kServer[] = "Server";
  add("--host", &o->host, "Address to listen on (default 127.0.0.1)", "ADDRESS", kServer);
  add("--port", &o->port, "Port; 0 any free one (default 8080)", "N", kServer)->check(cli::Integer(0, 65535));
  add("--alias", &o->alias, "Name of the model as clients see it (default: the file's)", "NAME", kServer);
  add("--api-key", &o->api_key, "Requests must bring this key", "KEY", kServer);
  add("--api-key-file", &o->api_key_file, "The key is the first line of this file", "FILE", kServer);
  add("--parallel", &o->parallel, "Answers written at a time (-np, default 4)", "N", kServer)
      ->check(cli::Integer(1, 1024));
  add("--queue", &o->queue, "Requests that may wait; more get 429 (default 32)", "N", kServer)
      ->check(cli::Integer(0, 100000));
  add("--decode-batch", &o->batch, "Answers in one step of the model; 0 all (default), 1 each on its own", "N", kServer)
      ->check(cli::Integer(0, 1024));
  add("--threads-http", &o->http_threads, "Connections at a time; 0 enough for all that may wait (default)", "N",
      kServer)
      ->check(cli::Integer(0, 10000));
  add("--max-body", &o->max_body, "Largest body of a request (default 64M)", "BYTES", kServer);
  add("--timeout", &o->timeout_s,
      "Seconds that a request may take to come, and its answer to be read; large ones 1 more for each 16 KiB (default "
      "30)",
      "S", kServer)
      ->check(cli::Integer(1, 86400));
  add("--shutdown-grace", &o->grace_s, "Seconds that answers may take to finish after SIGTERM or SIGINT (default 30)",
      "S", kServer)
      ->check(cli::Integer(0, 86400));
  constexpr char kContexts[] = "Contexts kept";
  add("--kv-pool-bytes", &o->pool_bytes, "Memory for prefixes and uploads; 0 no limit (default 1G)", "BYTES",
      kContexts);
  add("--kv-live-bytes", &o->live_bytes,
      "Caches of the answers being written; requests wait until theirs fits; 0 no limit", "BYTES", kContexts);
  add("--kv-dir", &o->directory, "Keep contexts as .akv files in this folder too", "DIR", kContexts);
  add("--kv-redis", &o->redis, "Keep contexts in this Redis too, to share them with other servers", "HOST:PORT",
      kContexts);
}

Result<std::string> ResolveApiKey(const ServeOptions& o) {
  if (!o.api_key.empty() && !o.api_key_file.empty()) {
    return InvalidArgument("--api-key and --api-key-file say the same thing; give one of them");
  }
  if (o.api_key_file.empty()) return o.api_key;
  std::ifstream file(o.api_key_file);
  std::string key;
  if (!std::getline(file, key)) return NotFound("--api-key-file " + o.api_key_file + ": it cannot be read or is empty");
  while (!key.empty() && (key.back() == '\r' || key.back() == ' ')) key.pop_back();
  if (key.empty()) return InvalidArgument("--api-key-file " + o.api_key_file + ": its first line is empty");
  return key;
}

bool IsLoopback(const std::string& host) { return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0; }

}  // namespace anchorkv::server
