// The command line of `anchorkv serve`.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "anchorkv/status.h"
#include "cli/run_options.h"

namespace anchorkv::server {

struct ServeOptions {
  cli::RunOptions run;  // model, cache, machine, sampling
  std::string host = "127.0.0.1";
  int port = 8080;
  std::string alias;
  std::string api_key;
  std::string api_key_file;
  int parallel = 4;
  int queue = 32;
  int batch = 0;
  int timeout_s = 30;
  int http_threads = 0;  // 0: enough for everybody who may wait
  std::string pool_bytes = "1G";
  std::string live_bytes = "0";
  std::string max_body = "64M";
  std::string directory;  // --kv-dir
  std::string redis;      // --kv-redis
  int grace_s = 30;
};

void AddServeOptions(CLI::App* app, ServeOptions* options);

// The key of --api-key or of the first line of --api-key-file, empty for none.
Result<std::string> ResolveApiKey(const ServeOptions& options);

// True for 127.0.0.0/8, ::1 and localhost.
bool IsLoopback(const std::string& host);

}  // namespace anchorkv::server
