// The tables that ggml reads, the plug-in as a file, and the versions it accepts.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "failed.h"
#include "ggml_plugin/build_record.h"
#include "ggml_plugin/fake_host.h"

namespace dflash::ggml_plugin {
namespace {

TEST_CASE("two devices, and a backend of each") {
  const ExpertsModel model({});
  FakeHost host(model);
  ggml_backend_reg_t reg = host.registration().reg();
  CHECK(reg->api_version == GGML_BACKEND_API_VERSION);
  CHECK(std::string(reg->iface.get_name(reg)) == "DFLASH_MOE");
  REQUIRE(reg->iface.get_device_count(reg) == 2);
  CHECK(reg->iface.get_device(reg, 2) == nullptr);
  const char* names[] = {"DFLASH_MOE_W", "DFLASH_MOE"};
  const char* types[] = {"DFLASH_MOE", "DFLASH_MOE_Host"};
  for (size_t i = 0; i < 2; ++i) {
    ggml_backend_dev_t device = reg->iface.get_device(reg, i);
    CHECK(device->reg == reg);
    CHECK(std::string(device->iface.get_name(device)) == names[i]);
    ggml_backend_buffer_type_t type = device->iface.get_buffer_type(device);
    CHECK(std::string(type->iface.get_name(type)) == types[i]);
    CHECK(type->device == device);
    CHECK(type->iface.is_host(type) == (i == 1));
    // A scheduler stops the program unless a backend supports its own default type.
    CHECK(device->iface.supports_buft(device, type));
    CHECK((device->iface.offload_op == nullptr));
    ggml_backend_dev_props props;
    device->iface.get_props(device, &props);
    CHECK(std::string(props.name) == names[i]);
    CHECK_FALSE(props.caps.async);
    CHECK_FALSE(props.caps.buffer_from_host_ptr);
    ggml_backend_t backend = device->iface.init_backend(device, nullptr);
    REQUIRE(backend);
    CHECK(std::string(backend->iface.get_name(backend)) == names[i]);
    CHECK(backend->device == device);
    backend->iface.free(backend);
  }
  ggml_backend_buffer_type foreign = {};
  CHECK_FALSE(host.device()->iface.supports_buft(host.device(), &foreign));
  CHECK_FALSE(host.weight_device()->iface.supports_buft(host.weight_device(),
                                                        host.registration().host_type()));
  CHECK(host.device()->iface.supports_buft(host.device(), host.registration().weight_type()));
}

TEST_CASE("the weight device runs nothing") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  ggml_backend_t backend = host.weight_device()->iface.init_backend(host.weight_device(), nullptr);
  CapturedErrors errors;
  CHECK(compute(backend, experts.graph.all()) == GGML_STATUS_FAILED);
  CHECK(errors.text() == Has{"computes nothing"});
  backend->iface.free(backend);
}

TEST_CASE("host buffers are memory") {
  const ExpertsModel model({});
  FakeHost host(model);
  ggml_backend_buffer_type_t type = host.registration().host_type();
  ggml_backend_buffer_t buffer = type->iface.alloc_buffer(type, 100);
  REQUIRE(buffer);
  FakeGraph graph;
  ggml_tensor* tensor = graph.leaf("x", {4, 1, 1, 1});
  tensor->data = buffer->iface.get_base(buffer);
  CHECK(reinterpret_cast<uintptr_t>(tensor->data) % type->iface.get_alignment(type) == 0);
  const float in[4] = {1, 2, 3, 4};
  float out[4] = {};
  buffer->iface.set_tensor(buffer, tensor, in, 0, sizeof in);
  buffer->iface.get_tensor(buffer, tensor, out, 4, 8);
  CHECK(out[0] == 2);
  CHECK(out[1] == 3);
  buffer->iface.memset_tensor(buffer, tensor, 0, 4, 4);
  buffer->iface.get_tensor(buffer, tensor, out, 0, sizeof out);
  CHECK(out[1] == 0);
  CHECK(out[2] == 3);
  buffer->iface.clear(buffer, 0xFF);
  buffer->iface.get_tensor(buffer, tensor, out, 0, sizeof out);
  CHECK(out[0] != out[0]);
  buffer->iface.free_buffer(buffer);
  delete buffer;
}

TEST_CASE("versions that contradict each other are refused with both and the command") {
  const GgmlVersion built = {"0.25.3", "0c1e5701a"};
  CHECK(mismatch(built, {"0.25.3", "0c1e5701a"}).empty());
  CHECK(mismatch(built, {"0.25.3", "0c1e570"}).empty());        // a shorter hash of the same
  CHECK(mismatch(built, {"0.25.3", "0c1e570-dirty"}).empty());  // files changed since
  CHECK(mismatch(built, {"0.25.3", "unknown"}).empty());        // built from an archive
  CHECK(mismatch(built, {"", ""}).empty());                     // a static build says nothing
  const std::string version = mismatch(built, {"0.26.0", "0c1e5701a"});
  for (const char* text : {"0.25.3", "0.26.0", "make ggml LLAMA_CPP="}) {
    INFO(version);
    CHECK(version == Has{text});
  }
  const std::string commit = mismatch(built, {"0.25.3", "ffff570"});
  CHECK(commit == Has{"0c1e5701a"});
  CHECK(commit == Has{"ffff570"});
  // This program has no ggml.
  CHECK(running_ggml(reinterpret_cast<const void*>(&mismatch)).version.empty());
  CHECK_FALSE(built_for().version.empty());
  CHECK(build_record() == Has{"\"ggml_tensor\": {\"bytes\": "});
}

// Loads the plug-in in a process of its own and returns what `body` does with it: 0 is good.
template <class Body>
int in_child(const char* handover, std::string* said, Body body) {
  CapturedErrors errors;
  const pid_t child = ::fork();
  if (child == 0) {
    if (handover)
      ::setenv("DFLASH_MOE_HANDOVER", handover, 1);
    else
      ::unsetenv("DFLASH_MOE_HANDOVER");
    // Everything is bound at once: the plug-in may want no symbol of ggml, and here is none.
    void* library = ::dlopen(DFLASH_GGML_MODULE, RTLD_NOW | RTLD_LOCAL);
    if (!library) ::_exit(10);
    const auto init =
        reinterpret_cast<ggml_backend_reg_t (*)()>(::dlsym(library, "ggml_backend_init"));
    if (!init) ::_exit(11);
    for (const char* name : {"dflash_moe_open", "dflash_moe_submit"})
      if (::dlsym(library, name)) ::_exit(12);
    ::_exit(body(library, init));
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  *said = errors.text();
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + status;
}

TEST_CASE("the plug-in as a file: no workers, once; workers, the same answer again") {
  std::string said;
  const auto refuses = [](void*, ggml_backend_reg_t (*init)()) {
    return init() == nullptr && init() == nullptr ? 0 : 1;
  };
  CHECK(in_child(nullptr, &said, refuses) == 0);
  CHECK(said ==
        "dflash-moe: no workers were handed over to this program, which computes its experts "
        "itself; start it as 'dflash-moe llama -- PROGRAM ...', which sets GGML_BACKEND_PATH\n");
  CHECK(in_child("nowhere", &said, refuses) == 0);
  CHECK(said.find("there are no workers here; this program computes its experts itself\n") !=
        std::string::npos);
  CHECK(in_child("empty", &said, [](void* library, ggml_backend_reg_t (*init)()) {
          ggml_backend_reg_t first = init();
          if (!first || first->api_version != GGML_BACKEND_API_VERSION) return 1;
          // ggml loads all backends again and closes the second handle.
          ::dlclose(library);
          void* again = ::dlopen(DFLASH_GGML_MODULE, RTLD_NOW | RTLD_LOCAL);
          const auto init_again =
              reinterpret_cast<ggml_backend_reg_t (*)()>(::dlsym(again, "ggml_backend_init"));
          return init_again() == first ? 0 : 2;
        }) == 0);
}

}  // namespace
}  // namespace dflash::ggml_plugin
