// Every kernel set gives the reference's bits in norms, rotary embedding, gates and argmax: at odd
// widths, with special values, in every dtype, with any number of threads and in any company.
// Routing has a file of its own.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/row_operators.h"

#include <doctest/doctest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/float_mode.h"
#include "compute/reference/row_operators.h"
#include "failed.h"
#include "strided_rows.h"
#include "twins.h"

namespace dflash::compute {
namespace {

constexpr uint32_t kWidths[] = {1, 2, 15, 16, 37, 60, 64, 2880};
constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kF16, Dtype::kBF16};
constexpr uint32_t kRows = 40;  // enough for every special value of probe_row

// Calls body(pool, isa) for every kernel set of this processor, with one thread and with three.
template <class Body>
void on_every_set(const Body& body) {
  const CanonicalFloatMode mode;
  for (const uint32_t num_threads : {1u, 3u}) {
    const auto pool = ThreadPool::create(num_threads, {}, 0).value();
    for (const Isa isa : toy::kernel_sets()) {
      INFO("set " << isa_name(isa) << ", threads " << num_threads);
      body(*pool, isa);
    }
  }
}

void check_norms(ThreadPool& pool, Isa isa, const NormForm& form, uint32_t width, Dtype dtype,
                 bool has_weight, bool has_bias) {
  const StridedRows rows = probe_rows(dtype, kRows, width, width);
  const std::vector<float> weight = probe_row(0, width, 77), bias = probe_row(1, width, 78);
  StridedRows out(dtype, kRows, width);
  const NormArgs args = {.form = form,
                         .width = width,
                         .rows = rows.view(),
                         .residual = {},
                         .sum = {},
                         .weight = has_weight ? weight.data() : nullptr,
                         .bias = has_bias ? bias.data() : nullptr,
                         .out = out.target()};
  REQUIRE(normalize(pool, isa, args).ok());
  for (uint32_t row = 0; row < kRows; ++row)
    CHECK(out.has(row, reference_norm(form, rows.get(row), args.weight, args.bias)));
  CHECK(out.gaps_are_untouched());
}

TEST_CASE("norms have the reference's bits on every kernel set") {
  on_every_set([](ThreadPool& pool, Isa isa) {
    for (const uint32_t width : kWidths) {
      for (const Dtype dtype : kDtypes) {
        INFO("width " << width << ", " << dtype_name(dtype));
        for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
          check_norms(pool, isa, {kind, 1e-6f, false, false}, width, dtype, false, false);
          check_norms(pool, isa, {kind, 1e-5f, false, false}, width, dtype, true, false);
          check_norms(pool, isa, {kind, 1e-5f, true, false}, width, dtype, true, true);
          check_norms(pool, isa, {kind, 1e-6f, false, false}, width, dtype, false, true);
        }
      }
    }
  });
}

// The sum that a norm with a residual keeps and normalises, by the words of operators/norm.h.
std::vector<float> sum_of_rows(const StridedRows& rows, const StridedRows& residual, uint32_t row) {
  std::vector<float> sum = rows.get(row);
  const std::vector<float> other = residual.get(row);
  for (size_t i = 0; i < sum.size(); ++i) {
    sum[i] = sum[i] + other[i];
    if (std::isnan(sum[i])) sum[i] = std::numeric_limits<float>::quiet_NaN();
  }
  return sum;
}

TEST_CASE("a norm adds the residual in float32, keeps the sum, and normalises what the form says") {
  on_every_set([](ThreadPool& pool, Isa isa) {
    for (const uint32_t width : {37u, 64u}) {
      for (const Dtype dtype : kDtypes) {
        for (const bool is_rounded : {false, true}) {
          const StridedRows rows = probe_rows(dtype, kRows, width, 3);
          StridedRows residual = probe_rows(dtype, kRows, width, 4), out(dtype, kRows, width);
          const StridedRows before = residual;
          NormForm form;
          form.normalizes_rounded_sum = is_rounded;
          const NormArgs args = {.form = form,
                                 .width = width,
                                 .rows = rows.view(),
                                 .residual = residual.view(),
                                 .sum = residual.target(),  // in the residual's place
                                 .out = out.target()};
          REQUIRE(normalize(pool, isa, args).ok());
          for (uint32_t row = 0; row < kRows; ++row) {
            const std::vector<float> sum = sum_of_rows(rows, before, row);
            CHECK(residual.has(row, sum));
            CHECK(out.has(
                row, reference_norm(form, is_rounded ? residual.get(row) : sum, nullptr, nullptr)));
          }
          CHECK(residual.gaps_are_untouched());
        }
      }
    }
  });
}

void check_rotation(ThreadPool& pool, Isa isa, const RotaryForm& form, Dtype dtype) {
  const uint32_t width = form.num_heads * form.head_dim;
  const uint32_t entries = form.has_full_tables ? form.rotary_dim : form.rotary_dim / 2;
  const StridedRows rows = probe_rows(dtype, kRows, width, 5);
  const StridedRows cos = probe_rows(Dtype::kF32, kRows, entries, 6),
                    sin = probe_rows(Dtype::kF32, kRows, entries, 7);
  StridedRows out(dtype, kRows, width), in_place = rows;
  RotateArgs args = {form, rows.view(), cos.view(), sin.view(), out.target()};
  REQUIRE(rotate(pool, isa, args).ok());
  args.rows = in_place.view(), args.out = in_place.target();
  REQUIRE(rotate(pool, isa, args).ok());
  for (uint32_t row = 0; row < kRows; ++row) {
    CHECK(out.has(row,
                  reference_rotate(form, rows.get(row), cos.get(row).data(), sin.get(row).data())));
  }
  CHECK(out.gaps_are_untouched());
  CHECK(in_place == out);
}

TEST_CASE("rotary embedding has the reference's bits in every layout, in place and elsewhere") {
  on_every_set([](ThreadPool& pool, Isa isa) {
    for (const RotaryLayout layout :
         {RotaryLayout::kHalves, RotaryLayout::kInterleaved, RotaryLayout::kInterleavedToHalves}) {
      for (const bool has_full_tables : {false, true}) {
        for (const Dtype dtype : kDtypes) {
          INFO("layout " << static_cast<int>(layout) << ", " << dtype_name(dtype));
          check_rotation(pool, isa, {3, 64, 64, 0, layout, has_full_tables}, dtype);
          check_rotation(pool, isa, {2, 37, 26, 0, layout, has_full_tables}, dtype);
          check_rotation(pool, isa, {2, 60, 10, 50, layout, has_full_tables}, dtype);
          check_rotation(pool, isa, {1, 2, 2, 0, layout, has_full_tables}, dtype);
        }
      }
    }
  });
}

std::vector<FfnSpec> gate_specs() {
  std::vector<FfnSpec> specs;
  for (int activation = 0; activation <= static_cast<int>(Activation::kQuickGelu); ++activation) {
    for (const GateKind gate : {GateKind::kNone, GateKind::kGated}) {
      FfnSpec spec;
      spec.activation = static_cast<Activation>(activation);
      spec.gate = gate;
      specs.push_back(spec);
    }
  }
  FfnSpec clamped;
  clamped.gate = GateKind::kClampedSwiglu;
  clamped.alpha = 1.702f, clamped.up_offset = 1.0f;
  clamped.gate_max = clamped.up_limit = 7.0f;
  specs.push_back(clamped);
  return specs;
}

TEST_CASE("gates and activations have the reference's bits on every kernel set") {
  on_every_set([](ThreadPool& pool, Isa isa) {
    for (const FfnSpec& spec : gate_specs()) {
      for (const uint32_t width : {1u, 37u, 60u, 64u}) {
        for (const Dtype dtype : kDtypes) {
          const StridedRows g = probe_rows(dtype, kRows, width, 8);
          StridedRows u = probe_rows(dtype, kRows, width, 9), out(dtype, kRows, width);
          GateArgs args = {spec, width, g.view(), u.view(), out.target()};
          if (spec.gate == GateKind::kNone) args.gate = {};
          REQUIRE(apply_gate(pool, isa, args).ok());
          for (uint32_t row = 0; row < kRows; ++row)
            CHECK(out.has(row, reference_gate(spec, g.get(row), u.get(row))));
          args.out = u.target();
          REQUIRE(apply_gate(pool, isa, args).ok());
          CHECK(u == out);
        }
      }
    }
  });
}

TEST_CASE("scaled rows are added with the reference's bits, with and without gate and base") {
  on_every_set([](ThreadPool& pool, Isa isa) {
    for (const uint32_t width : {1u, 37u, 64u}) {
      for (const Dtype dtype : kDtypes) {
        for (const int parts : {0, 1, 2, 3}) {
          const bool has_base = (parts & 1) != 0, has_gate = (parts & 2) != 0;
          const StridedRows x = probe_rows(dtype, kRows, width, 10);
          const StridedRows base = probe_rows(dtype, kRows, width, 11);
          const StridedRows gates = probe_rows(dtype, kRows, 1, 12);
          StridedRows out(dtype, kRows, width);
          const AddScaledArgs args = {.width = width,
                                      .rows = x.view(),
                                      .base = has_base ? base.view() : RowsView{},
                                      .gate = has_gate ? gates.view() : RowsView{},
                                      .scale = 0.22f,
                                      .out = out.target()};
          REQUIRE(add_scaled(pool, isa, args).ok());
          for (uint32_t row = 0; row < kRows; ++row) {
            const std::vector<float> base_row = base.get(row), gate = gates.get(row);
            CHECK(
                out.has(row, reference_add_scaled(x.get(row), has_base ? base_row.data() : nullptr,
                                                  has_gate ? gate.data() : nullptr, 0.22f)));
          }
        }
      }
    }
  });
}

TEST_CASE("argmax takes the lowest place among equals, and never a NaN") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  on_every_set([&](ThreadPool& pool, Isa isa) {
    for (const uint32_t width : kWidths) {
      StridedRows rows = probe_rows(Dtype::kF32, kRows, width, 13);
      std::vector<float> values(width, 1.0f);  // all equal
      rows.set(0, values);
      values[0] = nan, rows.set(1, values);
      rows.set(4, std::vector<float>(width, nan));
      values.assign(width, -kInf), values[0] = nan, rows.set(9, values);
      values.assign(width, -0.0f), values[width - 1] = 0.0f, rows.set(14, values);
      std::vector<int64_t> places(kRows, -1);
      REQUIRE(argmax(pool, isa, width, rows.view(), places.data()).ok());
      for (uint32_t row = 0; row < kRows; ++row)
        CHECK(places[row] == reference_argmax(rows.get(row)));
    }
  });
}

TEST_CASE("a row's bits are the same alone and among rows that several threads share") {
  constexpr uint32_t kMany = 297, kWidth = 2880;  // values of three tasks
  const StridedRows rows = probe_rows(Dtype::kBF16, kMany, kWidth, 14);
  StridedRows together(Dtype::kBF16, kMany, kWidth), alone = together;
  on_every_set([&](ThreadPool& pool, Isa isa) {
    NormArgs args = {.form = {}, .width = kWidth, .rows = rows.view(), .out = together.target()};
    REQUIRE(normalize(pool, isa, args).ok());
    for (uint32_t row = 0; row < kMany; ++row) {
      args.rows = rows.row_view(row), args.out = alone.row_target(row);
      REQUIRE(normalize(pool, isa, args).ok());
    }
    CHECK(together == alone);
  });
}

TEST_CASE("sizes that cannot be are refused by name, and no rows are no error") {
  const auto pool = ThreadPool::create(1, {}, 0).value();
  const Isa isa = best_isa();
  StridedRows rows(Dtype::kF32, 4, 8);
  const auto refused = [](const char* words) { return Failed(ErrorCode::kInvalidArgument, words); };
  const NormArgs good = {.form = {}, .width = 8, .rows = rows.view(), .out = rows.target()};
  const auto norm_with = [&](auto change) {
    NormArgs args = good;
    change(args);
    return normalize(*pool, isa, args);
  };
  CHECK(norm_with([](NormArgs&) {}).ok());
  CHECK(norm_with([](NormArgs& a) { a.rows.num_rows = 0, a.rows.data = nullptr; }).ok());
  CHECK(norm_with([](NormArgs& a) { a.width = 0; }) == refused("0 values"));
  CHECK(norm_with([](NormArgs& a) { a.rows.data = nullptr; }) == refused("rows has no address"));
  CHECK(norm_with([](NormArgs& a) { a.rows.data += 2; }) == refused("multiples of 4 bytes"));
  CHECK(norm_with([](NormArgs& a) { a.out.stride_bytes = 16; }) ==
        refused("out steps by 16 bytes"));
  CHECK(norm_with([](NormArgs& a) { a.form.normalizes_rounded_sum = true; }) == refused("the sum"));
  CHECK(norm_with([](NormArgs& a) { a.residual = a.rows, a.residual.num_rows = 3; }) ==
        refused("residual has 3 rows"));
  const auto rotate_with = [&](RotaryForm form) {
    return rotate(*pool, isa, {form, rows.view(), rows.view(), rows.view(), rows.target()});
  };
  CHECK(rotate_with({1, 8, 7, 0}) == refused("rotary_dim 7"));
  CHECK(rotate_with({1, 8, 4, 5}) == refused("rotary_dim 4 from 5"));
  CHECK(rotate_with({0, 8, 4, 0}) == refused("num_heads is 0"));
}

}  // namespace
}  // namespace dflash::compute
