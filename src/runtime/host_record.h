// A PromptRecord in host memory, in float.
#pragma once

#include <memory>

#include "runtime/prompt_record.h"

namespace anchorkv {

class HostRecord final : public PromptRecord {
 public:
  ~HostRecord() override;

  int layers() const noexcept override;
  int64_t tokens() const noexcept override;
  const Observations& observed() const noexcept override;
  int64_t resident_bytes() const noexcept override;
  LayerInput layer(int layer) const noexcept override;
  HeadsView<const float> last_text_queries(int layer) const noexcept override;
  Status Pop() override;

 private:
  friend class Recorder;
  HostRecord();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace anchorkv
