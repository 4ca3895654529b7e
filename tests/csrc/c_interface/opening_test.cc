// Opening a client: what the environment and the supervisor have to say, and what happens when they
// say something else.
// SPDX-License-Identifier: Apache-2.0

#include <sys/resource.h>
#include <sys/stat.h>

#include <cmath>
#include <functional>

#include "c_interface/stand_ins.h"
#include "wire/handover_messages.h"

namespace dflash::c_interface {
namespace {

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  MESSAGE("the text is: ", text);
  return false;
}

// Whether the number is that of a pipe; once it is closed, another descriptor may get it.
bool is_pipe(int fd) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 && S_ISFIFO(found.st_mode);
}

TEST_CASE("a client is opened from the environment, over every transport") {
  for (const char* transport : {"shared", "unix", "tcp"}) {
    CAPTURE(transport);
    Scene scene({}, transport);
    CHECK(std::string(dflash_moe_architecture(scene.client)) == "qwen3moe");
    CHECK(scene.works());
    CHECK(scene.works(100));
    CHECK_FALSE(is_pipe(scene.supervisor.token_fd));
  }
}

TEST_CASE("the plan's layers and tensors are told as the structs have room for them") {
  PlanOptions options;
  options.tensors = {
      {kLayer, "blk.5.ffn_up_exps.weight", 8, {32, 64, 4}, 4096, 64, true, 7}
  };
  Scene scene(options);
  REQUIRE(dflash_moe_num_layers(scene.client) == 1);
  dflash_moe_layer layer{};
  layer.struct_bytes = sizeof layer;
  REQUIRE(dflash_moe_layer_at(scene.client, 0, &layer) == DFLASH_MOE_OK);
  CHECK(std::string(layer.name) == "blk.5");
  CHECK(layer.layer == kLayer);
  CHECK(layer.intermediate_size == 2 * kWidth);
  CHECK(layer.alpha == 1.702f);
  CHECK(layer.gate_max == 7);
  CHECK(std::isinf(layer.up_limit));
  CHECK(dflash_moe_layer_at(scene.client, 1, &layer) == DFLASH_MOE_INVALID);

  REQUIRE(dflash_moe_num_tensors(scene.client) == 1);
  dflash_moe_tensor tensor{};
  CHECK(dflash_moe_tensor_at(scene.client, 0, &tensor) == DFLASH_MOE_INVALID);
  tensor.struct_bytes = offsetof(dflash_moe_tensor, num_bytes);  // of an older program
  tensor.num_bytes = 5;
  REQUIRE(dflash_moe_tensor_at(scene.client, 0, &tensor) == DFLASH_MOE_OK);
  CHECK(tensor.num_extents == 3);
  CHECK(tensor.extents[2] == 4);
  CHECK(tensor.extents[3] == 1);
  CHECK(tensor.num_bytes == 5);
  struct {
    dflash_moe_tensor known;
    char later[8];
  } newer{{}, "abcdefg"};
  newer.known.struct_bytes = sizeof newer;
  REQUIRE(dflash_moe_tensor_at(scene.client, 0, &newer.known) == DFLASH_MOE_OK);
  CHECK(newer.known.num_bytes == 4096);
  CHECK(newer.later[0] == 0);
  CHECK(newer.known.struct_bytes == sizeof newer);
}

TEST_CASE("a path in place of the environment's, a socket that is none, and nobody there") {
  SupervisorStandIn supervisor;
  ::unsetenv(kPathVariable);
  {
    Opening opening(supervisor.path());
    supervisor.accept();
    supervisor.greet();
    supervisor.connect_worker(0);
    supervisor.send(wire::HandoverReady{});
    dflash_moe_client* client = opening.finish();
    REQUIRE(client != nullptr);
    dflash_moe_close(client);
  }
  CHECK(contains(Opening().refusal(), "DFLASH_MOE_HANDOVER names no supervisor's socket"));
  ::unsetenv(kTokenVariable);
  CHECK(contains(Opening(std::string("/nowhere/at/all")).refusal(), "cannot connect"));
  CHECK(contains(Opening(std::string(200, 'x')).refusal(), "socket path has 200 bytes"));
}

TEST_CASE("a program without the token, or one that it was taken from, is refused with a text") {
  SupervisorStandIn supervisor;
  ::setenv(kTokenVariable, "x1", 1);
  CHECK(contains(Opening().refusal(), "is no DESCRIPTOR:INODE"));
  ::setenv(kTokenVariable, "0", 1);
  CHECK(contains(Opening().refusal(), "is no DESCRIPTOR:INODE"));
  const OwnedFd no_pipe(::open("/dev/null", O_RDONLY));
  ::setenv(kTokenVariable, SupervisorStandIn::named(no_pipe.get()).c_str(), 1);
  CHECK(contains(Opening().refusal(), "is not the supervisor's pipe"));
  CHECK(::fcntl(no_pipe.get(), F_GETFD) >= 0);
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  REQUIRE(::write(ends[1], "abc", 3) == 3);
  ::close(ends[1]);
  // A program that another one started has another pipe under the number.
  const std::string other = std::to_string(ends[0]) + ":" + std::to_string(UINT64_MAX);
  ::setenv(kTokenVariable, other.c_str(), 1);
  CHECK(contains(Opening().refusal(), "is not the supervisor's pipe"));
  CHECK(is_pipe(ends[0]));
  ::setenv(kTokenVariable, SupervisorStandIn::named(ends[0]).c_str(), 1);
  CHECK(contains(Opening().refusal(), "holds 3 of 32 bytes"));
  CHECK_FALSE(is_pipe(ends[0]));
  ::unsetenv(kTokenVariable);
  CHECK(contains(Opening().refusal(), "names no token"));
  ::close(supervisor.token_fd);
}

TEST_CASE("a supervisor's refusal is the text, also where it hangs up without listening") {
  for (const bool is_read : {true, false}) {
    SupervisorStandIn supervisor;
    Opening opening;
    supervisor.accept();
    if (is_read) static_cast<void>(supervisor.receive<wire::OpenHandover>());
    supervisor.send(wire::RefuseHandover{"the token is not this supervisor's"});
    supervisor.hang_up();
    CHECK(opening.refusal() == "the supervisor refuses: the token is not this supervisor's");
  }
  SupervisorStandIn again;  // and a client can be opened afterwards
  Opening opening;
  again.accept();
  again.greet();
  again.connect_worker(0);
  again.send(wire::HandoverReady{});
  dflash_moe_close(opening.finish());
}

TEST_CASE("one client per process is open at a time") {
  Scene scene;
  CHECK(contains(Opening().refusal(), "this process has a client already"));
  CHECK(scene.works());
}

// Opens a client for which `say` plays the supervisor after the greeting. Returns the refusal.
std::string refusal_of(const std::function<void(SupervisorStandIn&)>& say) {
  SupervisorStandIn supervisor;
  Opening opening;
  supervisor.accept();
  static_cast<void>(supervisor.receive<wire::OpenHandover>());
  say(supervisor);
  supervisor.hang_up();
  return opening.refusal();
}

TEST_CASE("frames that are no message, and messages that do not belong, are refused by name") {
  const auto raw = [](std::vector<int> bytes) {
    return refusal_of([&](SupervisorStandIn& supervisor) {
      std::vector<std::byte> frame;
      for (const int byte : bytes) frame.push_back(static_cast<std::byte>(byte));
      supervisor.send_raw(frame);
    });
  };
  CHECK(contains(raw({0, 0, 0, 0}), "length 0 is outside"));
  CHECK(contains(raw({1, 0, 1, 0}), "length 65537 is outside"));
  CHECK(contains(raw({5, 0, 0, 0, 0x80}), "hung up"));
  CHECK(contains(raw({1, 0, 0, 0, 0xc1}), "not a msgpack message"));
  CHECK(contains(raw({1, 0, 0, 0, 0x80}), "message type"));
  CHECK(contains(raw({3, 0, 0, 0, 0x81, 0, 0x10}), "message type"));
  CHECK(contains(raw({3, 0, 0, 0, 0x81, 0, 3}), "message PlanHead: field num_workers: is missing"));
  CHECK(contains(raw({5, 0, 0, 0, 0x82, 0, 11, 1, 0}), "message Ready: unknown field 1"));
  CHECK(contains(raw({5, 0, 0, 0, 0x82, 0, 11, 0, 11}), "key 0 comes twice"));
  CHECK(contains(raw({3, 0, 0, 0, 0x81, 0, 11}), "message Ready came where another belongs"));
}

TEST_CASE("a plan that is cut short, or does not hold together, is refused") {
  // Sends the plan after `change`, and stops where it has nothing more.
  const auto changed = [](auto change) {
    return refusal_of([&](SupervisorStandIn& supervisor) {
      auto plan = plan_messages({.num_workers = 2});
      change(plan);
      for (const auto& message : plan) {
        if (!supervisor.connection->send(message, {}, patience()).ok()) break;
      }
    });
  };
  using Plan = std::vector<wire::HandoverMessage>;
  CHECK(contains(changed([](Plan& plan) { plan.resize(3); }), "hung up"));
  CHECK(contains(changed([](Plan& plan) { std::swap(plan[2], plan[3]); }),
                 "PlannedLayer came where another belongs"));
  CHECK(contains(changed([](Plan& plan) { std::get<wire::PlannedShard>(plan[4]).worker = 2; }),
                 "there is no such layer or worker"));
  CHECK(contains(changed([](Plan& plan) {
                   std::get<wire::PlannedShard>(plan[4]).expert_ranges = {0, 0xffffffff};
                 }),
                 "do not ascend within 0..4"));
  CHECK(contains(
      changed([](Plan& plan) { std::get<wire::PlannedShard>(plan[4]).expert_ranges = {0}; }),
      "a range lacks its count"));
  CHECK(contains(
      changed([](Plan& plan) { std::get<wire::PlannedWorker>(plan[1]).reply_dtype = "f8"; }),
      "dtype 'f8'"));
  CHECK(contains(changed([](Plan& plan) { std::get<wire::PlanHead>(plan[0]).call_timeout_ns = 0; }),
                 "call_timeout_ns is 0 ns"));
}

TEST_CASE("a tensor of a layer that is not there, or beyond any file, is refused") {
  const auto with = [](const wire::PlannedTensor& tensor) {
    return refusal_of([&](SupervisorStandIn& supervisor) {
      PlanOptions options;
      options.tensors = {tensor};
      for (const auto& message : plan_messages(options)) supervisor.send(message);
    });
  };
  CHECK(contains(with({9, "t", 0, {1}, 4, 0, false, 0}), "is of layer 9, which the plan does not"));
  CHECK(contains(with({kLayer, "t", 0, {1}, 4, ~uint64_t{0}, false, 0}), "begins at byte 184467"));
}

TEST_CASE("a plan whose experts are placed twice is refused once the paths are there") {
  SupervisorStandIn supervisor;
  Opening opening;
  supervisor.accept();
  static_cast<void>(supervisor.receive<wire::OpenHandover>());
  auto plan = plan_messages({.num_workers = 2});
  std::get<wire::PlannedShard>(plan[5]).expert_ranges = {0, 4};
  for (const auto& message : plan) supervisor.send(message);
  supervisor.connect_worker(0);
  supervisor.connect_worker(1);
  supervisor.send(wire::HandoverReady{});
  CHECK(contains(opening.refusal(), "the supervisor's plan: layer blk.5"));
}

TEST_CASE("a worker that is lost while the hand-over goes on is named") {
  const std::string text = refusal_of([](SupervisorStandIn& supervisor) {
    for (const auto& message : plan_messages({})) supervisor.send(message);
    supervisor.send(wire::WorkerGone{0, "its process ended with exit code 3"});
  });
  CHECK(text == "worker w0 was lost: its process ended with exit code 3");
  CHECK(contains(refusal_of([](SupervisorStandIn& supervisor) {
                   for (const auto& message : plan_messages({})) supervisor.send(message);
                   supervisor.send(wire::HandoverReady{});
                 }),
                 "worker w0 has no data path"));
}

TEST_CASE("terms that cannot be are refused") {
  const auto with = [](const wire::PathTermsMessage& terms) {
    return refusal_of([&](SupervisorStandIn& supervisor) {
      for (const auto& message : plan_messages({})) supervisor.send(message);
      supervisor.send(terms);
    });
  };
  CHECK(contains(with({1, 1, "shared", 3, 64, 64, 0, 0}), "there is no worker 1"));
  CHECK(contains(with({0, 1, "pigeon", 3, 64, 64, 0, 0}), "transport 'pigeon'"));
  CHECK(contains(with({0, 1, "shared", 0, 64, 64, 0, 0}), "cannot be"));
  CHECK(contains(with({0, 1, "shared", 257, 64, 64, 0, 0}), "cannot be"));
  CHECK(contains(with({0, 1, "shared", 3, 65, 64, 0, 0}), "cannot be"));
  CHECK(contains(with({0, 1, "shared", 3, 64, uint64_t{1} << 40, 0, 0}), "cannot be"));
  CHECK(contains(with({0, 1, "tcp", 3, 64, 64, uint64_t{1} << 40, 0}), "does not fit"));
}

// Answers the first offer with these descriptors and this many announced.
std::string answered_with(std::vector<int> descriptors, int announced, bool has_pulse,
                          uint64_t generation = 11) {
  return refusal_of([&](SupervisorStandIn& supervisor) {
    for (const auto& message : plan_messages({})) supervisor.send(message);
    supervisor.send(supervisor.terms(0));
    const auto [offered, brought] = supervisor.receive<wire::PathOffered>();
    CHECK(brought.size() == 2);
    for (const OwnedFd& one : brought) CHECK((::fcntl(one.get(), F_GETFD) & FD_CLOEXEC) != 0);
    supervisor.send(
        wire::PathAnswered{0, generation, {}, static_cast<uint16_t>(announced), has_pulse},
        descriptors);
  });
}

TEST_CASE("an answer with descriptors too few, too many, or of another kind is refused") {
  const OwnedFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  auto pulse = SupervisorStandIn::make_pulse();
  const int n = null.get(), p = pulse.second.get();
  CHECK(contains(answered_with({}, 2, true), "announced 2 descriptors, 0 arrived"));
  CHECK(contains(answered_with({n}, 2, true), "announced 2 descriptors, 1 arrived"));
  CHECK(contains(answered_with({n, p, p}, 2, true), "announced 2 descriptors, 3 arrived"));
  CHECK(contains(answered_with(std::vector<int>(8, n), 8, true), "no stream socket"));
  CHECK(contains(answered_with({}, 0, true), "lacks the pulse"));
  CHECK(contains(answered_with({n, n}, 2, true), "no stream socket"));
  CHECK(contains(answered_with({n, n, p}, 3, true), "its answer brought 2 descriptors"));
  CHECK_FALSE(answered_with({n, p}, 2, true).empty());  // the segment is none
  CHECK(contains(answered_with({n, p}, 2, true, 12), "came where none was asked for"));
}

TEST_CASE("descriptors that this process has no room for are told as its own limit") {
  rlimit former{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &former) == 0);
  SupervisorStandIn supervisor;
  Opening opening;
  supervisor.accept();
  supervisor.greet();
  supervisor.send(supervisor.terms(0));
  const auto [offered, brought] = supervisor.receive<wire::PathOffered>();
  const rlimit few{std::min<rlim_t>(256, former.rlim_max), former.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::vector<OwnedFd> filling;
  for (int fd = 0; (fd = ::fcntl(brought[0].get(), F_DUPFD_CLOEXEC, 0)) >= 0;)
    filling.emplace_back(fd);
  const std::array<int, 2> numbers{brought[0].get(), brought[1].get()};
  supervisor.send(wire::PathAnswered{0, 11, {}, 2, true}, numbers);
  const std::string text = opening.refusal();
  filling.clear();
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &former) == 0);
  CHECK(contains(text, "cannot take descriptors of the supervisor: Too many open files"));
  CHECK(contains(text, "ulimit -n"));
}

TEST_CASE("descriptors beside a message that has none are refused") {
  const OwnedFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK(contains(refusal_of([&](SupervisorStandIn& supervisor) {
                   const int one = null.get();
                   supervisor.send(plan_messages({})[0], {&one, 1});
                 }),
                 "message PlanHead announced 0 descriptors, 1 arrived"));
}

TEST_CASE("more descriptors than any message has are refused, and none of them stays open") {
  const OwnedFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const auto num_open = [] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& one : std::filesystem::directory_iterator("/proc/self/fd"))
      ++count;
    return count;
  };
  const size_t before = num_open();
  const std::string text = refusal_of([&](SupervisorStandIn& supervisor) {
    std::array<int, 12> many;
    many.fill(null.get());
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof many)> control{};
    std::byte length[4] = {std::byte{3}};
    iovec piece{length, sizeof length};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof many);
    std::memcpy(CMSG_DATA(part), many.data(), sizeof many);
    REQUIRE(::sendmsg(supervisor.connection->fd(), &header, MSG_NOSIGNAL) == sizeof length);
  });
  CHECK(contains(text, "more than 8 descriptors"));
  CHECK(num_open() == before);
}

}  // namespace
}  // namespace dflash::c_interface
