// Segments and channels. A Channel is opaque to Python: it is made here and handed to a client, a
// worker or a decorator.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "bindings/arguments.h"
#include "bindings/module.h"
#include "transport/faulty/faulty.h"
#include "transport/loopback/loopback.h"
#include "transport/shared/segment.h"
#include "transport/stream/stream.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using transport::Channel;
using transport::Segment;
using transport::SlotGeometry;

struct SegmentBox {
  std::optional<Segment> segment;

  Segment take() {
    if (!segment) raise(Error{ErrorCode::kClosed, "this segment was already handed over"});
    Segment taken = std::move(*segment);
    segment.reset();
    return taken;
  }
};

std::unique_ptr<ChannelBox> boxed(std::unique_ptr<Channel> channel) {
  return std::make_unique<ChannelBox>(ChannelBox{std::move(channel)});
}

std::unique_ptr<SegmentBox> boxed(Segment segment) {
  auto box = std::make_unique<SegmentBox>();
  box->segment.emplace(std::move(segment));
  return box;
}

OwnedFd duplicate(int fd) {
  if (fd < 0) return OwnedFd();
  OwnedFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.is_open())
    raise(Error{ErrorCode::kSystem,
                std::string("cannot duplicate a descriptor: ") + std::strerror(errno)});
  return copy;
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

void bind_segments(py::module_& module) {
  py::class_<SlotGeometry>(module, "Geometry")
      .def(py::init([](uint32_t num_slots, uint64_t request_bytes, uint64_t reply_bytes) {
             return SlotGeometry{num_slots, request_bytes, reply_bytes};
           }),
           py::arg("num_slots"), py::arg("request_bytes"), py::arg("reply_bytes"))
      .def_readonly("num_slots", &SlotGeometry::num_slots)
      .def_readonly("request_bytes", &SlotGeometry::request_bytes)
      .def_readonly("reply_bytes", &SlotGeometry::reply_bytes);
  py::class_<SegmentBox>(module, "Segment")
      .def_static(
          "create",
          [](const std::string& side, const SlotGeometry& geometry, uint64_t generation,
             bool is_open) {
            return boxed(unwrap(Segment::create(parse_side(side), geometry, generation, is_open)));
          },
          py::arg("side"), py::arg("geometry"), py::arg("generation"), py::arg("is_open") = false)
      .def_static(
          "attach",
          [](int fd, const std::string& writer, const SlotGeometry& geometry, uint64_t generation,
             bool is_open) {
            OwnedFd owned(fd);
            return boxed(unwrap(Segment::attach(std::move(owned), parse_side(writer), geometry,
                                                generation, is_open)));
          },
          py::arg("fd"), py::arg("writer"), py::arg("geometry"), py::arg("generation"),
          py::arg("is_open") = false)
      .def("fileno", [](const SegmentBox& box) {
        if (!box.segment) raise(Error{ErrorCode::kClosed, "this segment was already handed over"});
        return box.segment->fd();
      });
}

void bind_channels(py::module_& module) {
  py::class_<ChannelBox>(module, "Channel")
      .def_property_readonly("kind", [](const ChannelBox& box) {
        return std::string(box.channel == nullptr ? "handed over" : box.channel->kind());
      });
  module.def(
      "make_shared_channel",
      [](const std::string& side, const SlotGeometry& geometry, SegmentBox& own, SegmentBox& peer,
         int host_bell_fd) {
        return boxed(unwrap(transport::make_shared_channel(parse_side(side), geometry, own.take(),
                                                           peer.take(), duplicate(host_bell_fd))));
      },
      py::arg("side"), py::arg("geometry"), py::arg("own"), py::arg("peer"),
      py::arg("host_bell_fd"));
  module.def(
      "make_stream_channel",
      [](const std::string& side, const SlotGeometry& geometry, int fd, int send_buffer_bytes,
         int receive_buffer_bytes, int user_timeout_ms) {
        OwnedFd socket(fd);
        const transport::StreamOptions options{send_buffer_bytes, receive_buffer_bytes,
                                               user_timeout_ms};
        return boxed(unwrap(transport::make_stream_channel(parse_side(side), geometry,
                                                           std::move(socket), options)));
      },
      py::arg("side"), py::arg("geometry"), py::arg("fd"), py::kw_only(),
      py::arg("send_buffer_bytes") = 0, py::arg("receive_buffer_bytes") = 0,
      py::arg("user_timeout_ms") = 0);
  module.def(
      "make_loopback",
      [](const SlotGeometry& geometry) {
        auto pair = unwrap(transport::make_loopback(geometry));
        return py::make_tuple(boxed(std::move(pair.host)), boxed(std::move(pair.worker)));
      },
      py::arg("geometry"));
  module.def(
      "make_emulated",
      [](ChannelBox& box, double delay_ms, double jitter_ms, double mbit_s, uint64_t seed) {
        return boxed(transport::make_emulated(
            box.take(), transport::Emulation{delay_ms, jitter_ms, mbit_s, seed}));
      },
      py::arg("channel"), py::kw_only(), py::arg("delay_ms") = 0.0, py::arg("jitter_ms") = 0.0,
      py::arg("mbit_s") = 0.0, py::arg("seed") = 1);
  module.def(
      "make_faulty",
      [](ChannelBox& box, const std::string& kind, const std::string& point, uint64_t nth,
         double delay_ms, uint64_t seed) {
        const transport::Fault fault{parse_fault(kind), parse_point(point), nth, delay_ms, seed};
        return boxed(transport::make_faulty(box.take(), fault));
      },
      py::arg("channel"), py::kw_only(), py::arg("kind"), py::arg("point"), py::arg("nth"),
      py::arg("delay_ms") = 0.0, py::arg("seed") = 1);
}

}  // namespace

void bind_transport(py::module_& module) {
  bind_segments(module);
  bind_channels(module);
  module.def("new_eventfd", [] {
    const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0) raise(Error{ErrorCode::kSystem, std::string("eventfd: ") + std::strerror(errno)});
    return fd;
  });
}

}  // namespace dflash::bindings
