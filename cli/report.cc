#include "cli/report.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <array>
#include <cstdio>

namespace anchorkv::cli {

std::string FormatBytes(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 100 ? 2 : 1, kUnits[unit]);
}

int64_t PeakRssBytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
  return usage.ru_maxrss;
#else
  return int64_t{usage.ru_maxrss} * 1024;
#endif
}

void ResetPeakRss() {
  // Documented in proc(5); without the file or the right to write it, the peak stays that of the whole run.
  if (std::FILE* file = std::fopen("/proc/self/clear_refs", "w")) {
    std::fputs("5", file);
    std::fclose(file);
  }
}

std::string ReportLine(const CacheConfig& config, const ByteBill& bill, const Peak& peak) {
  std::string method = "full";
  std::string layers = fmt::format("{} layers exact", bill.layers_total);
  if (config.compress) {
    method = fmt::format("anchorkv {} theta={:.4g}", Name(config.codec.profile), config.codec.theta);
    const int skipped = bill.layers_total - bill.layers_compressed - bill.layers_sliding;
    layers = fmt::format("{}/{} layers compressed, {} skipped", bill.layers_compressed, bill.layers_total, skipped);
    std::string reason = bill.skipped_reason;
    if (skipped > 0 && bill.tokens < config.min_tokens) {
      reason = fmt::format("{} tokens are fewer than --kv-min-tokens {}", bill.tokens, config.min_tokens);
    }
    if (!reason.empty()) layers += " (" + reason + ")";
  }
  if (bill.layers_sliding > 0) {
    layers += fmt::format(", layers {} exact for the last {} tokens", SlidingLayersText(config), config.sliding_window);
  }
  return fmt::format(
      "KV cache: {}, {}; {} tokens, {} dense -> {} resident, ratio {:.2f}; peak {} in buffers, {} process", method,
      layers, bill.tokens, FormatBytes(static_cast<double>(bill.dense_bytes)),
      FormatBytes(static_cast<double>(bill.resident_bytes())), bill.ratio(),
      FormatBytes(static_cast<double>(peak.buffer_bytes)), FormatBytes(static_cast<double>(peak.process_bytes)));
}

// [{layers, reason}]: which layers are not compressed and why.
nlohmann::ordered_json NotCompressed(const CacheConfig& config, const ByteBill& bill) {
  auto list = nlohmann::ordered_json::array();
  const auto add = [&](bool sliding, const std::string& reason) {
    auto layers = nlohmann::ordered_json::array();
    for (int l = 0; l < config.layers; ++l) {
      if (config.slides(l) == sliding) layers.push_back(l);
    }
    if (!layers.empty()) list.push_back({{"layers", layers}, {"reason", reason}});
  };
  if (bill.layers_compressed == 0) add(false, bill.skipped_reason.empty() ? "compression is off" : bill.skipped_reason);
  add(true, fmt::format("a sliding window of {} tokens", config.sliding_window));
  return list;
}

nlohmann::ordered_json CacheJson(const CacheConfig& config, const ByteBill& bill) {
  using Json = nlohmann::ordered_json;
  return {
      {"method", config.compress ? "anchorkv" : "full"},
      {"profile", config.compress ? Json(Name(config.codec.profile)) : Json()},
      {"theta", config.compress ? Json(config.codec.theta) : Json()},
      {"asked_ratio", config.compress ? 1.0 / config.codec.theta : 1.0},
      {"dense_bytes", bill.dense_bytes},
      {"resident_bytes", bill.resident_bytes()},
      {"ratio", bill.ratio()},
      {"layers_compressed", bill.layers_compressed},
      {"layers_total", bill.layers_total},
      {"layers_not_compressed", NotCompressed(config, bill)},
      {"residual_share_k", bill.residual_share_k},
      {"residual_share_v", bill.residual_share_v},
  };
}

nlohmann::ordered_json AnswerJson(const AnswerRecord& record, const CacheConfig& config, const ByteBill& bill,
                                  int64_t peak_rss_bytes) {
  return {
      {"question", record.question},
      {"answer", record.answer},
      {"prompt_tokens", record.prompt_tokens},
      {"generated_tokens", record.generated_tokens},
      {"kv", CacheJson(config, bill)},
      {"timing",
       {{"prefill_s", record.prefill_s},
        {"compress_s", record.compress_s},
        {"decode_tokens_per_s", record.decode_tokens_per_s}}},
      {"peak_rss_bytes", peak_rss_bytes},
  };
}

std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace anchorkv::cli
