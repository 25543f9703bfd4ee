#include "runtime/gguf_file.h"

#include <cstdio>
#include <filesystem>
#include <system_error>

#include "gguf.h"
#include "runtime/ggml_log.h"

namespace anchorkv {
namespace {

// Tensor data of every writer we know is aligned to at least this; SIMD loads and ggml's buffers rely on it.
constexpr size_t kMinAlignment = 32;

std::string Quoted(const std::string& text) { return "'" + text + "'"; }

// An integer of any width, or nothing when the type is not an integer (or does not fit).
bool ReadInteger(gguf_type type, const void* data, size_t index, int64_t* value) {
  switch (type) {
    case GGUF_TYPE_UINT8:
      *value = static_cast<const uint8_t*>(data)[index];
      return true;
    case GGUF_TYPE_INT8:
      *value = static_cast<const int8_t*>(data)[index];
      return true;
    case GGUF_TYPE_UINT16:
      *value = static_cast<const uint16_t*>(data)[index];
      return true;
    case GGUF_TYPE_INT16:
      *value = static_cast<const int16_t*>(data)[index];
      return true;
    case GGUF_TYPE_UINT32:
      *value = static_cast<const uint32_t*>(data)[index];
      return true;
    case GGUF_TYPE_INT32:
      *value = static_cast<const int32_t*>(data)[index];
      return true;
    case GGUF_TYPE_INT64:
      *value = static_cast<const int64_t*>(data)[index];
      return true;
    case GGUF_TYPE_UINT64: {
      const uint64_t wide = static_cast<const uint64_t*>(data)[index];
      if (wide > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
      *value = static_cast<int64_t>(wide);
      return true;
    }
    default:
      return false;
  }
}

// The file name of part `part` (from 0) of a model split in `count`: PREFIX-00001-of-0000N.gguf.
std::string PartSuffix(int64_t part, int64_t count) {
  char suffix[64];
  std::snprintf(suffix, sizeof(suffix), "-%05lld-of-%05lld.gguf", static_cast<long long>(part + 1),
                static_cast<long long>(count));
  return suffix;
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

struct OpenedPart {
  gguf_context_ptr context;
  int64_t bytes = 0;
};

Result<OpenedPart> OpenPart(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) return NotFound("no such file: " + path);
  if (error) return NotFound("cannot open " + path + ": " + error.message());
  if (status.type() != std::filesystem::file_type::regular) return InvalidArgument(path + " is not a regular file");
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) return NotFound("cannot open " + path + ": " + error.message());
  std::FILE* readable = std::fopen(path.c_str(), "rb");
  if (readable == nullptr) return NotFound("cannot open " + path + " for reading");
  std::fclose(readable);

  OpenedPart part;
  part.bytes = static_cast<int64_t>(bytes);
  GgmlLogCapture log;
  part.context.reset(gguf_init_from_file(path.c_str(), gguf_init_params{/*no_alloc=*/true, /*ctx=*/nullptr}));
  if (part.context == nullptr) {
    const std::string why = log.first_error().empty() ? "its header cannot be read" : log.first_error();
    return DataLoss(path + " is not a readable GGUF file: " + why);
  }
  const size_t alignment = gguf_get_alignment(part.context.get());
  if (alignment < kMinAlignment) {
    return Unsupported(path + " aligns its tensors to " + std::to_string(alignment) + " bytes; at least " +
                       std::to_string(kMinAlignment) + " are needed");
  }
  return part;
}

}  // namespace

Result<GgufFile> GgufFile::Open(const std::string& path) {
  GgufFile file;
  AKV_RETURN_IF_ERROR(file.AddPart(path));
  int64_t count = 1;
  int64_t part = 0;
  constexpr int64_t kMaxParts = 65535;  // the key is a 16-bit integer
  AKV_RETURN_IF_ERROR(file.Read("split.count", Need::kOptional, 0, kMaxParts, &count));
  if (count <= 1) return file;
  AKV_RETURN_IF_ERROR(file.Read("split.no", Need::kRequired, 0, kMaxParts, &part));
  if (part != 0) {
    return InvalidArgument(path + " is part " + std::to_string(part + 1) + " of " + std::to_string(count) +
                           " of a split model; give the first part (..." + PartSuffix(0, count) + ")");
  }
  AKV_RETURN_IF_ERROR(file.OpenFurtherParts(path, count));
  return file;
}

Status GgufFile::OpenFurtherParts(const std::string& first, int64_t count) {
  const std::string suffix = PartSuffix(0, count);
  if (!EndsWith(first, suffix)) {
    return InvalidArgument(first + " is the first of " + std::to_string(count) + " parts, so its name must end in " +
                           suffix + " for the others to be found");
  }
  const std::string prefix = first.substr(0, first.size() - suffix.size());
  for (int64_t part = 1; part < count; ++part) {
    const std::string path = prefix + PartSuffix(part, count);
    AKV_ASSIGN_OR_RETURN(OpenedPart opened, OpenPart(path));
    const int64_t key = gguf_find_key(opened.context.get(), "split.no");
    int64_t number = -1;
    if (key < 0 || gguf_get_kv_type(opened.context.get(), key) == GGUF_TYPE_STRING ||
        gguf_get_kv_type(opened.context.get(), key) == GGUF_TYPE_ARRAY ||
        !ReadInteger(gguf_get_kv_type(opened.context.get(), key), gguf_get_val_data(opened.context.get(), key), 0,
                     &number) ||
        number != part) {
      return DataLoss(path + " says it is part " + std::to_string(number + 1) + " of the model, not " +
                      std::to_string(part + 1));
    }
    paths_.push_back(path);
    file_bytes_.push_back(opened.bytes);
    AKV_RETURN_IF_ERROR(AddTensors(opened.context.get(), static_cast<int>(part)));
  }
  int64_t expected = static_cast<int64_t>(tensors_.size());
  AKV_RETURN_IF_ERROR(Read("split.tensors.count", Need::kOptional, 0, std::numeric_limits<int64_t>::max(), &expected));
  if (expected != static_cast<int64_t>(tensors_.size())) {
    return DataLoss(first + " promises " + std::to_string(expected) + " tensors; its parts hold " +
                    std::to_string(tensors_.size()));
  }
  return Status();
}

Status GgufFile::AddPart(const std::string& path) {
  AKV_ASSIGN_OR_RETURN(OpenedPart part, OpenPart(path));
  paths_.push_back(path);
  file_bytes_.push_back(part.bytes);
  metadata_ = std::move(part.context);
  return AddTensors(metadata_.get(), 0);
}

Status GgufFile::AddTensors(const gguf_context* part, int file) {
  const std::string& path = paths_[static_cast<size_t>(file)];
  const int64_t file_bytes = file_bytes_[static_cast<size_t>(file)];
  const size_t data = gguf_get_data_offset(part);
  const int64_t count = gguf_get_n_tensors(part);
  for (int64_t i = 0; i < count; ++i) {
    GgufTensor tensor;
    tensor.name = gguf_get_tensor_name(part, i);
    tensor.type = gguf_get_tensor_type(part, i);
    const int64_t* ne = gguf_get_tensor_ne(part, i);
    for (int d = 0; d < GGML_MAX_DIMS; ++d) tensor.ne[d] = ne[d];
    tensor.file = file;
    const size_t offset = data + gguf_get_tensor_offset(part, i);
    const size_t bytes = gguf_get_tensor_size(part, i);
    if (offset > static_cast<size_t>(file_bytes) || bytes > static_cast<size_t>(file_bytes) - offset) {
      return DataLoss(path + " is truncated: tensor " + Quoted(tensor.name) + " needs bytes up to " +
                      std::to_string(offset + bytes) + ", the file has " + std::to_string(file_bytes));
    }
    tensor.offset = static_cast<int64_t>(offset);
    tensor.bytes = static_cast<int64_t>(bytes);
    if (!index_.emplace(tensor.name, tensors_.size()).second) {
      return DataLoss(path + " holds tensor " + Quoted(tensor.name) + " a second time");
    }
    tensors_.push_back(std::move(tensor));
  }
  return Status();
}

const GgufTensor* GgufFile::Find(const std::string& name) const noexcept {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

bool GgufFile::Has(const std::string& key) const noexcept { return gguf_find_key(metadata_.get(), key.c_str()) >= 0; }

Status GgufFile::Read(const std::string& key, Need need, int64_t min, int64_t max, int64_t* value) const {
  const gguf_context* context = metadata_.get();
  const int64_t id = gguf_find_key(context, key.c_str());
  if (id < 0) {
    return need == Need::kOptional ? Status() : DataLoss(paths_[0] + " has no key " + Quoted(key));
  }
  const gguf_type type = gguf_get_kv_type(context, id);
  const bool array = type == GGUF_TYPE_ARRAY;
  const gguf_type element = array ? gguf_get_arr_type(context, id) : type;
  const size_t count = array ? gguf_get_arr_n(context, id) : 1;
  int64_t number = 0;
  const bool is_text = element == GGUF_TYPE_STRING;
  const void* data = is_text ? nullptr : array ? gguf_get_arr_data(context, id) : gguf_get_val_data(context, id);
  if (is_text || count == 0 || !ReadInteger(element, data, 0, &number)) {
    return DataLoss(paths_[0] + ": key " + Quoted(key) + " is not an integer");
  }
  for (size_t i = 1; i < count; ++i) {
    int64_t other = 0;
    if (!ReadInteger(element, data, i, &other) || other != number) {
      return Unsupported(paths_[0] + ": key " + Quoted(key) +
                         " differs between layers; only models with equal layers are supported");
    }
  }
  if (number < min || number > max) {
    return DataLoss(paths_[0] + ": key " + Quoted(key) + " is " + std::to_string(number) + "; allowed are " +
                    std::to_string(min) + " to " + std::to_string(max));
  }
  *value = number;
  return Status();
}

Status GgufFile::Read(const std::string& key, Need need, double* value) const {
  const gguf_context* context = metadata_.get();
  const int64_t id = gguf_find_key(context, key.c_str());
  if (id < 0) {
    return need == Need::kOptional ? Status() : DataLoss(paths_[0] + " has no key " + Quoted(key));
  }
  switch (gguf_get_kv_type(context, id)) {
    case GGUF_TYPE_FLOAT32:
      *value = gguf_get_val_f32(context, id);
      return Status();
    case GGUF_TYPE_FLOAT64:
      *value = gguf_get_val_f64(context, id);
      return Status();
    default:
      return DataLoss(paths_[0] + ": key " + Quoted(key) + " is not a floating-point number");
  }
}

Status GgufFile::Read(const std::string& key, Need need, bool* value) const {
  const gguf_context* context = metadata_.get();
  const int64_t id = gguf_find_key(context, key.c_str());
  if (id < 0) {
    return need == Need::kOptional ? Status() : DataLoss(paths_[0] + " has no key " + Quoted(key));
  }
  if (gguf_get_kv_type(context, id) != GGUF_TYPE_BOOL) {
    return DataLoss(paths_[0] + ": key " + Quoted(key) + " is not a boolean");
  }
  *value = gguf_get_val_bool(context, id);
  return Status();
}

Status GgufFile::Read(const std::string& key, Need need, std::string* value) const {
  const gguf_context* context = metadata_.get();
  const int64_t id = gguf_find_key(context, key.c_str());
  if (id < 0) {
    return need == Need::kOptional ? Status() : DataLoss(paths_[0] + " has no key " + Quoted(key));
  }
  if (gguf_get_kv_type(context, id) != GGUF_TYPE_STRING) {
    return DataLoss(paths_[0] + ": key " + Quoted(key) + " is not a string");
  }
  *value = gguf_get_val_str(context, id);
  return Status();
}

Status GgufFile::Read(const std::string& key, std::vector<bool>* values) const {
  const int64_t count = ArrayLength(key);
  if (count < 0) return DataLoss(paths_[0] + " has no array " + Quoted(key));
  const int64_t id = gguf_find_key(metadata_.get(), key.c_str());
  const gguf_type element = gguf_get_arr_type(metadata_.get(), id);
  const bool opaque = element == GGUF_TYPE_STRING || element == GGUF_TYPE_ARRAY;
  const void* data = opaque ? nullptr : gguf_get_arr_data(metadata_.get(), id);
  values->clear();
  for (int64_t i = 0; i < count; ++i) {
    int64_t number = 0;
    if (element == GGUF_TYPE_BOOL) {
      number = static_cast<const int8_t*>(data)[i];
    } else if (opaque || !ReadInteger(element, data, static_cast<size_t>(i), &number)) {
      return DataLoss(paths_[0] + ": key " + Quoted(key) + " holds neither booleans nor integers");
    }
    values->push_back(number != 0);
  }
  return Status();
}

int64_t GgufFile::ArrayLength(const std::string& key) const noexcept {
  const int64_t id = gguf_find_key(metadata_.get(), key.c_str());
  if (id < 0 || gguf_get_kv_type(metadata_.get(), id) != GGUF_TYPE_ARRAY) return -1;
  return static_cast<int64_t>(gguf_get_arr_n(metadata_.get(), id));
}

}  // namespace anchorkv
