// Compares versions, takes the hand-over and reads the plan, once per process.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/registration.h"

#include <cstdlib>
#include <mutex>
#include <utility>

#include "ggml_plugin/build_record.h"
#include "ggml_plugin/notice.h"

namespace dflash::ggml_plugin {
namespace {

constexpr char kHandOverVariable[] = "DFLASH_MOE_HANDOVER";

// It is never destroyed: threads of the program may compute until the process is gone.
Registration* registration = nullptr;

Registration* start(const void* caller) {
  if (!std::getenv(kHandOverVariable)) {
    say_once(
        "no workers were handed over to this program, which computes its experts itself; start it "
        "as 'dflash-moe llama -- PROGRAM ...', which sets GGML_BACKEND_PATH");
    return nullptr;
  }
  const GgmlVersion running = running_ggml(caller);
  const std::string difference = mismatch(built_for(), running);
  if (!difference.empty()) {
    say_once(difference);
    return nullptr;
  }
  if (running.version.empty())
    say_once("this program does not say which ggml it has; libggml-dflash-moe.so was built for " +
             built_for().version +
             " and goes by names, types, shapes and strides of tensors that have to be as planned");
  dflash_moe_client* client = dflash_moe_open(nullptr);
  if (!client) {
    say_once(std::string(dflash_moe_error()) + "; this program computes its experts itself");
    return nullptr;
  }
  Plan plan;
  std::string error;
  if (!plan.read(client, &error)) {
    say_once(error + "; this program computes its experts itself");
    dflash_moe_close(client);
    return nullptr;
  }
  auto* made = new Registration(std::move(plan));
  registration = made;
  return made;
}

}  // namespace

Registration* initialize(const void* caller) {
  static std::mutex mutex;
  static bool has_started = false;
  const std::lock_guard lock(mutex);
  if (!std::exchange(has_started, true)) start(caller);
  return registration;
}

}  // namespace dflash::ggml_plugin
