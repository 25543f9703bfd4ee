#include <algorithm>
#include <cstdio>

#include "base/alloc_guard.h"
#include "base/checksum.h"
#include "store/bytes.h"
#include "store/context_store.h"
#include "store/option_properties.h"

namespace anchorkv {
namespace {

// Model and options as bytes that differ when the contexts would.
std::vector<std::byte> Recipe(const ModelFingerprint& model, const CacheConfig& config) {
  ByteWriter out;
  for (const uint64_t hash : {model.metadata, model.tensors, model.weights}) out.Number(hash);
  for (const int number : {config.layers, config.q_heads, config.kv_heads, config.head_dim}) out.Number(number);
  out.Number(static_cast<int32_t>(config.tail_type));
  out.Number(static_cast<int32_t>(config.compress));
  if (config.compress) {
    out.Number(config.min_tokens);
    Properties options;
    SetOptions(config.codec, &options);
    const std::vector<std::byte> bytes = options.Bytes();
    out.Text({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  return out.Take();
}

}  // namespace

std::string ContextKey::Text() const {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
  return text;
}

ContextKey KeyOf(const ModelFingerprint& model, const CacheConfig& config, std::span<const int32_t> tokens) {
  const std::vector<std::byte> recipe = Recipe(model, config);
  const WideChecksum sum = ChecksumWide(recipe, std::as_bytes(tokens));
  return {sum.high, sum.low};
}

Result<std::shared_ptr<const StoredContext>> Find(ContextStore* store, const ModelFingerprint& model,
                                                  const CacheConfig& config, std::span<const int32_t> tokens) {
  return GuardAllocation("a search for a context", [&]() -> Result<std::shared_ptr<const StoredContext>> {
    AKV_ASSIGN_OR_RETURN(std::shared_ptr<const StoredContext> found, store->Get(KeyOf(model, config, tokens)));
    const bool same = Recipe(found->model, found->config) == Recipe(model, config) &&
                      std::equal(tokens.begin(), tokens.end(), found->tokens.begin(), found->tokens.end());
    if (!same) return NotFound("what is stored under the key of this prompt is another one");
    return found;
  });
}

}  // namespace anchorkv
