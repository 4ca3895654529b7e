// The clock of a thread's operators: every moment is in one operator, and off it finds nothing.
// SPDX-License-Identifier: Apache-2.0
#include "base/operator_clock.h"

#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"

using namespace dflash;

namespace {

OperatorTimes found_of(const std::vector<OperatorTimes>& times, Operator which,
                       const void* subject = nullptr) {
  for (const OperatorTimes& one : times)
    if (one.which == which && one.subject == subject) return one;
  return {};
}

}  // namespace

TEST_CASE("the times of all operators add up to the time from start to stop") {
  int first = 0, second = 0;
  const int64_t before_ns = now_ns();
  OperatorClock::start();
  const int64_t started_ns = now_ns();
  {
    OperatorScope call(Operator::kExpertCall);
    call.count(7, 0, "");
    {
      const OperatorScope inner(Operator::kNorm);
    }
    // Counted where it is asked for, though another operator was inside.
    call.count(1, 2, "f32-canonical");
  }
  for (const int* subject : {&first, &second, &first}) {
    OperatorScope product(Operator::kLinear, subject);
    product.count(10, 100, "int8-groups");
  }
  const int64_t stopping_ns = now_ns();
  const auto times = OperatorClock::stop();
  const int64_t after_ns = now_ns();

  int64_t total_ns = 0;
  for (const OperatorTimes& one : times) total_ns += one.own_ns;
  CHECK(total_ns >= stopping_ns - started_ns);
  CHECK(total_ns <= after_ns - before_ns);
  CHECK(times.size() == 5);
  CHECK(found_of(times, Operator::kOutside).own_ns > 0);
  const OperatorTimes call = found_of(times, Operator::kExpertCall);
  CHECK(call.num_calls == 1);
  CHECK(call.num_bytes == 8);
  CHECK(call.num_multiply_adds == 2);
  CHECK(call.numerics == std::string("f32-canonical"));
  CHECK(found_of(times, Operator::kNorm).num_calls == 1);
  CHECK(found_of(times, Operator::kLinear, &first).num_calls == 2);
  CHECK(found_of(times, Operator::kLinear, &first).num_multiply_adds == 200);
  CHECK(found_of(times, Operator::kLinear, &second).num_bytes == 10);
}

TEST_CASE("a thread without a clock counts nothing, also beside one that has one") {
  CHECK(OperatorClock::stop().empty());
  OperatorClock::start();
  std::thread other([] {
    OperatorScope scope(Operator::kNorm);
    CHECK_FALSE(scope.is_clocked());
    scope.count(1, 1, "");
    CHECK(OperatorClock::stop().empty());
  });
  other.join();
  const auto times = OperatorClock::stop();
  CHECK(times.size() == 1);
  CHECK(found_of(times, Operator::kOutside).num_calls == 0);
  CHECK(OperatorClock::running() == nullptr);
}

TEST_CASE("every operator has a name of its own") {
  std::vector<std::string> names;
  for (int which = 0; which <= static_cast<int>(Operator::kExpertDown); ++which) {
    const std::string name = operator_name(static_cast<Operator>(which));
    for (const std::string& other : names) CHECK(name != other);
    names.push_back(name);
  }
}
