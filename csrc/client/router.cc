// Holders are few, so that each choice looks at all of them.
// SPDX-License-Identifier: Apache-2.0
#include "client/router.h"

#include <algorithm>
#include <optional>

namespace dflash::client {
namespace {

// The lower, the sooner it is asked.
int rank_of(const Link& link) {
  if (link.is_distrusted()) return 4;
  if (link.admission == Admission::kDraining) return 3;
  if (link.is_last_resort) return 2;
  return link.standing() == Standing::kWell ? 0 : 1;
}

bool contains(std::span<const uint32_t> holders, uint32_t holder) {
  return std::find(holders.begin(), holders.end(), holder) != holders.end();
}

// One that has answered nothing for long does not come back in a moment.
bool is_within_grace(const Link& link, int64_t now, int64_t grace_ns) {
  return link.path.is_lost() && link.has_remedy && !link.is_distrusted() &&
         now - link.lost_ns() < grace_ns;
}

}  // namespace

Link* pick_holder(std::span<const uint32_t> holders, Links links,
                  std::span<const uint32_t> refused_by, const Link* except) {
  Link* best = nullptr;
  for (const uint32_t holder : holders) {
    Link* link = links[holder].get();
    if (!link->can_send() || link == except) continue;
    if (contains(refused_by, holder)) continue;
    if (best == nullptr || rank_of(*link) < rank_of(*best) ||
        (rank_of(*link) == rank_of(*best) && link->backlog_ns() < best->backlog_ns()))
      best = link;
  }
  return best;
}

Link* find_on_trial(std::span<const uint32_t> holders, Links links) {
  for (const uint32_t holder : holders) {
    Link* link = links[holder].get();
    if (link->is_distrusted() && !link->path.is_listening() && link->waiting.empty() &&
        link->can_send() && link->admission == Admission::kOpen)
      return link;
  }
  return nullptr;
}

Outlook outlook_of(std::span<const uint32_t> holders, Links links, int64_t now, int64_t grace_ns,
                   std::span<const uint32_t> refused_by) {
  bool is_usable = false, is_busy = false, comes_back = false, is_in_grace = false;
  for (const uint32_t holder : holders) {
    if (contains(refused_by, holder)) continue;
    const Link& link = *links[holder];
    if (link.can_send()) {
      if (!link.is_last_resort) return Outlook::kUsable;
      is_usable = true;
    } else if (link.path.is_lost()) {
      comes_back = comes_back || link.has_remedy;
      is_in_grace = is_in_grace || is_within_grace(link, now, grace_ns);
    } else {
      is_busy = true;
    }
  }
  if (is_usable && !is_in_grace) return Outlook::kUsable;
  if (is_busy) return Outlook::kPathBusy;
  return comes_back ? Outlook::kComingBack : Outlook::kGone;
}

Error lost_shard_error(const Layer& layer, std::span<const uint32_t> holders, Links links) {
  std::optional<Error> error;
  for (const uint32_t holder : holders) {
    const Link& link = *links[holder];
    if (!link.path.is_lost()) continue;
    if (error)
      error->message += "; " + link.lost_text();
    else
      error = link.lost_error(layer);
  }
  return error.value_or(Error());
}

}  // namespace dflash::client
