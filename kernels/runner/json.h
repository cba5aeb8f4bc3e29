// JSON, as far as the headers of our files need it: strict, with bounds on depth, and numbers that are integers alone.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace octet {

class Json {
 public:
  enum class Kind { kNull, kBool, kInteger, kReal, kString, kArray, kObject };

  // Raises std::invalid_argument where the text is not one JSON value.
  static Json parse(std::string_view text);

  // Each raises std::invalid_argument where the value is of another kind; `what` names it in the message.
  const std::string& string(const char* what) const;
  int64_t integer(const char* what) const;
  bool boolean(const char* what) const;
  const std::vector<Json>& array(const char* what) const;
  const std::map<std::string, Json, std::less<>>& object(const char* what) const;

  bool is_null() const { return kind_ == Kind::kNull; }
  bool is_string() const { return kind_ == Kind::kString; }
  // The entry of an object; raises where it is no object or has none of that name.
  const Json& at(std::string_view name) const;
  const Json* find(std::string_view name) const;  // null where there is none

 private:
  friend class JsonReader;
  Kind kind_ = Kind::kNull;
  int64_t integer_ = 0;
  std::string string_;
  std::vector<Json> array_;
  std::map<std::string, Json, std::less<>> object_;
};

}  // namespace octet
