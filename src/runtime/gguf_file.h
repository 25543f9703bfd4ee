// A GGUF file, or all parts of a split one, as metadata: typed keys and a table of tensors whose extents
// have been checked against the file sizes. Reads no weights. ggml's own accessors end the process on a
// wrong type; the ones here return a Status.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "anchorkv/status.h"
#include "ggml-cpp.h"

namespace anchorkv {

struct GgufTensor {
  std::string name;
  ggml_type type = GGML_TYPE_F32;
  int64_t ne[GGML_MAX_DIMS] = {1, 1, 1, 1};  // ne[0] is the contiguous dimension
  int file = 0;                              // index into GgufFile::paths()
  int64_t offset = 0;                        // bytes from the start of that file
  int64_t bytes = 0;
};

class GgufFile {
 public:
  enum class Need { kOptional, kRequired };

  // `path` is a whole file or the first part (-00001-of-0000N.gguf) of a split model. kNotFound names the
  // missing file or part, kDataLoss says what is damaged, kInvalidArgument when another part than the first
  // is given.
  static Result<GgufFile> Open(const std::string& path);

  const std::vector<std::string>& paths() const noexcept { return paths_; }
  // Bytes of each file.
  const std::vector<int64_t>& file_bytes() const noexcept { return file_bytes_; }
  const std::vector<GgufTensor>& tensors() const noexcept { return tensors_; }
  const GgufTensor* Find(const std::string& name) const noexcept;

  bool Has(const std::string& key) const noexcept;
  // Reads a key of the first part. An absent optional key leaves *value as it is; an absent required one, a
  // value of another kind or outside [min, max] is kDataLoss naming the key. Integers may be stored in any
  // integer type, and as a per-layer array if all its elements agree (else kUnsupported).
  Status Read(const std::string& key, Need need, int64_t min, int64_t max, int64_t* value) const;
  Status Read(const std::string& key, Need need, double* value) const;
  Status Read(const std::string& key, Need need, bool* value) const;
  Status Read(const std::string& key, Need need, std::string* value) const;
  // A required array of booleans or integers, one per layer: true where an element is not 0.
  Status Read(const std::string& key, std::vector<bool>* values) const;
  // All keys, of the first part.
  const gguf_context* metadata() const noexcept { return metadata_.get(); }
  // Elements of an array key, or -1 if there is no such array.
  int64_t ArrayLength(const std::string& key) const noexcept;

 private:
  Status AddPart(const std::string& path);
  Status AddTensors(const gguf_context* part, int file);
  Status OpenFurtherParts(const std::string& first, int64_t count);

  gguf_context_ptr metadata_;  // of the first part
  std::vector<std::string> paths_;
  std::vector<int64_t> file_bytes_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string, size_t> index_;
};

}  // namespace anchorkv
