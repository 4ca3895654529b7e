// Checked conversions from Python arguments that several bindings share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/dtype.h"
#include "bindings/errors.h"
#include "compute/experts/expert_layer.h"
#include "compute/experts/ffn_spec.h"
#include "transport/channel.h"

namespace dflash::bindings {

// "f32" "f16" "bf16"; ConfigError naming the value otherwise.
Dtype parse_dtype(const std::string& name);
// "host" "worker"; ConfigError otherwise.
transport::Side parse_side(const std::string& name);
// A mapping with the fields of FfnSpec; missing ones keep their default, unknown ones are a
// ConfigError.
compute::FfnSpec parse_ffn_spec(const pybind11::dict& fields);

// Contiguous bytes of a matrix in a stored format and, where they lie apart, of its scales: rows
// one after another. The buffers keep the memory alive. ConfigError where sizes do not fit.
struct ByteMatrix {
  pybind11::buffer_info data, scales;
  compute::MatrixView view;
};
ByteMatrix byte_matrix(const std::string& format_name, const pybind11::buffer& data,
                       uint32_t outputs, uint32_t inputs, const pybind11::buffer& scales);

// A channel as Python holds it: owned until a client, worker or decorator takes it.
struct ChannelBox {
  std::unique_ptr<transport::Channel> channel;

  std::unique_ptr<transport::Channel> take() {
    if (channel == nullptr)
      raise(Error{ErrorCode::kClosed, "this channel was already handed over; make a new one"});
    return std::move(channel);
  }
};

}  // namespace dflash::bindings
