// What the program says about a cache: the report line after prefill, the JSON object per question, byte
// counts for people.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "anchorkv/options.h"
#include "cache/kv_cache.h"

namespace anchorkv::cli {

// "16.00 GiB", "77.9 MiB", "512 B".
std::string FormatBytes(double bytes);

// Highest resident set of this process, since the last reset where the system can (Linux), else so far.
int64_t PeakRssBytes();
void ResetPeakRss();

struct Peak {
  int64_t buffer_bytes = 0;   // the library's own buffers at their highest
  int64_t process_bytes = 0;  // resident set of the process at its highest
};

// One line: method, layers compressed and skipped and why, dense bytes (16-bit keys and values of all layers
// and tokens held), resident bytes, their quotient, peaks.
std::string ReportLine(const CacheConfig& config, const ByteBill& bill, const Peak& peak);

// One answered question; times in seconds.
struct AnswerRecord {
  std::string question;
  std::string answer;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  double prefill_s = 0;
  double compress_s = 0;
  double decode_tokens_per_s = 0;
};

// What a cache holds. `profile` and `theta` are null for the full cache.
nlohmann::ordered_json CacheJson(const CacheConfig& config, const ByteBill& bill);
nlohmann::ordered_json AnswerJson(const AnswerRecord& record, const CacheConfig& config, const ByteBill& bill,
                                  int64_t peak_rss_bytes);

// One line of text; bytes that are not UTF-8 become U+FFFD.
std::string Dump(const nlohmann::ordered_json& json);

}  // namespace anchorkv::cli
