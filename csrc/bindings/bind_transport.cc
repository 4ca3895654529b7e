// Binds the table of transports, the handshakes through it, and channels. A Channel is opaque to
// Python: it is made here and handed to a client, a worker or a decorator.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/typed.h"
#include "transport/fabric/fabric.h"
#include "transport/faulty/faulty.h"
#include "transport/kinds.h"
#include "transport/loopback/loopback.h"
#include "transport/tapped.h"
#include "wire/frame.h"
#include "wire/payload_layout.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using transport::Channel;
using transport::SlotGeometry;

using transport::PathTerms;
using transport::TransportKind;

std::unique_ptr<ChannelBox> boxed(std::unique_ptr<Channel> channel) {
  return std::make_unique<ChannelBox>(ChannelBox{std::move(channel)});
}

py::bytes to_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Takes the descriptors before anything can fail, so that the caller has given them away in any
// case.
transport::Handover handover_of(std::string_view bytes, const std::vector<int>& descriptors,
                                SecureSocketBox* secured) {
  transport::Handover handover;
  for (const int descriptor : descriptors) handover.descriptors.emplace_back(descriptor);
  if (secured != nullptr) handover.secured = secured->take();
  if (bytes.size() > transport::kMaxHandoverBytes) {
    raise(Error{ErrorCode::kProtocol, "the other end's handover has " +
                                          std::to_string(bytes.size()) + " bytes; allowed are " +
                                          std::to_string(transport::kMaxHandoverBytes)});
  }
  const auto view = std::as_bytes(std::span(bytes));
  handover.bytes.assign(view.begin(), view.end());
  return handover;
}

const TransportKind& kind_named(const std::string& name) {
  return *unwrap(transport::find_kind(transport::transport_kinds(), name));
}

// The host's end of a handshake; it is gone once the offer is completed.
struct OfferBox {
  std::unique_ptr<transport::PathOffer> offer;

  transport::PathOffer& get() const {
    if (offer == nullptr) raise(Error{ErrorCode::kClosed, "this offer was completed before"});
    return *offer;
  }
};

std::unique_ptr<OfferBox> offer_path(const std::string& kind, const PathTerms& terms) {
  Result<std::unique_ptr<transport::PathOffer>> made = Error{ErrorCode::kClosed, ""};
  const TransportKind& row = kind_named(kind);
  {
    py::gil_scoped_release unlocked;
    made = row.offer(terms);
  }
  return std::make_unique<OfferBox>(OfferBox{unwrap(std::move(made))});
}

std::unique_ptr<ChannelBox> complete(OfferBox& box, const py::bytes& answer,
                                     const std::vector<int>& descriptors,
                                     SecureSocketBox* secured) {
  transport::Handover handover = handover_of(answer, descriptors, secured);
  box.get();
  const auto offer = std::move(box.offer);
  Result<std::unique_ptr<Channel>> made = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    made = offer->complete(std::move(handover));
  }
  return boxed(unwrap(std::move(made)));
}

std::unique_ptr<transport::Acceptance> accept_path(const std::string& kind, const PathTerms& terms,
                                                   const py::bytes& offered,
                                                   const std::vector<int>& descriptors,
                                                   SecureSocketBox* secured) {
  transport::Handover handover = handover_of(offered, descriptors, secured);
  const TransportKind& row = kind_named(kind);
  Result<transport::Acceptance> made = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    made = row.accept(terms, std::move(handover));
  }
  return std::make_unique<transport::Acceptance>(unwrap(std::move(made)));
}

transport::FaultKind parse_fault(const std::string& kind) {
  using transport::FaultKind;
  if (kind == "fail") return FaultKind::kFail;
  if (kind == "delay") return FaultKind::kDelay;
  if (kind == "truncate") return FaultKind::kTruncate;
  if (kind == "corrupt") return FaultKind::kCorrupt;
  if (kind == "drop") return FaultKind::kDrop;
  raise(Error{ErrorCode::kInvalidArgument,
              "fault kind '" + kind + "' is none of fail, delay, truncate, corrupt, drop"});
}

transport::FaultPoint parse_point(const std::string& point) {
  if (point == "publish") return transport::FaultPoint::kPublish;
  if (point == "poll") return transport::FaultPoint::kPoll;
  raise(Error{ErrorCode::kInvalidArgument, "fault point '" + point + "' is none of publish, poll"});
}

void bind_terms(py::module_& module) {
  py::class_<SlotGeometry>(
      module, "Geometry",
      "The slots of a data path: their number, and the bytes of a request and of a reply in each.")
      .def(py::init([](uint32_t num_slots, uint64_t request_bytes, uint64_t reply_bytes) {
             return SlotGeometry{num_slots, request_bytes, reply_bytes};
           }),
           py::arg("num_slots"), py::arg("request_bytes"), py::arg("reply_bytes"))
      .def_readonly("num_slots", &SlotGeometry::num_slots)
      .def_readonly("request_bytes", &SlotGeometry::request_bytes)
      .def_readonly("reply_bytes", &SlotGeometry::reply_bytes);
  py::class_<PathTerms>(
      module, "PathTerms",
      "What both ends know of a data path before it exists (csrc/transport/kinds.h).")
      .def(py::init([](const SlotGeometry& geometry, uint64_t generation, bool is_open,
                       int socket_buffer_bytes, int user_timeout_ms, std::string local_host,
                       bool is_fast_only) {
             return PathTerms{geometry,        generation,
                              is_open,         socket_buffer_bytes,
                              user_timeout_ms, std::move(local_host),
                              is_fast_only};
           }),
           py::arg("geometry"), py::arg("generation"), py::kw_only(), py::arg("is_open") = false,
           py::arg("socket_buffer_bytes") = 0, py::arg("user_timeout_ms") = 0,
           py::arg("local_host") = "", py::arg("is_fast_only") = false,
           "is_open: The segment of replies stays writable, so that a device of the host may "
           "register it.\nsocket_buffer_bytes: The buffers have this size each way; 0 keeps the "
           "system's own.\nuser_timeout_ms: TCP takes a peer that acknowledges nothing for so long "
           "for gone; 0 keeps the system's own.\nlocal_host: The host's own numeric address on the "
           "network of the worker; empty stands for one machine.\nis_fast_only: A fabric may only "
           "be "
           "one behind which hardware moves the bytes.");
}

void bind_fabric(py::module_& module) {
  py::class_<transport::FabricProvider>(
      module, "FabricProvider",
      "A provider of libfabric that paths can use here (csrc/transport/fabric/fabric.h).")
      .def_readonly("name", &transport::FabricProvider::name)
      .def_readonly("protocol", &transport::FabricProvider::protocol)
      .def_readonly("protocol_version", &transport::FabricProvider::protocol_version)
      .def_readonly("is_fast", &transport::FabricProvider::is_fast, "Hardware moves the bytes.");
  module.def(
      "fabric_providers",
      [] {
        Result<std::vector<transport::FabricProvider>> found = Error{ErrorCode::kClosed, ""};
        {
          py::gil_scoped_release unlocked;
          found = transport::fabric_providers();
        }
        return unwrap(std::move(found));
      },
      "Those of this machine, with hardware first; the first call takes 0.1 to 0.4 s. "
      "UnsupportedError where there is no libfabric, or no provider that fits.");
  module.def("fabric_strangers", &transport::num_fabric_strangers,
             "How many messages that were not their peers' have reached this process's endpoints.");
}

void bind_handshake(py::module_& module) {
  py::class_<TransportKind>(module, "TransportKind",
                            "A row of the table of transports (csrc/transport/kinds.h).")
      .def_property_readonly("name", [](const TransportKind& self) { return self.name; })
      .def_property_readonly(
          "setting", [](const TransportKind& self) { return self.setting; },
          "This value of the setting `transport` means this kind.")
      .def_property_readonly(
          "reaches",
          [](const TransportKind& self) {
            std::vector<std::string> names;
            for (const transport::Reach reach : self.reaches)
              names.emplace_back(transport::reach_name(reach));
            return names;
          },
          "The workers that it reaches: \"started\", \"started, unix\", \"started, tcp\", \"unix "
          "path\" or \"tcp host\".")
      .def_property_readonly(
          "is_dialled", [](const TransportKind& self) { return self.is_dialled; },
          "The host dials its connections, and the data connection is the only descriptor of both "
          "ends.")
      .def_property_readonly(
          "is_clear", [](const TransportKind& self) { return self.is_clear; },
          "Messages travel in clear even where those connections are encrypted.")
      .def(
          "try_here",
          [](const TransportKind& self) {
            Status tried = ok();
            {
              py::gil_scoped_release unlocked;
              tried = transport::try_kind(self);
            }
            unwrap(std::move(tried));
          },
          "Makes a path within this process. DflashError says what this machine lacks.");
  module.def(
      "transport_kinds",
      [] {
        py::typing::List<TransportKind> kinds;
        for (const TransportKind& kind : transport::transport_kinds())
          kinds.append(py::cast(&kind, py::return_value_policy::reference));
        return kinds;
      },
      "All transports of this build. Setting `auto` takes the first that serves an address.");
  py::class_<OfferBox>(module, "PathOffer",
                       "The host's end between its offer and the worker's answer.")
      .def_property_readonly("payload",
                             [](const OfferBox& self) { return to_bytes(self.get().bytes()); })
      .def_property_readonly(
          "descriptors", [](const OfferBox& self) { return self.get().descriptors(); },
          "They stay the offer's own; the peer gets copies.")
      .def("complete", &complete, py::arg("answer"), py::arg("descriptors"),
           py::arg("secured") = nullptr,
           "Makes the host's channel, once. It takes ownership of the descriptors, whatever "
           "happens. An encrypted data connection, which it consumes, stands in the place of a "
           "descriptor.");
  py::class_<transport::Acceptance>(module, "Acceptance",
                                    "The worker's end once it has accepted an offer.")
      .def("take_channel",
           [](transport::Acceptance& self) {
             if (self.channel == nullptr)
               raise(Error{ErrorCode::kClosed, "this channel was already handed over"});
             return boxed(std::move(self.channel));
           })
      .def_property_readonly(
          "payload", [](const transport::Acceptance& self) { return to_bytes(self.answer.bytes); })
      .def_property_readonly(
          "descriptors",
          [](const transport::Acceptance& self) {
            std::vector<int> descriptors;
            for (const OwnedFd& descriptor : self.answer.descriptors)
              descriptors.push_back(descriptor.get());
            return descriptors;
          },
          "They stay the acceptance's own; the peer gets copies.");
  module.def("offer_path", &offer_path, py::arg("kind"), py::arg("terms"));
  module.def("accept_path", &accept_path, py::arg("kind"), py::arg("terms"), py::arg("offered"),
             py::arg("descriptors"), py::arg("secured") = nullptr,
             "It takes ownership of the descriptors, whatever happens, and consumes `secured`.");
}

// Flips one bit of the lowest mantissa byte of a value in every `one_in`-th row of all replies, and
// makes their checksums fit: what a worker sends whose arithmetic goes wrong now and then.
class Drift {
 public:
  Drift(uint64_t one_in, uint64_t seed) : one_in_(one_in), random_(seed) {
    num_rows_ = random_() % one_in_;
  }
  void operator()(std::span<std::byte> message) {
    if (message.size() < wire::kFrameHeaderBytes) return;
    auto decoded = wire::decode_frame_header(message.first<wire::kFrameHeaderBytes>());
    if (!decoded.ok() || decoded.value().kind != wire::FrameKind::kReply) return;
    wire::FrameHeader header = decoded.value();
    const auto payload = message.subspan(wire::kFrameHeaderBytes);
    const size_t value_bytes = dtype_bytes(header.reply_dtype);
    const size_t row_bytes = (payload.size() - wire::kReplyTimingBytes) / header.num_rows;
    for (uint32_t row = 0; row < header.num_rows; ++row) {
      if (++num_rows_ % one_in_ != 0) continue;
      const size_t value = random_() % (row_bytes / value_bytes);
      const auto bit = static_cast<std::byte>(1u << (random_() % 7));
      payload[wire::kReplyTimingBytes + row * row_bytes + value * value_bytes] ^= bit;
    }
    header.payload_checksum = checksum(payload);
    wire::encode_frame_header(header, message.first<wire::kFrameHeaderBytes>());
  }

 private:
  const uint64_t one_in_;
  std::mt19937_64 random_;
  uint64_t num_rows_ = 0;
};

using TapHolder = std::shared_ptr<transport::Tap>;

void bind_tap(py::module_& module) {
  py::class_<transport::Tap, TapHolder>(
      module, "Tap",
      "Copies of exchanges that cross a channel (csrc/transport/tapped.h). Any thread may call. "
      "DflashError where the system has no descriptor left.")
      .def(py::init([] { return unwrap(transport::Tap::create()); }))
      .def("arm", &transport::Tap::arm, py::arg("num_skipped"), py::arg("num_exchanges"),
           py::arg("max_bytes"),
           "The next `num_exchanges` after `num_skipped` are copied, as long as their requests "
           "have `max_bytes` at most. They count when they are sent, whether a reply comes or not.")
      .def_property_readonly("is_spent", &transport::Tap::is_spent,
                             "All of them were sent: nothing more is copied until the next `arm`.")
      .def("fileno", &transport::Tap::fd,
           "Readable while there are copies to take, and when the last exchange was sent; the "
           "tap's own.")
      .def(
          "take",
          [](transport::Tap& self) {
            py::typing::List<py::typing::Tuple<py::bytes, py::bytes>> taken;
            for (const transport::TappedExchange& exchange : self.take())
              taken.append(py::make_tuple(to_bytes(exchange.request), to_bytes(exchange.reply)));
            return taken;
          },
          "Pairs of request and reply, whole frames, oldest first.");
  module.def(
      "make_tapped",
      [](ChannelBox& box, const TapHolder& tap) {
        return boxed(transport::make_tapped(box.take(), tap));
      },
      py::arg("channel"), py::arg("tap"),
      "Consumes `channel` and returns one whose exchanges the tap copies. Channels may share a "
      "tap.");
  module.def(
      "make_drifting",
      [](ChannelBox& box, uint64_t one_in, uint64_t seed) {
        if (one_in == 0) raise(Error{ErrorCode::kInvalidArgument, "one_in is 0"});
        return boxed(transport::make_rewritten(box.take(), Drift(one_in, seed)));
      },
      py::arg("channel"), py::kw_only(), py::arg("one_in"), py::arg("seed") = 1,
      "Consumes `channel` and returns one in whose replies every `one_in`-th row has a flipped bit "
      "in the lowest mantissa byte of one value, with checksums that fit, for tests.");
}

void bind_channels(py::module_& module) {
  py::class_<ChannelBox>(
      module, "Channel",
      "One end of a data path. `Client.add_worker`, `Client.renew_path`, `Client.revive`, "
      "`Worker.serve` or a decorator such as `make_emulated` consumes it.")
      .def_property_readonly("kind", [](const ChannelBox& box) {
        return std::string(box.channel == nullptr ? "handed over" : box.channel->kind());
      });
  module.def(
      "make_loopback",
      [](const SlotGeometry& geometry) {
        auto pair = unwrap(transport::make_loopback(geometry));
        return py::make_tuple(boxed(std::move(pair.host)), boxed(std::move(pair.worker)));
      },
      py::arg("geometry"), "The ends of the host and of the worker.");
  module.def(
      "make_emulated",
      [](ChannelBox& box, double delay_ms, double jitter_ms, double mbit_s, uint64_t seed) {
        return boxed(transport::make_emulated(
            box.take(), transport::Emulation{delay_ms, jitter_ms, mbit_s, seed}));
      },
      py::arg("channel"), py::kw_only(), py::arg("delay_ms") = 0.0, py::arg("jitter_ms") = 0.0,
      py::arg("mbit_s") = 0.0, py::arg("seed") = 1,
      "Consumes `channel` and returns one that delays messages as a slower link would.");
  module.def(
      "make_faulty",
      [](ChannelBox& box, const std::string& kind, const std::string& point, uint64_t nth,
         double delay_ms, uint64_t seed) {
        const transport::Fault fault{parse_fault(kind), parse_point(point), nth, delay_ms, seed};
        return boxed(transport::make_faulty(box.take(), fault));
      },
      py::arg("channel"), py::kw_only(), py::arg("kind"), py::arg("point"), py::arg("nth"),
      py::arg("delay_ms") = 0.0, py::arg("seed") = 1,
      "Consumes `channel` and returns one whose nth operation goes wrong, for tests. `kind` is "
      "fail, delay, truncate, corrupt or drop, and `point` is publish or poll.");
}

}  // namespace

void bind_transport(py::module_& module) {
  module.attr("MAX_HANDOVER_BYTES") = transport::kMaxHandoverBytes;  // of one end of a path
  bind_terms(module);
  bind_channels(module);
  bind_tap(module);
  bind_handshake(module);
  bind_fabric(module);
}

}  // namespace dflash::bindings
