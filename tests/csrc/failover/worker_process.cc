// The host offers a path, the child accepts it, and its answer comes over a socket pair that takes
// the place of the control connection. What the child inherits beside its own ends are descriptors
// of other workers' paths, and it closes those first.
// SPDX-License-Identifier: Apache-2.0
#include "failover/worker_process.h"

#include <dirent.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

#include "base/result.h"
#include "compute/cpu/cpu_backend.h"
#include "compute/experts/random_expert.h"
#include "transport/stream/stream.h"
#include "worker/expert_worker.h"

namespace dflash::failover {
namespace {

// Starting takes a fork, a few system calls and no loading.
constexpr int64_t kStartMs = 20'000;
constexpr size_t kMostDescriptors = 4;  // of a worker's answer

// What the child takes with it through the fork.
struct WorkersEnds {
  transport::Handover offered;
  OwnedFd socket;  // a duplicate of the data path's, closed where it has none
  OwnedFd pulse, control;
};

Result<std::pair<OwnedFd, OwnedFd>> connected(bool is_dialled) {
  if (is_dialled) return transport::tcp_pair();
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("socketpair");
  return std::pair(OwnedFd(ends[0]), OwnedFd(ends[1]));
}

// One byte, so that there is a message where an answer has no descriptors.
Status send_descriptors(int socket, const std::vector<OwnedFd>& descriptors) {
  check(descriptors.size() <= kMostDescriptors, "an answer has more descriptors than expected");
  std::byte one{1};
  iovec piece{&one, 1};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    for (size_t i = 0; i < descriptors.size(); ++i) {
      const int number = descriptors[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &number, sizeof number);
    }
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) != 1) return system_error("sendmsg");
  return ok();
}

Result<std::vector<OwnedFd>> receive_descriptors(int socket) {
  pollfd awaited{socket, POLLIN, 0};
  if (::poll(&awaited, 1, kStartMs) <= 0) return system_error("a worker did not answer");
  std::byte one;
  iovec piece{&one, 1};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1)
    return Error{ErrorCode::kWorkerLost, "a worker ended before it answered"};
  std::vector<OwnedFd> descriptors;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + i * sizeof(int), sizeof number);
      descriptors.emplace_back(number);
    }
  }
  return descriptors;
}

void close_all_but(const WorkersEnds& ends) {
  std::vector<int> kept{ends.socket.get(), ends.pulse.get(), ends.control.get()};
  for (const OwnedFd& one : ends.offered.descriptors) kept.push_back(one.get());
  for (const int descriptor : open_descriptors()) {
    if (descriptor > STDERR_FILENO && std::ranges::find(kept, descriptor) == kept.end())
      ::close(descriptor);
  }
}

// The child's whole life. Nothing of the parent's is destroyed here, because its peers would see
// that; only descriptors are closed.
[[noreturn]] void serve(const Weights& weights, const transport::TransportKind& kind,
                        const transport::PathTerms& terms, WorkersEnds ends, pid_t parent,
                        Orders& orders) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  close_all_but(ends);
  auto accepted = kind.accept(terms, std::move(ends.offered));
  if (!accepted.ok()) ::_exit(2);
  worker::WorkerOptions options;
  options.name = "w";
  auto worker = worker::ExpertWorker::create(options);
  if (!worker.ok()) ::_exit(2);
  for (uint32_t shard = 0; shard < weights.num_shards(); ++shard) {
    if (!worker.value()->hold({kLayer, shard}, weights.shard(shard)).ok()) ::_exit(3);
  }
  if (!worker.value()->start_pulse(std::move(ends.pulse)).ok()) ::_exit(4);
  if (!send_descriptors(ends.control.get(), accepted.value().answer.descriptors).ok()) ::_exit(5);
  ends.control.close();
  const Status served = worker.value()->serve(
      make_struck(std::move(accepted.value().channel), orders, std::move(ends.socket)),
      terms.generation);
  ::_exit(served.ok() || served.error().code == ErrorCode::kWorkerLost ? 0 : 6);
}

// The host's end, once the child has answered.
Result<std::unique_ptr<transport::Channel>> complete(transport::PathOffer& offer, int control,
                                                     OwnedFd dialled) {
  auto descriptors = receive_descriptors(control);
  if (!descriptors.ok()) return std::move(descriptors).error();
  transport::Handover answer;
  answer.descriptors = std::move(descriptors).value();
  if (dialled.is_open()) answer.descriptors.push_back(std::move(dialled));
  return offer.complete(std::move(answer));
}

}  // namespace

Result<std::unique_ptr<Weights>> Weights::make(uint32_t num_shards) {
  auto backend = compute::CpuBackend::create(compute::best_isa(), 1);
  if (!backend.ok()) return std::move(backend).error();
  std::unique_ptr<Weights> weights(new Weights(std::move(backend).value()));
  for (uint32_t shard = 0; shard < num_shards; ++shard) {
    store::ShardFacts facts;
    facts.spec.in_size = facts.spec.out_size = kWidth;
    facts.spec.intermediate_size = kIntermediate;
    facts.num_local_experts = kExpertsEach;
    facts.formats = Dtype::kF32;
    facts.weights_fingerprint = kFirstFingerprint + shard;
    auto loan = weights->store_.borrow(facts);
    if (!loan.ok()) return std::move(loan).error();
    for (uint32_t id = 0; id < kExpertsEach; ++id) {
      const compute::RandomExpert expert(facts.spec, facts.formats, shard * kExpertsEach + id);
      DFLASH_TRY(weights->store_.load_expert(loan.value(), id, expert.weights()));
    }
    weights->shards_.push_back(std::move(loan).value());
  }
  return weights;
}

Result<SharedOrders> SharedOrders::make(uint32_t count) {
  const size_t num_bytes = count * sizeof(Orders);
  void* memory =
      ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return system_error("mmap of orders");
  auto* const orders = static_cast<Orders*>(memory);
  for (uint32_t i = 0; i < count; ++i) new (&orders[i]) Orders();
  return SharedOrders(orders, num_bytes);
}

SharedOrders::~SharedOrders() {
  if (orders_ != nullptr) ::munmap(orders_, num_bytes_);
}

Result<Started> start_worker(const Weights& weights, const transport::TransportKind& kind,
                             const transport::SlotGeometry& geometry, uint64_t generation,
                             Orders& orders) {
  transport::PathTerms terms;
  terms.geometry = geometry;
  terms.generation = generation;
  auto offer = kind.offer(terms);
  auto pulse = connected(kind.is_dialled), control = connected(false);
  if (!offer.ok()) return std::move(offer).error();
  if (!pulse.ok()) return std::move(pulse).error();
  if (!control.ok()) return std::move(control).error();
  WorkersEnds ends;
  ends.pulse = std::move(pulse.value().second);
  ends.control = std::move(control.value().second);
  for (const int descriptor : offer.value()->descriptors()) {
    auto copy = OwnedFd::duplicate(descriptor);
    if (!copy.ok()) return std::move(copy).error();
    ends.offered.descriptors.push_back(std::move(copy).value());
  }
  OwnedFd dialled;
  if (kind.is_dialled) {
    auto data = connected(true);
    if (!data.ok()) return std::move(data).error();
    dialled = std::move(data.value().first);
    ends.offered.descriptors.push_back(std::move(data.value().second));
  }
  if (std::string(kind.setting) == "stream") {
    auto copy = OwnedFd::duplicate(ends.offered.descriptors[0].get());
    if (!copy.ok()) return std::move(copy).error();
    ends.socket = std::move(copy).value();
  }
  orders.withdraw();
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return system_error("fork");
  if (pid == 0) serve(weights, kind, terms, std::move(ends), parent, orders);
  ends = WorkersEnds();  // while this process held them open, no hang-up could be seen
  Started started{
      pid, {nullptr, generation},
       std::move(pulse.value().first)
  };
  auto channel = complete(*offer.value(), control.value().first.get(), std::move(dialled));
  if (!channel.ok()) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return std::move(channel).error();
  }
  started.path.channel = std::move(channel).value();
  return started;
}

std::vector<int> open_descriptors() {
  std::vector<int> open;
  DIR* directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return open;
  while (const dirent* entry = ::readdir(directory)) {
    const int descriptor = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && descriptor != ::dirfd(directory)) open.push_back(descriptor);
  }
  ::closedir(directory);
  return open;
}

size_t num_segments() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") != std::string::npos) ++count;
  }
  return count;
}

}  // namespace dflash::failover
