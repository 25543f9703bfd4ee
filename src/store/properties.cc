#include "store/properties.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>
#include <utility>

#include "store/bytes.h"

namespace anchorkv {
namespace {

// The whole of `text` as a number; `base` only for integers.
template <typename T, typename... Base>
bool Parse(const std::string& text, T* value, Base... base) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value, base...);
  return error == std::errc() && stop == end;
}

Status Bad(std::string_view name, const std::string& value, const std::string& allowed) {
  return DataLoss("its property " + std::string(name) + " is '" + value + "'; allowed are " + allowed);
}

}  // namespace

Result<Properties> Properties::Read(std::span<const std::byte> bytes) {
  Properties properties;
  ByteReader in(bytes);
  while (!in.at_end()) {
    std::string name(in.Text());
    std::string value(in.Text());
    if (!in.ok()) return DataLoss("its properties end inside one");
    if (!properties.values_.emplace(std::move(name), std::move(value)).second) {
      return DataLoss("its properties name one twice");
    }
  }
  return properties;
}

std::vector<std::byte> Properties::Bytes() const {
  ByteWriter out;
  for (const auto& [name, value] : values_) {
    out.Text(name);
    out.Text(value);
  }
  return out.Take();
}

void Properties::SetReal(std::string name, double value) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;  // the shortest that reads back
  Set(std::move(name), std::string(text, end));
}

void Properties::SetHash(std::string name, uint64_t value) {
  char text[16];
  const auto end = std::to_chars(text, text + sizeof(text), value, 16).ptr;
  std::string digits(text, end);
  Set(std::move(name), std::string(16 - digits.size(), '0') + digits);
}

const std::string* Properties::Find(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

Status Properties::Get(std::string_view name, std::string* value) const {
  if (const std::string* text = Find(name)) *value = *text;
  return {};
}

Status Properties::Get(std::string_view name, int64_t min, int64_t max, int64_t* value) const {
  const std::string* const text = Find(name);
  if (text == nullptr) return {};
  int64_t number = 0;
  if (!Parse(*text, &number, 10) || number < min || number > max) {
    return Bad(name, *text, std::to_string(min) + " to " + std::to_string(max));
  }
  *value = number;
  return {};
}

Status Properties::Get(std::string_view name, int64_t min, int64_t max, int* value) const {
  int64_t wide = *value;
  AKV_RETURN_IF_ERROR(Get(name, min, max, &wide));
  *value = static_cast<int>(wide);
  return {};
}

Status Properties::Get(std::string_view name, bool* value) const {
  int64_t number = *value ? 1 : 0;
  AKV_RETURN_IF_ERROR(Get(name, 0, 1, &number));
  *value = number == 1;
  return {};
}

Status Properties::GetReal(std::string_view name, double* value) const {
  const std::string* const text = Find(name);
  if (text == nullptr) return {};
  double number = 0;
  if (!Parse(*text, &number) || !std::isfinite(number)) return Bad(name, *text, "finite numbers");
  *value = number;
  return {};
}

Status Properties::GetHash(std::string_view name, uint64_t* value) const {
  const std::string* const text = Find(name);
  if (text == nullptr) return {};
  uint64_t number = 0;
  if (text->size() != 16 || !Parse(*text, &number, 16)) return Bad(name, *text, "16 hexadecimal digits");
  *value = number;
  return {};
}

}  // namespace anchorkv
