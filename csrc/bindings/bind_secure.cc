// Binds encrypted connections, for the control plane: Python's own ssl module takes pre-shared keys
// from 3.13 on only.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/boxes.h"
#include "transport/secure/libssl.h"
#include "transport/secure/relay.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using transport::PresharedKey;
using transport::Relay;
using transport::SecureSide;
using transport::SecureSocket;

struct RelayBox {
  std::unique_ptr<Relay, DeleteInOwnProcess> relay;
};

// Runs `step` with the connection, and neither with the interpreter's lock nor beside another one.
template <class Step>
auto with_socket(SecureSocketBox& box, const Step& step) {
  using Outcome = decltype(step(*box.socket));
  std::optional<Outcome> outcome;
  {
    py::gil_scoped_release unlocked;
    const std::lock_guard lock(box.mutex);
    if (box.socket != nullptr) outcome.emplace(step(*box.socket));
  }
  if (!outcome) raise(Error{ErrorCode::kClosed, "this connection is closed or was handed over"});
  return unwrap(std::move(*outcome));
}

std::unique_ptr<SecureSocketBox> make_socket(
    int descriptor, bool is_dialling,
    const std::vector<std::pair<std::string, py::bytes>>& identities) {
  OwnedFd socket(descriptor);
  std::vector<PresharedKey> keys;
  for (const auto& [identity, key] : identities) {
    const auto bytes = static_cast<std::string_view>(key);
    PresharedKey made{identity, {}};
    if (bytes.size() != made.key.size())
      raise(Error{ErrorCode::kInvalidArgument, "a pre-shared key has 32 bytes"});
    std::memcpy(made.key.data(), bytes.data(), bytes.size());
    keys.push_back(std::move(made));
  }
  auto box = std::make_unique<SecureSocketBox>();
  const SecureSide side = is_dialling ? SecureSide::kDialling : SecureSide::kAccepting;
  Result<std::unique_ptr<SecureSocket>> made = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    made = SecureSocket::create(side, std::move(socket), std::move(keys));
  }
  box->socket = unwrap(std::move(made));
  return box;
}

std::optional<py::bytes> receive(SecureSocketBox& box, size_t num_bytes) {
  std::vector<std::byte> bytes(std::min(num_bytes, transport::kRecordBytes));
  const size_t received = with_socket(box, [&](SecureSocket& socket) {
    const iovec room{bytes.data(), bytes.size()};
    return socket.receive({&room, 1});
  });
  if (received == 0) return std::nullopt;
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), received);
}

size_t send(SecureSocketBox& box, const py::buffer& content) {
  const py::buffer_info view = content.request();
  return with_socket(box, [&](SecureSocket& socket) {
    const iovec piece{view.ptr, static_cast<size_t>(view.size * view.itemsize)};
    return socket.send({&piece, 1});
  });
}

py::bytes channel_binding(SecureSocketBox& box) {
  const auto binding =
      with_socket(box, [](SecureSocket& socket) { return socket.channel_binding(); });
  return {reinterpret_cast<const char*>(binding.data()), binding.size()};
}

template <class Ask>
auto ask(SecureSocketBox& box, const Ask& question) {
  return with_socket(box, [&](SecureSocket& socket) {
    return Result<decltype(question(socket))>(question(socket));
  });
}

Result<bool> flushed(SecureSocket& socket) {
  DFLASH_TRY(socket.flush());
  return true;
}

std::unique_ptr<RelayBox> start_relay(SecureSocketBox& box) {
  auto relay = unwrap(Relay::start(box.take()));
  return std::make_unique<RelayBox>(
      RelayBox{std::unique_ptr<Relay, DeleteInOwnProcess>(relay.release())});
}

void bind_socket(py::module_& module) {
  py::class_<SecureSocketBox>(
      module, "SecureSocket",
      "One connection under TLS 1.3 with a pre-shared key (csrc/transport/secure). No call blocks. "
      "Any thread may call; calls of two threads take turns. A channel, a pulse or a relay "
      "consumes it.\n\nWorkerLost where the peer hung up, ProtocolError where the ends do not "
      "share a key or a record was changed on its way.")
      .def(py::init(&make_socket), py::arg("descriptor"), py::kw_only(), py::arg("is_dialling"),
           py::arg("keys"),
           "It takes ownership of `descriptor`, whatever happens. `keys` are (identity, 32 bytes): "
           "the dialling side offers the first, the accepting side takes any. UnsupportedError "
           "without libssl.")
      .def(
          "handshake",
          [](SecureSocketBox& box) {
            return with_socket(box, [](SecureSocket& socket) { return socket.handshake(); });
          },
          "True once it is over. Before that: wait for POLLIN, and for POLLOUT while `has_unsent`.")
      .def("send", &send, py::arg("content"), "Returns how many bytes were taken.")
      .def("flush",
           [](SecureSocketBox& box) {
             with_socket(box, [](SecureSocket& socket) { return flushed(socket); });
           })
      .def("receive", &receive, py::arg("num_bytes"), "Returns None where nothing has come.")
      .def("channel_binding", &channel_binding,
           "32 bytes that only the two ends of this connection know (RFC 9266).")
      .def_property_readonly(
          "identity",
          [](SecureSocketBox& box) {
            return ask(box, [](SecureSocket& socket) { return socket.identity(); });
          },
          "The identity of the key that is used, once the handshake is over.")
      .def_property_readonly("has_unsent",
                             [](SecureSocketBox& box) {
                               return ask(box,
                                          [](SecureSocket& socket) { return socket.has_unsent(); });
                             })
      .def_property_readonly(
          "has_pending",
          [](SecureSocketBox& box) {
            return ask(box, [](SecureSocket& socket) { return socket.has_pending(); });
          },
          "receive() may return bytes although the descriptor is not readable.")
      .def(
          "fileno",
          [](SecureSocketBox& box) {
            const std::lock_guard lock(box.mutex);
            return box.socket == nullptr ? -1 : box.socket->fd();
          },
          "-1 once it is closed or consumed.")
      .def(
          "hang_up",
          [](SecureSocketBox& box) {
            const std::lock_guard lock(box.mutex);
            if (box.socket != nullptr) ::shutdown(box.socket->fd(), SHUT_RDWR);
          },
          "Ends every wait on the descriptor.")
      .def("close", [](SecureSocketBox& box) {
        const std::lock_guard lock(box.mutex);
        box.socket.reset();
      });
}

}  // namespace

void bind_secure(py::module_& module) {
  bind_socket(module);
  py::class_<RelayBox>(module, "Relay",
                       "Decrypts for somebody who has only a descriptor, in a thread of its own. "
                       "It consumes `socket`.")
      .def(py::init(&start_relay), py::arg("socket"))
      .def(
          "take_plain",
          [](RelayBox& self) {
            if (self.relay == nullptr) raise(Error{ErrorCode::kClosed, "this relay is closed"});
            return self.relay->take_plain().release();
          },
          "The plain end, once; it becomes the caller's.")
      .def(
          "close",
          [](RelayBox& self) {
            py::gil_scoped_release unlocked;
            self.relay.reset();
          },
          "Hangs up at both ends. It may be called again.");
  module.def(
      "libssl_version",
      [](const std::string& library) {
        return unwrap(transport::load_libssl(library.c_str()))->version();
      },
      py::arg("library") = transport::kLibsslName,
      "Raises UnsupportedError naming the package and the setting where the library cannot be "
      "used.");
}

}  // namespace dflash::bindings
