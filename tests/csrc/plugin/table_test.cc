// Any backend through the C table: the processor's own must give the same bits as without it, and
// misuse must be an error that says what.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "compute/reference/reference.h"
#include "compute/toy_experts.h"
#include "failed.h"
#include "plugin/abi_records.h"
#include "plugin/device_table.h"
#include "plugin/loader.h"
#include "plugin/plugin_backend.h"
#include "plugin/scripted_device.h"

namespace {

using namespace dflash;
using namespace dflash::plugin;
namespace toy = compute::toy;

compute::FfnSpec toy_spec() {
  compute::FfnSpec spec;
  spec.in_size = 270;
  spec.intermediate_size = 37;
  spec.out_size = 45;
  return spec;
}

std::unique_ptr<PluginBackend> open_cpu() {
  auto backend = PluginBackend::open(*cpu_table(), 0, OpenOptions{});
  REQUIRE(backend.ok());
  return std::move(backend).value();
}

std::unique_ptr<compute::ExpertLayer> layer_of(PluginBackend& backend, const toy::Experts& experts,
                                               uint32_t count) {
  auto layer = backend.create_layer(experts.spec(), count, experts.dtype(),
                                    compute::NumericsClass::kF32Canonical);
  REQUIRE(layer.ok());
  REQUIRE(experts.load_into(*layer.value()).ok());
  return std::move(layer).value();
}

std::string message_of(const Status& status) { return status.ok() ? "" : status.error().message; }

}  // namespace

TEST_CASE("a layer behind the C table gives the reference's bits for every dtype and activation") {
  for (const auto gate :
       {compute::GateKind::kNone, compute::GateKind::kGated, compute::GateKind::kClampedSwiglu}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      compute::FfnSpec spec = toy_spec();
      spec.gate = gate;
      spec.has_gate_up_bias = spec.has_down_bias = true;
      if (gate == compute::GateKind::kClampedSwiglu)
        spec.alpha = 1.7f, spec.up_offset = 1.0f, spec.gate_max = spec.up_limit = 7.0f;
      const toy::Experts experts(spec, 3, dtype, 7);
      auto backend = open_cpu();
      const auto layer = layer_of(*backend, experts, 3);
      const auto reference = compute::make_reference_layer(spec, 3, dtype);
      REQUIRE(experts.load_into(*reference).ok());
      toy::Batch batch = toy::Batch::random(spec, 3, 11, 3, 5);
      batch.row_dtype = batch.reply_dtype = dtype;
      std::vector<std::byte> ours, expected;
      REQUIRE(batch.run(*layer, ours).ok());
      REQUIRE(batch.run(*reference, expected).ok());
      CHECK(ours == expected);
      CHECK(layer->resident_bytes() > 0);
      for (uint32_t id = 0; id < 3; ++id)
        CHECK(layer->content_checksum(id) == reference->content_checksum(id));
    }
  }
}

TEST_CASE(
    "progress made behind the table reaches the caller's counter and its task on the same thread") {
  const toy::Experts experts(toy_spec(), 2, Dtype::kF32, 1);
  auto backend = open_cpu();
  const auto layer = layer_of(*backend, experts, 2);
  const toy::Batch batch = toy::Batch::random(toy_spec(), 2, 9, 2, 3);
  const std::vector<std::byte> encoded = toy::encode(Dtype::kF32, batch.rows);
  std::vector<std::byte> reply(size_t{9} * toy_spec().out_size * 4);
  compute::YieldingProgress progress;
  int runs = 0;
  auto count_run = [&runs] { ++runs; };
  {
    const compute::YieldingProgress::YieldTo yielding(progress, count_run);
    REQUIRE(layer->forward(batch.args(encoded, reply), progress).ok());
  }
  CHECK(progress.load() > 0);
  CHECK(runs > 0);
}

TEST_CASE(
    "errors keep their type and name the device, except a range error, which names row and column "
    "as everywhere") {
  toy::Experts experts(toy_spec(), 2, Dtype::kF32, 1);
  auto backend = open_cpu();
  auto empty =
      backend->create_layer(toy_spec(), 2, Dtype::kF32, compute::NumericsClass::kF32Canonical);
  REQUIRE(empty.ok());
  toy::Batch batch = toy::Batch::random(toy_spec(), 2, 2, 2, 3);
  batch.row_counts = {1, 1};
  batch.ids = {0, 1};
  batch.weights = {1.0f, 1.0f};
  std::vector<std::byte> reply;
  Status failed = batch.run(*empty.value(), reply);
  REQUIRE(failed == Failed(ErrorCode::kInvalidArgument));
  CHECK(message_of(failed).find("device cpu:0") == 0);

  const auto layer = layer_of(*backend, experts, 2);
  for (float& value : batch.rows) value *= 1e6f;
  batch.reply_dtype = Dtype::kF16;
  failed = batch.run(*layer, reply);
  REQUIRE(failed == Failed(ErrorCode::kRange));
  CHECK(message_of(failed).find("row 0, column") == 0);
}

TEST_CASE(
    "a batch can be waited for once, in any order of the tickets, and the queue has a bound") {
  const dflash_backend_table& table = *cpu_table();
  auto options = new_record<dflash_open_options>();
  dflash_device* device = nullptr;
  REQUIRE(table.open(0, &options, &device, nullptr) == 0);
  const toy::Experts experts(toy_spec(), 1, Dtype::kF32, 1);
  const dflash_ffn_spec spec = to_record(toy_spec());
  const dflash_layer_options layer_options = to_record(LayerOptions{1, Dtype::kF32});
  dflash_layer* layer = nullptr;
  REQUIRE(table.layer_define(device, &spec, &layer_options, &layer, nullptr) == 0);
  const dflash_expert expert = to_record(0, experts.weights(0));
  REQUIRE(table.expert_load(layer, &expert, nullptr, nullptr) == 0);

  const toy::Batch batch = toy::Batch::random(toy_spec(), 1, 2, 1, 3);
  const std::vector<std::byte> encoded = toy::encode(Dtype::kF32, batch.rows);
  std::vector<std::vector<std::byte>> replies(
      65, std::vector<std::byte>(size_t{2} * toy_spec().out_size * 4, std::byte{0xee}));
  uint64_t tickets[65] = {};
  auto error = new_record<dflash_error>();
  for (int n = 0; n < 64; ++n) {
    const dflash_batch record = to_record(batch.args(encoded, replies[static_cast<size_t>(n)]));
    REQUIRE(table.submit(layer, &record, &tickets[n], &error) == 0);
  }
  const dflash_batch late = to_record(batch.args(encoded, replies[64]));
  CHECK(table.submit(layer, &late, &tickets[64], &error) ==
        static_cast<int32_t>(ErrorCode::kInvalidArgument));
  CHECK(std::string(error.text).find("64 batches are under way") == 0);

  CHECK(table.wait(device, tickets[5], 0, nullptr, &error) ==
        static_cast<int32_t>(ErrorCode::kTimeout));
  REQUIRE(table.wait(device, tickets[5], 1'000'000'000, nullptr, &error) == 0);
  CHECK(replies[5] == replies[0]);  // computed on the way
  CHECK(replies[6] != replies[5]);  // still queued
  CHECK(table.wait(device, tickets[5], 1'000'000'000, nullptr, &error) ==
        static_cast<int32_t>(ErrorCode::kInvalidArgument));
  REQUIRE(table.wait(device, tickets[0], 1'000'000'000, nullptr, &error) == 0);
  CHECK(table.submit(layer, &late, &tickets[64], &error) == 0);  // in the place of ticket 0
  CHECK(table.wait(device, 1000, 1'000'000'000, nullptr, &error) ==
        static_cast<int32_t>(ErrorCode::kInvalidArgument));
  table.layer_drop(layer);
  table.close(device);
}

TEST_CASE("records of a shorter or longer peer are read as far as both know them") {
  auto full = to_record(LayerOptions{3, Dtype::kBF16});
  full.struct_size = offsetof(dflash_layer_options, numerics);
  full.numerics = 77;  // beyond the peer's record
  auto read = layer_options_of(read_record(&full));
  REQUIRE(read.ok());
  CHECK(read.value().num_local_experts == 3);
  CHECK(read.value().numerics == compute::NumericsClass::kF32Canonical);

  struct {
    dflash_probe known;
    uint64_t later = 42;
  } longer;
  longer.known = new_record<dflash_probe>();
  longer.known.struct_size = sizeof longer;
  cpu_table()->probe(&longer.known);
  CHECK(longer.known.num_devices == 1);
  CHECK(longer.later == 42);
}

TEST_CASE("values that this build does not know are refused by name") {
  const dflash_backend_table& table = *cpu_table();
  auto options = new_record<dflash_open_options>();
  dflash_device* device = nullptr;
  REQUIRE(table.open(0, &options, &device, nullptr) == 0);
  dflash_ffn_spec spec = to_record(toy_spec());
  dflash_layer_options layer_options = to_record(LayerOptions{1, Dtype::kF32});
  dflash_layer* layer = nullptr;
  auto error = new_record<dflash_error>();
  const auto unsupported = static_cast<int32_t>(ErrorCode::kUnsupported);
  layer_options.down_format = 99;
  CHECK(table.layer_define(device, &spec, &layer_options, &layer, &error) == unsupported);
  CHECK(std::string(error.text) == Has{"down_format 99 is not known"});
  layer_options = to_record(LayerOptions{1, Dtype::kF32});
  layer_options.numerics = 9;
  CHECK(table.layer_define(device, &spec, &layer_options, &layer, &error) == unsupported);
  layer_options = to_record(LayerOptions{0, Dtype::kF32});
  CHECK(table.layer_define(device, &spec, &layer_options, &layer, &error) == unsupported);
  spec.activation = 50;
  CHECK(table.layer_define(device, &spec, &layer_options, &layer, &error) == unsupported);
  CHECK(std::string(error.text) == Has{"activation 50"});
  CHECK(table.layer_define(nullptr, &spec, &layer_options, &layer, &error) ==
        static_cast<int32_t>(ErrorCode::kInvalidArgument));
  CHECK(layer == nullptr);
  table.close(device);
}

TEST_CASE("a device that does not exist, or that cannot be used, is refused with its reason") {
  auto absent = PluginBackend::open(*cpu_table(), 3, OpenOptions{});
  REQUIRE(absent == Failed(ErrorCode::kInvalidArgument));
  CHECK(absent.error().message ==
        "device cpu:3 does not exist; this machine has 1 such device, number 0");

  auto unusable =
      PluginBackend::open(*table_of<toys::ScriptedDriver>(), toys::kTooOld, OpenOptions{});
  REQUIRE(unusable == Failed(ErrorCode::kUnsupported));
  CHECK(unusable.error().message ==
        "device scripted:1 (old card): compute capability 5.2 is below 7.5");

  auto none = PluginBackend::open(*table_of<toys::DriverlessDriver>(), 0, OpenOptions{});
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().message == "device driverless:0: the driver library is missing");
  CHECK_FALSE(list_devices(*table_of<toys::DriverlessDriver>()).ok());
}

TEST_CASE(
    "too little device memory names the shortfall and how many experts fit, before anything is "
    "loaded") {
  auto backend =
      PluginBackend::open(*table_of<toys::ScriptedDriver>(), toys::kSmallMemory, OpenOptions{});
  REQUIRE(backend.ok());
  auto layer = backend.value()->create_layer(toy_spec(), 10, Dtype::kF32,
                                             compute::NumericsClass::kF32Canonical);
  REQUIRE(layer == Failed(ErrorCode::kOutOfMemory));
  CHECK(layer.error().message ==
        "device scripted:0 (small card): 10 experts of this layer need 10000 bytes, 4500 are free: "
        "5500 short; at most 4 experts fit");
}

TEST_CASE(
    "a format or class that the device lacks is unsupported, a card that is lost fails the call") {
  auto backend =
      PluginBackend::open(*table_of<toys::ScriptedDriver>(), toys::kSmallMemory, OpenOptions{});
  REQUIRE(backend.ok());
  CHECK(backend.value()->create_layer(toy_spec(), 1, compute::WeightFormat::kQ4K,
                                      compute::NumericsClass::kF32Canonical) ==
        Failed(ErrorCode::kUnsupported, "scripted:0 (small card): weights in q4_k have no kernel"));
  auto numerics =
      backend.value()->create_layer(toy_spec(), 1, Dtype::kBF16, compute::NumericsClass::kBf16Dot);
  REQUIRE_FALSE(numerics.ok());
  CHECK(numerics.error().message == Has{"bf16-dot is not computed by this device"});
  CHECK_FALSE(backend.value()->computes(compute::NumericsClass::kBf16Dot));

  const toy::Experts experts(toy_spec(), 2, Dtype::kF32, 1);
  const auto layer = layer_of(*backend.value(), experts, 2);
  const toy::Batch batch = toy::Batch::random(toy_spec(), 2, 4, 2, 3);
  std::vector<std::byte> reply;
  Status lost = batch.run(*layer, reply);
  REQUIRE(lost == Failed(ErrorCode::kWorkerFailed));
  CHECK(lost.error().message == "device scripted:0 (small card): the card has fallen off the bus");
}

TEST_CASE("a card that no test ever ran on computes the reference's numbers, or gets no layer") {
  const auto define = [](uint32_t device, Dtype format,
                         compute::NumericsClass numerics =
                             compute::NumericsClass::kF32Canonical) -> Status {
    auto backend = PluginBackend::open(*table_of<toys::ScriptedDriver>(), device, OpenOptions{});
    REQUIRE(backend.ok());
    auto layer = backend.value()->create_layer(toy_spec(), 1, format, numerics);
    return layer.ok() ? ok() : Status(std::move(layer).error());
  };
  CHECK(define(toys::kUntriedRight, Dtype::kBF16).ok());
  CHECK(define(toys::kWrongBits, Dtype::kBF16).ok());  // one that need not prove anything
  CHECK(define(toys::kUntriedWrong, Dtype::kBF16) ==
        Failed(ErrorCode::kUnsupported,
               "scripted:3 (untried card): its kernels compute wrong "
               "numbers: f32-canonical silu with weights in bf16 differs "
               "from the reference in "));

  // In a class of matrix units bits are the card's own, but a row's must not depend on how many
  // come with it.
  CHECK(define(toys::kUntriedRight, Dtype::kBF16, compute::NumericsClass::kBf16Mma).ok());
  const Status uneven = define(toys::kUntriedUneven, Dtype::kF16, compute::NumericsClass::kBf16Mma);
  REQUIRE_FALSE(uneven.ok());
  CHECK(uneven.error().message ==
        Has{"bf16-mma silu with weights in f16 differs from the reference in 1 of "});
}

TEST_CASE(
    "the self-test passes on the processor's kernels and counts what a wrong device computes") {
  auto backend = open_cpu();
  auto first = backend->self_test(0);
  REQUIRE(first.ok());
  REQUIRE(first.value().num_cases > 12);
  for (uint32_t test_case = 0; test_case < first.value().num_cases; ++test_case) {
    const auto tested = backend->self_test(test_case);
    REQUIRE(tested.ok());
    CHECK_MESSAGE(tested.value().differing == 0, tested.value().kernel, " ",
                  tested.value().formats);
    CHECK(tested.value().elements > 1000);
  }
  CHECK_FALSE(backend->self_test(first.value().num_cases).ok());

  auto wrong =
      PluginBackend::open(*table_of<toys::ScriptedDriver>(), toys::kWrongBits, OpenOptions{});
  REQUIRE(wrong.ok());
  const auto tested = wrong.value()->self_test(0);
  REQUIRE(tested.ok());
  CHECK(tested.value().differing == tested.value().elements);
}
