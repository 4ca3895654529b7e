// The kill campaign as a program: one JSON line for each event into a file, where one is named, and
// the summary as JSON on standard output.
//
//   worker_kills --transport shared [--seed 0] [--kills 1000] [--stops 0] [--lone-kills 0]
//                [--baseline 20] [--events FILE]
//
// The exit status is 0 where no call failed, no bit was wrong, every stopped worker was well again
// and nothing was left behind; 1 otherwise; 2 where nothing could be run.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "failover/campaign.h"
#include "failover/rounds.h"

namespace dflash::failover {
namespace {

// Text as a JSON string. Messages are ASCII; what is not printable becomes a space.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c >= ' ' && c <= '~' ? c : ' ';
  }
  return out + '"';
}

void write_event(std::FILE* to, const CampaignOptions& options, const StrikeEvent& event) {
  std::fprintf(to,
               "{\"transport\": \"%s\", \"seed\": %llu, \"kind\": \"%s\", \"moment\": \"%s\", "
               "\"obeyed\": %s, \"worker\": %u, \"pid\": %d, \"tokens\": %u, \"calls\": %u, "
               "\"stall_ms\": %.3f, \"failed\": %u, \"wrong\": %u, \"error\": %s}\n",
               options.transport.c_str(), static_cast<unsigned long long>(options.seed),
               event_name(event.kind), moment_name(event.moment),
               event.is_obeyed ? "true" : "false", event.worker, static_cast<int>(event.pid),
               event.num_tokens, event.num_calls, event.stall_ms, event.num_failed, event.num_wrong,
               quoted(event.error).c_str());
}

void write_summary(const CampaignOptions& options, const CampaignReport& report) {
  const auto number = [](const char* name, uint64_t value) {
    std::printf(", \"%s\": %llu", name, static_cast<unsigned long long>(value));
  };
  std::printf("{\"transport\": \"%s\", \"seed\": %llu", options.transport.c_str(),
              static_cast<unsigned long long>(options.seed));
  number("kills", report.count(EventKind::kKill));
  number("failed_calls", report.num_failed);
  number("wrong_bits", report.num_wrong);
  const std::pair<const char*, EventKind> kinds[] = {
      {"",      EventKind::kKill    },
      {"stop_", EventKind::kStop    },
      {"lone_", EventKind::kLoneKill}
  };
  for (const auto& [prefix, kind] : kinds) {
    std::printf(", \"%sstall_p50_ms\": %.3f, \"%sstall_p99_ms\": %.3f, \"%sstall_max_ms\": %.3f",
                prefix, report.stall_ms(kind, 0.5), prefix, report.stall_ms(kind, 0.99), prefix,
                report.stall_ms(kind, 1));
  }
  for (uint32_t size = 0; size < kSizes.size(); ++size)
    std::printf(", \"usual_%u_ms\": %.3f", kSizes[size], report.usual_ms[size]);
  number("left_processes", report.left_processes);
  number("left_descriptors", report.left_descriptors);
  number("left_segments", report.left_segments);
  number("stops", report.count(EventKind::kStop));
  number("lone_kills", report.count(EventKind::kLoneKill));
  number("calls", report.num_calls);
  number("unsettled", report.num_unsettled);
  number("lost_unasked", report.num_lost_unasked);
  number("failovers", report.failovers);
  number("hedges", report.hedges);
  number("hedges_won", report.hedges_won);
  number("superseded", report.superseded);
  std::printf(", \"first_error\": %s}\n", quoted(report.first_error).c_str());
}

int run(const std::map<std::string, std::string>& given) {
  const auto text = [&given](const char* name, const char* otherwise) {
    const auto found = given.find(name);
    return found == given.end() ? std::string(otherwise) : found->second;
  };
  const auto number = [&text](const char* name, const char* otherwise) {
    return static_cast<uint32_t>(std::strtoul(text(name, otherwise).c_str(), nullptr, 10));
  };
  CampaignOptions options;
  options.transport = text("--transport", "shared");
  options.seed = std::strtoull(text("--seed", "0").c_str(), nullptr, 10);
  options.num_kills = number("--kills", "1000");
  options.num_stops = number("--stops", "0");
  options.num_lone_kills = number("--lone-kills", "0");
  options.baseline_rounds = number("--baseline", "20");
  auto report = run_campaign(options);
  if (!report.ok()) {
    std::fprintf(stderr, "worker_kills: %s\n", report.error().message.c_str());
    return 2;
  }
  if (const std::string path = text("--events", ""); !path.empty()) {
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) {
      std::fprintf(stderr, "worker_kills: %s cannot be written\n", path.c_str());
      return 2;
    }
    for (const StrikeEvent& event : report.value().events) write_event(file, options, event);
    std::fclose(file);
  }
  write_summary(options, report.value());
  const CampaignReport& found = report.value();
  const bool is_clean = found.num_failed == 0 && found.num_wrong == 0 && found.num_unsettled == 0 &&
                        found.left_processes == 0 && found.left_descriptors == 0 &&
                        found.left_segments == 0;
  return is_clean ? 0 : 1;
}

}  // namespace
}  // namespace dflash::failover

int main(int argc, char** argv) {
  if (argc % 2 == 0) {
    std::fprintf(stderr, "worker_kills: options come in pairs, as in --kills 1000\n");
    return 2;
  }
  std::map<std::string, std::string> given;
  for (int i = 1; i + 1 < argc; i += 2) given[argv[i]] = argv[i + 1];
  return dflash::failover::run(given);
}
