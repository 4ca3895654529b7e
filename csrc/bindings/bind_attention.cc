// Binds the paged keys and values of a layer, the plan of a step, and attention over them. Tensors
// come as addresses; whoever calls keeps them alive.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/errors.h"
#include "bindings/program.h"
#include "bindings/typed.h"
#include "compute/cpu/kv_layer.h"
#include "compute/cpu/paged_attention.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using compute::AttentionPlan;
using compute::kBlockTokens;
using compute::KvLayer;
using compute::KvShape;

compute::RowsView rows_view(uintptr_t address, size_t stride_bytes, const std::string& dtype,
                            uint32_t num_rows) {
  return {reinterpret_cast<const std::byte*>(address), parse_dtype(dtype), stride_bytes, num_rows};
}

// Returns what stores rows at the slots that it is given.
auto storing(KvLayer& self, uint32_t num_rows, uintptr_t k_address, size_t k_stride_bytes,
             const std::string& k_dtype, uintptr_t v_address, size_t v_stride_bytes,
             const std::string& v_dtype) {
  const auto keys = rows_view(k_address, k_stride_bytes, k_dtype, num_rows),
             values = rows_view(v_address, v_stride_bytes, v_dtype, num_rows);
  return [&self, keys, values](std::span<const int64_t> slots) {
    return self.append(slots, keys, values);
  };
}

void append(KvLayer& self, uintptr_t slots, uint32_t num_rows, uintptr_t k_address,
            size_t k_stride_bytes, const std::string& k_dtype, uintptr_t v_address,
            size_t v_stride_bytes, const std::string& v_dtype) {
  const auto store = storing(self, num_rows, k_address, k_stride_bytes, k_dtype, v_address,
                             v_stride_bytes, v_dtype);
  Status status = [&] {
    py::gil_scoped_release unlocked;
    return store({reinterpret_cast<const int64_t*>(slots), num_rows});
  }();
  unwrap(std::move(status));
}

void append_store(Program& program, KvLayer& self, uint32_t num_rows, uintptr_t k_address,
                  size_t k_stride_bytes, const std::string& k_dtype, uintptr_t v_address,
                  size_t v_stride_bytes, const std::string& v_dtype) {
  program.append([store = storing(self, num_rows, k_address, k_stride_bytes, k_dtype, v_address,
                                  v_stride_bytes, v_dtype)](ProgramRun& run) {
    return store(run.inputs().slots);
  });
}

// Makes an array [num_kv_heads, 16, size] of float32 of the elements of one block, element i of
// token t of a head at t * token_stride + i * element_stride. `block_of(head)` points to a head's.
template <class BlockOf>
py::array_t<float> block_array(const KvShape& shape, const BlockOf& block_of, uint32_t size,
                               size_t token_stride, size_t element_stride) {
  py::array_t<float> found({static_cast<py::ssize_t>(shape.num_kv_heads),
                            static_cast<py::ssize_t>(kBlockTokens),
                            static_cast<py::ssize_t>(size)});
  float* to = found.mutable_data();
  for (size_t head = 0; head < shape.num_kv_heads; ++head) {
    for (size_t t = 0; t < kBlockTokens; ++t) {
      for (size_t i = 0; i < size; ++i, ++to) {
        const size_t element = t * token_stride + i * element_stride;
        widen(shape.dtype, block_of(head) + element * dtype_bytes(shape.dtype), to, 1);
      }
    }
  }
  return found;
}

py::typing::Tuple<py::array_t<float>, py::array_t<float>> read(const KvLayer& self,
                                                               uint32_t block) {
  const KvShape& shape = self.shape();
  if (block >= shape.num_blocks)
    raise(
        Error{ErrorCode::kInvalidArgument, "block " + std::to_string(block) + " is out of range"});
  const compute::KvView view = self.view();
  return py::make_tuple(block_array(
                            shape, [&](size_t head) { return view.key_block(block, head); },
                            shape.key_size, 1, kBlockTokens),
                        block_array(
                            shape, [&](size_t head) { return view.value_block(block, head); },
                            shape.value_size, shape.value_stride(), 1));
}

using BlockTable = py::array_t<int32_t, py::array::c_style>;

AttentionPlan make_plan(
    const SequenceOf<py::typing::Tuple<BlockTableArgument, py::int_, py::int_>>& sequences) {
  std::vector<BlockTable> tables;  // keeps what the rows point to
  std::vector<compute::SequenceRows> rows;
  for (const py::handle item : sequences) {
    const auto parts = py::cast<py::tuple>(item);
    if (parts.size() != 3 || !py::isinstance<BlockTable>(parts[0]) ||
        py::cast<py::array>(parts[0]).ndim() != 1) {
      raise(Error{ErrorCode::kInvalidArgument,
                  "a sequence is (block_table: contiguous int32 array, first_position, num_rows)"});
    }
    tables.push_back(py::cast<BlockTable>(parts[0]));
    rows.push_back({
        {tables.back().data(), static_cast<size_t>(tables.back().size())},
        py::cast<uint32_t>(parts[1]),
        py::cast<uint32_t>(parts[2])
    });
  }
  return unwrap(AttentionPlan::create(rows));
}

py::array_t<int64_t> positions(const AttentionPlan& plan) {
  py::array_t<int64_t> found(static_cast<py::ssize_t>(plan.num_rows()));
  int64_t* to = found.mutable_data();
  for (const AttentionPlan::Sequence& sequence : plan.sequences()) {
    for (uint32_t i = 0; i < sequence.num_rows; ++i) *to++ = int64_t{sequence.first_position} + i;
  }
  return found;
}

// The scratch of all layers that a thread calls: two micro-batches may call at the same time.
compute::AttentionScratch& attention_scratch() {
  thread_local compute::AttentionScratch scratch;
  return scratch;
}

// Returns what computes the attention of the rows of the plan that it is given.
auto attending(const HostPoolBox& pool, const KvLayer& layer, uintptr_t q_address,
               size_t q_stride_bytes, const std::string& q_dtype, uint32_t num_heads,
               uintptr_t out_address, size_t out_stride_bytes, const std::string& out_dtype,
               float scale, uint32_t window, float softcap, uintptr_t sinks) {
  const auto queries = rows_view(q_address, q_stride_bytes, q_dtype, 0);
  const compute::RowsTarget out{reinterpret_cast<std::byte*>(out_address), parse_dtype(out_dtype),
                                out_stride_bytes};
  const compute::AttentionForm form{scale, window, softcap, reinterpret_cast<const float*>(sinks)};
  return [&pool, &layer, queries, num_heads, out, form](const AttentionPlan& plan) {
    compute::RowsView rows = queries;
    rows.num_rows = plan.num_rows();
    return compute::paged_attention(*pool.pool, pool.isa, layer.view(), plan, form, num_heads, rows,
                                    out, attention_scratch());
  };
}

void run_attention(const HostPoolBox& pool, const KvLayer& layer, const AttentionPlan& plan,
                   uintptr_t q_address, size_t q_stride_bytes, const std::string& q_dtype,
                   uint32_t num_heads, uintptr_t out_address, size_t out_stride_bytes,
                   const std::string& out_dtype, float scale, uint32_t window, float softcap,
                   uintptr_t sinks) {
  const auto attend =
      attending(pool, layer, q_address, q_stride_bytes, q_dtype, num_heads, out_address,
                out_stride_bytes, out_dtype, scale, window, softcap, sinks);
  Status status = [&] {
    py::gil_scoped_release unlocked;
    return attend(plan);
  }();
  unwrap(std::move(status));
}

void append_attention(Program& program, const HostPoolBox& pool, const KvLayer& layer,
                      uintptr_t q_address, size_t q_stride_bytes, const std::string& q_dtype,
                      uint32_t num_heads, uintptr_t out_address, size_t out_stride_bytes,
                      const std::string& out_dtype, float scale, uint32_t window, float softcap,
                      uintptr_t sinks) {
  program.append(
      [attend = attending(pool, layer, q_address, q_stride_bytes, q_dtype, num_heads, out_address,
                          out_stride_bytes, out_dtype, scale, window, softcap,
                          sinks)](ProgramRun& run) { return attend(*run.inputs().plan); });
}

void bind_kv_layer(py::module_& module) {
  py::class_<KvLayer>(
      module, "KvLayer",
      "The keys and values of one layer in blocks of 16 tokens, in \"f32\", \"f16\" or \"bf16\". "
      "Memory becomes resident as blocks are written. Nobody may read a block while it is written. "
      "ConfigError for sizes, blocks and slots that cannot be.")
      .def(py::init([](uint32_t num_blocks, uint32_t num_kv_heads, uint32_t key_size,
                       uint32_t value_size, const std::string& dtype) {
             return unwrap(KvLayer::create(
                 {num_blocks, num_kv_heads, key_size, value_size, parse_dtype(dtype)}));
           }),
           py::arg("num_blocks"), py::arg("num_kv_heads"), py::arg("key_size"),
           py::arg("value_size"), py::arg("dtype"))
      .def(
          "append", &append, py::arg("slots_address"), py::arg("num_rows"), py::arg("k_address"),
          py::arg("k_stride_bytes"), py::arg("k_dtype"), py::arg("v_address"),
          py::arg("v_stride_bytes"), py::arg("v_dtype"),
          "Stores rows [num_rows, num_kv_heads * size] at int64 slots block * 16 + offset, rounded "
          "once to the layer's dtype; WorkerError where that makes a finite value infinite.")
      .def(
          "copy_block",
          [](KvLayer& self, uint32_t from, uint32_t to) { unwrap(self.copy_block(from, to)); },
          py::arg("from_block"), py::arg("to_block"))
      .def("read", &read, py::arg("block"),
           "For tests: returns keys [num_kv_heads, 16, key_size], values [num_kv_heads, 16, "
           "value_size].")
      .def_property_readonly("num_bytes", &KvLayer::num_bytes)
      .def_property_readonly("num_blocks",
                             [](const KvLayer& self) { return self.shape().num_blocks; });
}

}  // namespace

void bind_attention(py::module_& module) {
  bind_kv_layer(module);
  py::class_<AttentionPlan>(
      module, "AttentionPlan",
      "The rows of one step: for each sequence its block table, the position of its first row and "
      "the number of its rows, which are packed one sequence after another. It does not change.")
      .def(py::init(&make_plan), py::arg("sequences"),
           "ConfigError names the sequence that cannot be.")
      .def_property_readonly("num_rows", &AttentionPlan::num_rows)
      .def_property_readonly("positions", &positions);
  module.def(
      "paged_attention", &run_attention, py::arg("pool"), py::arg("kv_layer"), py::arg("plan"),
      py::arg("q_address"), py::arg("q_stride_bytes"), py::arg("q_dtype"), py::arg("num_heads"),
      py::arg("out_address"), py::arg("out_stride_bytes"), py::arg("out_dtype"), py::arg("scale"),
      py::arg("window") = 0, py::arg("softcap") = 0.0f, py::arg("sinks_address") = 0,
      "Writes the attention of q [num_rows, num_heads * key_size] to out [num_rows, num_heads * "
      "value_size]. Keys and values of the rows themselves are in `kv_layer` already. A query sees "
      "its last `window` keys, or all where that is 0; sinks are float32 [num_heads].");
  program_class(module)
      .def("store_keys", &append_store, py::keep_alive<1, 2>(), py::arg("kv_layer"),
           py::arg("num_rows"), py::arg("k_address"), py::arg("k_stride_bytes"), py::arg("k_dtype"),
           py::arg("v_address"), py::arg("v_stride_bytes"), py::arg("v_dtype"),
           "As KvLayer.append, at the slots of the step.")
      .def("paged_attention", &append_attention, py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::arg("pool"), py::arg("kv_layer"), py::arg("q_address"), py::arg("q_stride_bytes"),
           py::arg("q_dtype"), py::arg("num_heads"), py::arg("out_address"),
           py::arg("out_stride_bytes"), py::arg("out_dtype"), py::arg("scale"),
           py::arg("window") = 0, py::arg("softcap") = 0.0f, py::arg("sinks_address") = 0,
           "As the function of this name, by the plan of the step.");
}

}  // namespace dflash::bindings
