#include "store/context.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/alloc_guard.h"
#include "base/atomic_file.h"
#include "base/mapped_file.h"
#include "format/residual_code.h"
#include "store/bytes.h"
#include "store/image_parts.h"
#include "store/option_properties.h"
#include "store/properties.h"

namespace anchorkv {
namespace {

constexpr uint32_t kPropertiesKind = SectionKind("PROP");
constexpr uint32_t kTokensKind = SectionKind("TOKN");
constexpr uint32_t kLayersKind = SectionKind("LAYR");
constexpr uint32_t kBytesKind = SectionKind("BYTE");
constexpr int64_t kParallelBytes = 1 << 20;  // less is not worth waking threads

std::string LayerName(size_t layer) { return "layer " + std::to_string(layer); }

Status InLayer(size_t layer, const Status& status) {
  return status.ok() ? status : Status(status.code(), LayerName(layer) + ": " + status.message());
}

// --- Properties

Properties ContextProperties(const StoredContext& context) {
  Properties out;
  const CacheConfig& config = context.config;
  out.Set("writer", context.writer);
  out.Set("source", context.source);
  out.Set("model.name", context.model.name);
  out.Set("model.architecture", context.model.architecture);
  out.Set("model.quantization", context.model.quantization);
  out.SetHash("model.metadata", context.model.metadata);
  out.SetHash("model.tensors", context.model.tensors);
  out.SetHash("model.weights", context.model.weights);
  out.Set("frame.before", context.frame.before);
  out.Set("frame.after", context.frame.after);
  out.Set("frame.between", context.frame.between);
  out.Set("cache.layers", int64_t{config.layers});
  out.Set("cache.q_heads", int64_t{config.q_heads});
  out.Set("cache.kv_heads", int64_t{config.kv_heads});
  out.Set("cache.head_dim", int64_t{config.head_dim});
  out.Set("cache.compress", int64_t{config.compress ? 1 : 0});
  out.Set("cache.tail_bits", int64_t{config.tail_type == DenseType::kF16 ? 16 : 32});
  out.Set("cache.min_tokens", config.min_tokens);
  if (config.sliding_window > 0) {
    out.Set("cache.sliding_window", config.sliding_window);
    std::string layers;
    for (const bool slides : config.sliding_layers) layers += slides ? '1' : '0';
    out.Set("cache.sliding_layers", layers);
  }
  if (config.compress) SetOptions(config.codec, &out);
  return out;
}

Status ReadProperties(std::span<const std::byte> bytes, StoredContext* context) {
  AKV_ASSIGN_OR_RETURN(const Properties in, Properties::Read(bytes));
  constexpr int64_t kMaxHeads = kMaxStoredHeads;
  constexpr int64_t kMaxLayers = 1 << 16;
  CacheConfig& config = context->config;
  const std::pair<const char*, std::string*> texts[] = {{"writer", &context->writer},
                                                        {"source", &context->source},
                                                        {"model.name", &context->model.name},
                                                        {"model.architecture", &context->model.architecture},
                                                        {"model.quantization", &context->model.quantization},
                                                        {"frame.before", &context->frame.before},
                                                        {"frame.after", &context->frame.after},
                                                        {"frame.between", &context->frame.between}};
  for (const auto& [name, value] : texts) AKV_RETURN_IF_ERROR(in.Get(name, value));
  AKV_RETURN_IF_ERROR(in.GetHash("model.metadata", &context->model.metadata));
  AKV_RETURN_IF_ERROR(in.GetHash("model.tensors", &context->model.tensors));
  AKV_RETURN_IF_ERROR(in.GetHash("model.weights", &context->model.weights));
  AKV_RETURN_IF_ERROR(in.Get("cache.layers", 1, kMaxLayers, &config.layers));
  AKV_RETURN_IF_ERROR(in.Get("cache.q_heads", 1, kMaxHeads, &config.q_heads));
  AKV_RETURN_IF_ERROR(in.Get("cache.kv_heads", 1, kMaxHeads, &config.kv_heads));
  AKV_RETURN_IF_ERROR(in.Get("cache.head_dim", 1, kMaxHeadDim, &config.head_dim));
  AKV_RETURN_IF_ERROR(in.Get("cache.compress", &config.compress));
  int64_t tail_bits = 16;
  AKV_RETURN_IF_ERROR(in.Get("cache.tail_bits", 16, 32, &tail_bits));
  config.tail_type = tail_bits == 16 ? DenseType::kF16 : DenseType::kF32;
  AKV_RETURN_IF_ERROR(in.Get("cache.min_tokens", 0, INT64_MAX, &config.min_tokens));
  AKV_RETURN_IF_ERROR(in.Get("cache.sliding_window", 0, kMaxStoredTokens, &config.sliding_window));
  if (config.sliding_window > 0) {
    std::string layers;
    AKV_RETURN_IF_ERROR(in.Get("cache.sliding_layers", &layers));
    if (layers.size() != static_cast<size_t>(config.layers) || layers.find_first_not_of("01") != std::string::npos) {
      return DataLoss("its property cache.sliding_layers must have one 0 or 1 for each of " +
                      std::to_string(config.layers) + " layers");
    }
    for (const char c : layers) config.sliding_layers.push_back(c == '1');
  }
  return config.compress ? ReadOptions(in, &config.codec) : Status();
}

// --- The whole

// What a reader relies on, checked before writing too.
Status CheckContext(const StoredContext& context) {
  const CacheConfig& config = context.config;
  if (config.layers < 1 || context.layers.size() != static_cast<size_t>(config.layers)) {
    return DataLoss("it holds " + std::to_string(context.layers.size()) + " layers; the model has " +
                    std::to_string(config.layers));
  }
  const auto tokens = static_cast<int64_t>(context.tokens.size());
  for (size_t l = 0; l < context.layers.size(); ++l) {
    const SegmentImage& layer = context.layers[l];
    const bool slides = config.slides(static_cast<int>(l));
    const int64_t first = slides ? std::max<int64_t>(0, tokens - config.sliding_window) : 0;
    const SegmentFormat format = slides ? SegmentFormat::kRows : context.format();
    if (layer.first_position != first || layer.tokens() != tokens - first || layer.format != format) {
      return DataLoss(LayerName(l) + " holds " + std::to_string(layer.tokens()) + " tokens from position " +
                      std::to_string(layer.first_position) + " in format " + FormatName(layer.format) + "; expected " +
                      std::to_string(tokens - first) + " from " + std::to_string(first) + " in " + FormatName(format));
    }
    if (format == SegmentFormat::kRows && RowsType(layer) != config.tail_type) {
      return DataLoss("its rows have another element type than its options say");
    }
  }
  if (context.compressed() && !config.compress) return DataLoss("its layers are compressed, its options say that not");
  return {};
}

Status CheckLayers(const StoredContext& context) {
  std::vector<Status> statuses(context.layers.size());
#pragma omp parallel for schedule(dynamic) if (context.segment_bytes() > kParallelBytes)
  for (size_t l = 0; l < statuses.size(); ++l) {
    statuses[l] = GuardAllocation("a layer", [&] {
      return InLayer(l, CheckImage(context.layers[l], context.config.kv_heads, context.config.head_dim));
    });
  }
  const auto bad = std::find_if(statuses.begin(), statuses.end(), [](const Status& s) { return !s.ok(); });
  return bad == statuses.end() ? Status() : std::move(*bad);
}

Result<StoredContext> Read(std::span<const std::byte> file, const std::shared_ptr<const void>& owner) {
  AKV_ASSIGN_OR_RETURN(const std::vector<Section> sections, ReadSections(file));
  const Section* single[3] = {};
  constexpr std::array<uint32_t, 3> kSingle = {kPropertiesKind, kTokensKind, kLayersKind};
  std::vector<const Section*> bytes;
  for (const Section& section : sections) {
    const auto known = std::find(kSingle.begin(), kSingle.end(), section.kind);
    if (known != kSingle.end()) {
      const Section*& place = single[known - kSingle.begin()];
      if (place != nullptr) return DataLoss("it has two sections " + KindName(section.kind));
      place = &section;
    } else if (section.kind == kBytesKind) {
      if (section.index != bytes.size()) return DataLoss("its layers are not in order");
      bytes.push_back(&section);
    } else if (section.required) {
      return Unsupported("it needs what this program does not know: section " + KindName(section.kind));
    }
  }
  for (size_t i = 0; i < kSingle.size(); ++i) {
    if (single[i] == nullptr) return DataLoss("it has no section " + KindName(kSingle[i]));
  }

  StoredContext context;
  AKV_RETURN_IF_ERROR(ReadProperties(single[0]->bytes, &context));
  const std::span<const std::byte> tokens = single[1]->bytes;
  if (tokens.empty() || tokens.size() % sizeof(int32_t) != 0) return DataLoss("its tokens are damaged");
  context.tokens.resize(tokens.size() / sizeof(int32_t));
  std::memcpy(context.tokens.data(), tokens.data(), tokens.size());
  ByteReader list(single[2]->bytes);
  AKV_RETURN_IF_ERROR(ReadLayers(&list, &context.layers));
  if (!list.at_end()) return DataLoss("the description of its layers is damaged");
  if (bytes.size() != context.layers.size()) {
    return DataLoss("it describes " + std::to_string(context.layers.size()) + " layers and holds " +
                    std::to_string(bytes.size()));
  }
  for (size_t l = 0; l < bytes.size(); ++l) {
    context.layers[l].bytes = bytes[l]->bytes;
    context.layers[l].owner = owner;
  }
  // First each layer: an unknown format has no length.
  AKV_RETURN_IF_ERROR(CheckLayers(context));
  AKV_RETURN_IF_ERROR(CheckContext(context));
  return context;
}

}  // namespace

std::string Describe(const ModelFingerprint& model) {
  std::string text = model.name.empty() ? "a model without a name" : model.name;
  text += " (" + model.architecture + ", " + model.quantization + ")";
  return text;
}

std::string Difference(const ModelFingerprint& file, const ModelFingerprint& loaded) {
  std::vector<std::string> parts;
  if (file.tensors != loaded.tensors) parts.push_back("the shapes or types of the tensors");
  if (file.weights != loaded.weights) parts.push_back("the weights");
  if (file.metadata != loaded.metadata) parts.push_back("the settings or the tokenizer");
  if (parts.empty()) return {};
  std::string what = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) what += (i + 1 == parts.size() ? " and " : ", ") + parts[i];
  return "it was made for " + Describe(file) + ", this is " + Describe(loaded) + ": " + what + " differ";
}

SegmentFormat StoredContext::format() const noexcept {
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!config.slides(static_cast<int>(l))) return layers[l].format;
  }
  return SegmentFormat::kRows;
}

int64_t StoredContext::segment_bytes() const noexcept {
  int64_t total = 0;
  for (const SegmentImage& layer : layers) total += static_cast<int64_t>(layer.bytes.size());
  return total;
}

Result<ContextImage> ContextImage::Make(const StoredContext& context) {
  return GuardAllocation("a context", [&]() -> Result<ContextImage> {
    AKV_RETURN_IF_ERROR(CheckLayers(context));
    if (const Status status = CheckContext(context); !status.ok()) {
      return InvalidArgument("a context that cannot be stored: " + status.message());
    }
    const std::vector<std::byte> properties = ContextProperties(context).Bytes();
    ByteWriter list;
    WriteLayers(&list, context.layers);
    const std::vector<std::byte> layers = list.Take();
    std::vector<Section> sections = {{kPropertiesKind, 0, true, properties},
                                     {kTokensKind, 0, true, std::as_bytes(std::span(context.tokens))},
                                     {kLayersKind, 0, true, layers}};
    for (size_t l = 0; l < context.layers.size(); ++l) {
      sections.push_back({kBytesKind, static_cast<uint32_t>(l), true, context.layers[l].bytes});
    }
    ContextImage image;
    AKV_ASSIGN_OR_RETURN(image.sections_, SectionImage::Make(sections));
    return image;
  });
}

Result<StoredContext> ReadContext(std::span<const std::byte> file, std::shared_ptr<const void> owner) {
  return GuardAllocation("a context", [&] { return Read(file, owner); });
}

Status WriteContextFile(const std::string& path, const StoredContext& context) {
  return GuardAllocation("a context", [&]() -> Status {
    const Result<ContextImage> image = ContextImage::Make(context);
    if (!image.ok()) return Status(image.status().code(), "cannot write " + path + ": " + image.status().message());
    return ReplaceFile(path, image->pieces());
  });
}

Result<StoredContext> ReadContextFile(const std::string& path) {
  return GuardAllocation("a context", [&]() -> Result<StoredContext> {
    AKV_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Map(path));
    mapped.Prefault(0, mapped.size_bytes());
    const auto file = std::make_shared<const MappedFile>(std::move(mapped));
    Result<StoredContext> context = ReadContext({file->data(), static_cast<size_t>(file->size_bytes())}, file);
    if (!context.ok()) return Status(context.status().code(), path + ": " + context.status().message());
    return context;
  });
}

}  // namespace anchorkv
