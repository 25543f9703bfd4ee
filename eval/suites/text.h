// Small operations on text that suites and scores share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace anchorkv {

inline bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
inline bool IsDigit(char c) { return c >= '0' && c <= '9'; }
inline bool IsUpper(char c) { return c >= 'A' && c <= 'Z'; }
inline bool IsLower(char c) { return c >= 'a' && c <= 'z'; }

std::string Lower(std::string_view text);
std::string_view Strip(std::string_view text);
// Words between white space.
std::vector<std::string> Words(std::string_view text);
std::vector<std::string_view> Split(std::string_view text, char separator);
std::string Join(const std::vector<std::string>& parts, std::string_view separator);
// "a", "a and b", "a, b, and c".
std::string JoinList(const std::vector<std::string>& parts);
std::string Replace(std::string text, std::string_view from, std::string_view to);

}  // namespace anchorkv
