// Layout `mapped`: panels packed for each task out of where the weights lie give the bits of panels
// packed once; nothing stays in memory; a file that can no longer be read ends the call.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "compute/cpu/page_buffer.h"
#include "failed.h"
#include "memory_file.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::reply_of;
using toy::spec_of;
using toy::StoredExperts;

std::unique_ptr<ExpertLayer> loaded(CpuBackend& backend, const FfnSpec& spec,
                                    ResidentFormats formats, const StoredExperts& experts,
                                    const MappedBytes* file,
                                    NumericsClass numerics = NumericsClass::kF32Canonical) {
  auto layer = backend.create_layer(spec, 2, formats, numerics).value();
  YieldingProgress progress{0};
  for (uint32_t id = 0; id < 2; ++id) {
    const ExpertWeights weights = experts.weights(id);
    REQUIRE(
        layer->load_expert(id, file == nullptr ? weights : toy::in_file(weights, *file), progress)
            .ok());
  }
  return layer;
}

std::unique_ptr<CpuBackend> backend_of(Isa isa, uint32_t threads, WeightsLayout layout) {
  return CpuBackend::create(isa, threads, {}, layout).value();
}

// What `from` has packed, as it lies in a file of panels that `to` then takes.
std::vector<PageBuffer> hand_over(const ExpertLayer& from, ExpertLayer& to) {
  std::vector<PageBuffer> files;
  const PanelForm form = from.panel_form().value();
  for (uint32_t id = 0; id < from.num_local_experts(); ++id) {
    files.push_back(PageBuffer::create(form.num_bytes()).value());
    std::byte* at = files.back().data();
    for (const auto& piece : from.resident_pieces(id))
      at = std::copy(piece.begin(), piece.end(), at);
    REQUIRE(at == files.back().data() + form.num_bytes());
    REQUIRE(to.map_expert(id, {files.back().data(), form.num_bytes()}, *from.content_checksum(id))
                .ok());
  }
  return files;
}

// Two layers with equal experts, one of which packed them, compute equal bits from one file.
void check_handover(const ExpertLayer& from, std::unique_ptr<ExpertLayer> to, ExpertLayer& packed,
                    uint32_t seed) {
  const auto files = hand_over(from, *to);
  CHECK(to->resident_bytes() == 0);
  CHECK(to->panel_form() == packed.panel_form());
  for (uint32_t rows : {1u, 40u}) {
    const Batch batch = Batch::random(packed.spec(), 2, rows, 2, seed + rows);
    CHECK(reply_of(*to, batch) == reply_of(packed, batch));
  }
  // What is packed gives its memory back to the same panels.
  const auto changed = hand_over(*to, packed);
  CHECK(packed.resident_bytes() == 0);
  const Batch batch = Batch::random(packed.spec(), 2, 3, 2, seed);
  CHECK(reply_of(packed, batch) == reply_of(*to, batch));
}

TEST_CASE("panels taken from a file give the bits of packed ones in every format, set and class") {
  const FfnSpec spec = spec_of(256, 512, 200);
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (!format_facts(format).is_stored || !has_panels(format)) continue;
    const StoredExperts experts(spec, 2, format, format, 40u + value);
    for (Isa isa : toy::kernel_sets()) {
      const auto backend = backend_of(isa, 1, WeightsLayout::kPacked);
      for (NumericsClass numerics : CpuBackend::numerics_classes(isa)) {
        if (!numerics_facts(numerics).takes(format)) continue;
        CAPTURE(isa_name(isa));
        CAPTURE(format_name(format));
        CAPTURE(numerics_name(numerics));
        const auto packed = loaded(*backend, spec, format, experts, nullptr, numerics);
        check_handover(*packed, backend->create_layer(spec, 2, format, numerics).value(), *packed,
                       41u + value);
      }
    }
  }
}

TEST_CASE("biases in a file of panels are those that were packed, with and without a gate") {
  for (const GateKind gate : {GateKind::kGated, GateKind::kNone}) {
    FfnSpec spec = spec_of(64, 46, 70);
    spec.gate = gate;
    spec.has_gate_up_bias = spec.has_down_bias = true;
    const toy::Experts experts(spec, 2, Dtype::kF32, 5);
    for (Isa isa : toy::kernel_sets()) {
      CAPTURE(isa_name(isa));
      const auto backend = backend_of(isa, 1, WeightsLayout::kPacked);
      const auto layer = [&] {
        return backend->create_layer(spec, 2, Dtype::kF32, kDefaultNumerics).value();
      };
      const auto packed = layer();
      YieldingProgress progress{0};
      for (uint32_t id = 0; id < 2; ++id)
        REQUIRE(packed->load_expert(id, experts.weights(id), progress).ok());
      check_handover(*packed, layer(), *packed, 6);
    }
  }
}

TEST_CASE(
    "panels of another size, off their cache line, or for a layer that takes none are refused") {
  const FfnSpec spec = spec_of(256, 512, 200);
  const auto layer =
      backend_of(best_isa(), 1, WeightsLayout::kPacked)->create_layer(spec, 1, Dtype::kF32).value();
  const uint64_t size = layer->panel_form()->num_bytes();
  const PageBuffer room = PageBuffer::create(size + 64).value();
  CHECK(layer->map_expert(0, {room.data(), size - 4}, 1) ==
        Failed(ErrorCode::kInvalidArgument, std::to_string(size - 4) + " bytes"));
  CHECK(layer->map_expert(0, {room.data() + 4, size}, 1) ==
        Failed(ErrorCode::kInvalidArgument, "cache line"));
  const auto mapping =
      backend_of(best_isa(), 1, WeightsLayout::kMapped)->create_layer(spec, 1, Dtype::kF32).value();
  CHECK_FALSE(mapping->panel_form());
  CHECK(mapping->map_expert(0, {room.data(), size}, 1) ==
        Failed(ErrorCode::kUnsupported, "mapped"));
  const auto reference = backend_of(Isa::kReference, 1, WeightsLayout::kPacked)
                             ->create_layer(spec, 1, Dtype::kF32)
                             .value();
  CHECK(reference->map_expert(0, {room.data(), size}, 1) ==
        Failed(ErrorCode::kUnsupported, "no panels"));
}

TEST_CASE(
    "mapped experts give the bits of packed ones in every stored format, set and class, and hold "
    "no memory") {
  const FfnSpec spec = spec_of(256, 512, 200);
  const toy::MemoryFile file;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (!format_facts(format).is_stored || !has_panels(format)) continue;
    const StoredExperts experts(spec, 2, format, format, 40u + value);
    for (Isa isa : toy::kernel_sets()) {
      const auto packing = backend_of(isa, 1, WeightsLayout::kPacked),
                 mapping = backend_of(isa, 2, WeightsLayout::kMapped);
      for (NumericsClass numerics : CpuBackend::numerics_classes(isa)) {
        if (!numerics_facts(numerics).takes(format)) continue;
        CAPTURE(isa_name(isa));
        CAPTURE(format_name(format));
        CAPTURE(numerics_name(numerics));
        const auto packed = loaded(*packing, spec, format, experts, &file, numerics);
        const auto mapped = loaded(*mapping, spec, format, experts, &file, numerics);
        CHECK(packed->resident_bytes() > 0);
        CHECK(mapped->resident_bytes() == 0);
        for (uint32_t rows : {1u, 40u}) {
          const Batch batch = Batch::random(spec, 2, rows, 2, 41u + value + rows);
          CHECK(reply_of(*mapped, batch) == reply_of(*packed, batch));
        }
      }
    }
  }
  CHECK(file.num_copies() > 0);
}

TEST_CASE(
    "formats without kernels are refused by name where they are packed, and mapped they give the "
    "reference's bits in every set") {
  const FfnSpec spec = spec_of(256, 512, 70);
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (has_panels(format)) continue;
    CAPTURE(format_name(format));
    StoredExperts experts(spec, 2, format, format, 140u + value);
    const auto reference = backend_of(Isa::kReference, 1, WeightsLayout::kPacked);
    const auto expected = loaded(*reference, spec, format, experts, nullptr);
    for (Isa isa : toy::kernel_sets()) {
      CAPTURE(isa_name(isa));
      const auto packing = backend_of(isa, 1, WeightsLayout::kPacked);
      CHECK(packing->create_layer(spec, 1, format) ==
            Failed(ErrorCode::kUnsupported, std::string("in ") + format_name(format)));
      const auto mapping = backend_of(isa, 2, WeightsLayout::kMapped);
      CHECK_FALSE(mapping->create_layer(spec, 1, format, NumericsClass::kInt8Groups).ok());
      const auto mapped = loaded(*mapping, spec, format, experts, nullptr);
      CHECK(mapped->resident_bytes() == 0);
      for (uint32_t rows : {1u, 40u}) {
        const Batch batch = Batch::random(spec, 2, rows, 2, 141u + value + rows);
        CHECK(reply_of(*mapped, batch) == reply_of(*expected, batch));
      }
    }
    if (format == WeightFormat::kNvfp4) continue;  // its scales have no NaN
    experts.damage_down(17);
    const auto layer =
        toy::layer_of(best_isa(), spec, 2, format, kDefaultNumerics, 1, WeightsLayout::kMapped);
    CHECK(experts.load_into(*layer) == Failed(ErrorCode::kCheckpoint, "down: output 17, input 0"));
  }
}

TEST_CASE(
    "a mapped file that can no longer be read ends the call, and the next one works when it can") {
  const FfnSpec spec = spec_of(256, 256, 64);
  const StoredExperts experts(spec, 2, WeightFormat::kQ4K, WeightFormat::kQ6K, 7);
  toy::MemoryFile file;
  const auto backend = backend_of(best_isa(), 2, WeightsLayout::kMapped);
  const auto layer =
      loaded(*backend, spec, {WeightFormat::kQ4K, WeightFormat::kQ6K}, experts, &file);
  const Batch batch = Batch::random(spec, 2, 5, 2, 8);
  const std::vector<std::byte> expected = reply_of(*layer, batch);
  file.is_gone = true;
  std::vector<std::byte> reply;
  CHECK(batch.run(*layer, reply) == Failed(ErrorCode::kCheckpoint, "model.safetensors"));
  file.is_gone = false;
  CHECK(reply_of(*layer, batch) == expected);
}

TEST_CASE("formats that are made at load cannot be mapped") {
  const auto backend = backend_of(Isa::kScalar, 1, WeightsLayout::kMapped);
  for (WeightFormat format : {WeightFormat::kInt8G32, WeightFormat::kInt4G32}) {
    CHECK(backend->create_layer(spec_of(64, 64, 64), 1, format) ==
          Failed(ErrorCode::kUnsupported, "weights_layout: packed"));
  }
}

}  // namespace
}  // namespace dflash::compute
