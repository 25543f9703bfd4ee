#include "runtime/cuda/branches.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/check.h"

namespace anchorkv::cuda {

Result<Branches> Branches::Make(Stream main) {
  Branches out;
  out.main_ = main;
  const auto make_event = [](CUevent_st** event) {
    return ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
  };
  AKV_RETURN_IF_ERROR(make_event(&out.begun_));
  for (int i = 0; i < kMost - 1; ++i) {
    AKV_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&out.streams_[i], cudaStreamNonBlocking), "making a stream"));
    AKV_RETURN_IF_ERROR(make_event(&out.done_[i]));
  }
  return Result<Branches>(std::move(out));
}

Branches& Branches::operator=(Branches&& other) noexcept {
  std::swap(main_, other.main_);
  std::swap(streams_, other.streams_);
  std::swap(begun_, other.begun_);
  std::swap(done_, other.done_);
  return *this;
}

Branches::~Branches() {
  if (begun_ != nullptr) cudaEventDestroy(begun_);
  for (int i = 0; i < kMost - 1; ++i) {
    if (done_[i] != nullptr) cudaEventDestroy(done_[i]);
    if (streams_[i] != nullptr) cudaStreamDestroy(streams_[i]);
  }
}

int Branches::Width(int64_t count) noexcept { return static_cast<int>(std::clamp<int64_t>(count, 1, kMost)); }

Status Branches::Run(int64_t count, const std::function<Status(int64_t, Stream)>& enqueue) const {
  const int width = Width(count);
  if (width > 1) AKV_RETURN_IF_ERROR(ToStatus(cudaEventRecord(begun_, main_), "beginning branches"));
  Status status;
  int begun = 1;
  for (; begun < width && status.ok(); ++begun) {
    status = ToStatus(cudaStreamWaitEvent(streams_[begun - 1], begun_, 0), "beginning a branch");
  }
  for (int64_t i = 0; i < count && status.ok(); ++i) {
    const auto branch = static_cast<int>(i % width);
    status = enqueue(i, branch == 0 ? main_ : streams_[branch - 1]);
  }
  for (int i = 0; i < begun - 1; ++i) {
    Status joined = ToStatus(cudaEventRecord(done_[i], streams_[i]), "ending a branch");
    if (joined.ok()) joined = ToStatus(cudaStreamWaitEvent(main_, done_[i], 0), "waiting for a branch");
    if (status.ok()) status = std::move(joined);
  }
  return status;
}

}  // namespace anchorkv::cuda
