// A compressed prompt with all that is needed to go on from it: which model made it, how, of which tokens, what the
// chat template puts around a question, and every layer's bytes. What an .akv file holds; docs/file-format.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "cache/kv_cache.h"
#include "store/sections.h"
#include "store/segment_image.h"

namespace anchorkv {

// Which model file. Names are for people; the hashes decide.
struct ModelFingerprint {
  std::string name;          // general.name, may be empty
  std::string architecture;  // "llama"
  std::string quantization;  // majority type of the weights, "Q4_1"
  uint64_t metadata = 0;     // everything that says how to run the model and its tokenizer
  uint64_t tensors = 0;      // names, types and shapes
  uint64_t weights = 0;      // the tensors' bytes
};

// "SmolLM2 (llama, Q4_1)".
std::string Describe(const ModelFingerprint& model);
// Empty when they are the same model, else what differs: "it was made for X, this is Y: the weights differ".
std::string Difference(const ModelFingerprint& file, const ModelFingerprint& loaded);

// The texts of runtime/chat_frame.h.
struct StoredFrame {
  std::string before;
  std::string after;
  std::string between;

  friend bool operator==(const StoredFrame&, const StoredFrame&) = default;
};

struct StoredContext {
  std::string writer;  // "anchorkv 0.1.0"
  std::string source;  // the document's file name, may be empty
  ModelFingerprint model;
  CacheConfig config;  // shape, options; the tail's limit is not stored
  StoredFrame frame;
  std::vector<int32_t> tokens;
  // One per layer, from position 0, as long as `tokens`; all of rows or none. Layers that slide (CacheConfig) have the
  // rows of the window, which end where the tokens do.
  std::vector<SegmentImage> layers;

  // The format of the layers that do not slide; kRows when every layer does.
  SegmentFormat format() const noexcept;
  bool compressed() const noexcept { return format() != SegmentFormat::kRows; }
  int64_t segment_bytes() const noexcept;
};

// A context's bytes. Borrows those of its layers, which must outlive it. kInvalidArgument for what cannot be stored.
class ContextImage {
 public:
  static Result<ContextImage> Make(const StoredContext& context);
  std::span<const std::span<const std::byte>> pieces() const noexcept { return sections_.pieces(); }
  uint64_t total_bytes() const noexcept { return sections_.total_bytes(); }

 private:
  SectionImage sections_;
};

// The context of a file's bytes, checked to the last index, so that attention can rely on it. Its layers point into
// `file` and keep `owner`. kDataLoss for damage, kUnsupported for what a later version wrote. Messages do not name the
// file.
Result<StoredContext> ReadContext(std::span<const std::byte> file, std::shared_ptr<const void> owner);

// Puts a context at `path` as base/atomic_file.h does it. Errors name the path.
Status WriteContextFile(const std::string& path, const StoredContext& context);
// Maps a file; its pages stay mapped as long as a layer of the context is in use. Whoever changes the file meanwhile
// changes the context: replace files by renaming, as WriteContextFile does. Errors name the path.
Result<StoredContext> ReadContextFile(const std::string& path);

}  // namespace anchorkv
