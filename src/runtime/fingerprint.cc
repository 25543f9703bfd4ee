#include "runtime/fingerprint.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "base/alloc_guard.h"
#include "base/checksum.h"
#include "base/mapped_file.h"
#include "gguf.h"
#include "runtime/engine.h"
#include "runtime/gguf_file.h"
#include "store/bytes.h"

namespace anchorkv {
namespace {

bool StartsWith(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

// Whether a key says how the model is run.
bool Counts(std::string_view key) {
  if (key == "general.architecture") return true;
  return !StartsWith(key, "general.") && !StartsWith(key, "split.") && !StartsWith(key, "tokenizer.chat_template");
}

size_t ElementBytes(gguf_type type) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
      return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
      return 2;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
      return 8;
    default:
      return 4;
  }
}

// Type and value of one key.
void AppendValue(const gguf_context* file, int64_t key, ByteWriter* out) {
  const gguf_type type = gguf_get_kv_type(file, key);
  out->Number(static_cast<int32_t>(type));
  if (type == GGUF_TYPE_STRING) {
    out->Text(gguf_get_val_str(file, key));
    return;
  }
  if (type != GGUF_TYPE_ARRAY) {
    out->Text({static_cast<const char*>(gguf_get_val_data(file, key)), ElementBytes(type)});
    return;
  }
  const gguf_type element = gguf_get_arr_type(file, key);
  const size_t count = gguf_get_arr_n(file, key);
  out->Number(static_cast<int32_t>(element));
  out->Number(static_cast<uint64_t>(count));
  if (element == GGUF_TYPE_STRING) {
    for (size_t i = 0; i < count; ++i) out->Text(gguf_get_arr_str(file, key, i));
  } else if (element != GGUF_TYPE_ARRAY && count > 0) {
    out->Text({static_cast<const char*>(gguf_get_arr_data(file, key)), count * ElementBytes(element)});
  }
}

uint64_t MetadataHash(const gguf_context* file) {
  std::map<std::string, int64_t> keys;
  for (int64_t i = 0; i < gguf_get_n_kv(file); ++i) {
    if (Counts(gguf_get_key(file, i))) keys.emplace(gguf_get_key(file, i), i);
  }
  ByteWriter out;
  for (const auto& [name, key] : keys) {
    out.Text(name);
    AppendValue(file, key, &out);
  }
  return Checksum(out.Take());
}

std::vector<const GgufTensor*> ByName(const GgufFile& file) {
  std::vector<const GgufTensor*> tensors;
  for (const GgufTensor& tensor : file.tensors()) tensors.push_back(&tensor);
  std::sort(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  return tensors;
}

uint64_t TensorsHash(std::span<const GgufTensor* const> tensors) {
  ByteWriter out;
  for (const GgufTensor* tensor : tensors) {
    out.Text(tensor->name);
    out.Number(static_cast<int32_t>(tensor->type));
    for (const int64_t n : tensor->ne) out.Number(n);
  }
  return Checksum(out.Take());
}

Result<uint64_t> WeightsHash(const GgufFile& file, std::span<const GgufTensor* const> tensors) {
  std::vector<MappedFile> parts;
  for (const std::string& path : file.paths()) {
    AKV_ASSIGN_OR_RETURN(MappedFile part, MappedFile::Map(path));
    parts.push_back(std::move(part));
  }
  for (const GgufTensor* tensor : tensors) {
    const MappedFile& part = parts[static_cast<size_t>(tensor->file)];
    if (tensor->offset + tensor->bytes > part.size_bytes()) return DataLoss("a model file became shorter");
  }
  std::vector<uint64_t> hashes(tensors.size());
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::byte* const data = parts[static_cast<size_t>(tensors[i]->file)].data() + tensors[i]->offset;
    hashes[i] = Checksum({data, static_cast<size_t>(tensors[i]->bytes)});
  }
  ByteWriter out;
  for (size_t i = 0; i < tensors.size(); ++i) {
    out.Text(tensors[i]->name);
    out.Number(hashes[i]);
  }
  return Checksum(out.Take());
}

}  // namespace

Result<ModelFingerprint> FingerprintModel(const std::string& path) {
  return GuardAllocation("a model's fingerprint", [&]() -> Result<ModelFingerprint> {
    AKV_ASSIGN_OR_RETURN(const ModelInfo info, ReadModelInfo(path));
    AKV_ASSIGN_OR_RETURN(const GgufFile file, GgufFile::Open(path));
    const std::vector<const GgufTensor*> tensors = ByName(file);
    ModelFingerprint print;
    print.name = info.name;
    print.architecture = info.architecture;
    print.quantization = info.quantization;
    print.metadata = MetadataHash(file.metadata());
    print.tensors = TensorsHash(tensors);
    AKV_ASSIGN_OR_RETURN(print.weights, WeightsHash(file, tensors));
    return print;
  });
}

}  // namespace anchorkv
