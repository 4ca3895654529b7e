// Binds programs and the inputs of their steps. Operators add themselves as methods where they are
// bound (def_operator); here are those that only programs have.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/operator_clock.h"
#include "bindings/boxes.h"
#include "bindings/program.h"
#include "compute/operators/paged_kv.h"

namespace py = pybind11;

namespace dflash::bindings {

void ProgramRun::see_signals() {
  const int64_t now = now_ns();
  if (now - seen_ns_ < kSignalPeriodNs) return;
  seen_ns_ = now;
  raise_signals();
}

Status ProgramRun::submit(size_t place, uint32_t layer, const TokenBatch& batch, CallCount* count) {
  if (clients_[place] == nullptr || pending_ != nullptr) {
    return Error{ErrorCode::kInvalidArgument,
                 "a program has a call of experts that is not bound or that nobody has awaited"};
  }
  if (count != nullptr) count->value.fetch_add(1, std::memory_order_relaxed);
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
    DFLASH_TRY(submit(run, place));
    return run.wait(since_ns);
  });
  return place;
}

size_t Program::append_submit() {
  const size_t place = experts_.size();
  experts_.emplace_back();
  append([this, place](ProgramRun& run) { return submit(run, place); });
  return place;
}

void Program::append_wait() {
  append([](ProgramRun& run) { return run.wait(now_ns()); });
}

void Program::bind_experts(size_t place, std::shared_ptr<ClientBox> box, uint32_t layer,
                           const TokenBatchBox& batch, std::shared_ptr<CallCount> count) {
  if (place >= experts_.size())
    raise(Error{ErrorCode::kInvalidArgument, "the program has no such call of experts"});
  experts_[place] = {std::move(box), layer, batch, std::move(count)};
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

// Temperature, top_k, top_p, min_p, uniform.
using DrawFields = std::tuple<double, int64_t, double, double, double>;

std::unique_ptr<PackedInputs> make_packed(const compute::AttentionPlan& plan,
                                          const std::vector<int64_t>& token_ids, size_t vocab_size,
                                          uintptr_t cos, uintptr_t sin, size_t num_positions,
                                          size_t table_width, uintptr_t logits,
                                          const std::vector<DrawFields>& draws) {
  const size_t count = plan.num_rows();
  if (token_ids.size() != count || draws.size() != count)
    raise(Error{ErrorCode::kInvalidArgument, "a step of " + std::to_string(count) + " rows has " +
                                                 std::to_string(token_ids.size()) +
                                                 " token ids and " + std::to_string(draws.size()) +
                                                 " draws"});
  for (const int64_t token : token_ids) {
    if (token < 0 || static_cast<uint64_t>(token) >= vocab_size)
      raise(Error{ErrorCode::kInvalidArgument,
                  "a token id is outside the vocabulary of " + std::to_string(vocab_size)});
  }
  auto made = std::make_unique<PackedInputs>();
  made->numbers.resize(4 * count);
  int64_t* const numbers = made->numbers.data();
  size_t row = 0;
  for (const compute::AttentionPlan::Sequence& one : plan.sequences()) {
    const int32_t* const table = plan.block_table(one);
    for (uint32_t i = 0; i < one.num_rows; ++i, ++row) {
      const uint32_t position = one.first_position + i;
      numbers[row] = int64_t{table[position / compute::kBlockTokens]} * compute::kBlockTokens +
                     position % compute::kBlockTokens;
      numbers[count + row] = position;
    }
  }
  std::copy(token_ids.begin(), token_ids.end(), numbers + 2 * count);
  made->forms.reserve(count);
  for (const auto& [temperature, top_k, top_p, min_p, uniform] : draws) {
    if (!(temperature >= 0.0))
      raise(Error{ErrorCode::kInvalidArgument, "a draw needs a temperature of at least 0"});
    made->forms.push_back({temperature, top_k, top_p, min_p, uniform});
  }
  static_cast<StepInputs&>(*made) = {
      .plan = &plan,
      .num_rows = count,
      .slots = {numbers,             count},
      .positions = {numbers + count,     count},
      .token_ids = {numbers + 2 * count, count},
      .cos = table_rows(cos, table_width, num_positions),
      .sin = table_rows(sin, table_width, num_positions),
      .logits = reinterpret_cast<std::byte*>(logits),
      .draws = made->forms,
      .chosen = numbers + 3 * count
  };
  return made;
}

std::vector<int64_t> chosen_tokens(const PackedInputs& step) {
  return {step.chosen, step.chosen + step.num_rows};
}

// The scratch of the threads that draw.
compute::DrawScratch& draw_scratch() {
  thread_local compute::DrawScratch scratch;
  return scratch;
}

void append_choice(Program& program, const HostPoolBox& box, size_t vocab_size) {
  if (vocab_size < 1 || vocab_size > (size_t{1} << 22))
    raise(Error{ErrorCode::kInvalidArgument, "tokens chosen from " + std::to_string(vocab_size) +
                                                 " logits; allowed: 1..4194304"});
  program.append([&pool = *box.pool, vocab_size](ProgramRun& run) -> Status {
    const StepInputs& step = run.inputs();
    if (step.draws.empty()) return ok();
    const OperatorScope scope(Operator::kChoose);
    const auto* logits = reinterpret_cast<const float*>(step.logits);
    auto choose = [&](uint64_t row) {
      step.chosen[row] = compute::draw_token(std::span(logits + row * vocab_size, vocab_size),
                                             step.draws[row], draw_scratch());
    };
    if (step.draws.size() == 1) {
      choose(0);
    } else {
      pool.run(step.draws.size(), choose);
    }
    return ok();
  });
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
  py::class_<CallCount, std::shared_ptr<CallCount>>(
      module, "CallCount",
      "The number of calls of the routed experts of one layer. Any thread may count.")
      .def(py::init<>())
      .def_property_readonly("value", [](const CallCount& self) { return self.value.load(); })
      .def("add", [](CallCount& self) { self.value.fetch_add(1); }, "Counts a call.");
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
      .def("choose", &append_choice, py::keep_alive<1, 2>(), py::arg("pool"), py::arg("vocab_size"),
           "Chooses the token behind each row from its logits, as the step's draws say; nothing "
           "where it has none.")
      .def("bind_experts", &Program::bind_experts, py::arg("place"), py::arg("client"),
           py::arg("layer"), py::arg("batch"), py::arg("count") = nullptr,
           "Has the call at this place be `client.run(layer, batch)`, counted in `count`. Errors "
           "of a run are those of Client.run.");
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
  py::class_<PackedInputs, StepInputs>(
      module, "PackedInputs",
      "The inputs of a whole step over pages of 16 tokens, of which tokens are chosen. Slots and "
      "positions follow from the plan; cosines, sines and logits are as StepInputs has them. A "
      "draw for each row is (temperature, top_k, top_p, min_p, uniform), see draw_tokens. "
      "ConfigError for a token id outside the vocabulary, and for other numbers of ids and draws "
      "than rows.")
      .def(py::init(&make_packed), py::keep_alive<1, 2>(), py::arg("plan"), py::arg("token_ids"),
           py::arg("vocab_size"), py::arg("cos_address"), py::arg("sin_address"),
           py::arg("num_positions"), py::arg("table_width"), py::arg("logits_address"),
           py::arg("draws"))
      .def_property_readonly(
          "chosen", &chosen_tokens,
          "The token chosen behind each row, -1 where the row's largest logit is not finite.");
  program_class(module).def(
      "run", &Program::run, py::arg("inputs"), py::arg("begin"), py::arg("end"),
      "Makes the calls begin..end - 1 and returns the seconds in which it waited for routed "
      "experts, and those in which experts were under way. Raises the error of the call that "
      "failed; signals are seen every 20 ms.");
}

}  // namespace dflash::bindings
