// What the files of the C interface share: the objects behind its handles, and the ways in and out: errors, structs
// that may be of another size than ours, views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "anchorkv/anchorkv.h"
#include "anchorkv/options.h"
#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "backend/backend.h"
#include "segment/segment.h"

struct anchorkv_rope {
  std::shared_ptr<const anchorkv::RopeTable> table;
};

struct anchorkv_segment {
  std::shared_ptr<const anchorkv::Segment> segment;  // keeps the table too: see Together
  std::shared_ptr<const anchorkv::RopeTable> rope;
  int kv_heads = 0;
};

namespace anchorkv::capi {

// Keeps `message` for anchorkv_last_error of this thread; allocates nothing.
void KeepError(const char* message) noexcept;
anchorkv_status Finish(const Status& status) noexcept;
// Inside catch (...): what was thrown, as a status.
anchorkv_status FinishException() noexcept;

// Every function that can fail is one of these.
template <typename Body>
anchorkv_status Call(Body&& body) noexcept {
  try {
    return Finish(body());
  } catch (...) {
    return FinishException();
  }
}

// kInvalidArgument "NAME is null".
Status CheckGiven(const char* name, const void* pointer);

// Sizes of the structs when they first appeared: no program has smaller ones.
template <typename T>
inline constexpr size_t kFirstSize = 0;
template <>
inline constexpr size_t kFirstSize<anchorkv_rope_params> = 96;
template <>
inline constexpr size_t kFirstSize<anchorkv_codec_options> = 120;
template <>
inline constexpr size_t kFirstSize<anchorkv_layer> = 192;
template <>
inline constexpr size_t kFirstSize<anchorkv_segment_info> = 64;
template <>
inline constexpr size_t kFirstSize<anchorkv_attention> = 232;
template <>
inline constexpr size_t kFirstSize<anchorkv_estimate> = 48;
template <>
inline constexpr size_t kFirstSize<anchorkv_cache_params> = 40;
template <>
inline constexpr size_t kFirstSize<anchorkv_cache_info> = 72;

Status TakeBytes(const char* name, const void* from, size_t first_size, size_t our_size, void* to);
Status GiveBytes(const char* name, void* to, size_t size, size_t first_size, size_t our_size, const void* from);

// *to, which holds the defaults, gets the fields that the caller's struct has. kInvalidArgument for null and for sizes
// that are none, kUnsupported when fields that this library does not know are not zero.
template <typename T>
Status Take(const char* name, const T* from, T* to) {
  static_assert(kFirstSize<T> >= sizeof(size_t) && sizeof(T) >= kFirstSize<T> && offsetof(T, size) == 0);
  return TakeBytes(name, from, kFirstSize<T>, sizeof(T), to);
}
// The first `size` bytes of `from` for the caller; zeros where the caller's struct is longer.
template <typename T>
Status Give(const char* name, T* to, size_t size, const T& from) {
  return GiveBytes(name, to, size, kFirstSize<T>, sizeof(T), &from);
}

// Views, checked: data, lengths of at least 1, strides that are not negative; outputs have no overlapping rows.
Result<HeadsView<const float>> In(const char* name, const anchorkv_view* view);
Result<HeadsView<float>> Out(const char* name, const anchorkv_mutable_view* view);
// Out, of that shape.
Result<HeadsView<float>> Out(const char* name, const anchorkv_mutable_view* view, int64_t heads, int64_t tokens,
                             int64_t head_dim);

// null: the profile adaptive at ratio 4.
Result<CodecOptions> OptionsOf(const anchorkv_codec_options* options);

const Backend& BestBackend();

// A segment that keeps its table.
std::shared_ptr<const Segment> Together(std::shared_ptr<const Segment> segment, std::shared_ptr<const RopeTable> rope);

}  // namespace anchorkv::capi
