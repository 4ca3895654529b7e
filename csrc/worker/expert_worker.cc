// The worker's loop: it queues requests, checks one, computes it and publishes the reply. While it
// computes, bytes move in both directions.
// SPDX-License-Identifier: Apache-2.0
#include "worker/expert_worker.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/idle_spin.h"
#include "wire/frame.h"
#include "wire/payload.h"
#include "wire/ragged.h"
#include "worker/merged_batch.h"
#include "worker/pieces.h"
#include "worker/pulse.h"

namespace dflash::worker {
namespace {

// The longest sleep, so that stop() is obeyed within 50 ms.
constexpr int64_t kTickNs = 40'000'000;
// This keeps the emulated time of any call within 63 bits of nanoseconds.
constexpr double kMaxSlowdown = 1e6;
// The time between two looks at the channel while computing. What arrives in it fits the socket's
// buffer (200 KB) up to 3 Gbit/s.
constexpr int64_t kMovePeriodNs = 500'000;
// An emulated slow worker sleeps in steps, so that its links and its progress counter keep moving.
constexpr int64_t kSlowdownStepNs = 1'000'000;

// A request that waits for its turn. Its bytes stay valid because its slot is not free.
struct Queued {
  transport::Arrival arrival;
  int64_t received_ns = 0;
};

std::string where_text(LayerShard where) {
  return "layer " + std::to_string(where.layer) + ", shard " + std::to_string(where.shard);
}

Error protocol_error(std::string message) {
  return Error{ErrorCode::kProtocol, std::move(message)};
}

}  // namespace

struct ExpertWorker::State {
  WorkerOptions options;
  // By (layer, shard). It changes only while nothing is served.
  std::map<std::pair<uint32_t, uint32_t>, std::shared_ptr<store::ResidentShard>> shards;
  compute::YieldingProgress progress{0};
  Pulse pulse{progress.count()};
  std::atomic<uint64_t> stopped_generation{0};  // no session has generation 0
  uint64_t generation = 0;                      // serve thread only: that of the session served

  bool is_stopped() const {
    return stopped_generation.load(std::memory_order_relaxed) == generation;
  }
  // The rows of the reply, in memory that no other process can write. Serve thread only.
  std::vector<std::byte> reply_rows;
  wire::RaggedIndex index;      // serve thread only
  PieceCutter pieces;           // serve thread only
  std::deque<Queued> queued;    // serve thread only; at most one per slot
  IdleSpin idle{0};             // serve thread only
  int64_t idle_since_ns = 0;    // serve thread only; 0 while there is work
  int64_t next_move_ns = 0;     // serve thread only
  std::optional<Error> broken;  // serve thread only: the channel's error during a computation
  store::ComputeTurns::Account account;
  MergedBatch merged;  // serve thread only
  // Serve thread only: whether rows of this host have given sums that are out of range. They may do
  // so again, and shall cost others no second computation of theirs.
  bool is_apart = false;

  std::atomic<uint64_t> calls{0}, rows{0}, pairs{0}, request_bytes{0}, reply_bytes{0}, errors{0};
  std::atomic<int64_t> compute_ns{0}, queue_ns{0}, busy_since_ns{0};
  std::atomic<uint64_t> batches{0}, batch_rows{0}, batch_sessions{0};

  // A request that has been found well-formed.
  struct Request {
    wire::FrameHeader header;
    wire::RequestLayout layout;
    store::ResidentShard* shard = nullptr;
    std::span<const std::byte> payload;
    std::span<std::byte> reply_slot;
    uint64_t reply_payload_bytes = 0;
  };

  Status take_in(transport::Channel& channel);
  Status answer_next(transport::Channel& channel);
  Status queue_up(transport::Channel& channel, const transport::Arrival& arrival);
  void move_bytes(transport::Channel& channel);
  Status answer(transport::Channel& channel, const Queued& queued_request);
  Status check(Request& request);
  Piece next_piece(const Request& request, const Piece& former);
  compute::ForwardArgs arguments_of(const Request& request, const Piece& piece);
  // What a request has taken so far: of computing its own share, and of waiting for what other
  // sessions computed.
  struct Spent {
    int64_t computed_ns = 0, behind_ns = 0;
  };
  Status compute_next(const Request& request, Piece& piece, Spent& spent);
  Status compute_turn(const Request& request, const Piece& piece,
                      const store::ComputeTurns::Piece& offered, store::ComputeTurns::Turn& turn);
  Status compute_alone(const Request& request, const Piece& piece);
  Status compute(const Request& request, int64_t received_ns);
  Status publish_error(transport::Channel& channel, uint32_t slot, const wire::FrameHeader& header,
                       const Error& error);
  void emulate_slowness(int64_t computed_ns);
};

ExpertWorker::ExpertWorker() : state_(std::make_unique<State>()) {}
ExpertWorker::~ExpertWorker() { state_->pulse.stop(); }

Result<std::unique_ptr<ExpertWorker>> ExpertWorker::create(const WorkerOptions& options) {
  if (!(options.slowdown >= 1.0 && options.slowdown <= kMaxSlowdown)) {  // also refuses NaN
    return Error{ErrorCode::kInvalidArgument,
                 "slowdown is " + std::to_string(options.slowdown) + "; allowed are 1 to 1000000"};
  }
  std::unique_ptr<ExpertWorker> worker(new ExpertWorker());
  worker->state_->options = options;
  return worker;
}

Status ExpertWorker::hold(LayerShard where, std::shared_ptr<store::ResidentShard> shard) {
  const uint32_t num_experts = shard->facts().num_local_experts;
  if (num_experts == 0 || num_experts > wire::kMaxExpertsPerShard) {
    return Error{ErrorCode::kInvalidArgument,
                 where_text(where) + ": " + std::to_string(num_experts) +
                     " experts, allowed are 1.." + std::to_string(wire::kMaxExpertsPerShard)};
  }
  if (!state_->shards.emplace(std::pair(where.layer, where.shard), std::move(shard)).second)
    return Error{ErrorCode::kInvalidArgument, where_text(where) + " is already held"};
  return ok();
}

std::shared_ptr<store::ResidentShard> ExpertWorker::held(LayerShard where) const {
  const auto found = state_->shards.find({where.layer, where.shard});
  return found == state_->shards.end() ? nullptr : found->second;
}

void ExpertWorker::give_back() { state_->shards.clear(); }

Status ExpertWorker::start_pulse(transport::StreamSocket socket) {
  return state_->pulse.start(std::move(socket));
}
void ExpertWorker::stop_pulse() { state_->pulse.stop(); }
void ExpertWorker::stop(uint64_t generation) {
  state_->stopped_generation.store(generation, std::memory_order_relaxed);
}
uint64_t ExpertWorker::progress() const { return state_->progress.load(std::memory_order_relaxed); }

WorkerStats ExpertWorker::stats() const {
  const State& s = *state_;
  constexpr auto relaxed = std::memory_order_relaxed;
  return WorkerStats{
      s.calls.load(relaxed),
      s.rows.load(relaxed),
      s.pairs.load(relaxed),
      s.request_bytes.load(relaxed),
      s.reply_bytes.load(relaxed),
      s.errors.load(relaxed),
      s.compute_ns.load(relaxed),
      s.queue_ns.load(relaxed),
      s.busy_since_ns.load(relaxed),
      {s.batches.load(relaxed), s.batch_rows.load(relaxed), s.batch_sessions.load(relaxed)}
  };
}

Status ExpertWorker::serve(std::unique_ptr<transport::Channel> channel, uint64_t generation) {
  begin_session(generation);
  while (!state_->is_stopped()) {
    DFLASH_TRY(state_->take_in(*channel));
    // Also while idle: a host whose request is still on a slow link must not mistake this worker
    // for a frozen one. No body is in force here, so this only counts.
    state_->progress.count_and_yield();
    if (!state_->queued.empty()) DFLASH_TRY(state_->answer_next(*channel));
  }
  return ok();
}

void ExpertWorker::begin_session(uint64_t generation) {
  state_->generation = generation;
  state_->queued.clear();
  state_->idle = IdleSpin(state_->options.spin_ns);
  state_->idle_since_ns = 0;
  state_->broken.reset();
  state_->is_apart = false;
}

Result<bool> ExpertWorker::serve_one(transport::Channel& channel) {
  if (state_->is_stopped())
    return Error{ErrorCode::kClosed, "worker " + state_->options.name + " was stopped"};
  if (state_->queued.empty()) {
    auto polled = channel.poll();
    if (!polled.ok()) return std::move(polled).error();
    if (!polled.value()) return false;
    DFLASH_TRY(state_->queue_up(channel, *polled.value()));
  }
  DFLASH_TRY(state_->answer_next(channel));
  return true;
}

Status ExpertWorker::State::answer_next(transport::Channel& channel) {
  const Queued next = queued.front();
  queued.pop_front();
  busy_since_ns.store(now_ns(), std::memory_order_relaxed);
  Status answered = answer(channel, next);
  busy_since_ns.store(0, std::memory_order_relaxed);
  return answered;
}

// Queues every request that has come. Only when nothing is queued does it wait for one, at most a
// tick.
Status ExpertWorker::State::take_in(transport::Channel& channel) {
  for (;;) {
    transport::WaitEntry entry{&channel, std::nullopt, std::nullopt};
    if (queued.empty()) {
      // What did not come in time does not become likelier with the next tick.
      const int64_t spin_ns = idle_since_ns == 0 ? idle.budget_ns() : 0;
      if (idle_since_ns == 0) idle_since_ns = now_ns();
      transport::wait_any({&entry, 1}, Deadline::after_ns(kTickNs), spin_ns);
    } else {
      auto polled = channel.poll();
      if (!polled.ok()) return std::move(polled).error();
      entry.arrival = polled.value();
    }
    if (entry.error) return std::move(*entry.error);
    if (!entry.arrival) return ok();
    if (idle_since_ns != 0) idle.came_after(now_ns() - idle_since_ns);
    idle_since_ns = 0;
    DFLASH_TRY(queue_up(channel, *entry.arrival));
  }
}

Status ExpertWorker::State::queue_up(transport::Channel& channel,
                                     const transport::Arrival& arrival) {
  if (queued.size() == channel.geometry().num_slots)
    return protocol_error("more requests than slots are under way");
  queued.push_back({arrival, now_ns()});
  account.set_more(true);
  return ok();
}

// Called at every step of a computation. It takes in what has arrived and sends on what waits, so
// that a link carries the next request and the former reply meanwhile. Whatever breaks is reported
// after the computation.
void ExpertWorker::State::move_bytes(transport::Channel& channel) {
  const int64_t now = now_ns();
  if (now < next_move_ns || broken) return;
  next_move_ns = now + kMovePeriodNs;
  for (;;) {
    auto polled = channel.poll();
    if (!polled.ok()) {
      broken = std::move(polled).error();
      return;
    }
    if (!polled.value()) return;
    if (Status queued_up = queue_up(channel, *polled.value()); !queued_up.ok()) {
      broken = std::move(queued_up).error();
      return;
    }
  }
}

// Answers one request. Errors end the session: bytes that are no frame, or a channel that broke. A
// request that is a frame but cannot be served is answered with an error frame.
Status ExpertWorker::State::answer(transport::Channel& channel, const Queued& queued_request) {
  const transport::Arrival& arrival = queued_request.arrival;
  if (arrival.bytes.size() < wire::kFrameHeaderBytes)
    return protocol_error("a message shorter than a frame header");
  // The host can still write the slot, so that a private copy is decoded.
  std::byte copied[wire::kFrameHeaderBytes];
  std::memcpy(copied, arrival.bytes.data(), sizeof copied);
  auto decoded = wire::decode_frame_header(copied);
  if (!decoded.ok()) return std::move(decoded).error();
  Request request;
  request.header = decoded.value();
  if (request.header.kind != wire::FrameKind::kRequest)
    return protocol_error("a host may send requests only");
  if (request.header.generation != generation) {
    return protocol_error("generation " + std::to_string(request.header.generation) +
                          ", this data path is " + std::to_string(generation));
  }
  if (arrival.bytes.size() != wire::kFrameHeaderBytes + uint64_t{request.header.payload_bytes}) {
    return protocol_error("payload_bytes " + std::to_string(request.header.payload_bytes) +
                          " in a message of " + std::to_string(arrival.bytes.size()) + " bytes");
  }
  request.payload = arrival.bytes.subspan(wire::kFrameHeaderBytes);
  request.reply_slot = channel.outgoing(arrival.slot);

  Status done = check(request);
  if (done.ok()) {
    next_move_ns = now_ns() + kMovePeriodNs;
    // From here on every count_and_yield() of this thread, deep in the kernels' loops too, may
    // send and receive on the data path: nobody else moves its bytes while this thread computes.
    auto move = [&] { move_bytes(channel); };
    const compute::YieldingProgress::YieldTo yielding(progress, move);
    done = compute(request, queued_request.received_ns);
  }
  if (broken) return *std::exchange(broken, std::nullopt);
  if (!done.ok()) return publish_error(channel, arrival.slot, request.header, done.error());
  calls.fetch_add(1, std::memory_order_relaxed);
  rows.fetch_add(request.header.num_rows, std::memory_order_relaxed);
  pairs.fetch_add(request.header.num_pairs, std::memory_order_relaxed);
  request_bytes.fetch_add(arrival.bytes.size(), std::memory_order_relaxed);
  reply_bytes.fetch_add(wire::kFrameHeaderBytes + request.reply_payload_bytes,
                        std::memory_order_relaxed);
  return channel.publish(arrival.slot, wire::kFrameHeaderBytes + request.reply_payload_bytes);
}

// Checks everything that must hold before a byte of the payload is used, and fills the rest of
// `request` and the private index.
Status ExpertWorker::State::check(Request& request) {
  const wire::FrameHeader& header = request.header;
  const LayerShard where{header.layer, header.shard};
  const auto found = shards.find({header.layer, header.shard});
  if (found == shards.end())
    return protocol_error(where_text(where) + " is not held by worker " + options.name);
  request.shard = found->second.get();
  const store::ShardFacts& facts = request.shard->facts();
  if (header.weights_fingerprint != facts.weights_fingerprint) {
    return protocol_error(
        where_text(where) + ": weights_fingerprint " + std::to_string(header.weights_fingerprint) +
        " was asked, the worker loaded " + std::to_string(facts.weights_fingerprint));
  }
  auto layout = wire::RequestLayout::of(header.num_rows, header.num_pairs, facts.spec.in_size,
                                        header.request_dtype);
  if (!layout.ok()) return std::move(layout).error();
  request.layout = layout.value();
  if (request.layout.payload_bytes != header.payload_bytes) {
    return protocol_error(where_text(where) + ": payload_bytes " +
                          std::to_string(header.payload_bytes) + ", its rows and pairs need " +
                          std::to_string(request.layout.payload_bytes));
  }
  auto reply = wire::ReplyLayout::of(header.num_rows, facts.spec.out_size, header.reply_dtype);
  if (!reply.ok()) return std::move(reply).error();
  request.reply_payload_bytes = reply.value().payload_bytes;
  if (wire::kFrameHeaderBytes + request.reply_payload_bytes > request.reply_slot.size()) {
    return protocol_error("a reply of " + std::to_string(request.reply_payload_bytes) +
                          " bytes does not fit the agreed slot of " +
                          std::to_string(request.reply_slot.size()));
  }
  if (checksum(request.payload) != header.payload_checksum)
    return protocol_error("payload_checksum does not match the payload");
  return index.assign(request.layout, header.num_rows, header.num_pairs, facts.num_local_experts,
                      request.payload);
}

Piece ExpertWorker::State::next_piece(const Request& request, const Piece& former) {
  return pieces.next(index, former, request.shard->facts().num_local_experts,
                     request.shard->turns().quiet_ns());
}

compute::ForwardArgs ExpertWorker::State::arguments_of(const Request& request, const Piece& piece) {
  const wire::FrameHeader& asked = request.header;
  const compute::FfnSpec& spec = request.shard->facts().spec;
  compute::ForwardArgs args;
  args.rows = request.payload.data() + request.layout.rows_offset +
              size_t{piece.first_row} * spec.in_size * dtype_bytes(asked.request_dtype);
  args.row_dtype = asked.request_dtype;
  args.num_rows = piece.num_rows;
  args.row_counts = index.row_counts().subspan(piece.first_row, piece.num_rows);
  args.local_expert_ids = index.local_expert_ids().subspan(piece.first_pair, piece.num_pairs);
  args.weights = index.weights().subspan(piece.first_pair, piece.num_pairs);
  args.reply =
      reply_rows.data() + size_t{piece.first_row} * spec.out_size * dtype_bytes(asked.reply_dtype);
  args.reply_dtype = asked.reply_dtype;
  return args;
}

// Computes the rows of a request behind `piece`, as many as one turn takes, or waits until another
// session has computed them with its own.
Status ExpertWorker::State::compute_next(const Request& request, Piece& piece, Spent& spent) {
  DFLASH_TRY(request.shard->await_whole(progress));
  Piece next = next_piece(request, piece);
  store::ComputeTurns::Piece offered{request.shard, arguments_of(request, next), is_apart};
  account.set_more(!queued.empty() || next.first_row + next.num_rows < request.header.num_rows);
  const int64_t asked_ns = now_ns();
  store::ComputeTurns::Turn turn(request.shard->turns(), &account);
  const auto outcome = turn.await(progress, [this] { return is_stopped(); }, &offered);
  if (outcome == store::ComputeTurns::Outcome::kOver)
    return Error{ErrorCode::kClosed, "the data path ended before its turn to compute"};
  if (outcome == store::ComputeTurns::Outcome::kTurn) {
    next = next_piece(request, piece);  // others may have come, or gone, since it was asked for
    offered.args = arguments_of(request, next);
    Status done = compute_turn(request, next, offered, turn);
    is_apart = is_apart || (!done.ok() && done.error().code == ErrorCode::kRange);
    DFLASH_TRY(std::move(done));
  }
  piece = next;
  spent.computed_ns += turn.share_ns();
  if (!turn.was_alone()) spent.behind_ns += now_ns() - asked_ns - turn.share_ns();
  batches.fetch_add(1, std::memory_order_relaxed);
  batch_rows.fetch_add(turn.batch_rows(), std::memory_order_relaxed);
  batch_sessions.fetch_add(turn.batch_sessions(), std::memory_order_relaxed);
  return ok();
}

// Computes a piece, and what others wait with for the same weights, as far as these would be read
// once more for that: the batch ends where each expert of the shard could have kPairsPerExpert.
Status ExpertWorker::State::compute_turn(const Request& request, const Piece& piece,
                                         const store::ComputeTurns::Piece& offered,
                                         store::ComputeTurns::Turn& turn) {
  const store::ShardFacts& facts = request.shard->facts();
  const auto company = turn.take_company(size_t{kPairsPerExpert} * facts.num_local_experts);
  const int64_t started_ns = now_ns();
  const int64_t started_cpu_ns = options.slowdown > 1.0 ? thread_cpu_ns() : 0;
  bool is_computed = false;
  if (!company.empty()) {
    is_computed =
        request.shard
            ->forward(merged.gather(offered.args, company, facts.spec.in_size, facts.spec.out_size),
                      progress)
            .ok();
    if (is_computed)
      merged.scatter();
    else
      turn.refuse_company();  // each learns from its own computation what is wrong with whose rows
  }
  if (!is_computed) DFLASH_TRY(compute_alone(request, piece));
  if (options.slowdown > 1.0) emulate_slowness(thread_cpu_ns() - started_cpu_ns);
  turn.answer_company(now_ns() - started_ns);
  return ok();
}

Status ExpertWorker::State::compute_alone(const Request& request, const Piece& piece) {
  Status done = request.shard->forward(arguments_of(request, piece), progress);
  if (done.ok() || done.error().code != ErrorCode::kRange || piece.first_row == 0) return done;
  // The error names a row of the piece. All rows up to here give that of the request.
  const Piece all{0, piece.first_row + piece.num_rows, 0, piece.first_pair + piece.num_pairs};
  return request.shard->forward(arguments_of(request, all), progress);
}

// Computes from the request's slot, and copies rows and header to the reply's slot once they are
// summed up. Whatever is written over a shared slot, by a peer or a bug, then shows in the
// checksum.
Status ExpertWorker::State::compute(const Request& request, int64_t received_ns) {
  const wire::FrameHeader& asked = request.header;
  const size_t row_bytes = request.reply_payload_bytes - wire::kReplyTimingBytes;
  if (reply_rows.size() < row_bytes) reply_rows.resize(row_bytes);
  Spent spent;
  for (Piece piece; piece.first_row + piece.num_rows < asked.num_rows;)
    DFLASH_TRY(compute_next(request, piece, spent));
  progress.count_and_yield();  // may move bytes; nothing of the reply is in its slot yet
  // Time behind other sessions is time in the queue, also where it lies between two pieces: it says
  // nothing about how fast this worker computes.
  const int64_t finished_ns = now_ns();
  const int64_t started_ns = finished_ns - spent.computed_ns;
  compute_ns.fetch_add(spent.computed_ns, std::memory_order_relaxed);
  queue_ns.fetch_add(started_ns - received_ns, std::memory_order_relaxed);

  std::array<std::byte, wire::kReplyTimingBytes> timing;
  wire::encode_reply_timing({received_ns, started_ns, finished_ns, spent.behind_ns}, timing);
  Checksum sum;
  sum.update(timing);
  sum.update({reply_rows.data(), row_bytes});
  wire::FrameHeader header = asked;
  header.kind = wire::FrameKind::kReply;
  header.payload_bytes = static_cast<uint32_t>(request.reply_payload_bytes);
  header.payload_checksum = sum.finish();
  std::array<std::byte, wire::kFrameHeaderBytes> header_bytes;
  wire::encode_frame_header(header, header_bytes);
  std::byte* to = request.reply_slot.data();
  std::memcpy(to, header_bytes.data(), header_bytes.size());
  std::memcpy(to + header_bytes.size(), timing.data(), timing.size());
  std::memcpy(to + header_bytes.size() + timing.size(), reply_rows.data(), row_bytes);
  return ok();
}

Status ExpertWorker::State::publish_error(transport::Channel& channel, uint32_t slot,
                                          const wire::FrameHeader& asked, const Error& error) {
  errors.fetch_add(1, std::memory_order_relaxed);
  std::byte text[wire::kMaxErrorPayloadBytes];
  const size_t text_bytes = wire::encode_error(error, text);
  const auto slot_bytes = channel.outgoing(slot);
  if (slot_bytes.size() < wire::kFrameHeaderBytes + text_bytes)
    return protocol_error("the reply slot is too small for an error");
  std::memcpy(slot_bytes.data() + wire::kFrameHeaderBytes, text, text_bytes);
  wire::FrameHeader header = asked;
  header.kind = wire::FrameKind::kError;
  header.num_rows = 0;
  header.num_pairs = 0;
  header.payload_bytes = static_cast<uint32_t>(text_bytes);
  header.payload_checksum = checksum({text, text_bytes});
  wire::encode_frame_header(header, slot_bytes.first<wire::kFrameHeaderBytes>());
  return channel.publish(slot, wire::kFrameHeaderBytes + text_bytes);
}

// Sleeps by the CPU time of this thread, which takes part in all of a computation. Time during
// which a neighbour had the core must not count several times.
void ExpertWorker::State::emulate_slowness(int64_t computed_ns) {
  const Deadline until = Deadline::after_ns(
      static_cast<int64_t>(static_cast<double>(computed_ns) * (options.slowdown - 1.0)));
  while (!until.has_passed() && !is_stopped()) {
    nap_ns(until.left_ns() < kSlowdownStepNs ? until.left_ns() : kSlowdownStepNs);
    progress.count_and_yield();  // also moves bytes, as in a real computation
  }
}

}  // namespace dflash::worker
