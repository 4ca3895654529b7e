// A program: calls of operators over fixed memory, which run one after another without the GIL. An
// operator is bound by one function that checks its arguments and returns what computes; the same
// function serves the call of the operator that computes at once, so that there is one way.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bindings/client_box.h"
#include "bindings/errors.h"
#include "compute/cpu/thread_pool.h"
#include "compute/operators/attention_plan.h"
#include "compute/operators/draw.h"
#include "compute/operators/row_copies.h"

namespace dflash::bindings {

// What differs from step to step. The memory is the caller's while a program runs.
struct StepInputs {
  const compute::AttentionPlan* plan = nullptr;  // of num_rows rows
  size_t num_rows = 0;
  // Each is [num_rows], or empty where no call of the program reads it.
  std::span<const int64_t> slots = {}, positions = {}, token_ids = {};
  // Cosines and sines of all positions from 0 on, float32.
  compute::ByteRows cos = {}, sin = {};
  std::byte* logits = nullptr;  // float32 [num_rows, vocab_size], dense
  // How the token behind each row is chosen, [num_rows], or empty where none is; and where to.
  std::span<const compute::DrawForm> draws = {};
  int64_t* chosen = nullptr;
};

// The inputs of a step that own their memory.
struct PackedInputs : StepInputs {
  PackedInputs() = default;
  PackedInputs(const PackedInputs&) = delete;
  PackedInputs& operator=(const PackedInputs&) = delete;

  std::vector<int64_t> numbers;  // slots, positions, token ids and chosen tokens, each [num_rows]
  std::vector<compute::DrawForm> forms;
};

// Counts the calls of the routed experts of one layer, by programs and by everybody else.
struct CallCount {
  std::atomic<uint64_t> value{0};
};

// A run that is under way, on one thread and without the GIL.
class ProgramRun {
 public:
  // `clients` are those of the program's expert calls at their places.
  ProgramRun(const StepInputs& inputs, std::span<const std::shared_ptr<ExpertClient>> clients)
      : inputs_(inputs), clients_(clients) {}
  ProgramRun(const ProgramRun&) = delete;
  ProgramRun& operator=(const ProgramRun&) = delete;
  // A call that is under way reads and writes memory of the program, so that it ends here.
  ~ProgramRun() {
    if (pending_ != nullptr) pending_client_->abandon(pending_);
  }

  const StepInputs& inputs() const { return inputs_; }
  // Throws Python's exception where a signal has raised one, seen every kSignalPeriodNs.
  void see_signals();

  // `count` may be null.
  Status submit(size_t place, uint32_t layer, const TokenBatch& batch, CallCount* count);
  // Waits for what was submitted. Experts count as awaited from `since_ns` on.
  Status wait(int64_t since_ns);

  // Nanoseconds in which the run waited for experts, and in which experts were under way.
  int64_t awaited_ns() const { return awaited_ns_; }
  int64_t remote_ns() const { return remote_ns_; }

 private:
  const StepInputs& inputs_;
  std::span<const std::shared_ptr<ExpertClient>> clients_;
  ExpertClient* pending_client_ = nullptr;
  client::CallPtr pending_;
  int64_t submitted_ns_ = 0, awaited_ns_ = 0, remote_ns_ = 0;
  int64_t seen_ns_ = now_ns();
};

// Its members change only with the GIL held, and one thread at a time runs it.
class Program {
 public:
  using Call = std::function<Status(ProgramRun&)>;

  explicit Program(size_t num_rows) : num_rows_(num_rows) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void append(Call call) { calls_.push_back(std::move(call)); }
  // Appends a product, whose job reads weights: threads that have nothing to do since the product
  // before it fetch the first of them.
  void append_product(Call call, compute::ThreadPool& pool, compute::FirstReads reads) {
    append([this, index = products_.size(), call = std::move(call)](ProgramRun& run) {
      expect_behind(index);
      return call(run);
    });
    products_.push_back({&pool, reads});
  }
  size_t size() const { return calls_.size(); }
  // Keeps an object alive as long as the program: tensors whose memory the calls use. It must not
  // lead back to the program, because Python's collector does not look in here.
  void keep(pybind11::object owner) { owners_.push_back(std::move(owner)); }

  // Make room for a call of the routed experts that `bind_experts` fills in, and return its place
  // among these.
  size_t append_experts();
  size_t append_submit();
  void append_wait();
  // Each call is counted in `count`, which may be null.
  void bind_experts(size_t place, std::shared_ptr<ClientBox> box, uint32_t layer,
                    const TokenBatchBox& batch, std::shared_ptr<CallCount> count);

  // Runs calls begin..end - 1 and returns the seconds of awaited_ns and remote_ns. Raises the error
  // of the call that failed, after which `failed` is its place.
  std::pair<double, double> run(const StepInputs& inputs, size_t begin, size_t end);
  std::optional<size_t> failed() const { return failed_; }

 private:
  struct Experts {
    std::shared_ptr<ClientBox> box;  // null until it is bound
    uint32_t layer = 0;
    TokenBatchBox batch = {};
    std::shared_ptr<CallCount> count;
  };

  struct Product {
    compute::ThreadPool* pool;
    compute::FirstReads reads;
  };

  Status submit(ProgramRun& run, size_t place) {
    const Experts& one = experts_[place];
    return run.submit(place, one.layer, one.batch.batch, one.count.get());
  }
  // Tells the pool what the product behind this one reads; behind the last is the next step's
  // first.
  void expect_behind(size_t index) const {
    const Product& behind = products_[(index + 1) % products_.size()];
    behind.pool->expect(behind.reads);
  }

  size_t num_rows_;
  std::vector<Call> calls_;
  std::vector<Product> products_;  // in the order in which they run
  std::vector<Experts> experts_;
  std::vector<pybind11::object> owners_;
  std::optional<size_t> failed_;
  bool is_running_ = false;
};

// Returns what Python calls to compute at once: `make(arguments...)` checks the arguments with the
// GIL held, and what it returns computes without it.
template <class Made, class... Arguments>
auto at_once(Made (*make)(Arguments...)) {
  return [make](Arguments... arguments) {
    const Made compute = make(std::forward<Arguments>(arguments)...);
    Status status = ok();
    {
      pybind11::gil_scoped_release unlocked;
      status = compute();
    }
    unwrap(std::move(status));
  };
}

// Returns what Python calls to append the same to a program.
template <class Made, class... Arguments>
auto in_program(Made (*make)(Arguments...)) {
  return [make](Program& program, Arguments... arguments) {
    program.append([compute = make(std::forward<Arguments>(arguments)...)](ProgramRun&) -> Status {
      return compute();
    });
  };
}

using ProgramClass = pybind11::class_<Program>;

// Returns the class that bind_program has made.
inline ProgramClass program_class(const pybind11::module_& module) {
  return pybind11::reinterpret_borrow<ProgramClass>(module.attr("Program"));
}

// Defines an operator as a function of the module and, under the same name and with the same
// arguments, as a method of Program, which keeps the first argument alive.
template <class Made, class... Arguments, class... Extra>
void def_operator(pybind11::module_& module, const char* name, Made (*make)(Arguments...),
                  const Extra&... extra) {
  module.def(name, at_once(make), extra...);
  program_class(module).def(name, in_program(make), pybind11::keep_alive<1, 2>(), extra...);
}

}  // namespace dflash::bindings
