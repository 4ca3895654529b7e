// Builds request messages by hand, so that worker tests can say anything a host could, right or
// wrong.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "compute/toy_experts.h"
#include "wire/frame.h"
#include "wire/payload.h"

namespace dflash::worker::toy {

// A batch whose rows are well-formed for the wire: 1..max_pairs pairs a row, ids ascending.
inline compute::toy::Batch wire_batch(const compute::FfnSpec& spec, uint32_t num_experts,
                                      uint32_t num_rows, uint32_t seed) {
  std::mt19937 random(seed);
  compute::toy::Batch batch;
  batch.rows = compute::toy::random_floats(random, size_t{num_rows} * spec.in_size, 1.0f);
  for (uint32_t row = 0; row < num_rows; ++row) {
    uint16_t id = 0;
    uint16_t count = 0;
    for (; id < num_experts; id = static_cast<uint16_t>(id + 1 + random() % 2)) {
      batch.ids.push_back(id);
      batch.weights.push_back(static_cast<float>(random() % 1000) / 1000.0f);
      ++count;
    }
    batch.row_counts.push_back(count);
  }
  return batch;
}

struct Request {
  wire::FrameHeader header;
  std::vector<std::byte> payload;

  // Header and payload as they go into a slot; the checksum and length fields are set unless a test
  // changed the payload after seal().
  std::vector<std::byte> message() const {
    std::vector<std::byte> bytes(wire::kFrameHeaderBytes + payload.size());
    wire::encode_frame_header(header, std::span(bytes).first<wire::kFrameHeaderBytes>());
    std::memcpy(bytes.data() + wire::kFrameHeaderBytes, payload.data(), payload.size());
    return bytes;
  }
  void seal() {
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    header.payload_checksum = checksum(payload);
  }
  wire::RequestLayout layout(uint32_t in_size) const {
    return wire::RequestLayout::of(header.num_rows, header.num_pairs, in_size, header.request_dtype)
        .value();
  }
};

inline Request make_request(const compute::toy::Batch& batch, const compute::FfnSpec& spec) {
  Request request;
  request.header.kind = wire::FrameKind::kRequest;
  request.header.request_dtype = batch.row_dtype;
  request.header.reply_dtype = batch.reply_dtype;
  request.header.num_rows = batch.num_rows();
  request.header.num_pairs = static_cast<uint32_t>(batch.ids.size());
  const wire::RequestLayout layout = request.layout(spec.in_size);
  request.payload.assign(layout.payload_bytes, std::byte{0});
  const std::vector<std::byte> rows = compute::toy::encode(batch.row_dtype, batch.rows);
  std::memcpy(request.payload.data() + layout.weights_offset, batch.weights.data(),
              batch.weights.size() * 4);
  std::memcpy(request.payload.data() + layout.row_counts_offset, batch.row_counts.data(),
              batch.row_counts.size() * 2);
  std::memcpy(request.payload.data() + layout.local_ids_offset, batch.ids.data(),
              batch.ids.size() * 2);
  std::memcpy(request.payload.data() + layout.rows_offset, rows.data(), rows.size());
  request.seal();
  return request;
}

}  // namespace dflash::worker::toy
