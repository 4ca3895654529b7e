// The connection where its other end does not read.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/connection.h"
#include "failed.h"

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <string>
#include <utility>

namespace dflash::c_interface {
namespace {

TEST_CASE("after a message that could not be written whole nothing is sent, and nobody waits") {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  Connection connection{OwnedFd(ends[0])};
  const OwnedFd reader(ends[1]);
  const wire::TensorSeen message{"blk.0.ffn_up_exps.weight", std::string(1000, 'r')};
  Status sent = ok();
  for (int i = 0; i < 100'000 && sent.ok(); ++i)
    sent = connection.send(message, {}, Deadline::after_ms(20));
  REQUIRE(sent == Failed(ErrorCode::kTimeout));
  const int64_t start = now_ns();
  CHECK(connection.send(message, {}, Deadline::after_ms(60'000)) == Failed(ErrorCode::kClosed));
  CHECK(now_ns() - start < 30'000'000'000);
}

}  // namespace
}  // namespace dflash::c_interface
