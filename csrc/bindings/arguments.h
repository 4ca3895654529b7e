// Checked conversions from Python arguments that several bindings share. The caller holds the GIL.
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

// Takes "f32", "f16" or "bf16". Raises ConfigError naming any other value.
Dtype parse_dtype(const std::string& name);
// Takes "host" or "worker". Raises ConfigError for any other value.
transport::Side parse_side(const std::string& name);
// Takes a mapping with the fields of FfnSpec, of which missing ones keep their default. Raises
// ConfigError for an unknown field, UnsupportedError for a value that is not supported.
compute::FfnSpec parse_ffn_spec(const pybind11::dict& fields);

// The contiguous bytes of a matrix in a stored format, rows one after another, and those of its
// scales where they lie apart. The buffers keep the memory alive. Raises ConfigError where sizes do
// not fit.
struct ByteMatrix {
  pybind11::buffer_info data, scales;
  compute::MatrixView view;
};
ByteMatrix byte_matrix(const std::string& format_name, const pybind11::buffer& data,
                       uint32_t outputs, uint32_t inputs, const pybind11::buffer& scales);

// A channel as Python holds it: owned here until a client, worker or decorator takes it.
struct ChannelBox {
  std::unique_ptr<transport::Channel> channel;

  std::unique_ptr<transport::Channel> take() {
    if (channel == nullptr)
      raise(Error{ErrorCode::kClosed, "this channel was already handed over; make a new one"});
    return std::move(channel);
  }
};

// Returns the folder of a backend's plug-in: the core's own where it lies there or no package
// brings one, else that package's, which only Python can find. Needs the GIL. Raises what
// `card_packages.directory_of` raises: UnsupportedError for a package of another core.
std::string plugin_directory(const std::string& backend);

}  // namespace dflash::bindings
