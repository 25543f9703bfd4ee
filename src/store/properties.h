// Named values as text: what a context says of itself (model, options, template). A reader ignores names that it does
// not know and keeps its own default for names that are missing, so that later versions may add some.
//
// Bytes: for each, its name and its value, both as u32 length and bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv {

class Properties {
 public:
  // kDataLoss when the bytes are not such a list.
  static Result<Properties> Read(std::span<const std::byte> bytes);
  std::vector<std::byte> Bytes() const;

  void Set(std::string name, std::string value) { values_[std::move(name)] = std::move(value); }
  void Set(std::string name, int64_t value) { Set(std::move(name), std::to_string(value)); }
  void SetReal(std::string name, double value);    // read back as the same bits
  void SetHash(std::string name, uint64_t value);  // 16 hexadecimal digits

  // Leave *value as it is where there is no such name; kDataLoss for a value of another kind or outside [min, max].
  Status Get(std::string_view name, std::string* value) const;
  Status Get(std::string_view name, int64_t min, int64_t max, int64_t* value) const;
  Status Get(std::string_view name, int64_t min, int64_t max, int* value) const;
  Status Get(std::string_view name, bool* value) const;
  Status GetReal(std::string_view name, double* value) const;
  Status GetHash(std::string_view name, uint64_t* value) const;

  const std::map<std::string, std::string, std::less<>>& values() const noexcept { return values_; }

 private:
  const std::string* Find(std::string_view name) const;

  std::map<std::string, std::string, std::less<>> values_;
};

}  // namespace anchorkv
