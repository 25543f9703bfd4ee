// Structs and views of the caller.
#include <algorithm>
#include <cstring>

#include "base/shape_text.h"
#include "capi/internal.h"

namespace anchorkv::capi {
namespace {

constexpr size_t kLargestStruct = 4096;  // of any later version; larger sizes are garbage
constexpr int64_t kLargestExtent = int64_t{1} << 31;
constexpr int64_t kLargestArray = int64_t{1} << 46;  // elements, strides included

Status CheckSize(const char* name, size_t size, size_t first_size) {
  if (size >= first_size && size <= kLargestStruct) return {};
  return InvalidArgument("the size of " + std::string(name) + " is " + std::to_string(size) +
                         "; it must be its sizeof, from " + std::to_string(first_size) + " to " +
                         std::to_string(kLargestStruct));
}

template <typename View>
Status CheckView(const char* name, const View* view) {
  AKV_RETURN_IF_ERROR(CheckGiven(name, view));
  for (const int64_t n : {view->heads, view->tokens, view->head_dim}) {
    if (n >= 1 && n <= kLargestExtent) continue;
    return InvalidArgument(std::string(name) + " has the shape " + ShapeText(*view) + "; each must be from 1 to " +
                           std::to_string(kLargestExtent));
  }
  if (view->data == nullptr) return InvalidArgument("the data of " + std::string(name) + " is null");
  int64_t rows = 0, heads = 0, elements = 0;
  if (view->token_stride < 0 || view->head_stride < 0) {
    return InvalidArgument(std::string(name) + " has a negative stride");
  }
  if (__builtin_mul_overflow(view->tokens, std::max(view->token_stride, view->head_dim), &rows) ||
      __builtin_mul_overflow(view->heads, std::max(view->head_stride, rows), &heads) ||
      __builtin_add_overflow(rows, heads, &elements) || elements > kLargestArray) {
    return InvalidArgument(std::string(name) + " " + ShapeText(*view) + " with its strides is too large");
  }
  return {};
}

template <typename To, typename View>
HeadsView<To> Converted(const View& v) {
  return {v.data, v.heads, v.tokens, v.head_dim, v.head_stride, v.token_stride};
}

}  // namespace

Status CheckGiven(const char* name, const void* pointer) {
  return pointer != nullptr ? Status() : InvalidArgument(std::string(name) + " is null");
}

Status TakeBytes(const char* name, const void* from, size_t first_size, size_t our_size, void* to) {
  AKV_RETURN_IF_ERROR(CheckGiven(name, from));
  size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  AKV_RETURN_IF_ERROR(CheckSize(name, size, first_size));
  const auto* bytes = static_cast<const unsigned char*>(from);
  for (size_t i = our_size; i < size; ++i) {
    if (bytes[i] == 0) continue;
    return Unsupported(std::string(name) + " sets a field at byte " + std::to_string(i) +
                       " that this library does not know; it knows " + std::to_string(our_size) + " bytes");
  }
  std::memcpy(to, from, std::min(size, our_size));
  return {};
}

Status GiveBytes(const char* name, void* to, size_t size, size_t first_size, size_t our_size, const void* from) {
  AKV_RETURN_IF_ERROR(CheckGiven(name, to));
  AKV_RETURN_IF_ERROR(CheckSize(name, size, first_size));
  std::memset(to, 0, size);
  std::memcpy(to, from, std::min(size, our_size));
  std::memcpy(to, &size, sizeof size);
  return {};
}

Result<HeadsView<const float>> In(const char* name, const anchorkv_view* view) {
  AKV_RETURN_IF_ERROR(CheckView(name, view));
  return Converted<const float>(*view);
}

Result<HeadsView<float>> Out(const char* name, const anchorkv_mutable_view* view) {
  AKV_RETURN_IF_ERROR(CheckView(name, view));
  const int64_t head_span = (view->heads - 1) * view->head_stride + view->head_dim;
  const int64_t token_span = (view->tokens - 1) * view->token_stride + view->head_dim;
  const bool apart =
      (view->heads == 1 || view->head_stride >= view->head_dim) &&
      (view->tokens == 1 || view->token_stride >= view->head_dim) &&
      (view->heads == 1 || view->tokens == 1 || view->head_stride >= token_span || view->token_stride >= head_span);
  if (!apart) {
    return InvalidArgument("rows of " + std::string(name) + " " + ShapeText(*view) + " overlap: strides of " +
                           std::to_string(view->head_stride) + " per head and " + std::to_string(view->token_stride) +
                           " per token");
  }
  return Converted<float>(*view);
}

Result<HeadsView<float>> Out(const char* name, const anchorkv_mutable_view* view, int64_t heads, int64_t tokens,
                             int64_t head_dim) {
  AKV_ASSIGN_OR_RETURN(const HeadsView<float> out, Out(name, view));
  if (out.heads == heads && out.tokens == tokens && out.head_dim == head_dim) return out;
  return InvalidArgument(std::string(name) + " has the shape " + ShapeText(out) + "; it must be [" +
                         std::to_string(heads) + ", " + std::to_string(tokens) + ", " + std::to_string(head_dim) + "]");
}

const Backend& BestBackend() {
  const Backend* fast = CpuBackend();
  return fast != nullptr ? *fast : ReferenceBackend();
}

std::shared_ptr<const Segment> Together(std::shared_ptr<const Segment> segment, std::shared_ptr<const RopeTable> rope) {
  struct Pair {
    std::shared_ptr<const RopeTable> rope;
    std::shared_ptr<const Segment> segment;
  };
  auto pair = std::make_shared<const Pair>(Pair{std::move(rope), std::move(segment)});
  const Segment* const inner = pair->segment.get();
  return {std::move(pair), inner};
}

}  // namespace anchorkv::capi
