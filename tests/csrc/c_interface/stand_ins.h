// Stand-ins for what is at the other end of the C interface: a supervisor, which a test plays
// message by message, and workers, each a thread that answers every row with the row times the sum
// of its weights.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "c_interface/connection.h"
#include "c_interface/dflash_moe.h"
#include "scaling_worker.h"
#include "transport/kinds.h"
#include "transport/stream/stream.h"
#include "wire/frame.h"
#include "wire/payload.h"

namespace dflash::c_interface {

inline constexpr uint32_t kWidth = 32, kNumExperts = 4, kTopK = 2, kLayer = 5;
inline constexpr int64_t kPatienceMs = 20'000;  // of anything that should take milliseconds
inline constexpr uint32_t kSlots = 3;
inline constexpr uint64_t kSlotBytes = 8192;

template <class T>
T take(Result<T> result) {
  REQUIRE_MESSAGE(result.ok(), (result.ok() ? std::string() : result.error().message));
  return std::move(result).value();
}

inline Deadline patience() { return Deadline::after_ms(kPatienceMs); }

// A worker on a thread of its own. Destroying it hangs up path and pulse.
class WorkerStandIn {
 public:
  WorkerStandIn(std::unique_ptr<transport::Channel> channel, OwnedFd pulse)
      : channel_(std::move(channel)), pulse_(std::move(pulse)), thread_([this] { serve(); }) {}
  ~WorkerStandIn() {
    is_over_ = true;
    thread_.join();
  }
  // Answers no requests any more while its pulses go on.
  std::atomic<bool> is_silent = false;
  std::atomic<int> num_requests = 0;

  void await_requests(int count) const {
    const Deadline deadline = patience();
    while (num_requests < count && !deadline.has_passed()) std::this_thread::yield();
    REQUIRE(num_requests >= count);
  }
  OwnedFd take_pulse() {
    is_over_ = true;
    thread_.join();
    thread_ = std::thread([] {});
    return std::move(pulse_);
  }

 private:
  void serve() {
    for (uint64_t counter = 1; !is_over_; ++counter) {
      std::array<std::byte, wire::kPulseBytes> bytes;
      wire::encode_pulse(counter, bytes);
      if (pulse_.is_open())
        static_cast<void>(
            ::send(pulse_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
      transport::WaitEntry entry{channel_.get(), std::nullopt, std::nullopt};
      transport::wait_any({&entry, 1}, Deadline::after_ms(5), 0);
      if (entry.error) return;
      if (!entry.arrival) continue;
      ++num_requests;
      if (is_silent) continue;
      const auto message = entry.arrival->bytes;
      const auto header = wire::decode_frame_header(message.first<wire::kFrameHeaderBytes>());
      const auto slot = channel_->outgoing(entry.arrival->slot);
      const size_t num_bytes =
          answer(header.value(), message.subspan(wire::kFrameHeaderBytes), slot, kWidth);
      static_cast<void>(channel_->publish(entry.arrival->slot, num_bytes));
    }
  }

  std::unique_ptr<transport::Channel> channel_;
  OwnedFd pulse_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

// A plan of `num_workers`, each with an equal share of the experts of one layer.
struct PlanOptions {
  uint32_t num_workers = 1;
  uint64_t call_timeout_ns = 30'000'000'000, stall_timeout_ns = 10'000'000'000;
  std::vector<wire::PlannedTensor> tensors = {};
  std::string fingerprint = std::string(64, 'a');
};

inline std::vector<wire::HandoverMessage> plan_messages(const PlanOptions& options) {
  std::vector<wire::HandoverMessage> plan;
  wire::PlanHead head;
  head.num_workers = options.num_workers;
  head.num_layers = 1;
  head.num_shards = options.num_workers;
  head.num_tensors = static_cast<uint32_t>(options.tensors.size());
  head.architecture = "qwen3moe";
  head.fingerprint = options.fingerprint;
  head.call_timeout_ns = options.call_timeout_ns;
  head.stall_timeout_ns = options.stall_timeout_ns;
  plan.emplace_back(head);
  for (uint32_t i = 0; i < options.num_workers; ++i) {
    plan.emplace_back(wire::PlannedWorker{std::string("w").append(std::to_string(i)), 256,
                                          kSlots - 1, false, "f32", "f32"});
  }
  wire::PlannedLayer layer;
  layer.layer = kLayer;
  layer.name = "blk.5";
  layer.in_size = layer.out_size = kWidth;
  layer.intermediate_size = 2 * kWidth;
  layer.num_experts = kNumExperts;
  layer.top_k = kTopK;
  layer.activation = 1;
  layer.gate = 1;
  layer.alpha = 1.702;
  layer.gate_max = 7;
  plan.emplace_back(layer);
  const uint32_t share = kNumExperts / options.num_workers;
  for (uint32_t i = 0; i < options.num_workers; ++i)
    plan.emplace_back(wire::PlannedShard{
        kLayer, i, i, 900 + i, {uint64_t{i} * share, share}
    });
  for (const wire::PlannedTensor& tensor : options.tensors) plan.emplace_back(tensor);
  return plan;
}

// The supervisor. It listens, and is what the environment names; the test sends and receives.
class SupervisorStandIn {
 public:
  SupervisorStandIn() {
    folder_ = (std::filesystem::temp_directory_path() / "dflash-handover-XXXXXX").string();
    REQUIRE(::mkdtemp(folder_.data()) != nullptr);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path().c_str());
    listener_ = OwnedFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(listener_.get(), 4) == 0);
    for (size_t i = 0; i < token.size(); ++i) token[i] = static_cast<std::byte>(3 * i + 1);
    offer_token();
  }
  ~SupervisorStandIn() {
    ::unsetenv(kPathVariable);
    ::unsetenv(kTokenVariable);
    std::filesystem::remove_all(folder_);
  }

  std::string path() const { return folder_ + "/handover"; }
  // A descriptor as the variable names it.
  static std::string named(int fd) {
    struct stat found{};
    REQUIRE(::fstat(fd, &found) == 0);
    return std::to_string(fd) + ":" + std::to_string(found.st_ino);
  }
  // Sets the environment, with a new pipe for the token.
  void offer_token() {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    REQUIRE(::write(ends[1], token.data(), token.size()) == wire::kHandoverTokenBytes);
    ::close(ends[1]);
    token_fd = ends[0];
    ::setenv(kPathVariable, path().c_str(), 1);
    ::setenv(kTokenVariable, named(ends[0]).c_str(), 1);
  }

  void accept() {
    pollfd_wait(listener_.get());
    OwnedFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    REQUIRE(socket.is_open());
    connection = std::make_unique<Connection>(std::move(socket));
  }
  void send(const wire::HandoverMessage& message, std::span<const int> descriptors = {}) {
    REQUIRE(connection->send(message, descriptors, patience()).ok());
  }
  void send_raw(std::span<const std::byte> bytes) {
    REQUIRE(::send(connection->fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(bytes.size()));
  }
  // Returns the next message that is a T, with its descriptors; counters in between are kept in
  // `counted`.
  template <class T>
  std::pair<T, std::vector<OwnedFd>> receive() {
    for (;;) {
      Received received = take(connection->receive(patience()));
      if (auto* found = std::get_if<T>(&received.message))
        return {std::move(*found), std::move(received.descriptors)};
      const auto* counters = std::get_if<wire::Counted>(&received.message);
      REQUIRE_MESSAGE(counters != nullptr,
                      "unexpected " << wire::handover_message_name(received.message));
      counted = *counters;
    }
  }
  // Takes the greeting and sends the plan.
  void greet(const PlanOptions& options = {}) {
    const auto [opened, none] = receive<wire::OpenHandover>();
    CHECK(opened.version == wire::kHandoverVersion);
    CHECK(opened.token == token);
    CHECK(opened.layout == wire::layout_fingerprint());
    for (const wire::HandoverMessage& message : plan_messages(options)) send(message);
  }

  wire::PathTermsMessage terms(uint32_t worker) {
    return {worker, ++generation_, transport, kSlots, kSlotBytes, kSlotBytes, 0, 0};
  }
  // Both ends of a pulse; the worker's is first.
  static std::pair<OwnedFd, OwnedFd> make_pulse() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    return {OwnedFd(ends[0]), OwnedFd(ends[1])};
  }
  // Makes a path for a worker by the whole exchange, and a worker at its end. One without pulse
  // renews a path and takes over the pulse of the worker that is there.
  void connect_worker(uint32_t worker, bool has_pulse = true) {
    const wire::PathTermsMessage asked = terms(worker);
    send(asked);
    auto [offered, descriptors] = receive<wire::PathOffered>();
    REQUIRE(offered.generation == asked.generation);
    const auto* kind = take(transport::find_kind(transport::transport_kinds(), transport));
    transport::PathTerms agreed;
    agreed.geometry = {kSlots, kSlotBytes, kSlotBytes};
    agreed.generation = asked.generation;
    std::pair<OwnedFd, OwnedFd> dialled;
    if (kind->is_dialled) {
      dialled = take(transport::tcp_pair());
      descriptors.push_back(std::move(dialled.second));
    }
    auto accepted = take(kind->accept(agreed, {offered.payload, std::move(descriptors)}));
    auto pulse = make_pulse();
    std::vector<OwnedFd> answers = std::move(accepted.answer.descriptors);
    if (kind->is_dialled) answers.push_back(std::move(dialled.first));
    if (has_pulse) answers.push_back(std::move(pulse.second));
    std::vector<int> numbers;
    for (const OwnedFd& one : answers) numbers.push_back(one.get());
    if (workers.size() <= worker) workers.resize(worker + 1);
    OwnedFd own = has_pulse ? std::move(pulse.first) : workers[worker]->take_pulse();
    workers[worker] = std::make_unique<WorkerStandIn>(std::move(accepted.channel), std::move(own));
    send(wire::PathAnswered{worker, asked.generation, accepted.answer.bytes,
                            static_cast<uint16_t>(numbers.size()), has_pulse},
         numbers);
  }
  void hang_up() { connection.reset(); }

  std::array<std::byte, wire::kHandoverTokenBytes> token{};
  int token_fd = -1;  // in the environment; whoever reads the token closes it
  const char* transport = "shared";
  std::unique_ptr<Connection> connection;
  std::vector<std::unique_ptr<WorkerStandIn>> workers;
  wire::Counted counted;

 private:
  static void pollfd_wait(int fd) {
    pollfd one{fd, POLLIN, 0};
    REQUIRE(::poll(&one, 1, kPatienceMs) == 1);
  }
  std::string folder_;
  OwnedFd listener_;
  uint64_t generation_ = 10;
};

// Opens a client on another thread, as the program does while the test is the supervisor.
class Opening {
 public:
  Opening() : Opening(std::nullopt) {}
  explicit Opening(std::optional<std::string> path)
      : thread_([this, path = std::move(path)] {
          client_ = dflash_moe_open(path ? path->c_str() : nullptr);
          if (client_ == nullptr) text_ = dflash_moe_error();
        }) {}
  ~Opening() {
    if (thread_.joinable()) thread_.join();
  }
  dflash_moe_client* finish() {
    thread_.join();
    return client_;
  }
  std::string refusal() {
    REQUIRE(finish() == nullptr);
    return text_;
  }

 private:
  dflash_moe_client* client_ = nullptr;
  std::string text_;
  std::thread thread_;
};

// A call's tensors: token t is its number plus the column, and asks for experts t and t + 1.
struct Tokens {
  explicit Tokens(uint32_t num_tokens)
      : hidden(num_tokens * kWidth), weights(num_tokens * kTopK, 0.25f), output(hidden.size(), -7) {
    for (uint32_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>(i);
    for (uint32_t i = 0; i < num_tokens * kTopK; ++i)
      ids.push_back(static_cast<int32_t>((i / kTopK + i % kTopK) % kNumExperts));
    batch.struct_bytes = sizeof batch;
    batch.layer = kLayer;
    batch.num_tokens = num_tokens;
    batch.top_k = kTopK;
    batch.hidden_states = hidden.data();
    batch.topk_ids = ids.data();
    batch.topk_weights = weights.data();
    batch.output = output.data();
  }
  bool is_right() const {
    for (size_t i = 0; i < hidden.size(); ++i) {
      if (output[i] != 0.5f * hidden[i]) return false;
    }
    return true;
  }
  std::vector<float> hidden, weights, output;
  std::vector<int32_t> ids;
  dflash_moe_batch batch{};
};

// Runs one call. Returns how it ended.
inline int run(dflash_moe_client* client, Tokens& tokens) {
  int status = DFLASH_MOE_OK;
  dflash_moe_call* call = dflash_moe_submit(client, &tokens.batch, &status);
  if (call == nullptr) return status;
  CHECK(status == DFLASH_MOE_OK);
  status = dflash_moe_wait(call, -1);
  dflash_moe_abandon(call);
  return status;
}

// A supervisor and a client that it has handed everything to.
struct Scene {
  explicit Scene(const PlanOptions& options = {}, const char* transport = "shared") {
    supervisor.transport = transport;
    Opening opening;
    supervisor.accept();
    supervisor.greet(options);
    for (uint32_t i = 0; i < options.num_workers; ++i) supervisor.connect_worker(i);
    supervisor.send(wire::HandoverReady{});
    client = opening.finish();
    REQUIRE_MESSAGE(client != nullptr, dflash_moe_error());
  }
  ~Scene() { dflash_moe_close(client); }
  bool works(uint32_t num_tokens = 3) {
    Tokens tokens(num_tokens);
    const int status = run(client, tokens);
    if (status != DFLASH_MOE_OK) MESSAGE(dflash_moe_error());
    return status == DFLASH_MOE_OK && tokens.is_right();
  }
  SupervisorStandIn supervisor;
  dflash_moe_client* client = nullptr;
};

}  // namespace dflash::c_interface
