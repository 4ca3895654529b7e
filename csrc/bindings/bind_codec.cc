// Binds codec and limits: pure functions for tests, tools and the handshake.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "base/checksum.h"
#include "bindings/arguments.h"
#include "bindings/typed.h"
#include "wire/frame.h"
#include "wire/limits.h"
#include "wire/payload.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

std::span<const std::byte> as_bytes(const py::bytes& data) {
  return std::as_bytes(std::span(static_cast<std::string_view>(data)));
}

py::bytes encode_header(const Counts& fields) {
  wire::FrameHeader header;
  for (const auto& [key, value] : fields) {
    const std::string name = py::cast<std::string>(key);
    const auto number = py::cast<uint64_t>(value);
    if (name == "kind")
      header.kind = static_cast<wire::FrameKind>(number);
    else if (name == "request_dtype")
      header.request_dtype = static_cast<Dtype>(number);
    else if (name == "reply_dtype")
      header.reply_dtype = static_cast<Dtype>(number);
    else if (name == "generation")
      header.generation = number;
    else if (name == "call_id")
      header.call_id = number;
    else if (name == "weights_fingerprint")
      header.weights_fingerprint = number;
    else if (name == "layer")
      header.layer = static_cast<uint32_t>(number);
    else if (name == "shard")
      header.shard = static_cast<uint32_t>(number);
    else if (name == "num_rows")
      header.num_rows = static_cast<uint32_t>(number);
    else if (name == "num_pairs")
      header.num_pairs = static_cast<uint32_t>(number);
    else if (name == "payload_bytes")
      header.payload_bytes = static_cast<uint32_t>(number);
    else if (name == "payload_checksum")
      header.payload_checksum = static_cast<uint32_t>(number);
    else if (name == "slice")
      header.slice = static_cast<uint16_t>(number);
    else if (name == "attempt")
      header.attempt = static_cast<uint16_t>(number);
    else
      raise(Error{ErrorCode::kInvalidArgument, "the frame header has no field '" + name + "'"});
  }
  std::byte out[wire::kFrameHeaderBytes];
  wire::encode_frame_header(header, std::span<std::byte, wire::kFrameHeaderBytes>(out));
  return py::bytes(reinterpret_cast<const char*>(out), sizeof out);
}

Counts decode_header(const py::bytes& data) {
  const auto bytes = as_bytes(data);
  if (bytes.size() != wire::kFrameHeaderBytes) {
    raise(Error{ErrorCode::kProtocol,
                "a frame header has 64 bytes, found " + std::to_string(bytes.size())});
  }
  const wire::FrameHeader header =
      unwrap(wire::decode_frame_header(bytes.first<wire::kFrameHeaderBytes>()));
  Counts fields;
  fields["kind"] = static_cast<int>(header.kind);
  fields["request_dtype"] = static_cast<int>(header.request_dtype);
  fields["reply_dtype"] = static_cast<int>(header.reply_dtype);
  fields["generation"] = header.generation;
  fields["call_id"] = header.call_id;
  fields["weights_fingerprint"] = header.weights_fingerprint;
  fields["layer"] = header.layer;
  fields["shard"] = header.shard;
  fields["num_rows"] = header.num_rows;
  fields["num_pairs"] = header.num_pairs;
  fields["payload_bytes"] = header.payload_bytes;
  fields["payload_checksum"] = header.payload_checksum;
  fields["slice"] = header.slice;
  fields["attempt"] = header.attempt;
  return fields;
}

Counts wire_limits() {
  Counts limits;
  limits["max_rows"] = wire::kMaxRows;
  limits["max_pairs_per_row"] = wire::kMaxPairsPerRow;
  limits["max_pairs"] = wire::kMaxPairs;
  limits["max_experts_per_shard"] = wire::kMaxExpertsPerShard;
  limits["max_row_width"] = wire::kMaxRowWidth;
  limits["max_payload_bytes"] = wire::kMaxPayloadBytes;
  limits["max_layers"] = wire::kMaxLayers;
  limits["max_error_text_bytes"] = wire::kMaxErrorTextBytes;
  limits["max_slots"] = transport::kMaxSlots;
  limits["max_slot_bytes"] = transport::kMaxSlotBytes;
  limits["frame_header_bytes"] = wire::kFrameHeaderBytes;
  limits["reply_timing_bytes"] = wire::kReplyTimingBytes;
  return limits;
}

Counts request_layout(uint32_t num_rows, uint32_t num_pairs, uint32_t row_width,
                      const std::string& dtype) {
  const auto layout =
      unwrap(wire::RequestLayout::of(num_rows, num_pairs, row_width, parse_dtype(dtype)));
  Counts offsets;
  offsets["weights_offset"] = layout.weights_offset;
  offsets["row_counts_offset"] = layout.row_counts_offset;
  offsets["local_ids_offset"] = layout.local_ids_offset;
  offsets["rows_offset"] = layout.rows_offset;
  offsets["payload_bytes"] = layout.payload_bytes;
  return offsets;
}

Counts reply_layout(uint32_t num_rows, uint32_t row_width, const std::string& dtype) {
  const auto layout = unwrap(wire::ReplyLayout::of(num_rows, row_width, parse_dtype(dtype)));
  Counts offsets;
  offsets["rows_offset"] = layout.rows_offset;
  offsets["payload_bytes"] = layout.payload_bytes;
  return offsets;
}

}  // namespace

void bind_codec(py::module_& module) {
  module.def(
      "wire_dtypes",
      [] {
        Counts sizes;
        for (uint8_t number = 0; number < kNumDtypes; ++number) {
          const auto dtype = static_cast<Dtype>(number);
          sizes[dtype_name(dtype)] = dtype_bytes(dtype);
        }
        return sizes;
      },
      "The bytes of a value of each dtype that travels, in the order of their numbers in frames.");
  module.attr("REQUEST_FRAME") = static_cast<int>(wire::FrameKind::kRequest);
  module.attr("REPLY_FRAME") = static_cast<int>(wire::FrameKind::kReply);
  module.def("wire_limits", &wire_limits,
             "Every constant of wire/limits.h and transport/channel.h by its name in snake_case.");
  module.def("layout_fingerprint", &wire::layout_fingerprint,
             "A number that differs between builds which lay data frames out differently.");
  module.def(
      "checksum",
      [](const py::buffer& data) {
        const py::buffer_info found = data.request();
        const std::span bytes(static_cast<const std::byte*>(found.ptr),
                              static_cast<size_t>(found.size * found.itemsize));
        const py::gil_scoped_release unlocked;
        return checksum(bytes);
      },
      py::arg("data"), "The sum of base/checksum.h over contiguous bytes.");
  module.def("encode_frame_header", &encode_header, py::arg("fields"),
             "The fields have the names of wire/frame.h, payload_checksum included.");
  module.def("decode_frame_header", &decode_header, py::arg("data"),
             "ProtocolError is for bytes that are no header.");
  module.def("request_layout", &request_layout, py::arg("num_rows"), py::arg("num_pairs"),
             py::arg("row_width"), py::arg("dtype"));
  module.def("reply_layout", &reply_layout, py::arg("num_rows"), py::arg("row_width"),
             py::arg("dtype"));
  module.def(
      "floor_bytes",
      [](uint64_t num_rows, uint64_t num_pairs, uint64_t in_width, const std::string& request_dtype,
         uint64_t out_width, const std::string& reply_dtype) {
        return wire::floor_bytes(num_rows, num_pairs, in_width, parse_dtype(request_dtype),
                                 out_width, parse_dtype(reply_dtype));
      },
      py::arg("num_rows"), py::arg("num_pairs"), py::arg("in_width"), py::arg("request_dtype"),
      py::arg("out_width"), py::arg("reply_dtype"));
}

}  // namespace dflash::bindings
