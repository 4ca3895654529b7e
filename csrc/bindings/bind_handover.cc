// Binds the messages of a hand-over and their codec, for the supervisor: classes and signatures
// come out of the table that the codec walks.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/typed.h"
#include "transport/kinds.h"
#include "wire/handover_fields.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

static_assert(wire::kMaxPathBytes == transport::kMaxHandoverBytes);

// How a member's values come from Python (In) and go there (Out).
template <class Member>
struct Exchanged {
  using In = Member;
  static Member in(const char*, Member value) { return value; }
  static Member out(Member value) { return value; }
};
template <>
struct Exchanged<std::string> {
  using In = py::str;
  // Texts tell of files too, whose names need not be UTF-8.
  static std::string in(const char*, const py::str& value) {
    const auto text = py::reinterpret_steal<py::bytes>(
        PyUnicode_AsEncodedString(value.ptr(), "utf-8", "replace"));
    if (!text) throw py::error_already_set();
    return text;
  }
  static std::string out(const std::string& value) { return value; }
};
template <>
struct Exchanged<std::vector<std::byte>> {
  using In = py::bytes;
  static std::vector<std::byte> in(const char*, const py::bytes& value) {
    const auto bytes = std::as_bytes(std::span(static_cast<std::string_view>(value)));
    return {bytes.begin(), bytes.end()};
  }
  static py::bytes out(const std::vector<std::byte>& value) {
    return {reinterpret_cast<const char*>(value.data()), value.size()};
  }
};
template <size_t kSize>
struct Exchanged<std::array<std::byte, kSize>> {
  using In = py::bytes;
  static std::array<std::byte, kSize> in(const char* name, const py::bytes& value) {
    const auto bytes = std::as_bytes(std::span(static_cast<std::string_view>(value)));
    if (bytes.size() != kSize)
      raise(Error{ErrorCode::kProtocol, std::string("field ") + name + ": found " +
                                            std::to_string(bytes.size()) +
                                            " bytes, allowed is a binary of exactly " +
                                            std::to_string(kSize) + " bytes"});
    std::array<std::byte, kSize> copied;
    std::copy(bytes.begin(), bytes.end(), copied.begin());
    return copied;
  }
  static py::bytes out(const std::array<std::byte, kSize>& value) {
    return {reinterpret_cast<const char*>(value.data()), value.size()};
  }
};
template <>
struct Exchanged<std::vector<uint64_t>> {
  using In = std::vector<uint64_t>;
  static std::vector<uint64_t> in(const char*, std::vector<uint64_t> value) { return value; }
  static py::typing::Tuple<py::int_, py::ellipsis> out(const std::vector<uint64_t>& value) {
    return py::tuple(py::cast(value));
  }
};

template <class Field>
using MemberOf =
    std::remove_cvref_t<decltype(std::declval<typename Field::Of>().*std::declval<Field>().member)>;
template <class Message, size_t kIndex>
using FieldMember = MemberOf<std::tuple_element_t<
    kIndex, std::remove_const_t<decltype(wire::HandoverTable<Message>::kFields)>>>;

// One instance for all fields of a type that a message has.
template <class Message, class Member>
void bind_getter(py::class_<Message>& cls, const wire::HandoverField<Message, Member>& field) {
  cls.def_property_readonly(field.name, [member = field.member](const Message& message) {
    return Exchanged<Member>::out(message.*member);
  });
}

template <class Message, size_t... kIndex>
void bind_message(py::module_& module, const char* name, std::index_sequence<kIndex...>) {
  using Table = wire::HandoverTable<Message>;
  py::class_<Message> cls(module, name, Table::kMeaning);
  if constexpr (sizeof...(kIndex) == 0) {
    cls.def(py::init<>());
  } else {
    cls.def(py::init([](typename Exchanged<FieldMember<Message, kIndex>>::In... values) {
              Message message;
              ((message.*std::get<kIndex>(Table::kFields).member =
                    Exchanged<FieldMember<Message, kIndex>>::in(
                        std::get<kIndex>(Table::kFields).name, std::move(values))),
               ...);
              return message;
            }),
            py::kw_only(), py::arg(std::get<kIndex>(Table::kFields).name)...);
    (bind_getter(cls, std::get<kIndex>(Table::kFields)), ...);
  }
}

std::string number(double value) { return std::to_string(static_cast<int64_t>(value)) + ".0"; }

// What a field may hold, as docs/protocol.md says it.
template <class Field>
std::string kind_text(const Field& field) {
  using Member = MemberOf<Field>;
  const std::string most = std::to_string(field.limit);
  if constexpr (std::is_same_v<Member, bool>)
    return "bool";
  else if constexpr (std::is_same_v<Member, double>)
    return "float " + number(field.minimum) + ".." + number(wire::kMaxHandoverReal);
  else if constexpr (std::is_same_v<Member, std::string>)
    return "text <= " + most + " bytes";
  else if constexpr (std::is_same_v<Member, std::vector<std::byte>>)
    return "binary, at most " + most + " bytes";
  else if constexpr (std::is_same_v<Member, std::vector<uint64_t>>)
    return "list of at most " + most + ": uint <= " + std::to_string(field.item_limit);
  else if constexpr (std::is_integral_v<Member>)
    return "uint <= " + most;
  else
    return "binary, " + std::to_string(Member().size()) + " bytes";
}

using FieldRows = std::vector<std::tuple<uint64_t, std::string, std::string>>;

template <class... Messages>
void bind_messages(py::module_& module, const std::variant<Messages...>*) {
  // The names that other classes of this module have.
  const auto class_name = [](const std::string& name) {
    if (name == "PathTerms") return std::string("PathTermsMessage");
    return name == "Ready" ? std::string("HandoverReady") : name;
  };
  (bind_message<Messages>(
       module, class_name(wire::HandoverTable<Messages>::kName).c_str(),
       std::make_index_sequence<std::tuple_size_v<
           std::remove_const_t<decltype(wire::HandoverTable<Messages>::kFields)>>>()),
   ...);
  module.def(
      "handover_tables",
      [] {
        std::vector<std::pair<std::string, FieldRows>> tables;
        const auto add = [&]<class Message>(const Message*) {
          FieldRows rows;
          wire::each_field<Message>([&](const auto& field) {
            rows.emplace_back(field.key, field.name, kind_text(field));
          });
          tables.emplace_back(wire::HandoverTable<Message>::kName, std::move(rows));
        };
        (add(static_cast<const Messages*>(nullptr)), ...);
        return tables;
      },
      "For documents: (name, fields) of every message in the order of the types, 1 and up; a field "
      "is "
      "(key, name, what it may hold).");
}

}  // namespace

void bind_handover(py::module_& module) {
  bind_messages(module, static_cast<const wire::HandoverMessage*>(nullptr));
  module.attr("HANDOVER_VERSION") = wire::kHandoverVersion;
  module.attr("HANDOVER_TOKEN_BYTES") = wire::kHandoverTokenBytes;
  module.def(
      "encode_handover",
      [](const wire::HandoverMessage& message) {
        const std::vector<std::byte> bytes = unwrap(wire::encode_handover(message));
        return Exchanged<std::vector<std::byte>>::out(bytes);
      },
      py::arg("message"),
      "Texts beyond their limit are cut at a character. ProtocolError names another field outside "
      "its limits.");
  module.def(
      "decode_handover",
      [](const py::bytes& data) {
        const auto bytes = std::as_bytes(std::span(static_cast<std::string_view>(data)));
        return unwrap(wire::decode_handover(bytes));
      },
      py::arg("data"),
      "Any bytes give a message whose every field is within its limits, or ProtocolError naming "
      "message and field.");
}

}  // namespace dflash::bindings
