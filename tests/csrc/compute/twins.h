// Layers of all who compute a class here, kernel sets or cards, beside the class's readable twin,
// and what each class is held to: the twin's bits over shapes, formats, numbers of rows, gates and
// special values, and for a row whatever lies beside it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compute/cpu/cpu_backend.h"
#include "compute/reference/reference.h"
#include "stored_experts.h"

namespace dflash::compute::toy {

// The kernel sets that this processor has.
inline std::vector<Isa> kernel_sets() {
  std::vector<Isa> found;
  for (Isa isa : kAllIsas) {
    if (isa != Isa::kReference && isa_is_supported(isa)) found.push_back(isa);
  }
  return found;
}

// A layer of a kernel set, with the backend that it computes on.
inline std::shared_ptr<ExpertLayer> layer_of(Isa isa, const FfnSpec& spec, uint32_t num_experts,
                                             ResidentFormats formats,
                                             NumericsClass numerics = kDefaultNumerics,
                                             uint32_t num_threads = 1,
                                             WeightsLayout layout = WeightsLayout::kPacked) {
  struct Kept {
    std::unique_ptr<CpuBackend> backend;
    std::unique_ptr<ExpertLayer> layer;
  };
  auto kept = std::make_shared<Kept>();
  kept->backend = CpuBackend::create(isa, num_threads, {}, layout).value();
  auto made = kept->backend->create_layer(spec, num_experts, formats, numerics);
  REQUIRE_MESSAGE(made.ok(), (made.ok() ? "" : made.error().message));
  kept->layer = std::move(made).value();
  return {kept, kept->layer.get()};
}

// One with experts.
template <class Weights>
std::shared_ptr<ExpertLayer> load(Isa isa, const Weights& experts, ResidentFormats formats,
                                  NumericsClass numerics = kDefaultNumerics,
                                  uint32_t num_threads = 1) {
  auto layer = layer_of(isa, experts.spec(), experts.count(), formats, numerics, num_threads);
  REQUIRE(experts.load_into(*layer).ok());
  return layer;
}

// Who computes a class.
struct Machine {
  std::string name;
  std::function<std::shared_ptr<ExpertLayer>(const FfnSpec&, uint32_t num_experts, ResidentFormats)>
      create;
};
struct Machines {
  NumericsClass numerics;
  std::vector<Machine> all;
};

// The kernel sets that compute a class, each with these numbers of threads.
inline Machines kernel_sets_of(NumericsClass numerics, const std::vector<uint32_t>& threads = {1}) {
  Machines machines{numerics, {}};
  for (Isa isa : kernel_sets()) {
    if (!isa_computes(isa, numerics)) continue;
    for (uint32_t count : threads) {
      machines.all.push_back(
          {std::string(isa_name(isa)) + ", threads " + std::to_string(count),
           [=](const FfnSpec& spec, uint32_t num_experts, ResidentFormats formats) {
             return layer_of(isa, spec, num_experts, formats, numerics, count);
           }});
    }
  }
  return machines;
}

// The layers of machines and their class's twin, all with the same experts.
class Twins {
 public:
  template <class Weights>
  Twins(const Machines& machines, const Weights& experts, ResidentFormats formats)
      : twin_(make_reference_layer(experts.spec(), experts.count(), formats, machines.numerics)) {
    REQUIRE(experts.load_into(*twin_).ok());
    for (const Machine& machine : machines.all) {
      layers_.push_back({machine.name, machine.create(experts.spec(), experts.count(), formats)});
      const Status status = experts.load_into(*layers_.back().layer);
      REQUIRE_MESSAGE(status.ok(), (status.ok() ? "" : status.error().message));
    }
  }

  ExpertLayer& twin() const { return *twin_; }
  ExpertLayer& layer(size_t machine) const { return *layers_[machine].layer; }
  // Whether all have the twin's bits.
  void check(const Batch& batch) const {
    const std::vector<std::byte> expected = reply_of(*twin_, batch);
    for (const Named& one : layers_)
      CHECK_MESSAGE(reply_of(*one.layer, batch) == expected, one.name, ", rows ", batch.num_rows());
  }
  // Whether all fail as the twin does, with its words.
  void check_failure(const Batch& batch, ErrorCode code) const {
    std::vector<std::byte> reply;
    const Status expected = batch.run(*twin_, reply);
    REQUIRE_FALSE(expected.ok());
    for (const Named& one : layers_) {
      const Status found = batch.run(*one.layer, reply);
      REQUIRE_FALSE(found.ok());
      CHECK(found.error().code == code);
      CHECK_MESSAGE(found.error().message == expected.error().message, one.name);
    }
  }
  // Whether slices of 1, 1, 2, 4, ... rows have the bits that the rows have together.
  void check_slices(const Batch& batch) const {
    check(batch);
    const std::vector<std::byte> together = reply_of(*twin_, batch);
    const size_t row_bytes = together.size() / batch.num_rows();
    for (uint32_t begin = 0, end = 1; begin < batch.num_rows();
         begin = end, end = std::min(2 * end, batch.num_rows())) {
      const Batch slice = batch.slice(begin, end);
      const std::vector<std::byte> alone = reply_of(*twin_, slice);
      REQUIRE(std::equal(alone.begin(), alone.end(),
                         together.begin() + static_cast<std::ptrdiff_t>(begin * row_bytes)));
      check(slice);
    }
  }

 private:
  struct Named {
    std::string name;
    std::shared_ptr<ExpertLayer> layer;
  };
  std::unique_ptr<ExpertLayer> twin_;
  std::vector<Named> layers_;
};

struct Shape {
  uint32_t in, intermediate, out;
};

// Experts of every shape, held in one of `formats` after the other: rows of every dtype, spread
// over experts and many of one expert.
inline void check_shapes(const Machines& machines, const std::vector<Shape>& shapes,
                         const std::vector<WeightFormat>& formats) {
  uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (uint32_t turn = 0; turn < 3; ++turn) {
      const WeightFormat format = formats[turn % formats.size()];
      FfnSpec spec = spec_of(shape.in, shape.intermediate, shape.out);
      spec.has_gate_up_bias = spec.has_down_bias = turn == 2;
      const Experts experts(spec, 5, is_float(format) ? dtype_of(format) : Dtype::kBF16, ++seed);
      const Twins twins(machines, experts, format);
      for (Batch batch :
           {Batch::random(spec, 5, 9, 4, ++seed), Batch::of_one_expert(spec, 24, 2, seed)}) {
        batch.row_dtype = static_cast<Dtype>(seed % 3);
        batch.reply_dtype = static_cast<Dtype>(seed / 3 % 3);
        CAPTURE(shape.in);
        CAPTURE(format_name(format));
        twins.check(batch);
      }
    }
  }
}

// Two experts, stored as checkpoints store `formats` or as given, for numbers of rows of one of
// them.
inline void check_formats(const Machines& machines, const FfnSpec& spec, ResidentFormats formats,
                          uint32_t seed, const std::vector<uint32_t>& numbers = {1, 3, 37},
                          std::optional<ResidentFormats> stored = std::nullopt) {
  if (!stored) stored = {source_of(formats.gate_up), source_of(formats.down)};
  const StoredExperts experts(spec, 2, stored->gate_up, stored->down, seed);
  const Twins twins(machines, experts, formats);
  for (uint32_t rows : numbers) {
    CAPTURE(format_name(formats.gate_up));
    CAPTURE(format_name(formats.down));
    twins.check(Batch::of_one_expert(spec, rows, rows / 2 % 2, seed + rows));
  }
}

// Numbers of rows on one expert, and spread over all, evenly or half of them on one.
template <class Weights>
void check_numbers_of_rows(const Machines& machines, const Weights& experts,
                           ResidentFormats formats, const std::vector<uint32_t>& numbers) {
  const FfnSpec& spec = experts.spec();
  const Twins twins(machines, experts, formats);
  for (uint32_t rows : numbers) {
    twins.check(Batch::of_one_expert(spec, rows, 1, rows));
    Batch several = Batch::random(spec, experts.count(), rows, 6, rows);
    for (size_t i = 0; rows % 2 == 0 && i < several.ids.size(); i += 2) several.ids[i] = 2;
    several.row_dtype = static_cast<Dtype>(rows % 3);
    several.reply_dtype = static_cast<Dtype>(rows / 3 % 3);
    twins.check(several);
  }
}

// Calls body(spec, seed) with every gate of the activations in `spec`, with and without biases and
// limits.
template <class Body>
void for_every_gate(FfnSpec spec, const std::vector<Activation>& activations, uint32_t seed,
                    const Body& body) {
  for (Activation activation : activations) {
    for (GateKind gate : {GateKind::kNone, GateKind::kGated, GateKind::kClampedSwiglu}) {
      ++seed;
      FfnSpec gated = spec;
      gated.activation = activation;
      gated.gate = gate;
      gated.has_gate_up_bias = seed % 2 == 0;
      gated.has_down_bias = seed / 2 % 2 == 0;
      if (gate == GateKind::kClampedSwiglu) gated.alpha = 1.702f, gated.up_offset = 1.0f;
      if (gate != GateKind::kNone && seed % 3 == 0) gated.gate_max = 0.5f, gated.up_limit = 0.75f;
      CAPTURE(static_cast<int>(activation));
      CAPTURE(static_cast<int>(gate));
      body(gated, seed);
    }
  }
}

inline std::vector<Activation> all_activations() {
  std::vector<Activation> all;
  for (int value = 0; value <= 7; ++value) all.push_back(static_cast<Activation>(value));
  return all;
}

// Few rows and many, reaching into the tails of the activations.
inline void check_gates(const Machines& machines, const std::vector<Activation>& activations,
                        ResidentFormats formats, Dtype stored) {
  for_every_gate(spec_of(41, 51, 61), activations, 100, [&](const FfnSpec& spec, uint32_t seed) {
    const Experts experts(spec, 2, stored, seed);
    const Twins twins(machines, experts, formats);
    for (uint32_t rows : {5u, 40u}) {
      Batch batch = Batch::random(spec, 2, rows, 3, seed);
      for (float& value : batch.rows) value *= 4.0f;
      twins.check(batch);
    }
  });
}

// Values of which each makes its row one of canonical NaNs, beside rows that it leaves alone, few
// of an expert and many.
template <class Weights>
void check_special_rows(const Machines& machines, const Weights& experts, ResidentFormats formats,
                        const std::vector<float>& specials) {
  const Twins twins(machines, experts, formats);
  const FfnSpec& spec = experts.spec();
  for (uint32_t num_rows : {7u, 40u}) {
    Batch clean = Batch::of_one_expert(spec, num_rows, 0, 32, 0.5f);
    for (uint32_t r = 0; r < num_rows; ++r)
      clean.ids[r] = static_cast<uint16_t>(r % experts.count());
    Batch dirty = clean;
    for (size_t i = 0; i < specials.size(); ++i)
      dirty.rows[(2 * i + 1) * spec.in_size + 5 * i] = specials[i];
    twins.check(clean);
    const std::vector<std::byte> untouched = reply_of(twins.twin(), clean),
                                 found = reply_of(twins.twin(), dirty);
    const size_t row_bytes = size_t{spec.out_size} * 4;
    for (uint32_t r = 0; r < num_rows; ++r) {
      const bool is_special = r % 2 == 1 && r / 2 < specials.size();
      for (size_t at = r * row_bytes; at < (r + 1) * row_bytes; at += 4) {
        uint32_t bits, clean_bits;
        std::memcpy(&bits, &found[at], 4);
        std::memcpy(&clean_bits, &untouched[at], 4);
        CHECK(bits == (is_special ? 0x7fc00000u : clean_bits));
      }
    }
    for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      dirty.reply_dtype = dtype;
      twins.check(dirty);
    }
  }
}

// What most classes take for special: a negative NaN with a payload, infinity, a signalling NaN.
inline std::vector<float> special_values() {
  return {std::bit_cast<float>(0xffabcdefu), std::numeric_limits<float>::infinity(),
          std::bit_cast<float>(0x7f800001u)};
}

}  // namespace dflash::compute::toy
