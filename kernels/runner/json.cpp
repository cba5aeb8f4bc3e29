#include "json.h"

#include <charconv>
#include <stdexcept>

#include "core/plan/text.h"

namespace octet {

// A reader of one text. Names that occur twice are refused: another reader might take the other one.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  Json whole() {
    Json value = read(0);
    space();
    if (at_ != end_) fail("text behind its end");
    return value;
  }

 private:
  static constexpr int kMostDepth = 64;

  [[noreturn]] void fail(const std::string& why) const { throw std::invalid_argument("damaged JSON: " + why); }

  void space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }
  char peek() {
    space();
    if (at_ == end_) fail("it ends too early");
    return *at_;
  }
  void take(char sign) {
    if (peek() != sign) fail(std::string("expected ") + sign);
    ++at_;
  }
  bool took(char sign) {
    if (peek() != sign) return false;
    ++at_;
    return true;
  }

  Json read(int depth) {
    if (depth > kMostDepth) fail("it is nested too deeply");
    Json value;
    switch (peek()) {
      case '{':
        value.kind_ = Json::Kind::kObject;
        read_object(value, depth);
        break;
      case '[':
        value.kind_ = Json::Kind::kArray;
        read_array(value, depth);
        break;
      case '"':
        value.kind_ = Json::Kind::kString;
        value.string_ = read_string();
        break;
      default:
        read_word(value);
    }
    return value;
  }

  void read_object(Json& value, int depth) {
    take('{');
    if (took('}')) return;
    do {
      space();
      std::string name = read_string();
      take(':');
      if (!value.object_.emplace(name, read(depth + 1)).second) fail("'" + name + "' is there twice");
    } while (took(','));
    take('}');
  }

  void read_array(Json& value, int depth) {
    take('[');
    if (took(']')) return;
    do value.array_.push_back(read(depth + 1));
    while (took(','));
    take(']');
  }

  std::string read_string() {
    take('"');
    std::string out;
    while (true) {
      const char* begin = at_;
      while (at_ != end_ && *at_ != '"' && *at_ != '\\') ++at_;
      out.append(begin, at_);
      if (at_ == end_) fail("it ends in a string");
      if (*at_++ == '"') return out;
      read_escape(out);
    }
  }

  void read_escape(std::string& out) {
    if (at_ == end_) fail("it ends in a string");
    const char sign = *at_++;
    switch (sign) {
      case '"': case '\\': case '/': out += sign; return;
      case 'b': out += '\b'; return;
      case 'f': out += '\f'; return;
      case 'n': out += '\n'; return;
      case 'r': out += '\r'; return;
      case 't': out += '\t'; return;
      case 'u': return append_utf8(out, read_code_point());
      default: fail("an unknown escape in a string");
    }
  }

  uint32_t read_unit() {
    uint32_t unit = 0;
    if (end_ - at_ < 4) fail("it ends in a string");
    const auto [end, error] = std::from_chars(at_, at_ + 4, unit, 16);
    if (error != std::errc() || end != at_ + 4) fail("\\u without four digits");
    at_ += 4;
    return unit;
  }

  // One unit, or two where the first is the high half of a pair.
  uint32_t read_code_point() {
    const uint32_t high = read_unit();
    if (high < 0xd800 || high > 0xdfff) return high;
    if (high > 0xdbff || end_ - at_ < 6 || at_[0] != '\\' || at_[1] != 'u') fail("half a pair in a string");
    at_ += 2;
    const uint32_t low = read_unit();
    if (low < 0xdc00 || low > 0xdfff) fail("half a pair in a string");
    return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
  }

  static void append_utf8(std::string& out, uint32_t code) {
    const auto byte = [&](uint32_t bits) { out += static_cast<char>(bits); };
    if (code < 0x80) return byte(code);
    if (code < 0x800) {
      byte(0xc0 | code >> 6);
    } else if (code < 0x10000) {
      byte(0xe0 | code >> 12), byte(0x80 | (code >> 6 & 63));
    } else {
      byte(0xf0 | code >> 18), byte(0x80 | (code >> 12 & 63)), byte(0x80 | (code >> 6 & 63));
    }
    byte(0x80 | (code & 63));
  }

  void read_word(Json& value) {
    const char* begin = at_;
    while (at_ != end_ && *at_ != ',' && *at_ != ']' && *at_ != '}' && *at_ != ' ' && *at_ != '\n' && *at_ != '\r' && *at_ != '\t')
      ++at_;
    const std::string_view word(begin, at_ - begin);
    if (word == "null") return;
    if (word == "true" || word == "false") {
      value.kind_ = Json::Kind::kBool;
      value.integer_ = word == "true";
      return;
    }
    const auto [end, error] = std::from_chars(begin, at_, value.integer_);
    value.kind_ = Json::Kind::kInteger;
    if (error == std::errc() && end == at_ && !word.empty()) return;
    // A number that is no integer, whose value nobody asks for.
    if (!read_real(word)) fail("'" + std::string(word.substr(0, 40)) + "' is no value");
    value.kind_ = Json::Kind::kReal;
  }

  const char* at_;
  const char* end_;
};

Json Json::parse(std::string_view text) { return JsonReader(text).whole(); }

namespace {

void check(bool right, const char* what, const char* expected) {
  if (!right) throw std::invalid_argument(std::string(what) + " is not " + expected);
}

}  // namespace

const std::string& Json::string(const char* what) const {
  check(kind_ == Kind::kString, what, "a string");
  return string_;
}
int64_t Json::integer(const char* what) const {
  check(kind_ == Kind::kInteger, what, "an integer");
  return integer_;
}
bool Json::boolean(const char* what) const {
  check(kind_ == Kind::kBool, what, "true or false");
  return integer_;
}
const std::vector<Json>& Json::array(const char* what) const {
  check(kind_ == Kind::kArray, what, "a list");
  return array_;
}
const std::map<std::string, Json, std::less<>>& Json::object(const char* what) const {
  check(kind_ == Kind::kObject, what, "an object");
  return object_;
}
const Json* Json::find(std::string_view name) const {
  const auto found = object_.find(name);
  return found == object_.end() ? nullptr : &found->second;
}
const Json& Json::at(std::string_view name) const {
  const Json* found = find(name);
  if (!found) throw std::invalid_argument("there is no '" + std::string(name) + "'");
  return *found;
}

}  // namespace octet
