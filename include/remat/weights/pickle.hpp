// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/pickle_globals.hpp"
#include "remat/weights/pickle_stack.hpp"
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
  static constexpr std::size_t kLongestName = 300;

  Pickle(ByteCursor& cursor, PickleValues& values)
      : cursor_(cursor), values_(values), stack_(cursor) {}

  PickleId run() {
    for (;;) {
      const auto opcode = static_cast<unsigned char>(cursor_.next());
      if (opcode == '.') return stack_.pop();
      if (push_number(opcode) || push_text(opcode) || arrange(opcode) || build_sequence(opcode) ||
          build_dictionary(opcode) || remember(opcode) || apply(opcode))
        continue;
      refuse("has the opcode " + std::to_string(opcode) + ", which torch.save does not write");
    }
  }

  bool push_number(unsigned char opcode) {
    switch (opcode) {
      case 'N':
        stack_.push(values_.add(PickleKind::kNone));
        return true;
      case 0x88:
        stack_.push(values_.add(PickleKind::kBool, 1));
        return true;
      case 0x89:
        stack_.push(values_.add(PickleKind::kBool, 0));
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
        stack_.push(values_.add(PickleKind::kReal));
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
        stack_.mark();
        return true;
      case '0':
        stack_.pop();
        return true;
      case '1':
        stack_.take_to_mark();
        return true;
      case '2':
        stack_.push(stack_.top());
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
        stack_.push(values_.add_list(kSequence));
        return true;
      case 't':
      case 'l':
      case 0x91:
        stack_.push(values_.add_list(kSequence, stack_.take_to_mark()));
        return true;
      case 0x85:
        stack_.push(values_.add_list(kSequence, stack_.take(1)));
        return true;
      case 0x86:
        stack_.push(values_.add_list(kSequence, stack_.take(2)));
        return true;
      case 0x87:
        stack_.push(values_.add_list(kSequence, stack_.take(3)));
        return true;
      case 'a':
        extend(kSequence, stack_.take(1));
        return true;
      case 'e':
      case 0x90:
        extend(kSequence, stack_.take_to_mark());
        return true;
      default:
        return false;
    }
  }

  bool build_dictionary(unsigned char opcode) {
    constexpr auto kDictionary = PickleKind::kDictionary;
    switch (opcode) {
      case '}':
        stack_.push(values_.add_list(kDictionary));
        return true;
      case 'd':
        stack_.push(values_.add_list(kDictionary, in_pairs(stack_.take_to_mark())));
        return true;
      case 's':
        extend(kDictionary, stack_.take(2));
        return true;
      case 'u':
        extend(kDictionary, in_pairs(stack_.take_to_mark()));
        return true;
      default:
        return false;
    }
  }

  bool remember(unsigned char opcode) {
    switch (opcode) {
      case 'q':
        memo_[cursor_.number<1>()] = stack_.top();
        return true;
      case 'r':
        memo_[cursor_.number<4>()] = stack_.top();
        return true;
      case 0x94:
        memo_[memo_.size()] = stack_.top();
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
        const std::string name = text_of(stack_.pop());
        push_global(text_of(stack_.pop()), name);
        return true;
      }
      case 'Q':
        push_storage(stack_.pop());
        return true;
      case 'R':
      case 0x81:
        call(stack_.take(2));
        return true;
      case 0x92:
        call(stack_.take(3));
        return true;
      // Attributes: a dictionary's `_metadata`, a tensor's own. None of them is a weight.
      case 'b':
        stack_.pop();
        stack_.top();
        return true;
      default:
        return false;
    }
  }

  void push_integer(std::int64_t number) { stack_.push(values_.add(PickleKind::kInteger, number)); }

  void push_long(std::uint64_t byte_count) {
    const std::size_t begin = values_.letters().size();
    cursor_.append_to(values_.letters(), byte_count);
    if (byte_count > 8) return stack_.push(values_.add_text(PickleKind::kBigInteger, begin));
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
    stack_.push(values_.add_text(PickleKind::kText, begin));
  }

  void push_global(const std::string& module, const std::string& name) {
    const auto role = find_role(module, name);
    if (!role) throw_unknown_global(values_.source(), module, name);
    const std::size_t begin = values_.letters().size();
    values_.letters() += name;
    stack_.push(values_.add_text(PickleKind::kGlobal, begin, static_cast<std::int64_t>(*role)));
  }

  void push_storage(PickleId reference) {
    const bool is_storage = values_.is(reference, PickleKind::kSequence) &&
                            values_.items(reference).size() >= 5 &&
                            is_text(values_.items(reference)[0], "storage");
    if (!is_storage) refuse("refers to something outside that is no storage, perhaps a module");
    const auto items = values_.items(reference);
    stack_.push(values_.add_list(PickleKind::kStorage, {items.begin(), items.end()}));
  }

  void call(const std::vector<PickleId>& callee_and_arguments) {
    stack_.push(result_of(callee_and_arguments[0], callee_and_arguments[1], 0));
  }

  PickleId result_of(PickleId callee, PickleId arguments, int depth) {
    if (!values_.is(callee, PickleKind::kGlobal) || !values_.is(arguments, PickleKind::kSequence))
      refuse("calls something that cannot be called");
    // Copied only where the copy is counted: a hostile pickle may pass one long list many times.
    const auto items = values_.items(arguments);
    switch (values_.role(callee)) {
      case PickleRole::kDictionary:
        return items.empty() ? values_.add_list(PickleKind::kDictionary) : dictionary_of(items[0]);
      case PickleRole::kTensor:
        return values_.add_list(PickleKind::kTensor, {items.begin(), items.end()});
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

  /// What Python 2 wrote: OrderedDict([[key, value], ...]).
  PickleId dictionary_of(PickleId pairs) {
    if (!values_.is(pairs, PickleKind::kSequence)) refuse("makes a dictionary of no list");
    const PickleId dictionary = values_.add_list(PickleKind::kDictionary);
    for (std::size_t i = 0; i < values_.items(pairs).size(); ++i) {
      const PickleId pair = values_.items(pairs)[i];
      if (!values_.is(pair, PickleKind::kSequence) || values_.items(pair).size() != 2)
        refuse("makes a dictionary of something else than pairs");
      values_.append(dictionary, values_.items(pair));
    }
    return dictionary;
  }

  void extend(PickleKind kind, const std::vector<PickleId>& items) {
    const PickleId target = stack_.top();
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
    stack_.push(found->second);
  }

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

  [[noreturn]] void refuse(std::string_view what) const { refuse_pickle(cursor_, what); }

  ByteCursor& cursor_;
  PickleValues& values_;
  PickleStack stack_;
  std::unordered_map<std::uint64_t, PickleId> memo_;
};

}  // namespace remat::detail
