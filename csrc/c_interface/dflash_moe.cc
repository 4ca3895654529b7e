// The C functions: they check what C cannot, and turn results into statuses and texts. No exception
// leaves them.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/dflash_moe.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "c_interface/session.h"
#include "c_interface/tensor_check.h"

namespace dflash::c_interface {
namespace {

// The longest wait that is not negative; a caller's number beyond it would overflow a deadline.
constexpr int64_t kMaxWaitNs = 1'000'000'000'000'000;
constexpr int64_t kWaitTickNs = 1'000'000'000;
// The offset of the last row of the largest batch must fit int64_t.
constexpr size_t kMaxStride = std::numeric_limits<int32_t>::max();

// These two are of the process: what opens a client may be called once in it, and the process's end
// has to find the client. The pid is of who claimed it; in a forked child it is the parent's.
std::atomic<pid_t> claimed_by = 0;
std::atomic<Session*> open_session = nullptr;

// The last failure's sentence. A plain array is there until the thread is gone, also for handlers
// of exit(), and takes a text when there is no memory left. Longer texts are cut.
constexpr size_t kErrorBytes = 2048;
char (&last_error())[kErrorBytes] {
  thread_local char text[kErrorBytes] = "";
  return text;
}

int status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return DFLASH_MOE_INVALID;
    case ErrorCode::kWorkerLost:
    // A worker that broke the protocol was given up for it.
    case ErrorCode::kProtocol:     return DFLASH_MOE_WORKER_LOST;
    case ErrorCode::kTimeout:      return DFLASH_MOE_TIMEOUT;
    case ErrorCode::kClosed:       return DFLASH_MOE_CLOSED;
    case ErrorCode::kUnsupported:
    case ErrorCode::kCheckpoint:
    case ErrorCode::kRange:
    case ErrorCode::kWorkerFailed:
    case ErrorCode::kSystem:
    case ErrorCode::kOutOfMemory:  break;
  }
  return DFLASH_MOE_FAILED;
}

int failed(int status, std::string_view text) {
  const size_t count = std::min(text.size(), kErrorBytes - 1);
  std::memcpy(last_error(), text.data(), count);
  last_error()[count] = '\0';
  return status;
}
int failed(const Error& error) { return failed(status_of(error.code), error.message); }

// Calls `work`. An exception, which can only be one of the standard library's, becomes `otherwise`.
template <class Work, class T>
T guarded(T otherwise, Work work) noexcept {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    static_cast<void>(failed(DFLASH_MOE_FAILED, "out of memory"));
  } catch (...) {
    static_cast<void>(failed(DFLASH_MOE_FAILED, "the library failed for an unknown reason"));
  }
  return otherwise;
}

const Session* session_of(const dflash_moe_client* client) {
  return reinterpret_cast<const Session*>(client);
}
Session* session_of(dflash_moe_client* client) { return reinterpret_cast<Session*>(client); }

// Says whether the client can be used here, and why not.
int refuse(const Session* session) {
  if (session == nullptr) return failed(DFLASH_MOE_INVALID, "the client is NULL");
  if (session->is_ours()) return DFLASH_MOE_OK;
  return failed(DFLASH_MOE_CLOSED,
                "this client belongs to the parent process; a forked child cannot use it");
}

// Copies as much of `from` as the caller has room for, and zeros beyond what this version knows.
template <class Struct>
int fill(Struct* to, Struct from) {
  if (to == nullptr || to->struct_bytes <= sizeof(size_t))
    return failed(DFLASH_MOE_INVALID, "the struct to fill is NULL, or its struct_bytes is not set");
  from.struct_bytes = to->struct_bytes;
  auto* const bytes = reinterpret_cast<char*>(to);
  const size_t room = from.struct_bytes, known = std::min(room, sizeof from);
  std::memcpy(bytes, &from, known);
  std::memset(bytes + known, 0, room - known);
  return DFLASH_MOE_OK;
}

Result<OpenCall*> submit(Session& session, const dflash_moe_batch* batch) {
  const auto invalid = [](std::string what) {
    return Error{ErrorCode::kInvalidArgument, std::move(what)};
  };
  if (batch == nullptr || batch->struct_bytes < sizeof *batch)
    return invalid("the batch is NULL, or its struct_bytes is smaller than this version's");
  const wire::PlannedLayer* layer = session.plan().layer(batch->layer);
  if (layer == nullptr)
    return invalid("layer " + std::to_string(batch->layer) + " is not one of the workers'");
  const size_t row_bytes = size_t{layer->in_size} * sizeof(float);
  const size_t stride = batch->hidden_states_stride == 0 ? row_bytes : batch->hidden_states_stride;
  if (stride < row_bytes || stride > kMaxStride) {
    return invalid("hidden_states_stride is " + std::to_string(stride) + "; a row of layer " +
                   layer->name + " has " + std::to_string(row_bytes) + " bytes");
  }
  TokenBatch tokens;
  tokens.hidden_states = reinterpret_cast<const std::byte*>(batch->hidden_states);
  tokens.row_stride_bytes = static_cast<int64_t>(stride);
  tokens.num_tokens = batch->num_tokens;
  tokens.top_k = batch->top_k;
  tokens.topk_ids = batch->topk_ids;
  tokens.topk_weights = reinterpret_cast<const std::byte*>(batch->topk_weights);
  tokens.output = reinterpret_cast<std::byte*>(batch->output);
  return session.submit(tokens, batch->layer);
}

void finish_at_exit() {
  Session* const session = open_session.load();
  if (session != nullptr && session->is_ours()) session->send_last_counters();
}

Result<Session*> open(const char* path) {
  auto supervisor = find_supervisor(path);
  if (!supervisor.ok()) return std::move(supervisor).error();
  auto session = Session::open(supervisor.value());
  if (!session.ok()) return std::move(session).error();
  static const int is_registered = std::atexit(finish_at_exit);
  static_cast<void>(is_registered);
  return std::move(session).value().release();
}

}  // namespace
}  // namespace dflash::c_interface

using namespace dflash::c_interface;
using dflash::Deadline;
using dflash::Status;

uint32_t dflash_moe_interface_version(void) { return DFLASH_MOE_INTERFACE_VERSION; }

dflash_moe_client* dflash_moe_open(const char* path) {
  pid_t former = claimed_by.load();
  const bool is_free =
      former != ::getpid() && claimed_by.compare_exchange_strong(former, ::getpid());
  auto* const client =
      guarded(static_cast<dflash_moe_client*>(nullptr), [&]() -> dflash_moe_client* {
        if (!is_free) {
          failed(DFLASH_MOE_INVALID, "this process has a client already; close it before the next");
          return nullptr;
        }
        auto session = open(path);
        if (session.ok()) return reinterpret_cast<dflash_moe_client*>(session.value());
        failed(session.error());
        return nullptr;
      });
  if (client != nullptr) open_session.store(session_of(client));
  if (client == nullptr && is_free) claimed_by.store(0);
  return client;
}

void dflash_moe_close(dflash_moe_client* client) {
  guarded(0, [&] {
    Session* const session = session_of(client);
    // In a forked child it is leaked, because closing would hang up the parent's connections.
    if (session == nullptr || !session->is_ours()) return 0;
    open_session.store(nullptr);
    delete session;
    claimed_by.store(0);
    return 0;
  });
}

const char* dflash_moe_architecture(const dflash_moe_client* client) {
  return client == nullptr ? "" : session_of(client)->plan().head.architecture.c_str();
}

uint32_t dflash_moe_num_layers(const dflash_moe_client* client) {
  return client == nullptr ? 0 : static_cast<uint32_t>(session_of(client)->plan().layers.size());
}

int dflash_moe_layer_at(const dflash_moe_client* client, uint32_t position,
                        dflash_moe_layer* layer) {
  return guarded(static_cast<int>(DFLASH_MOE_FAILED), [&]() -> int {
    if (client == nullptr || position >= dflash_moe_num_layers(client)) {
      return failed(DFLASH_MOE_INVALID, "there is no layer at position " +
                                            std::to_string(position) + " of " +
                                            std::to_string(dflash_moe_num_layers(client)));
    }
    const auto& planned = session_of(client)->plan().layers[position];
    const auto limit = [](double value) {
      return value == 0 ? std::numeric_limits<float>::infinity() : static_cast<float>(value);
    };
    dflash_moe_layer filled{};
    filled.name = planned.name.c_str();
    filled.layer = planned.layer;
    filled.in_size = planned.in_size;
    filled.intermediate_size = planned.intermediate_size;
    filled.out_size = planned.out_size;
    filled.num_experts = planned.num_experts;
    filled.top_k = planned.top_k;
    filled.activation = planned.activation;
    filled.gate = planned.gate;
    filled.alpha = static_cast<float>(planned.alpha);
    filled.up_offset = static_cast<float>(planned.up_offset);
    filled.gate_max = limit(planned.gate_max);
    filled.up_limit = limit(planned.up_limit);
    filled.has_gate_up_bias = planned.has_gate_up_bias;
    filled.has_down_bias = planned.has_down_bias;
    return fill(layer, filled);
  });
}

uint32_t dflash_moe_num_tensors(const dflash_moe_client* client) {
  return client == nullptr ? 0 : static_cast<uint32_t>(session_of(client)->plan().tensors.size());
}

int dflash_moe_tensor_at(const dflash_moe_client* client, uint32_t position,
                         dflash_moe_tensor* tensor) {
  return guarded(static_cast<int>(DFLASH_MOE_FAILED), [&]() -> int {
    if (client == nullptr || position >= dflash_moe_num_tensors(client)) {
      return failed(DFLASH_MOE_INVALID, "there is no tensor at position " +
                                            std::to_string(position) + " of " +
                                            std::to_string(dflash_moe_num_tensors(client)));
    }
    const auto& planned = session_of(client)->plan().tensors[position];
    dflash_moe_tensor filled{};
    filled.name = planned.name.c_str();
    filled.layer = planned.layer;
    filled.ggml_type = planned.ggml_type;
    filled.num_extents = static_cast<uint32_t>(planned.extents.size());
    std::fill(std::begin(filled.extents), std::end(filled.extents), 1);
    std::copy(planned.extents.begin(), planned.extents.end(), filled.extents);
    filled.num_bytes = planned.num_bytes;
    return fill(tensor, filled);
  });
}

int dflash_moe_check_tensor(dflash_moe_client* client, const char* name, const void* data,
                            size_t num_bytes) {
  return guarded(static_cast<int>(DFLASH_MOE_FAILED), [&]() -> int {
    if (const int refused = refuse(session_of(client)); refused != DFLASH_MOE_OK) return refused;
    if (name == nullptr || (data == nullptr && num_bytes > 0))
      return failed(DFLASH_MOE_INVALID, "the tensor's name or data is NULL");
    const Plan& plan = session_of(client)->plan();
    const auto* tensor = plan.tensor(name);
    if (tensor == nullptr)
      return failed(DFLASH_MOE_MISMATCH, std::string("the workers hold no tensor ") + name);
    const auto is_stub =
        check_tensor(*tensor, plan.layer(tensor->layer)->num_experts, plan.head.fingerprint,
                     {static_cast<const std::byte*>(data), num_bytes});
    if (!is_stub.ok()) return failed(DFLASH_MOE_MISMATCH, is_stub.error().message);
    return is_stub.value() ? DFLASH_MOE_STUB : DFLASH_MOE_OK;
  });
}

void dflash_moe_report_tensor(dflash_moe_client* client, const char* name, const char* reason) {
  guarded(0, [&] {
    if (refuse(session_of(client)) != DFLASH_MOE_OK || name == nullptr) return 0;
    session_of(client)->report_tensor(name, reason == nullptr ? "" : reason);
    return 0;
  });
}

dflash_moe_call* dflash_moe_submit(dflash_moe_client* client, const dflash_moe_batch* batch,
                                   int* status) {
  int ended = DFLASH_MOE_FAILED;
  auto* const call = guarded(static_cast<dflash_moe_call*>(nullptr), [&]() -> dflash_moe_call* {
    ended = refuse(session_of(client));
    if (ended != DFLASH_MOE_OK) return nullptr;
    auto submitted = submit(*session_of(client), batch);
    if (submitted.ok()) return reinterpret_cast<dflash_moe_call*>(submitted.value());
    ended = failed(submitted.error());
    return nullptr;
  });
  if (status != nullptr) *status = ended;
  return call;
}

int dflash_moe_wait(dflash_moe_call* call, int64_t timeout_ns) {
  return guarded(static_cast<int>(DFLASH_MOE_FAILED), [&]() -> int {
    if (call == nullptr) return failed(DFLASH_MOE_INVALID, "the call is NULL");
    OpenCall& open_call = *reinterpret_cast<OpenCall*>(call);
    Session& session = open_call.session;
    if (const int refused = refuse(&session); refused != DFLASH_MOE_OK) return refused;
    const auto step = [&](int64_t time_ns) {
      return session.wait(open_call, Deadline::after_ns(time_ns));
    };
    if (timeout_ns >= 0) {
      if (!step(std::min(timeout_ns, kMaxWaitNs))) return DFLASH_MOE_PENDING;
    } else {
      while (!step(kWaitTickNs)) {
      }
    }
    const Status outcome = session.outcome(open_call);
    return outcome.ok() ? DFLASH_MOE_OK : failed(outcome.error());
  });
}

void dflash_moe_abandon(dflash_moe_call* call) {
  guarded(0, [&] {
    auto* const open_call = reinterpret_cast<OpenCall*>(call);
    if (open_call != nullptr && refuse(&open_call->session) == DFLASH_MOE_OK)
      open_call->session.abandon(open_call);
    return 0;
  });
}

const char* dflash_moe_error(void) { return last_error(); }

int dflash_moe_count(dflash_moe_client* client, dflash_moe_counters* counters) {
  return guarded(static_cast<int>(DFLASH_MOE_FAILED), [&]() -> int {
    if (const int refused = refuse(session_of(client)); refused != DFLASH_MOE_OK) return refused;
    const dflash::wire::Counted counted = session_of(client)->count();
    return fill(counters,
                {sizeof(dflash_moe_counters), counted.calls, counted.failed_calls, counted.messages,
                 counted.rows, counted.request_bytes, counted.reply_bytes, counted.floor_bytes,
                 counted.call_ns, counted.compute_ns});
  });
}
