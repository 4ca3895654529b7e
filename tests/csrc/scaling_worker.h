// The answer of a stand-in for a worker, whose experts do nothing: a row's sum is the row times the
// sum of its routing weights, so that a test knows every result.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/checksum.h"
#include "wire/frame.h"
#include "wire/payload.h"

namespace dflash {

// Writes the reply to a request of float32 rows of `width` values into `reply`. Returns its bytes.
inline size_t answer(const wire::FrameHeader& asked, std::span<const std::byte> payload,
                     std::span<std::byte> reply, uint32_t width) {
  const auto layout =
      wire::RequestLayout::of(asked.num_rows, asked.num_pairs, width, asked.request_dtype).value();
  std::byte* rows = reply.data() + wire::kFrameHeaderBytes + wire::kReplyTimingBytes;
  size_t pair = 0;
  for (uint32_t row = 0; row < asked.num_rows; ++row) {
    uint16_t count = 0;
    std::memcpy(&count, payload.data() + layout.row_counts_offset + row * sizeof count,
                sizeof count);
    float sum = 0;
    for (uint16_t i = 0; i < count; ++i, ++pair) {
      float weight = 0;
      std::memcpy(&weight, payload.data() + layout.weights_offset + pair * sizeof weight,
                  sizeof weight);
      sum += weight;
    }
    for (uint32_t i = 0; i < width; ++i) {
      const size_t at = (row * width + i) * sizeof(float);
      float value = 0;
      std::memcpy(&value, payload.data() + layout.rows_offset + at, sizeof value);
      value *= sum;
      std::memcpy(rows + at, &value, sizeof value);
    }
  }
  wire::FrameHeader header = asked;
  header.kind = wire::FrameKind::kReply;
  header.payload_bytes = static_cast<uint32_t>(
      wire::ReplyLayout::of(asked.num_rows, width, asked.reply_dtype).value().payload_bytes);
  const auto body = reply.subspan(wire::kFrameHeaderBytes, header.payload_bytes);
  wire::encode_reply_timing({1, 2, 1002}, body.first<wire::kReplyTimingBytes>());
  header.payload_checksum = checksum(body);
  wire::encode_frame_header(header, reply.first<wire::kFrameHeaderBytes>());
  return wire::kFrameHeaderBytes + header.payload_bytes;
}

}  // namespace dflash
