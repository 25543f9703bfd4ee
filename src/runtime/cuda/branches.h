// Streams beside the main one, for work that does not depend on each other: kernels too small to fill the GPU run at
// the same time. Captured with the main stream they become branches of its graph.
#pragma once

#include <cstdint>
#include <functional>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

struct CUevent_st;

namespace anchorkv::cuda {

class Branches {
 public:
  static constexpr int kMost = 8;  // streams, the main one among them

  Branches() noexcept = default;
  static Result<Branches> Make(Stream main);
  Branches(Branches&& other) noexcept { *this = std::move(other); }
  Branches& operator=(Branches&& other) noexcept;
  Branches(const Branches&) = delete;
  Branches& operator=(const Branches&) = delete;
  ~Branches();

  // How many of `count` pieces of work run at the same time.
  static int Width(int64_t count) noexcept;
  // Calls enqueue(i, stream) for each of [0, count), in order; pieces of the same stream run one after another. They
  // begin when the main stream is through with what it has, which in turn waits for all of them. After an error the
  // main stream waits for what was enqueued before.
  Status Run(int64_t count, const std::function<Status(int64_t, Stream)>& enqueue) const;

 private:
  Stream main_ = nullptr;
  Stream streams_[kMost - 1] = {};
  CUevent_st* begun_ = nullptr;
  CUevent_st* done_[kMost - 1] = {};
};

}  // namespace anchorkv::cuda
