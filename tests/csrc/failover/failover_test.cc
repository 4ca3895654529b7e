// Kills and stops of real worker processes over each transport, few of each; the same campaign as
// bench/campaigns/worker_kills.py runs at full size. Nothing here depends on how long anything
// takes.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "failover/campaign.h"

namespace dflash::failover {
namespace {

void check(const CampaignOptions& options) {
  auto run = run_campaign(options);
  REQUIRE_MESSAGE(run.ok(), (run.ok() ? std::string() : run.error().message));
  const CampaignReport& report = run.value();
  CAPTURE(options.transport);
  CAPTURE(options.seed);
  CAPTURE(report.first_error);
  CHECK(report.events.size() == options.num_kills + options.num_stops + options.num_lone_kills);
  CHECK(report.num_calls > report.events.size());
  CHECK(report.num_failed == 0);
  CHECK(report.num_wrong == 0);
  CHECK(report.num_unsettled == 0);
  CHECK(report.left_processes == 0);
  CHECK(report.left_descriptors == 0);
  CHECK(report.left_segments == 0);
}

CampaignOptions quick(const char* transport) {
  CampaignOptions options;
  options.transport = transport;
  options.seed = 16;
  options.baseline_rounds = 1;
  options.stall_timeout_ns = 30'000'000'000;  // no neighbour's load makes a worker look dead
  return options;
}

TEST_CASE("no kill of a worker fails a call or changes a bit while another holder is left") {
  for (const char* transport : {"shared", "unix", "tcp"}) {
    CampaignOptions options = quick(transport);
    options.num_kills = 40;
    check(options);
  }
}

TEST_CASE("calls wait for the only holder of a shard, which is killed and comes back") {
  for (const char* transport : {"shared", "unix", "tcp"}) {
    CampaignOptions options = quick(transport);
    options.num_lone_kills = 8;
    check(options);
  }
}

TEST_CASE("a stopped worker is answered for by another one, and its late replies do no harm") {
  for (const char* transport : {"shared", "unix", "tcp"}) {
    CampaignOptions options = quick(transport);
    options.num_stops = 5;
    check(options);
  }
}

}  // namespace
}  // namespace dflash::failover
