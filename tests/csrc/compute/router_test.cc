// Routing has the reference's bits on every kernel set, in every form that models use; equal values
// take the lowest id, and forms that cannot be are refused.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/float_mode.h"
#include "compute/cpu/row_operators.h"
#include "compute/reference/row_operators.h"
#include "failed.h"
#include "strided_rows.h"
#include "twins.h"

namespace dflash::compute {
namespace {

constexpr uint32_t kRows = 40;  // enough for every special value of probe_row

std::unique_ptr<ThreadPool> make_pool() { return ThreadPool::create(2, {}, 0).value(); }

// A form with what it adds to logits: a bias, and scales of experts.
struct Case {
  const char* name;
  RouterForm form;
  bool has_bias = false, has_expert_scales = false;
};

RouterForm form_of(RouterScore score, RouterWeight weight) {
  RouterForm form;
  form.score = score, form.weight = weight;
  return form;
}

std::vector<Case> cases() {
  using enum RouterScore;
  using enum RouterWeight;
  std::vector<Case> cases = {
      {"softmax", form_of(kSoftmax, kScore)},
      {"softmax normalised", form_of(kSoftmax, kScore)},
      {"softmax bias floor", form_of(kSoftmax, kScore), true},
      {"softmax groups max", form_of(kSoftmax, kScore)},
      {"sigmoid groups bias", form_of(kSigmoid, kScore), true},
      {"sigmoid groups zero", form_of(kSigmoid, kScore), true},
      {"sigmoid bias", form_of(kSigmoid, kScore), true},
      {"logits softmax of chosen", form_of(kIdentity, kSoftmaxOfChosen)},
      {"logits bias sigmoid", form_of(kIdentity, kSigmoidOfChosen), true},
      {"expert scales", form_of(kSoftmax, kScore), false, true},
      {"sparse mixer", form_of(kIdentity, kSparseMixer)},
      {"sparse mixer of few", form_of(kIdentity, kSparseMixer)},
  };
  cases[1].form.normalizes = true;
  cases[2].form.normalizes = true, cases[2].form.sum_floor = 1e-2f;
  cases[3].form.num_groups = 4, cases[3].form.topk_groups = 2, cases[3].form.scale = 2.5f;
  cases[3].form.group_score = GroupScore::kMax;
  for (const size_t i : {4u, 5u}) {
    RouterForm& form = cases[i].form;
    form.num_groups = 4, form.topk_groups = 2, form.normalizes = true;
    form.sum_epsilon = 1e-20f, form.scale = 2.5f;
  }
  cases[5].form.excluded = 0.0f;
  cases[6].form.normalizes = true, cases[6].form.sum_epsilon = 1e-6f;
  cases[8].form.normalizes = true;
  cases[9].form.normalizes = true;
  cases[10].form.mixer_threshold = 0.5f, cases[11].form.mixer_threshold = 0.02f;
  return cases;
}

// Logits of which some rows are all equal, or equal in pairs, beside the probe rows.
StridedRows logits_with_ties(Dtype dtype, uint32_t num_experts) {
  StridedRows logits = probe_rows(dtype, kRows, num_experts, 21);
  logits.set(10, std::vector<float>(num_experts, 0.5f));
  std::vector<float> pairs = probe_row(11, num_experts, 22);
  for (uint32_t i = 0; i + 1 < num_experts; i += 2) pairs[i + 1] = pairs[i];
  logits.set(11, pairs);
  std::vector<float> near(num_experts, 1.0f);  // an ulp apart, where softmax makes them equal
  for (uint32_t i = 0; i < num_experts; i += 3) near[i] = std::nextafter(1.0f, 2.0f);
  logits.set(12, near);
  return logits;
}

void check_route(ThreadPool& pool, Isa isa, Case probe, uint32_t num_experts, uint32_t top_k,
                 Dtype dtype) {
  probe.form.num_experts = num_experts, probe.form.top_k = top_k;
  const StridedRows logits = logits_with_ties(dtype, num_experts);
  const std::vector<float> bias = probe_row(0, num_experts, 23),
                           scales = probe_row(1, num_experts, 24);
  std::vector<int64_t> ids(kRows * top_k, -1);
  std::vector<int32_t> short_ids(kRows * top_k, -1);
  std::vector<float> weights(kRows * top_k), same_weights = weights;
  RouteArgs args = {.form = probe.form,
                    .logits = logits.view(),
                    .bias = probe.has_bias ? bias.data() : nullptr,
                    .expert_scales = probe.has_expert_scales ? scales.data() : nullptr,
                    .topk_ids = reinterpret_cast<std::byte*>(ids.data()),
                    .id_type = IdType::kInt64,
                    .topk_weights = weights.data()};
  REQUIRE(route(pool, isa, args).ok());
  args.topk_ids = reinterpret_cast<std::byte*>(short_ids.data()), args.id_type = IdType::kInt32;
  args.topk_weights = same_weights.data();
  REQUIRE(route(pool, isa, args).ok());
  CHECK(std::equal(ids.begin(), ids.end(), short_ids.begin()));
  for (uint32_t row = 0; row < kRows; ++row) {
    INFO(probe.name << ", experts " << num_experts << ", row " << row);
    const RoutedRow expected =
        reference_route(probe.form, logits.get(row), args.bias, args.expert_scales);
    const size_t at = size_t{row} * top_k;
    CHECK(std::equal(expected.topk_ids.begin(), expected.topk_ids.end(),
                     ids.begin() + static_cast<std::ptrdiff_t>(at)));
    CHECK(std::memcmp(expected.topk_weights.data(), &weights[at], 4 * top_k) == 0);
    CHECK(std::memcmp(&same_weights[at], &weights[at], 4 * top_k) == 0);
  }
}

TEST_CASE("routing has the reference's bits on every kernel set, in every form") {
  const CanonicalFloatMode mode;
  const auto pool = make_pool();
  for (const Isa isa : toy::kernel_sets()) {
    INFO("set " << isa_name(isa));
    for (const Case& probe : cases()) {
      check_route(*pool, isa, probe, 60, 4, Dtype::kF32);
      check_route(*pool, isa, probe, 256, 8, Dtype::kF32);
      check_route(*pool, isa, probe, 128, 22, Dtype::kBF16);
      check_route(*pool, isa, probe, 8, 8, Dtype::kF32);
      if (probe.form.num_groups > 1) continue;
      check_route(*pool, isa, probe, 37, 3, Dtype::kF16);
      check_route(*pool, isa, probe, 1, 1, Dtype::kF32);
    }
  }
}

std::vector<int64_t> ids_of(const RouterForm& form, const std::vector<float>& logits) {
  const auto pool = make_pool();
  std::vector<int64_t> ids(form.top_k, -1);
  std::vector<float> weights(form.top_k);
  const RowsView view = {reinterpret_cast<const std::byte*>(logits.data()), Dtype::kF32, 0, 1};
  REQUIRE(route(*pool, best_isa(),
                {.form = form,
                 .logits = view,
                 .topk_ids = reinterpret_cast<std::byte*>(ids.data()),
                 .topk_weights = weights.data()})
              .ok());
  return ids;
}

TEST_CASE("equal scores take the lowest ids, and weights come in descending order") {
  RouterForm form;
  form.num_experts = 6, form.top_k = 3;
  CHECK(ids_of(form, {1, 1, 1, 1, 1, 1}) == std::vector<int64_t>{0, 1, 2});
  CHECK(ids_of(form, {0, 2, 1, 2, 1, 1}) == std::vector<int64_t>{1, 3, 2});
  form.num_groups = 3, form.topk_groups = 1, form.top_k = 2;
  CHECK(ids_of(form, {1, 0, 0, 1, 1, 0}) == std::vector<int64_t>{0, 1});  // equal groups
}

TEST_CASE("a NaN is chosen first, so that it shows in the row's output") {
  RouterForm form;
  form.num_experts = 4, form.top_k = 2, form.score = RouterScore::kSigmoid;
  CHECK(ids_of(form, {5, 1, std::nanf(""), 2}) == std::vector<int64_t>{2, 0});
}

TEST_CASE("router forms that cannot be are refused by field") {
  const auto pool = make_pool();
  const float logits[8] = {};
  int64_t ids[8];
  float weights[8];
  RouteArgs args;
  args.logits = {reinterpret_cast<const std::byte*>(logits), Dtype::kF32, 0, 1};
  args.topk_ids = reinterpret_cast<std::byte*>(ids), args.topk_weights = weights;
  args.form.num_experts = 8, args.form.top_k = 2;
  CHECK(route(*pool, best_isa(), args).ok());
  const auto check_refused = [&](const char* words, auto change) {
    RouteArgs wrong = args;
    change(wrong.form);
    CHECK(route(*pool, best_isa(), wrong) == Failed(ErrorCode::kInvalidArgument, words));
  };
  check_refused("num_experts", [](RouterForm& f) { f.num_experts = 0; });
  check_refused("top_k", [](RouterForm& f) { f.top_k = 9; });
  check_refused("top_k", [](RouterForm& f) { f.top_k = 0; });
  check_refused("num_groups", [](RouterForm& f) { f.num_groups = 0; });
  check_refused("topk_groups", [](RouterForm& f) { f.num_groups = 2, f.topk_groups = 3; });
  check_refused("equal groups", [](RouterForm& f) { f.num_groups = 3; });
  check_refused("at least 2", [](RouterForm& f) { f.num_groups = 8; });
}

}  // namespace
}  // namespace dflash::compute
