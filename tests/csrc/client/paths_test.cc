// Data paths have states, and calls wait in the client for a usable one: worn paths and their
// renewal, holding the client between calls, and what an error says of where it happened.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <poll.h>

#include <future>

#include "client/path.h"
#include "client/puppet.h"
#include "failed.h"

namespace dflash::client {
namespace {

Deadline patience() { return Deadline::after_ms(kPatienceMs); }

bool is_readable(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 0) == 1;
}

// Quarantines one slot of worker 1: a call whose reply does not come. Returns its request.
Message time_out(PuppetScene& scene) {
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message request = scene.puppets[1].take();
  scene.client.abandon(call);
  return request;
}

// Quarantines two of the three slots of worker 1. Returns their requests.
std::array<Message, 2> wear_out(PuppetScene& scene) { return {time_out(scene), time_out(scene)}; }

PathState state(const PuppetScene& scene) { return scene.client.workers()[1].path; }

TEST_CASE("a path is fresh, then in use, worn once it lacks slots, and fresh again when renewed") {
  PuppetScene scene;
  CHECK(state(scene) == PathState::kFresh);
  CHECK(scene.works(1));
  CHECK(state(scene) == PathState::kInUse);
  time_out(scene);
  CHECK(state(scene) == PathState::kInUse);  // two slots are left
  CHECK_FALSE(is_readable(scene.client.worn_fd()));
  time_out(scene);
  CHECK(state(scene) == PathState::kWorn);
  CHECK(is_readable(scene.client.worn_fd()));

  const std::vector<WornPath> worn = scene.client.retire_worn_paths();
  REQUIRE(worn.size() == 1);
  CHECK(worn[0].worker == 1);
  CHECK(worn[0].reason == "2 of its 3 slots wait for replies that are late");
  CHECK(scene.client.retire_worn_paths().empty());
  CHECK_FALSE(is_readable(scene.client.worn_fd()));
  REQUIRE(scene.renew(1).ok());
  CHECK(state(scene) == PathState::kFresh);
  CHECK(scene.works(1));
  CHECK(scene.client.workers()[0].path == PathState::kFresh);
}

TEST_CASE("calls wait for the renewal of a worn path, others go on meanwhile") {
  PuppetScene scene;
  wear_out(scene);
  Tokens first{{2}}, second{{3}};
  const CallPtr waiting = scene.submit(first), later = scene.submit(second);
  CHECK(scene.works(0));
  CHECK_FALSE(scene.client.wait(waiting, Deadline::after_ms(30)));
  CHECK_FALSE(scene.puppets[1].try_take());
  scene.client.retire_worn_paths();
  REQUIRE(scene.renew(1).ok());
  for (int i = 0; i < 2; ++i) {
    const Message request = scene.puppets[1].take();
    CHECK(request.header.generation == kGeneration + 1);
    scene.puppets[1].send(echo(request));
  }
  CHECK(scene.finish(waiting).ok());
  CHECK(scene.finish(later).ok());
  CHECK(first.is_right());
  CHECK(second.is_right());
}

TEST_CASE("a call that waits for a path ends by its own deadline, saying what it waited for") {
  PuppetScene scene(with_deadline(60));
  wear_out(scene);
  Tokens tokens{{2}};
  const Status outcome = scene.finish(scene.submit(tokens));
  REQUIRE(outcome ==
          Failed(ErrorCode::kTimeout, "waited 0.1 s for a fresh data path to worker w1"));
  CHECK(outcome.error().place.worker == "w1");
  CHECK(outcome.error().place.layer == 3);
}

TEST_CASE("a late reply gives a worn path its slot back, until somebody renews it") {
  PuppetScene scene;
  const auto [first, second] = wear_out(scene);
  Tokens tokens{{2}};
  const CallPtr waiting = scene.submit(tokens);
  scene.puppets[1].send(echo(first));
  CHECK_FALSE(scene.client.wait(waiting, Deadline::after_ms(30)));
  scene.serve(1);
  CHECK(scene.finish(waiting).ok());

  time_out(scene);
  CHECK(state(scene) == PathState::kWorn);
  scene.client.retire_worn_paths();
  scene.puppets[1].send(echo(second));
  Tokens more{{2}};
  const CallPtr parked = scene.submit(more);
  CHECK_FALSE(scene.client.wait(parked, Deadline::after_ms(30)));  // nobody listens there any more
  REQUIRE(scene.renew(1).ok());
  scene.serve(1);
  CHECK(scene.finish(parked).ok());
}

TEST_CASE("the hang-up of a retired path is no loss: its worker has closed it for the next") {
  PuppetScene scene;
  wear_out(scene);
  scene.client.retire_worn_paths();
  scene.puppets[1].channel.reset();
  CHECK(scene.works(0));
  CHECK(state(scene) == PathState::kWorn);
  REQUIRE(scene.renew(1).ok());
  CHECK(scene.works(1));
}

TEST_CASE("calls that wait for a path end with its worker") {
  PuppetScene scene;
  wear_out(scene);
  Tokens tokens{{2}};
  const CallPtr waiting = scene.submit(tokens);
  scene.client.mark_lost(1, "its process ended");
  const Status outcome = scene.finish(waiting);
  REQUIRE(outcome == Failed(ErrorCode::kWorkerLost));
  CHECK(outcome.error().place.worker == "w1");
  CHECK(state(scene) == PathState::kLost);
  CHECK(scene.client.retire_worn_paths().empty());
  CHECK(scene.renew(1).error().code == ErrorCode::kWorkerLost);
}

TEST_CASE("a path that is in use, or being renewed, is not retired by somebody else") {
  PuppetScene scene;
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  CHECK(scene.client.retire_path(1, "why").error().code == ErrorCode::kInvalidArgument);
  scene.serve(1);
  CHECK(scene.finish(call).ok());
  CHECK(scene.client.retire_path(1, "why").ok());
  CHECK(scene.client.retire_path(1, "why").error().code == ErrorCode::kInvalidArgument);
}

TEST_CASE("whoever holds the client has it alone, once nothing is under way; others wait") {
  PuppetScene scene;
  Tokens before{{2}}, after{{0}};
  const CallPtr under_way = scene.submit(before);
  REQUIRE(scene.client.hold(patience()));
  CHECK_FALSE(scene.client.wait_until_quiet(Deadline::after_ms(20)));
  const CallPtr parked = scene.submit(after);
  scene.serve(1);
  CHECK(scene.client.wait_until_quiet(patience()));
  CHECK(scene.client.is_done(under_way));
  CHECK_FALSE(scene.client.hold(Deadline::after_ms(20)));
  CHECK_FALSE(scene.client.wait(parked, Deadline::after_ms(20)));
  CHECK_FALSE(scene.puppets[0].try_take());

  auto other = std::async(std::launch::async, [&] { return scene.client.hold(patience()); });
  scene.client.resume();
  CHECK(other.get());
  scene.client.resume();
  scene.serve(0);
  CHECK(scene.finish(parked).ok());
  CHECK(after.is_right());
}

TEST_CASE("a held client is quiet while a path is renewed, and fit only with all its slots") {
  PuppetScene scene;
  const Message late = time_out(scene);
  REQUIRE(scene.client.hold(patience()));
  CHECK(scene.client.wait_until_quiet(patience()));  // two slots will do
  CHECK_FALSE(scene.client.wait_until_fit(Deadline::after_ms(20)));
  REQUIRE(is_readable(scene.client.worn_fd()));
  REQUIRE(scene.client.retire_worn_paths().size() == 1);
  CHECK(scene.client.wait_until_quiet(patience()));
  CHECK_FALSE(scene.client.wait_until_fit(Deadline::after_ms(20)));
  REQUIRE(scene.renew(1).ok());
  CHECK(scene.client.wait_until_fit(patience()));
}

TEST_CASE("calls that wait for the holder end by their deadline, and leave with resume") {
  PuppetScene scene(with_deadline(50));
  REQUIRE(scene.client.hold(patience()));
  Tokens tokens{{0}, {2}};
  CHECK(scene.finish(scene.submit(tokens)) == Failed(ErrorCode::kTimeout, "change of mode"));
  scene.client.resume();
  CHECK(scene.works(0));
}

TEST_CASE("closing ends every wait for a holder or for a path, and takes no call any more") {
  PuppetScene scene;
  wear_out(scene);
  Tokens tokens{{2}}, other{{0}};
  const CallPtr parked = scene.submit(tokens);
  REQUIRE(scene.client.hold(Deadline::after_ms(1000)));
  CHECK_FALSE(scene.client.hold(Deadline::after_ms(30)));
  CHECK_FALSE(scene.client.wait_until_fit(Deadline::after_ms(30)));
  auto waiting =
      std::async(std::launch::async, [&] { return scene.client.hold(Deadline::after_ms(30'000)); });
  scene.client.close();
  CHECK(waiting.get());
  CHECK(scene.client.wait_until_quiet(Deadline::after_ms(30'000)));
  CHECK(scene.client.wait_until_fit(Deadline::after_ms(30'000)));
  CHECK(scene.finish(parked).error().code == ErrorCode::kClosed);
  CHECK(scene.client.submit(other.batch(), 3).error().code == ErrorCode::kClosed);
}

TEST_CASE("an abandoned call leaves the queue of those that wait") {
  PuppetScene scene;
  REQUIRE(scene.client.hold(patience()));
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  scene.client.abandon(call);
  CHECK(scene.client.is_done(call));
  CHECK(scene.client.wait_until_quiet(patience()));
  scene.client.resume();
  CHECK_FALSE(scene.puppets[1].try_take());
  CHECK(scene.works(1));
}

TEST_CASE("errors say in fields where they happened, not only in words") {
  SceneOptions options = with_deadline(40);
  PuppetScene scene(options);
  Tokens tokens{{0}, {2}};
  const CallPtr late = scene.submit(tokens);
  scene.serve(0);
  const Error timeout = scene.finish(late).error();
  CHECK(timeout.place.worker == "w1");
  CHECK(timeout.place.layer == 3);

  scene.serve(1);
  Tokens refused{{2}};
  const CallPtr call = scene.submit(refused);
  const Message request = scene.puppets[1].take();
  scene.puppets[1].send(refusal(request, Error{ErrorCode::kRange, "too large"}));
  const Error range = scene.finish(call).error();
  CHECK(range.place.worker == "w1");
  CHECK(range.place.layer == 3);
  CHECK(range.place.slot == request.slot);

  Tokens unsendable{{0}, {2}};
  unsendable.hidden[kWidth] = 1e30f;
  REQUIRE(scene.client.set_dtypes(1, Dtype::kF16, Dtype::kF32).ok());
  const Error overflow = scene.finish(scene.submit(unsendable)).error();
  CHECK(overflow.code == ErrorCode::kRange);
  CHECK(overflow.place.token == 1);
  CHECK(overflow.place.layer == 3);

  Tokens negative{{-1}};
  const auto wrong = scene.client.submit(negative.batch(), 3);
  REQUIRE(!wrong.ok());
  CHECK(wrong.error().place.layer == 3);
}

TEST_CASE("what is nearest to an error decides its fields") {
  Error error = Error{ErrorCode::kRange, "x"}.at({"inner", 1, {}, {}});
  error = std::move(error).at({"outer", 2, 3, 4});
  CHECK(error.place.worker == "inner");
  CHECK(error.place.layer == 1);
  CHECK(error.place.token == 3);
  CHECK(error.place.slot == 4);
}

}  // namespace
}  // namespace dflash::client
