// What a layer accepts and refuses: layouts of weights, dtypes, range of the reply, wrong batches;
// and the pool beneath it.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <limits>

#include "compute/cpu/thread_pool.h"
#include "failed.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;

FfnSpec small_spec() { return toy::spec_of(70, 45, 100); }

// A layer of every kernel set and of the reference.
std::vector<std::shared_ptr<ExpertLayer>> layers(const FfnSpec& spec, uint32_t count, Dtype dtype) {
  std::vector<std::shared_ptr<ExpertLayer>> all = {
      toy::layer_of(Isa::kReference, spec, count, dtype)};
  for (Isa isa : toy::kernel_sets()) all.push_back(toy::layer_of(isa, spec, count, dtype));
  return all;
}

// The same values with outputs contiguous (transposed) or gate and up interleaved.
MatrixView rearrange(const MatrixView& view, std::vector<std::byte>& storage, int64_t output_stride,
                     int64_t input_stride, size_t first) {
  const size_t element = dtype_bytes(dtype_of(view.format));
  for (int64_t o = 0; o < view.outputs; ++o) {
    for (int64_t i = 0; i < view.inputs; ++i) {
      std::memcpy(
          storage.data() + (static_cast<int64_t>(first) + o * output_stride + i * input_stride) *
                               static_cast<int64_t>(element),
          view.data +
              (o * view.output_stride + i * view.input_stride) * static_cast<int64_t>(element),
          element);
    }
  }
  return {storage.data() + first * element,
          view.format,
          view.outputs,
          view.inputs,
          output_stride,
          input_stride};
}

TEST_CASE("transposed and interleaved weights give the bits of plain ones") {
  const FfnSpec spec = small_spec();
  for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    const Experts experts(spec, 1, dtype, 3);
    const ExpertWeights plain = experts.weights(0);
    std::vector<std::byte> gate_up(2 * experts.expert(0).gate.size()),
        down(experts.expert(0).down.size());
    ExpertWeights transposed = plain, interleaved = plain;
    std::vector<std::byte> gate_up_rows(gate_up.size());
    // [in, 2I] with gate and up side by side
    transposed.gate = rearrange(plain.gate, gate_up, 1, 2 * 45, 0);
    transposed.up = rearrange(plain.up, gate_up, 1, 2 * 45, 45);
    transposed.down = rearrange(plain.down, down, 1, 100, 0);
    // [in, 2I] alternating, as gpt-oss stores it
    interleaved.gate = rearrange(plain.gate, gate_up_rows, 2, 2 * 45, 0);
    interleaved.up = rearrange(plain.up, gate_up_rows, 2, 2 * 45, 1);
    const Batch batch = Batch::random(spec, 1, 15, 1, 4);
    for (const auto& layer : layers(spec, 1, dtype)) {
      YieldingProgress progress{0};
      std::vector<std::byte> expected, found;
      REQUIRE(layer->load_expert(0, plain, progress).ok());
      REQUIRE(batch.run(*layer, expected).ok());
      for (const ExpertWeights& weights : {transposed, interleaved}) {
        REQUIRE(layer->load_expert(0, weights, progress).ok());
        REQUIRE(batch.run(*layer, found).ok());
        CHECK(found == expected);
      }
      CHECK(progress.load() > 0);
    }
  }
}

TEST_CASE(
    "a value that the reply dtype cannot hold fails the call, naming the first row and column") {
  FfnSpec spec = small_spec();
  spec.activation = Activation::kIdentity;
  const Experts experts(spec, 2, Dtype::kF32, 5);
  Batch batch = Batch::of_one_expert(spec, 20, 1, 6, 1.0f);
  batch.weights[13] = batch.weights[17] = 1e9f;
  // infinite by itself: passes
  batch.rows[3 * spec.in_size] = std::numeric_limits<float>::infinity();
  batch.reply_dtype = Dtype::kF16;
  std::string message;
  for (const auto& layer : layers(spec, 2, Dtype::kF32)) {
    REQUIRE(experts.load_into(*layer).ok());
    std::vector<std::byte> reply;
    const Status status = batch.run(*layer, reply);
    REQUIRE(status == Failed(ErrorCode::kRange, "row 13, column ", "f16"));
    if (message.empty()) message = status.error().message;
    CHECK(status.error().message == message);  // the same column and value on every instruction set
    Batch wide = batch;
    wide.reply_dtype = Dtype::kF32;
    CHECK(wide.run(*layer, reply).ok());
  }
}

TEST_CASE("wrong experts and batches are refused") {
  FfnSpec spec = small_spec();
  spec.has_down_bias = true;
  const Experts experts(spec, 2, Dtype::kF32, 7);
  for (const auto& layer : layers(spec, 2, Dtype::kF32)) {
    YieldingProgress progress{0};
    Batch batch = Batch::of_one_expert(spec, 1, 1, 8);
    std::vector<std::byte> reply;
    const auto refused = [](const char* words) {
      return Failed(ErrorCode::kInvalidArgument, words);
    };
    CHECK(batch.run(*layer, reply) == refused("local expert 1 was not loaded"));
    CHECK(layer->load_expert(2, experts.weights(0), progress) == refused("local expert 2"));
    ExpertWeights wrong = experts.weights(0);
    wrong.down.inputs = 44;
    CHECK(layer->load_expert(0, wrong, progress) == refused("down is [100, 44]"));
    wrong = experts.weights(0);
    wrong.gate = {};
    CHECK(layer->load_expert(0, wrong, progress) == refused("gate is missing"));
    wrong = experts.weights(0);
    wrong.down_bias = {};
    CHECK(layer->load_expert(0, wrong, progress) == refused("down_bias is missing"));
    REQUIRE(experts.load_into(*layer).ok());
    CHECK(layer->resident_bytes() >= 2 * 4 * (2 * 70 * 45 + 45 * 100));
    batch.ids = {2};
    CHECK(batch.run(*layer, reply) == refused("local expert 2"));
    batch.ids = {1, 1};
    CHECK(batch.run(*layer, reply) == refused("pairs"));
  }
}

TEST_CASE("a resident dtype that would round the weights is refused") {
  const FfnSpec spec = small_spec();
  for (auto [source, resident] :
       {std::pair(Dtype::kF32, Dtype::kBF16), std::pair(Dtype::kF16, Dtype::kBF16),
        std::pair(Dtype::kBF16, Dtype::kF16), std::pair(Dtype::kF32, Dtype::kF16)}) {
    const Experts experts(spec, 1, source, 9);
    CHECK(experts.load_into(*toy::layer_of(best_isa(), spec, 1, resident)) ==
          Failed(ErrorCode::kUnsupported, dtype_name(resident)));
  }
}

TEST_CASE("an instruction set is found by name or the error lists those there are") {
  CHECK(parse_isa("scalar").value() == Isa::kScalar);
  CHECK(parse_isa(isa_name(best_isa())).value() == best_isa());
  CHECK(parse_isa("AVX9") == Failed(ErrorCode::kInvalidArgument, "reference, scalar"));
  CHECK_FALSE(CpuBackend::create(Isa::kScalar, 0).ok());
  CHECK_FALSE(CpuBackend::create(Isa::kScalar, 2, {0, 1 << 20}).ok());
}

TEST_CASE("the pool runs every task once, from sleep and from spin, for one thread and several") {
  for (uint32_t threads : {1u, 2u, 4u}) {
    for (int64_t spin_ns : {int64_t{0}, int64_t{50'000}}) {
      const auto pool = ThreadPool::create(threads, {}, spin_ns).value();
      for (uint32_t tasks : {0u, 1u, 2u, 7u, 300u}) {
        for (int round = 0; round < 50; ++round) {
          std::vector<std::atomic<int>> runs(tasks);
          std::vector<int> plain(tasks, 0);  // not atomic: run() must publish what tasks wrote
          pool->run(tasks, [&](uint64_t task) {
            runs[task].fetch_add(1);
            plain[task] = static_cast<int>(task) + 1;
          });
          for (uint32_t task = 0; task < tasks; ++task) {
            REQUIRE(runs[task].load() == 1);
            REQUIRE(plain[task] == static_cast<int>(task) + 1);
          }
        }
      }
    }
  }
}

TEST_CASE("a forward leaves what its caller expects of the job behind it") {
  const FfnSpec spec = small_spec();
  const Experts experts(spec, 2, Dtype::kF32, 3);
  const Batch batch = Batch::random(spec, 2, 5, 1, 4);
  std::shared_ptr<ThreadPool> pool = ThreadPool::create(2, {}, 50'000).value();
  for (const Isa isa : toy::kernel_sets()) {
    const auto backend = CpuBackend::create(isa, pool, WeightsLayout::kPacked).value();
    const auto layer = backend->create_layer(spec, 2, {}).value();
    REQUIRE(experts.load_into(*layer).ok());
    const std::byte weights[64] = {};
    pool->expect({weights, sizeof(weights)});
    std::vector<std::byte> reply;
    REQUIRE(batch.run(*layer, reply).ok());
    CHECK(pool->expected().begin == weights);
  }
}

TEST_CASE("progress moves at least once per kernel call in both phases") {
  const FfnSpec spec = small_spec();
  const Experts experts(spec, 1, Dtype::kF32, 13);
  const auto layer = toy::load(Isa::kScalar, experts, Dtype::kF32);
  const Batch batch = Batch::of_one_expert(spec, 200, 0, 14);
  const std::vector<std::byte> rows = toy::encode(batch.row_dtype, batch.rows);
  std::vector<std::byte> reply(200 * 4 * spec.out_size);
  YieldingProgress progress{0};
  REQUIRE(layer->forward(batch.args(rows, reply), progress).ok());
  CHECK(progress.load() >= 2 * 3 + 1);
}

}  // namespace
}  // namespace dflash::compute
