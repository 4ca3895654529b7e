// Binds programs and the inputs of their steps. Operators add themselves as methods where they are
// bound (def_operator); here are those that only programs have.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/program.h"

namespace py = pybind11;

namespace dflash::bindings {

void ProgramRun::see_signals() {
  const int64_t now = now_ns();
  if (now - seen_ns_ < kSignalPeriodNs) return;
  seen_ns_ = now;
  raise_signals();
}

Status ProgramRun::submit(size_t place, uint32_t layer, const TokenBatch& batch) {
  if (clients_[place] == nullptr || pending_ != nullptr) {
    return Error{ErrorCode::kInvalidArgument,
                 "a program has a call of experts that is not bound or that nobody has awaited"};
  }
  submitted_ns_ = now_ns();
  Result<client::CallPtr> submitted = clients_[place]->submit(batch, layer);
  if (!submitted.ok()) return std::move(submitted).error();
  pending_client_ = clients_[place].get();
  pending_ = std::move(submitted).value();
  return ok();
}

Status ProgramRun::wait(int64_t since_ns) {
  if (pending_ == nullptr)
    return Error{ErrorCode::kInvalidArgument, "a program awaits experts that it has not called"};
  await_call(*pending_client_, pending_);
  const int64_t now = now_ns();
  awaited_ns_ += now - since_ns;
  remote_ns_ += now - submitted_ns_;
  return pending_client_->outcome(std::exchange(pending_, nullptr));
}

size_t Program::append_experts() {
  const size_t place = experts_.size();
  experts_.emplace_back();
  append([this, place](ProgramRun& run) -> Status {
    const int64_t since_ns = now_ns();
    DFLASH_TRY(run.submit(place, experts_[place].layer, experts_[place].batch.batch));
    return run.wait(since_ns);
  });
  return place;
}

size_t Program::append_submit() {
  const size_t place = experts_.size();
  experts_.emplace_back();
  append([this, place](ProgramRun& run) {
    return run.submit(place, experts_[place].layer, experts_[place].batch.batch);
  });
  return place;
}

void Program::append_wait() {
  append([](ProgramRun& run) { return run.wait(now_ns()); });
}

void Program::bind_experts(size_t place, std::shared_ptr<ClientBox> box, uint32_t layer,
                           const TokenBatchBox& batch) {
  if (place >= experts_.size())
    raise(Error{ErrorCode::kInvalidArgument, "the program has no such call of experts"});
  experts_[place] = {std::move(box), layer, batch};
}

namespace {

// Marks a program as running until the end of a block.
class MarkRunning {
 public:
  explicit MarkRunning(bool& is_running) : is_running_(is_running) { is_running_ = true; }
  MarkRunning(const MarkRunning&) = delete;
  MarkRunning& operator=(const MarkRunning&) = delete;
  ~MarkRunning() { is_running_ = false; }

 private:
  bool& is_running_;
};

}  // namespace

std::pair<double, double> Program::run(const StepInputs& inputs, size_t begin, size_t end) {
  if (is_running_) raise(Error{ErrorCode::kInvalidArgument, "the program is running already"});
  if (begin > end || end > calls_.size() || inputs.num_rows != num_rows_) {
    raise(Error{ErrorCode::kInvalidArgument,
                "a program of " + std::to_string(calls_.size()) + " calls for " +
                    std::to_string(num_rows_) + " rows cannot run calls " + std::to_string(begin) +
                    ".." + std::to_string(end) + " for " + std::to_string(inputs.num_rows)});
  }
  const MarkRunning running(is_running_);
  failed_.reset();
  std::vector<std::shared_ptr<ExpertClient>> clients;
  clients.reserve(experts_.size());
  for (const Experts& one : experts_)
    clients.push_back(one.box == nullptr ? nullptr : one.box->get());
  Status status = ok();
  std::optional<size_t> failed;
  std::pair<double, double> seconds;
  {
    py::gil_scoped_release unlocked;
    ProgramRun run(inputs, clients);
    for (size_t place = begin; place < end; ++place) {
      run.see_signals();
      status = calls_[place](run);
      if (status.ok()) continue;
      failed = place;
      break;
    }
    seconds = {1e-9 * static_cast<double>(run.awaited_ns()),
               1e-9 * static_cast<double>(run.remote_ns())};
  }
  failed_ = failed;
  unwrap(std::move(status));
  return seconds;
}

namespace {

// int64 [count], empty where the address is 0.
std::span<const int64_t> numbers(uintptr_t address, size_t count) {
  if (address % alignof(int64_t) != 0)
    raise(Error{ErrorCode::kInvalidArgument, "int64 must begin at a multiple of 8 bytes"});
  return {reinterpret_cast<const int64_t*>(address), address == 0 ? 0 : count};
}

compute::ByteRows table_rows(uintptr_t address, size_t width, size_t num_rows) {
  const size_t row_bytes = width * sizeof(float);
  return {reinterpret_cast<const std::byte*>(address), row_bytes, row_bytes,
          address == 0 ? 0 : num_rows};
}

StepInputs make_inputs(const compute::AttentionPlan& plan, uintptr_t slots, uintptr_t positions,
                       uintptr_t token_ids, uintptr_t cos, uintptr_t sin, size_t num_positions,
                       size_t table_width, uintptr_t logits) {
  const size_t count = plan.num_rows();
  return {.plan = &plan,
          .num_rows = count,
          .slots = numbers(slots, count),
          .positions = numbers(positions, count),
          .token_ids = numbers(token_ids, count),
          .cos = table_rows(cos, table_width, num_positions),
          .sin = table_rows(sin, table_width, num_positions),
          .logits = reinterpret_cast<std::byte*>(logits)};
}

void append_copy(Program& program, uintptr_t rows_address, size_t row_stride_bytes,
                 size_t row_bytes, size_t num_rows, uintptr_t out_address,
                 size_t out_stride_bytes) {
  const compute::ByteRows rows{reinterpret_cast<const std::byte*>(rows_address), row_stride_bytes,
                               row_bytes, num_rows};
  program.append([=](ProgramRun&) -> Status {
    compute::copy_rows(rows, reinterpret_cast<std::byte*>(out_address), out_stride_bytes);
    return ok();
  });
}

void append_gather(Program& program, uintptr_t table_address, size_t stride_bytes, size_t row_bytes,
                   size_t num_rows, uintptr_t out_address, size_t out_stride_bytes) {
  const compute::ByteRows table{reinterpret_cast<const std::byte*>(table_address), stride_bytes,
                                row_bytes, num_rows};
  program.append([=](ProgramRun& run) {
    return compute::gather_rows("token id", table, run.inputs().token_ids,
                                reinterpret_cast<std::byte*>(out_address), out_stride_bytes);
  });
}

void append_tables(Program& program, uintptr_t cos_address, uintptr_t sin_address, size_t width) {
  const size_t row_bytes = width * sizeof(float);
  program.append([=](ProgramRun& run) -> Status {
    const StepInputs& step = run.inputs();
    if (step.cos.row_bytes != row_bytes || step.sin.row_bytes != row_bytes)
      return Error{ErrorCode::kInvalidArgument, "tables of another width than the program's"};
    DFLASH_TRY(compute::gather_rows("position", step.cos, step.positions,
                                    reinterpret_cast<std::byte*>(cos_address), row_bytes));
    return compute::gather_rows("position", step.sin, step.positions,
                                reinterpret_cast<std::byte*>(sin_address), row_bytes);
  });
}

}  // namespace

void bind_program(py::module_& module) {
  ProgramClass(
      module, "Program",
      "Calls of operators over fixed memory, which `run` makes one after another without the GIL. "
      "A method that has the name of a function of this module takes the same arguments and "
      "appends its call; memory must stay where it is as long as the program, see `keep`. One "
      "thread at a time runs it.")
      .def(py::init<size_t>(), py::arg("num_rows"), "A program for steps of so many rows.")
      .def_property_readonly("num_calls", &Program::size)
      .def("keep", &Program::keep, py::arg("owner"),
           "Keeps an object alive as long as the program. It must not lead back to the program, "
           "which would never go.")
      .def_property_readonly("failed", &Program::failed,
                             "The place of the call that ended the last run by its error, or None.")
      .def("copy_rows", &append_copy, py::arg("rows_address"), py::arg("row_stride_bytes"),
           py::arg("row_bytes"), py::arg("num_rows"), py::arg("out_address"),
           py::arg("out_stride_bytes"), "Copies rows of so many bytes as they are.")
      .def("gather_rows", &append_gather, py::arg("table_address"), py::arg("stride_bytes"),
           py::arg("row_bytes"), py::arg("num_rows"), py::arg("out_address"),
           py::arg("out_stride_bytes"),
           "Copies the rows of a table that the step's token ids name. ConfigError for an id that "
           "is not there.")
      .def("gather_tables", &append_tables, py::arg("cos_address"), py::arg("sin_address"),
           py::arg("width"),
           "Copies the cosines and sines of the step's positions to dense float32 [num_rows, "
           "width]. ConfigError for a position that is not there.")
      .def("experts", &Program::append_experts,
           "Appends a call of routed experts, and returns its place among these, at which "
           "`bind_experts` is told what to call before it runs.")
      .def("submit_experts", &Program::append_submit,
           "As `experts`, but returns before the experts have answered.")
      .def("wait_for_experts", &Program::append_wait, "Waits for what was submitted last.")
      .def("bind_experts", &Program::bind_experts, py::arg("place"), py::arg("client"),
           py::arg("layer"), py::arg("batch"),
           "Has the call at this place be `client.run(layer, batch)`. Errors of a run are those of "
           "Client.run.");
}

void bind_program_run(py::module_& module) {
  py::class_<StepInputs>(
      module, "StepInputs",
      "What differs from step to step for the calls of a Program. Addresses are those of int64 "
      "[num_rows], or 0 where no call reads them; `cos` and `sin` those of dense float32 "
      "[num_positions, table_width], `logits` that of dense float32 [num_rows, vocab_size]. The "
      "caller keeps all of them alive.")
      .def(py::init(&make_inputs), py::keep_alive<1, 2>(), py::arg("plan"),
           py::arg("slots_address"), py::arg("positions_address") = 0,
           py::arg("token_ids_address") = 0, py::arg("cos_address") = 0, py::arg("sin_address") = 0,
           py::arg("num_positions") = 0, py::arg("table_width") = 0, py::arg("logits_address") = 0);
  program_class(module).def(
      "run", &Program::run, py::arg("inputs"), py::arg("begin"), py::arg("end"),
      "Makes the calls begin..end - 1 and returns the seconds in which it waited for routed "
      "experts, and those in which experts were under way. Raises the error of the call that "
      "failed; signals are seen every 20 ms.");
}

}  // namespace dflash::bindings
