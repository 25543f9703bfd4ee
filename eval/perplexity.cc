#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "metrics/divergence.h"

namespace anchorkv {
namespace {

constexpr int64_t kBlock = 128;  // positions whose logits are held at once, for every cache

struct Quantile {
  const char* name;
  double q;
};
constexpr Quantile kQuantiles[] = {{"kl_max", 1},   {"kl_p999", .999}, {"kl_p99", .99}, {"kl_p95", .95},
                                   {"kl_p90", .90}, {"kl_p50", .5},    {"kl_p10", .10}, {"kl_p05", .05},
                                   {"kl_p01", .01}, {"kl_p001", .001}, {"kl_min", 0}};

// Log-probabilities as llama-perplexity stores them: per position a float scale and a float offset, then 16 bits
// per token, an even number of them.
class BaseRows {
 public:
  Status Open(const PerplexityInput& input, int vocab) {
    vocab_ = static_cast<size_t>(vocab);
    words_ = (vocab_ + 1) / 2 * 2 + 4;
    path_ = input.base_path;
    positions_ = input.chunk - 1 - input.chunk / 2;
    offset_ = input.base_offset;
    file_.open(path_, std::ios::binary);
    return file_ ? Status() : NotFound("cannot read " + path_);
  }
  void Seek(int64_t chunk) {
    file_.seekg(offset_ + chunk * positions_ * static_cast<int64_t>(words_ * sizeof(uint16_t)));
  }
  Status Read(int64_t rows, std::vector<float>* out) {
    std::vector<uint16_t> words(words_);
    out->resize(static_cast<size_t>(rows) * vocab_);
    for (int64_t i = 0; i < rows; ++i) {
      if (!file_.read(reinterpret_cast<char*>(words.data()), static_cast<std::streamsize>(words_ * sizeof(uint16_t)))) {
        return DataLoss(path_ + " ends before its last chunk");
      }
      float scale = 0, offset = 0;
      std::memcpy(&scale, words.data(), sizeof scale);
      std::memcpy(&offset, words.data() + 2, sizeof offset);
      float* row = out->data() + static_cast<size_t>(i) * vocab_;
      for (size_t t = 0; t < vocab_; ++t) row[t] = scale * static_cast<float>(words[4 + t]) + offset;
    }
    return {};
  }

 private:
  std::ifstream file_;
  std::string path_;
  size_t vocab_ = 0, words_ = 0;
  int64_t positions_ = 0, offset_ = 0;
};

struct Contender {
  const Configuration* configuration = nullptr;
  Row row;
  bool wanted = false;
  std::unique_ptr<KvCache> cache;
  Divergence divergence;
  std::vector<float> logits;
};

void Report(const std::string& label, const Divergence& d) {
  std::fprintf(stderr, "%s: %lld positions\n", label.c_str(), static_cast<long long>(d.count()));
  std::fprintf(stderr, "  Mean PPL(Q)          %10.4f\n  Mean PPL(base)       %10.4f\n  Mean PPL(Q)/PPL(base) %9.5f\n",
               std::exp(d.nll()), std::exp(d.reference_nll()), std::exp(d.nll() - d.reference_nll()));
  std::fprintf(stderr, "  Mean KLD             %10.6f\n", d.kl());
  for (const Quantile& quantile : kQuantiles) {
    std::fprintf(stderr, "  %-20s %10.6f\n", quantile.name, d.kl_quantile(quantile.q));
  }
  std::fprintf(stderr, "  Same top p           %9.3f%%\n", 100 * d.same_top());
}

}  // namespace

Result<PerplexityInput> CutText(const Tokenizer& tokenizer, const std::string& name, const std::string& text,
                                int64_t chunk, int64_t max_chunks) {
  PerplexityInput input;
  input.name = name;
  input.chunk = chunk;
  input.tokens = tokenizer.Encode(text, true, false);
  const auto whole = static_cast<int64_t>(input.tokens.size()) / chunk;
  if (whole < 1) {
    return InvalidArgument(name + " has " + std::to_string(input.tokens.size()) + " tokens; one chunk takes " +
                           std::to_string(chunk));
  }
  input.chunks = max_chunks > 0 ? std::min(whole, max_chunks) : whole;
  input.tokens.resize(static_cast<size_t>(input.chunks * chunk));
  return input;
}

Result<PerplexityInput> ReadBase(const std::string& path, int vocab, int64_t max_chunks) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound("cannot read " + path);
  char magic[8] = {};
  uint32_t chunk = 0;
  int32_t base_vocab = 0, chunks = 0;
  file.read(magic, sizeof magic);
  file.read(reinterpret_cast<char*>(&chunk), sizeof chunk);
  file.read(reinterpret_cast<char*>(&base_vocab), sizeof base_vocab);
  file.read(reinterpret_cast<char*>(&chunks), sizeof chunks);
  constexpr uint32_t kMaxChunk = 1u << 24;
  if (!file || std::memcmp(magic, "_logits_", sizeof magic) != 0 || chunk < 4 || chunk > kMaxChunk || chunks < 1 ||
      chunks > int32_t(kMaxChunk / chunk)) {
    return DataLoss(path + " is not a file of llama-perplexity --kl-divergence-base");
  }
  if (base_vocab != vocab) {
    return InvalidArgument(path + " was made with a vocabulary of " + std::to_string(base_vocab) + "; the model has " +
                           std::to_string(vocab));
  }
  PerplexityInput input;
  input.base_path = path;
  input.name = path.substr(path.rfind('/') + 1);
  input.chunk = chunk;
  input.chunks = max_chunks > 0 ? std::min<int64_t>(chunks, max_chunks) : chunks;
  input.tokens.resize(size_t{chunk} * static_cast<size_t>(chunks));
  if (!file.read(reinterpret_cast<char*>(input.tokens.data()),
                 static_cast<std::streamsize>(input.tokens.size() * sizeof(int32_t)))) {
    return DataLoss(path + " ends inside its tokens");
  }
  input.base_offset = file.tellg();
  return input;
}

Status RunPerplexity(Engine* engine, const Tokenizer& tokenizer, const Backend& backend, const RunnerOptions& options,
                     PerplexityInput input, const Runner::Hooks& hooks) {
  const auto vocab = static_cast<size_t>(engine->info().vocab);
  const int64_t prefix = input.chunk / 2;
  BaseRows base;
  const bool has_base = !input.base_path.empty();
  if (has_base) {
    AKV_RETURN_IF_ERROR(base.Open(input, engine->info().vocab));
  }
  const std::vector<int32_t> bos = tokenizer.AddsBos() ? tokenizer.Encode("", true, false) : std::vector<int32_t>();
  std::vector<Divergence> totals(options.configurations.size());

  for (int64_t chunk = 0; chunk < input.chunks; ++chunk) {
    std::vector<Contender> contenders;
    bool missing = false;
    for (const Configuration& c : options.configurations) {
      Contender contender;
      contender.configuration = &c;
      contender.row = {
          {"suite", "ppl"}, {"task", input.name}, {"sample", chunk}, {"length", input.chunk}, {"protocol", "agnostic"}};
      contender.row.update(c.columns());
      contender.row.update(options.columns);
      contender.wanted = hooks.wanted(contender.row);
      missing |= contender.wanted;
      contenders.push_back(std::move(contender));
    }
    if (!missing) continue;

    std::vector<int32_t> tokens(input.tokens.begin() + chunk * input.chunk,
                                input.tokens.begin() + (chunk + 1) * input.chunk);
    if (!bos.empty()) tokens.front() = bos.front();
    const auto context = std::span(tokens).first(static_cast<size_t>(prefix));
    AKV_ASSIGN_OR_RETURN(const auto record, engine->MakeRecord(Observed(options.configurations)));
    AKV_RETURN_IF_ERROR(engine->Extend(record.get(), context, nullptr, hooks.progress));
    std::unique_ptr<KvCache> full;  // the reference, unless a base file is
    if (!has_base) {
      AKV_ASSIGN_OR_RETURN(full, engine->MakeDenseCache(*record));
    }
    if (Observed(options.configurations).reconstruction) {
      AKV_RETURN_IF_ERROR(ObserveReconstruction(engine, tokenizer, "", context, record.get()));
    }
    EqualBytes equal_bytes(engine, record.get(), &backend);
    for (Contender& contender : contenders) {
      const Configuration& c = *contender.configuration;
      if (c.is_full()) {
        AKV_ASSIGN_OR_RETURN(contender.cache, engine->MakeDenseCache(*record));
        continue;
      }
      if (!contender.wanted && c.method != "anchorkv") continue;
      Result<StoredSegments> segments = equal_bytes.Compress(c);
      if (segments.ok()) {
        AKV_ASSIGN_OR_RETURN(contender.cache, engine->MakeCache(std::move(*segments)));
        continue;
      }
      if (!IsGap(segments.status())) return segments.status();
      if (!contender.wanted) continue;
      contender.row["error"] = segments.status().message();
      AKV_RETURN_IF_ERROR(hooks.emit(contender.row));
    }
    std::erase_if(contenders, [](const Contender& c) { return !c.wanted || c.cache == nullptr; });
    for (Contender& contender : contenders) {
      const ByteBill bill = contender.cache->bill();
      contender.row["achieved_ratio"] = bill.ratio();
      contender.row["resident_bytes"] = bill.resident_bytes();
    }

    // Position i predicts token i + 1; all caches go through the second half side by side.
    if (has_base) base.Seek(chunk);
    std::vector<float> reference;
    for (int64_t first = prefix; first + 1 < input.chunk; first += kBlock) {
      const int64_t n = std::min(kBlock, input.chunk - 1 - first);
      const auto step = std::span(tokens).subspan(static_cast<size_t>(first), static_cast<size_t>(n));
      AKV_RETURN_IF_ERROR(has_base ? base.Read(n, &reference) : engine->Append(full.get(), step, &reference, true));
      for (Contender& contender : contenders) {
        AKV_RETURN_IF_ERROR(engine->Append(contender.cache.get(), step, &contender.logits, true));
        for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
          const auto of_reference = std::span(reference).subspan(i * vocab, vocab);
          const auto own = std::span(contender.logits).subspan(i * vocab, vocab);
          const int32_t next = tokens[static_cast<size_t>(first) + i + 1];
          if (has_base) {
            contender.divergence.AddStored(of_reference, own, next);
          } else {
            contender.divergence.Add(of_reference, own, next);
          }
        }
      }
    }
    for (Contender& contender : contenders) {
      const Divergence& d = contender.divergence;
      contender.row["positions"] = d.count();
      contender.row["ppl"] = std::exp(d.nll());
      contender.row["ppl_full"] = std::exp(d.reference_nll());
      contender.row["kl"] = d.kl();
      contender.row["top1"] = d.same_top();
      for (const Quantile& quantile : kQuantiles) contender.row[quantile.name] = d.kl_quantile(quantile.q);
      AKV_RETURN_IF_ERROR(hooks.emit(contender.row));
      totals[static_cast<size_t>(contender.configuration - options.configurations.data())].Merge(d);
    }
  }
  for (size_t i = 0; i < totals.size(); ++i) {
    if (totals[i].count() > 0) Report(options.configurations[i].label(), totals[i]);
  }
  return {};
}

}  // namespace anchorkv
