#include "runtime/cuda/device_cache.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "backend/cuda/check.h"
#include "codec/codec.h"

namespace anchorkv::cuda {
namespace {

// Growing leaves room for an answer, and capacities are alike so that captured steps live on.
constexpr int64_t kSpareRows = 256;

}  // namespace

DeviceKvCache::DeviceKvCache() { NewLayout(); }

void DeviceKvCache::NewLayout() {
  static std::atomic<uint64_t> last{0};
  layout_ = ++last;
  graph = DecodeGraph();
  states = PartialStatesBuffer();
}

Result<std::unique_ptr<DeviceKvCache>> DeviceKvCache::Make(const CacheConfig& config) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(config.head_dim));
  if (config.compress) AKV_RETURN_IF_ERROR(Validate(config.codec));
  if (config.tail_limit != 0) {
    return Unsupported("a tail limit of " + std::to_string(config.tail_limit) +
                       "; on a GPU new tokens stay exact (limit 0)");
  }
  std::unique_ptr<DeviceKvCache> cache(new DeviceKvCache());
  cache->config_ = config;
  cache->layers_.resize(static_cast<size_t>(config.layers));
  return cache;
}

Status DeviceKvCache::Reserve(int64_t rows, Stream stream) {
  if (rows <= capacity_) return {};
  const int64_t capacity = (rows + 2 * kSpareRows - 1) / kSpareRows * kSpareRows;
  const auto element = static_cast<size_t>(SizeOf(tail_type()));
  const auto head_stretches = static_cast<size_t>(2 * config_.layers * config_.kv_heads);
  const auto row_bytes = static_cast<size_t>(config_.head_dim) * element;
  AKV_ASSIGN_OR_RETURN(DeviceBuffer grown,
                       DeviceBuffer::Make(head_stretches * static_cast<size_t>(capacity) * row_bytes, "exact tokens"));
  if (tail_rows() > 0) {
    AKV_RETURN_IF_ERROR(ToStatus(
        cudaMemcpy2DAsync(grown.data(), static_cast<size_t>(capacity) * row_bytes, tails_.data(),
                          static_cast<size_t>(capacity_) * row_bytes, static_cast<size_t>(tail_rows()) * row_bytes,
                          head_stretches, cudaMemcpyDeviceToDevice, stream),
        "moving exact tokens"));
  }
  AKV_RETURN_IF_ERROR(Synchronize(stream));  // steps may still read the old rows
  tails_ = std::move(grown);
  capacity_ = capacity;
  NewLayout();
  return {};
}

SequencePlace DeviceKvCache::Place(int64_t count) const noexcept {
  SequencePlace place;
  place.tails = tails_.data();
  place.type = tail_type();
  place.capacity = capacity_;
  place.position = static_cast<int32_t>(tokens_);
  place.row = static_cast<int32_t>(tail_rows());
  place.length = static_cast<int32_t>(tail_rows() + count);
  return place;
}

DeviceHeads DeviceKvCache::tail(int layer, Side side) const noexcept {
  const int64_t stretch = capacity_ * config_.head_dim;
  const int64_t first = (int64_t{2} * layer + side) * config_.kv_heads * stretch;
  return {tails_.data() + first * SizeOf(tail_type()),
          tail_type(),
          config_.kv_heads,
          capacity_,
          config_.head_dim,
          stretch,
          config_.head_dim};
}

void DeviceKvCache::SetSegments(DeviceSegments segments) {
  tokens_ = compressed_ = segments.front()->tokens();
  for (size_t l = 0; l < segments.size(); ++l) layers_[l].push_back(std::move(segments[l]));
  NewLayout();
}

Status DeviceKvCache::Truncate(int64_t n) {
  if (n < 0 || n > tokens_) {
    return InvalidArgument("cannot keep " + std::to_string(n) + " tokens; the cache holds " + std::to_string(tokens_));
  }
  if (n < compressed_) {
    if (n > 0) {
      return InvalidArgument("cannot keep " + std::to_string(n) + " tokens; the first " + std::to_string(compressed_) +
                             " are compressed and stay together");
    }
    for (DeviceSegments& layer : layers_) layer.clear();
    compressed_ = 0;
    NewLayout();
  }
  tokens_ = n;
  if (n == 0) uncompressed_reason_.clear();
  return {};
}

ByteBill DeviceKvCache::bill() const {
  ByteBill bill;
  bill.tokens = tokens_;
  bill.layers_total = config_.layers;
  bill.skipped_reason = uncompressed_reason_;
  bill.dense_bytes = LayerShape{config_.kv_heads, config_.head_dim, tokens_}.dense_bytes() * config_.layers;
  int64_t segments = 0;
  for (const DeviceSegments& layer : layers_) {
    if (!layer.empty()) ++bill.layers_compressed;
    for (const auto& segment : layer) {
      bill.segment_bytes += static_cast<int64_t>(segment->resident_bytes());
      bill.residual_share_k += segment->residual_share(kKeys);
      bill.residual_share_v += segment->residual_share(kValues);
      ++segments;
    }
  }
  if (segments > 0) {
    bill.residual_share_k /= static_cast<double>(segments);
    bill.residual_share_v /= static_cast<double>(segments);
  }
  bill.tail_bytes = tail_rows() * config_.layers * 2 * RowElements() * SizeOf(tail_type());
  bill.reserved_bytes = static_cast<int64_t>(tails_.size_bytes()) - bill.tail_bytes;
  return bill;
}

}  // namespace anchorkv::cuda
