// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/pickle_globals.hpp"
#include "remat/weights/pickle_values.hpp"

namespace remat::detail {

/// Reads one pickle into values: protocol 2, as torch.save writes it, and what later protocols add
/// for data. Nothing is imported, called or constructed.
///
/// @par Source  Python's Lib/pickletools.py, which describes each opcode
class Pickle {
 public:
  /// Reads from the cursor's position to the end of the pickle.
  ///
  /// @return  the value of the whole pickle
  /// @throws WeightsError  if the bytes are no pickle, or use what is not in the table of names
  static PickleId read(ByteCursor& cursor, PickleValues& values) {
    return Pickle(cursor, values).run();
  }

 private:
  static constexpr std::size_t kMostNested = 1000;
  static constexpr std::size_t kLongestName = 300;

  Pickle(ByteCursor& cursor, PickleValues& values) : cursor_(cursor), values_(values) {}

  PickleId run() {
    for (;;) {
      const auto opcode = static_cast<unsigned char>(cursor_.next());
      if (opcode == '.') return pop();
      if (push_number(opcode) || push_text(opcode) || arrange(opcode) || build_sequence(opcode) ||
          build_dictionary(opcode) || remember(opcode) || apply(opcode))
        continue;
      refuse("has the opcode " + std::to_string(opcode) + ", which torch.save does not write");
    }
  }

  bool push_number(unsigned char opcode) {
    switch (opcode) {
      case 'N':
        push(values_.add(PickleKind::kNone));
        return true;
      case 0x88:
        push(values_.add(PickleKind::kBool, 1));
        return true;
      case 0x89:
        push(values_.add(PickleKind::kBool, 0));
        return true;
      case 'K':
        push_integer(static_cast<std::int64_t>(cursor_.number<1>()));
        return true;
      case 'M':
        push_integer(static_cast<std::int64_t>(cursor_.number<2>()));
        return true;
      case 'J':
        push_integer(static_cast<std::int32_t>(cursor_.number<4>()));
        return true;
      case 0x8a:
        push_long(cursor_.number<1>());
        return true;
      case 0x8b:
        push_long(cursor_.number<4>());
        return true;
      case 'G':
        cursor_.skip(8);
        push(values_.add(PickleKind::kReal));
        return true;
      default:
        return false;
    }
  }

  bool push_text(unsigned char opcode) {
    switch (opcode) {
      case 'U':
      case 'C':
      case 0x8c:
        push_text_of(cursor_.number<1>());
        return true;
      case 'T':
      case 'X':
      case 'B':
        push_text_of(cursor_.number<4>());
        return true;
      case 0x8d:
      case 0x8e:
      case 0x96:
        push_text_of(cursor_.number<8>());
        return true;
      default:
        return false;
    }
  }

  bool arrange(unsigned char opcode) {
    switch (opcode) {
      case 0x80:
        if (const auto protocol = cursor_.number<1>(); protocol < 2 || protocol > 5)
          refuse("has protocol " + std::to_string(protocol) + ", 2 to 5 were expected");
        return true;
      case 0x95:
        cursor_.number<8>();
        return true;  // a frame: only says how much to buffer
      case '(':
        if (marks_.size() == kMostNested) refuse("is nested too deeply");
        marks_.push_back(stack_.size());
        return true;
      case '0':
        pop();
        return true;
      case '1':
        take_to_mark();
        return true;
      case '2':
        push(top());
        return true;
      default:
        return false;
    }
  }

  bool build_sequence(unsigned char opcode) {
    constexpr auto kSequence = PickleKind::kSequence;
    switch (opcode) {
      case ')':
      case ']':
      case 0x8f:
        push(values_.add_list(kSequence));
        return true;
      case 't':
      case 'l':
      case 0x91:
        push(values_.add_list(kSequence, take_to_mark()));
        return true;
      case 0x85:
        push(values_.add_list(kSequence, take(1)));
        return true;
      case 0x86:
        push(values_.add_list(kSequence, take(2)));
        return true;
      case 0x87:
        push(values_.add_list(kSequence, take(3)));
        return true;
      case 'a':
        extend(kSequence, take(1));
        return true;
      case 'e':
      case 0x90:
        extend(kSequence, take_to_mark());
        return true;
      default:
        return false;
    }
  }

  bool build_dictionary(unsigned char opcode) {
    constexpr auto kDictionary = PickleKind::kDictionary;
    switch (opcode) {
      case '}':
        push(values_.add_list(kDictionary));
        return true;
      case 'd':
        push(values_.add_list(kDictionary, in_pairs(take_to_mark())));
        return true;
      case 's':
        extend(kDictionary, take(2));
        return true;
      case 'u':
        extend(kDictionary, in_pairs(take_to_mark()));
        return true;
      default:
        return false;
    }
  }

  bool remember(unsigned char opcode) {
    switch (opcode) {
      case 'q':
        memo_[cursor_.number<1>()] = top();
        return true;
      case 'r':
        memo_[cursor_.number<4>()] = top();
        return true;
      case 0x94:
        memo_[memo_.size()] = top();
        return true;
      case 'h':
        recall(cursor_.number<1>());
        return true;
      case 'j':
        recall(cursor_.number<4>());
        return true;
      default:
        return false;
    }
  }

  bool apply(unsigned char opcode) {
    switch (opcode) {
      case 'c': {
        const std::string module = line();
        push_global(module, line());
        return true;
      }
      case 0x93: {
        const std::string name = text_of(pop());
        push_global(text_of(pop()), name);
        return true;
      }
      case 'Q':
        push_storage(pop());
        return true;
      case 'R':
      case 0x81:
        call(take(2));
        return true;
      case 0x92:
        call(take(3));
        return true;
      // Attributes: a dictionary's `_metadata`, a tensor's own. None of them is a weight.
      case 'b':
        pop();
        top();
        return true;
      default:
        return false;
    }
  }

  void push(PickleId id) { stack_.push_back(id); }

  void push_integer(std::int64_t number) { push(values_.add(PickleKind::kInteger, number)); }

  void push_long(std::uint64_t byte_count) {
    const std::size_t begin = values_.letters().size();
    cursor_.append_to(values_.letters(), byte_count);
    if (byte_count > 8) return push(values_.add_text(PickleKind::kBigInteger, begin));
    // Two's complement, least significant byte first, as short as it can be.
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < byte_count; ++i)
      bits |= std::uint64_t{static_cast<unsigned char>(values_.letters()[begin + i])} << (8 * i);
    const bool is_negative = byte_count != 0 && (bits >> (8 * byte_count - 1) & 1) != 0;
    if (is_negative && byte_count < 8) bits |= ~std::uint64_t{0} << (8 * byte_count);
    values_.letters().resize(begin);
    push_integer(static_cast<std::int64_t>(bits));
  }

  void push_text_of(std::uint64_t byte_count) {
    const std::size_t begin = values_.letters().size();
    cursor_.append_to(values_.letters(), byte_count);
    push(values_.add_text(PickleKind::kText, begin));
  }

  void push_global(const std::string& module, const std::string& name) {
    const auto role = find_role(module, name);
    if (!role) throw_unknown_global(values_.source(), module, name);
    const std::size_t begin = values_.letters().size();
    values_.letters() += name;
    push(values_.add_text(PickleKind::kGlobal, begin, static_cast<std::int64_t>(*role)));
  }

  void push_storage(PickleId reference) {
    const bool is_storage = values_.is(reference, PickleKind::kSequence) &&
                            values_.items(reference).size() >= 5 &&
                            is_text(values_.items(reference)[0], "storage");
    if (!is_storage) refuse("refers to something outside that is no storage, perhaps a module");
    const auto items = values_.items(reference);
    push(values_.add_list(PickleKind::kStorage, {items.begin(), items.end()}));
  }

  void call(const std::vector<PickleId>& callee_and_arguments) {
    push(result_of(callee_and_arguments[0], callee_and_arguments[1], 0));
  }

  PickleId result_of(PickleId callee, PickleId arguments, int depth) {
    if (!values_.is(callee, PickleKind::kGlobal) || !values_.is(arguments, PickleKind::kSequence))
      refuse("calls something that cannot be called");
    const auto span = values_.items(arguments);
    std::vector<PickleId> items(span.begin(), span.end());
    switch (values_.role(callee)) {
      case PickleRole::kDictionary:
        return dictionary_of(items);
      case PickleRole::kTensor:
        return values_.add_list(PickleKind::kTensor, std::move(items));
      case PickleRole::kFirstArgument:
        if (items.empty()) refuse("wraps nothing");
        return items[0];
      case PickleRole::kTypedTensor:
        if (items.size() < 3 || depth > 0) refuse("makes a tensor of a subclass from too little");
        return result_of(items[0], items[2], depth + 1);
      default:
        return values_.add(PickleKind::kOpaque);
    }
  }

  /// OrderedDict() and, as Python 2 wrote it, OrderedDict([[key, value], ...]).
  PickleId dictionary_of(const std::vector<PickleId>& arguments) {
    const PickleId dictionary = values_.add_list(PickleKind::kDictionary);
    if (arguments.empty()) return dictionary;
    if (!values_.is(arguments[0], PickleKind::kSequence)) refuse("makes a dictionary of no list");
    const auto span = values_.items(arguments[0]);
    for (const PickleId pair : std::vector<PickleId>(span.begin(), span.end())) {
      if (!values_.is(pair, PickleKind::kSequence) || values_.items(pair).size() != 2)
        refuse("makes a dictionary of something else than pairs");
      values_.append(dictionary,
                     std::vector(values_.items(pair).begin(), values_.items(pair).end()));
    }
    return dictionary;
  }

  void extend(PickleKind kind, const std::vector<PickleId>& items) {
    const PickleId target = top();
    if (values_.is(target, PickleKind::kOpaque)) return;
    if (!values_.is(target, kind)) refuse("adds items to something that has none");
    values_.append(target, items);
  }

  std::vector<PickleId> in_pairs(std::vector<PickleId> items) const {
    if (items.size() % 2 != 0) refuse("has a key without a value");
    return items;
  }

  void recall(std::uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) refuse("recalls a value that it never remembered");
    push(found->second);
  }

  PickleId top() const {
    if (stack_.size() <= floor()) refuse("takes a value where there is none");
    return stack_.back();
  }

  PickleId pop() {
    const PickleId id = top();
    stack_.pop_back();
    return id;
  }

  std::vector<PickleId> take(std::size_t count) {
    if (stack_.size() < floor() + count) refuse("takes more values than there are");
    return take_from(stack_.size() - count);
  }

  std::vector<PickleId> take_to_mark() {
    if (marks_.empty()) refuse("ends a group that it never began");
    const std::size_t begin = floor();
    marks_.pop_back();
    return take_from(begin);
  }

  std::vector<PickleId> take_from(std::size_t begin) {
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(begin);
    std::vector<PickleId> taken(first, stack_.end());
    stack_.erase(first, stack_.end());
    return taken;
  }

  /// Values below the last mark belong to the group around it.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  std::string line() {
    std::string text;
    for (char letter = cursor_.next(); letter != '\n'; letter = cursor_.next()) {
      if (text.size() == kLongestName) refuse("has a name that does not end");
      text += letter;
    }
    return text;
  }

  std::string text_of(PickleId id) const {
    if (!values_.is(id, PickleKind::kText) || values_.text(id).size() > kLongestName)
      refuse("has a name that is none");
    return std::string(values_.text(id));
  }

  bool is_text(PickleId id, std::string_view text) const {
    return values_.is(id, PickleKind::kText) && values_.text(id) == text;
  }

  [[noreturn]] void refuse(std::string_view what) const {
    values_.source().damaged("before byte " + std::to_string(cursor_.position()) + " its pickle " +
                             std::string(what));
  }

  ByteCursor& cursor_;
  PickleValues& values_;
  std::vector<PickleId> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleId> memo_;
};

}  // namespace remat::detail
