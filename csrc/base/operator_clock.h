// Where the time of one thread goes. A thread whose clock runs is in exactly one operator at a
// time, and what no operator covers is `outside`, so that the times add up to the time from start
// to stop. Bytes and multiply-adds are counted from shapes and routing where they are known. A
// clock that does not run costs an operator one read of a thread's own variable.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dflash {

enum class Operator : uint8_t {
  kOutside,    // Python, torch and bindings
  kEmbedding,  // rows read out of a packed matrix
  kNorm,
  kLinear,  // products with packed matrices
  kRotary,
  kAppend,  // keys and values stored in pages
  kAttention,
  kRoute,       // experts chosen from a router's logits
  kActivation,  // of a gated MLP at the host
  kAdd,
  kArgmax,
  kChoose,        // tokens from logits
  kExpertCall,    // routing, messages, waiting and the sum over shards
  kExpertGroups,  // what experts at the host take beside the four below: groups, scratch
  kExpertRows,    // rows widened and encoded
  kExpertGateUp,  // products with gate and up, and the activation
  kExpertEncode,  // intermediate values encoded
  kExpertDown,    // products with down, the routed sum and the reply; the last one
};

const char* operator_name(Operator which);

struct OperatorTimes {
  Operator which = Operator::kOutside;
  const void* subject = nullptr;  // where there are several of an operator: a packed matrix
  uint64_t num_calls = 0;
  int64_t own_ns = 0;  // inside it, without the operators that it calls
  // Of these, what its jobs took beyond their tasks evenly shared by all threads.
  int64_t lost_ns = 0;
  uint64_t num_bytes = 0;  // of weights, keys and values that are read
  uint64_t num_multiply_adds = 0;
  const char* numerics = "";  // the class of these; empty where there are none
};

class OperatorClock {
 public:
  // Starts the clock of this thread at zero.
  static void start();
  // Ends it and returns what it found, nothing where it does not run.
  static std::vector<OperatorTimes> stop();
  // The clock of this thread, null where it does not run.
  static OperatorClock* running() { return running_; }

  // Goes over to another operator, and returns the one to go back to.
  OperatorTimes* enter(Operator which, const void* subject);
  void leave(OperatorTimes* before);
  OperatorTimes& current() { return *current_; }

 private:
  using Key = std::pair<Operator, const void*>;
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.second) * 31 + static_cast<size_t>(key.first);
    }
  };

  OperatorClock();
  void go_to(OperatorTimes* next, int64_t now);

  static constinit thread_local OperatorClock* running_;
  std::unordered_map<Key, OperatorTimes, KeyHash> times_;
  OperatorTimes* current_;
  int64_t since_ns_;
};

// Counts a block as an operator of this thread.
class OperatorScope {
 public:
  explicit OperatorScope(Operator which, const void* subject = nullptr)
      : clock_(OperatorClock::running()) {
    if (clock_ != nullptr) before_ = clock_->enter(which, subject);
  }
  ~OperatorScope() {
    if (clock_ != nullptr) clock_->leave(before_);
  }
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

  bool is_clocked() const { return clock_ != nullptr; }
  // Adds work of this operator. `numerics` is the name of a class, which lives for ever.
  void count(uint64_t num_bytes, uint64_t num_multiply_adds, const char* numerics) {
    if (clock_ == nullptr) return;
    OperatorTimes& times = clock_->current();
    times.num_bytes += num_bytes;
    times.num_multiply_adds += num_multiply_adds;
    times.numerics = numerics;
  }

 private:
  OperatorClock* const clock_;
  OperatorTimes* before_ = nullptr;
};

}  // namespace dflash
