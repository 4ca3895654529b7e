// Turns to compute: in the order of asking among those who have had as much, given up by whoever is
// told to, with a count that moves as long as whoever computes gets on, and in company.
// SPDX-License-Identifier: Apache-2.0
#include "store/compute_turns.h"

#include <doctest/doctest.h>

#include <atomic>
#include <initializer_list>
#include <memory>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace dflash::store {
namespace {

// Far above what any step takes, sanitizers and a loaded machine included.
constexpr int64_t kPatienceMs = 20'000;

using Outcome = ComputeTurns::Outcome;

bool never() { return false; }

void wait_for_asking(const ComputeTurns& turns, size_t count) {
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (turns.num_asking() != count && !deadline.has_passed()) std::this_thread::yield();
  REQUIRE(turns.num_asking() == count);
}

TEST_CASE("who asks first computes first, and one at a time") {
  constexpr size_t kNumThreads = 6;
  ComputeTurns turns;
  std::atomic<int> num_computing{0};
  std::vector<size_t> order;  // guarded by the turns
  std::vector<std::thread> threads;
  {
    compute::YieldingProgress progress;
    ComputeTurns::Turn first(turns);
    REQUIRE(first.await(progress, never) == Outcome::kTurn);
    for (size_t i = 0; i < kNumThreads; ++i) {
      threads.emplace_back([&, i] {
        compute::YieldingProgress own;
        ComputeTurns::Turn turn(turns);
        CHECK(turn.await(own, never) == Outcome::kTurn);
        CHECK(num_computing.fetch_add(1) == 0);
        order.push_back(i);
        num_computing.fetch_sub(1);
      });
      wait_for_asking(turns, i + 2);
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < kNumThreads; ++i) CHECK(order[i] == i);
  CHECK(turns.num_asking() == 0);
}

TEST_CASE("who is told to stop leaves its place to the next one") {
  ComputeTurns turns;
  std::atomic<bool> is_over{false};
  std::thread leaver, stayer;
  {
    compute::YieldingProgress progress;
    ComputeTurns::Turn first(turns);
    REQUIRE(first.await(progress, never) == Outcome::kTurn);
    leaver = std::thread([&] {
      compute::YieldingProgress own;
      ComputeTurns::Turn turn(turns);
      CHECK(turn.await(own, [&] { return is_over.load(); }) == Outcome::kOver);
    });
    wait_for_asking(turns, 2);
    stayer = std::thread([&] {
      compute::YieldingProgress own;
      ComputeTurns::Turn turn(turns);
      CHECK(turn.await(own, never) == Outcome::kTurn);
    });
    wait_for_asking(turns, 3);
    is_over = true;
    leaver.join();
    wait_for_asking(turns, 2);
  }
  stayer.join();
  CHECK(turns.num_asking() == 0);
}

TEST_CASE("who waits counts as long as who computes does, and lets its bytes move") {
  ComputeTurns turns;
  compute::YieldingProgress computing, waiting;
  std::atomic<uint32_t> num_moves{0};
  std::thread waiter;
  {
    ComputeTurns::Turn first(turns);
    REQUIRE(first.await(computing, never) == Outcome::kTurn);
    waiter = std::thread([&] {
      auto move = [&] { num_moves.fetch_add(1); };
      const compute::YieldingProgress::YieldTo yielding(waiting, move);
      ComputeTurns::Turn turn(turns);
      CHECK(turn.await(waiting, never) == Outcome::kTurn);
    });
    wait_for_asking(turns, 2);
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (waiting.load() < 5 && !deadline.has_passed()) computing.count_and_yield();
    CHECK(waiting.load() >= 5);
    CHECK(num_moves >= 5);
    // One look may be under way that has seen the last count.
    nap_ns(20'000'000);
    const uint64_t before = waiting.load();
    nap_ns(20'000'000);
    CHECK(waiting.load() == before);
  }
  waiter.join();
}

// A piece of rows without values: turns look at numbers and types alone.
class Rows {
 public:
  Rows(const void* shard, uint32_t num_rows, uint32_t pairs_per_row)
      : ids_(num_rows * pairs_per_row) {
    piece.shard = static_cast<const ResidentShard*>(shard);
    piece.args.num_rows = num_rows;
    piece.args.local_expert_ids = ids_;
  }
  ComputeTurns::Piece piece;

 private:
  std::vector<uint16_t> ids_;
};

// Asks for a turn with a piece in a thread of its own, and keeps what became of it.
struct Asker {
  Asker(ComputeTurns& turns, ComputeTurns::Account& account, const ComputeTurns::Piece& piece)
      : thread([this, &turns, &account, &piece] {
          compute::YieldingProgress progress;
          ComputeTurns::Turn turn(turns, &account);
          outcome = turn.await(progress, never, &piece);
          share_ns = turn.share_ns();
          batch_rows = turn.batch_rows();
          batch_sessions = turn.batch_sessions();
          was_alone = turn.was_alone();
        }) {}

  Outcome outcome = Outcome::kOver;
  int64_t share_ns = 0;
  uint32_t batch_rows = 0, batch_sessions = 0;
  bool was_alone = true;
  std::thread thread;
};

TEST_CASE("whoever has the turn computes what others wait with, and time is shared by pairs") {
  const int shard = 0, another_shard = 0;
  ComputeTurns turns;
  ComputeTurns::Account first_account, accounts[6];
  const Rows first_rows(&shard, 2, 4), alike(&shard, 6, 4), large(&shard, 30, 4),
      elsewhere(&another_shard, 1, 4);
  Rows in_f16(&shard, 1, 4), apart(&shard, 1, 4);
  in_f16.piece.args.row_dtype = Dtype::kF16;
  apart.piece.is_apart = true;
  std::vector<std::unique_ptr<Asker>> askers;
  {
    compute::YieldingProgress progress;
    ComputeTurns::Turn turn(turns, &first_account);
    REQUIRE(turn.await(progress, never, &first_rows.piece) == Outcome::kTurn);
    for (const Rows* rows :
         std::initializer_list<const Rows*>{&alike, &large, &elsewhere, &in_f16, &apart, &alike}) {
      askers.push_back(std::make_unique<Asker>(turns, accounts[askers.size()], rows->piece));
      wait_for_asking(turns, askers.size() + 1);
    }
    const auto company = turn.take_company(8 + 2 * 24);
    REQUIRE(company.size() == 2);
    CHECK(company[0] == &alike.piece);
    CHECK(company[1] == &alike.piece);
    CHECK(turns.num_asking() == 7);
    turn.answer_company(7000);
    CHECK(turn.share_ns() == 1000);
    CHECK(turn.batch_sessions() == 3);
    CHECK(!turn.was_alone());
  }
  for (const auto& asker : askers) asker->thread.join();
  for (const size_t i : {0, 5}) {
    CHECK(askers[i]->outcome == Outcome::kComputed);
    CHECK(askers[i]->share_ns == 3000);
    CHECK(askers[i]->batch_rows == 14);
    CHECK(askers[i]->batch_sessions == 3);
    CHECK(!askers[i]->was_alone);
  }
  for (size_t i = 1; i < 5; ++i) CHECK(askers[i]->outcome == Outcome::kTurn);
  const BatchCounts counts = turns.counts();
  CHECK(counts.batches == 1);  // the others' turns ended without an answer
  CHECK(counts.rows == 14);
  CHECK(counts.sessions == 3);
  CHECK(turns.num_asking() == 0);
}

TEST_CASE("company that was not computed waits again, and nobody takes it up a second time") {
  const int shard = 0;
  ComputeTurns turns;
  ComputeTurns::Account accounts[2];
  const Rows rows(&shard, 1, 4);
  std::unique_ptr<Asker> asker;
  {
    compute::YieldingProgress progress;
    ComputeTurns::Turn turn(turns, &accounts[0]);
    REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
    asker = std::make_unique<Asker>(turns, accounts[1], rows.piece);
    wait_for_asking(turns, 2);
    CHECK(turn.take_company(100).size() == 1);
    turn.refuse_company();
    CHECK(turn.take_company(100).empty());
    turn.answer_company(1000);
    CHECK(turn.batch_sessions() == 1);
    CHECK(turn.was_alone());
  }
  asker->thread.join();
  CHECK(asker->outcome == Outcome::kTurn);
}

TEST_CASE("a turn that ends without an answer leaves its company to compute for itself") {
  const int shard = 0;
  ComputeTurns turns;
  ComputeTurns::Account accounts[2];
  const Rows rows(&shard, 1, 4);
  std::unique_ptr<Asker> asker;
  {
    compute::YieldingProgress progress;
    ComputeTurns::Turn turn(turns, &accounts[0]);
    REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
    asker = std::make_unique<Asker>(turns, accounts[1], rows.piece);
    wait_for_asking(turns, 2);
    CHECK(turn.take_company(100).size() == 1);
  }
  asker->thread.join();
  CHECK(asker->outcome == Outcome::kTurn);
}

TEST_CASE("who was told to stop is done with only once its piece was computed by another") {
  const int shard = 0;
  ComputeTurns turns;
  ComputeTurns::Account accounts[2];
  const Rows rows(&shard, 1, 4);
  std::atomic<uint32_t> num_looks{0};
  std::atomic<bool> has_ended{false};
  std::thread other;
  {
    compute::YieldingProgress progress;
    ComputeTurns::Turn turn(turns, &accounts[0]);
    REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
    std::atomic<bool> is_over{false};
    other = std::thread([&] {
      compute::YieldingProgress own;
      ComputeTurns::Turn theirs(turns, &accounts[1]);
      const auto look = [&] {
        ++num_looks;
        return is_over.load();
      };
      CHECK(theirs.await(own, look, &rows.piece) == Outcome::kComputed);
      has_ended = true;
    });
    wait_for_asking(turns, 2);
    REQUIRE(turn.take_company(100).size() == 1);
    is_over = true;
    const uint32_t before = num_looks;
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (num_looks < before + 3 && !deadline.has_passed()) std::this_thread::yield();
    CHECK(num_looks >= before + 3);
    CHECK(!has_ended);
    turn.answer_company(1);
  }
  other.join();
}

TEST_CASE("the next batch waits a moment for who was in the last one and has more to compute") {
  const int shard = 0;
  ComputeTurns turns;
  ComputeTurns::Account first, second, third;
  const Rows rows(&shard, 1, 4);
  first.set_more(true);
  second.set_more(true);
  // The second one's piece is computed with the first one's; meanwhile the third one asks.
  const auto compute_two = [&](int64_t ns) {
    compute::YieldingProgress progress;
    ComputeTurns::Turn turn(turns, &first);
    REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
    Asker company(turns, second, rows.piece);
    wait_for_asking(turns, 2);
    CHECK(turn.take_company(100).size() == 1);
    auto waiting = std::make_unique<Asker>(turns, third, rows.piece);
    wait_for_asking(turns, 3);
    turn.answer_company(ns);
    company.thread.join();
    return waiting;
  };
  SUBCASE("they ask, and all are in one batch") {
    // The next one may wait for ten minutes.
    const auto waiting = compute_two(32 * int64_t{600'000'000'000});
    Asker again(turns, second, rows.piece);
    wait_for_asking(turns, 2);
    nap_ns(20'000'000);
    CHECK(turns.num_asking() == 2);  // the third one still waits, though nobody computes
    Asker last(turns, first, rows.piece);
    for (Asker* asker : {waiting.get(), &again, &last}) {
      asker->thread.join();
      CHECK(asker->outcome == Outcome::kTurn);  // none of them takes anybody up here
    }
  }
  SUBCASE("they do not ask, and it begins after that moment") {
    const auto waiting = compute_two(32 * int64_t{10'000'000});
    waiting->thread.join();
    CHECK(waiting->outcome == Outcome::kTurn);
  }
}

TEST_CASE("two sessions that always ask have the same time, and not as many turns") {
  const int shard = 0;
  ComputeTurns turns;
  const Rows rows(&shard, 1, 4);
  // Times are only said. The next turn waits 20 s or more for who has just had one.
  constexpr int64_t kShort = 32 * int64_t{20'000'000'000}, kLong = 10 * kShort;
  constexpr int kLongTurns = 4;
  ComputeTurns::Account light, heavy;
  std::atomic<int> num_short{0}, num_long{0};
  // Returns how many short turns had ended before this one, during which the light one waits.
  const auto compute = [&](ComputeTurns::Account& account, int64_t ns) {
    compute::YieldingProgress progress;
    ComputeTurns::Turn turn(turns, &account);
    REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
    const int before = num_short;
    turn.answer_company(ns);
    return before;
  };
  std::thread of_heavy, of_light;
  int short_at_first = 0, short_at_last = 0;
  {
    compute::YieldingProgress progress;
    ComputeTurns::Account first;
    ComputeTurns::Turn turn(turns, &first);
    REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
    light.set_more(true);
    heavy.set_more(true);
    of_heavy = std::thread([&] {
      for (int i = 0; i < kLongTurns; ++i) {
        if (i == kLongTurns - 1) heavy.set_more(false);
        const int before = compute(heavy, kLong);
        (i == 0 ? short_at_first : short_at_last) = before;
        ++num_long;
      }
    });
    wait_for_asking(turns, 2);
    of_light = std::thread([&] {
      while (num_long < kLongTurns) {
        compute(light, kShort);
        ++num_short;
      }
    });
    wait_for_asking(turns, 3);
    turn.answer_company(1);
  }
  of_heavy.join();
  light.set_more(false);
  of_light.join();
  // Ten short turns for each of the three long ones behind the first, give or take the one that is
  // under way at either end.
  CHECK(short_at_last - short_at_first >= 28);
  CHECK(short_at_last - short_at_first <= 32);
}

TEST_CASE("next is who has had the least, and nobody saves up turns while it is away") {
  const int shard = 0;
  ComputeTurns turns;
  ComputeTurns::Account heavy, light, newcomer, latecomer, holder;
  const Rows rows(&shard, 1, 4);
  std::vector<ComputeTurns::Account*> order;  // guarded by the turns
  const auto have = [&](ComputeTurns::Account& account, int64_t ns) {
    compute::YieldingProgress progress;
    ComputeTurns::Turn turn(turns, &account);
    REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
    order.push_back(&account);
    turn.answer_company(ns);
  };
  // All have asked, in this order, before the first of them has its turn.
  const auto ask_all = [&](std::vector<ComputeTurns::Account*> accounts) {
    std::vector<std::thread> threads;
    {
      compute::YieldingProgress progress;
      ComputeTurns::Turn turn(turns, &holder);
      REQUIRE(turn.await(progress, never, &rows.piece) == Outcome::kTurn);
      for (ComputeTurns::Account* account : accounts) {
        threads.emplace_back([&have, account] { have(*account, 1'000'000); });
        wait_for_asking(turns, threads.size() + 1);
      }
      order.clear();
      turn.answer_company(1);
    }
    for (std::thread& thread : threads) thread.join();
    return order;
  };
  have(heavy, 50'000'000);
  have(light, 10'000'000);
  using Order = std::vector<ComputeTurns::Account*>;
  CHECK(ask_all({&heavy, &light, &newcomer}) == Order{&newcomer, &light, &heavy});
  // The last turn began at 50 ms. Neither the light one, at 11 ms, nor one that has never asked
  // comes before that, and so they come in the order of asking; the heavy one is at 51 ms.
  CHECK(ask_all({&heavy, &latecomer, &light}) == Order{&latecomer, &light, &heavy});
}

}  // namespace
}  // namespace dflash::store
