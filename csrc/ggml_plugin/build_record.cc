// Versions and layouts. The build defines DFLASH_GGML_VERSION, DFLASH_GGML_COMMIT and
// DFLASH_GGML_TAG.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/build_record.h"

#include <dlfcn.h>

#include <cstddef>
#include <iterator>

#include "ggml_plugin/ggml_headers.h"

namespace dflash::ggml_plugin {
namespace {

struct StructMember {
  const char* name;
  size_t offset;
};

std::string json(const char* name, size_t size, const StructMember* members, size_t num_members) {
  std::string text = std::string("    \"") + name + "\": {\"bytes\": " + std::to_string(size);
  for (size_t i = 0; i < num_members; ++i)
    text += std::string(", \"") + members[i].name + "\": " + std::to_string(members[i].offset);
  return text + "}";
}

template <size_t N>
std::string json(const char* name, size_t size, const StructMember (&members)[N]) {
  return json(name, size, members, N);
}

#define MEMBER(type, name) {#name, offsetof(type, name)}

std::string layouts() {
  const StructMember tensor[] = {
      MEMBER(ggml_tensor, type),      MEMBER(ggml_tensor, buffer), MEMBER(ggml_tensor, ne),
      MEMBER(ggml_tensor, nb),        MEMBER(ggml_tensor, op),     MEMBER(ggml_tensor, op_params),
      MEMBER(ggml_tensor, flags),     MEMBER(ggml_tensor, src),    MEMBER(ggml_tensor, view_src),
      MEMBER(ggml_tensor, view_offs), MEMBER(ggml_tensor, data),   MEMBER(ggml_tensor, name)};
  const StructMember graph[] = {MEMBER(ggml_cgraph, n_nodes), MEMBER(ggml_cgraph, nodes),
                                MEMBER(ggml_cgraph, use_counts),
                                MEMBER(ggml_cgraph, visited_hash_set)};
  const StructMember set[] = {MEMBER(ggml_hash_set, size), MEMBER(ggml_hash_set, used),
                              MEMBER(ggml_hash_set, keys)};
  const StructMember type[] = {MEMBER(ggml_backend_buffer_type, iface),
                               MEMBER(ggml_backend_buffer_type, device),
                               MEMBER(ggml_backend_buffer_type, context)};
  const StructMember buffer[] = {
      MEMBER(ggml_backend_buffer, iface), MEMBER(ggml_backend_buffer, buft),
      MEMBER(ggml_backend_buffer, context), MEMBER(ggml_backend_buffer, size),
      MEMBER(ggml_backend_buffer, usage)};
  const StructMember buffer_table[] = {
      MEMBER(ggml_backend_buffer_i, free_buffer), MEMBER(ggml_backend_buffer_i, get_base),
      MEMBER(ggml_backend_buffer_i, init_tensor), MEMBER(ggml_backend_buffer_i, memset_tensor),
      MEMBER(ggml_backend_buffer_i, set_tensor),  MEMBER(ggml_backend_buffer_i, get_tensor),
      MEMBER(ggml_backend_buffer_i, cpy_tensor),  MEMBER(ggml_backend_buffer_i, clear)};
  const StructMember backend[] = {MEMBER(ggml_backend, guid), MEMBER(ggml_backend, iface),
                                  MEMBER(ggml_backend, device), MEMBER(ggml_backend, context)};
  const StructMember backend_table[] = {MEMBER(ggml_backend_i, get_name),
                                        MEMBER(ggml_backend_i, free),
                                        MEMBER(ggml_backend_i, graph_compute)};
  const StructMember device[] = {MEMBER(ggml_backend_device, iface),
                                 MEMBER(ggml_backend_device, reg),
                                 MEMBER(ggml_backend_device, context)};
  const StructMember device_table[] = {MEMBER(ggml_backend_device_i, get_name),
                                       MEMBER(ggml_backend_device_i, get_description),
                                       MEMBER(ggml_backend_device_i, get_memory),
                                       MEMBER(ggml_backend_device_i, get_type),
                                       MEMBER(ggml_backend_device_i, get_props),
                                       MEMBER(ggml_backend_device_i, init_backend),
                                       MEMBER(ggml_backend_device_i, get_buffer_type),
                                       MEMBER(ggml_backend_device_i, supports_op),
                                       MEMBER(ggml_backend_device_i, supports_buft)};
  const StructMember props[] = {MEMBER(ggml_backend_dev_props, name),
                                MEMBER(ggml_backend_dev_props, type),
                                MEMBER(ggml_backend_dev_props, caps)};
  const StructMember reg[] = {MEMBER(ggml_backend_reg, api_version),
                              MEMBER(ggml_backend_reg, iface), MEMBER(ggml_backend_reg, context)};
  return json("ggml_tensor", sizeof(ggml_tensor), tensor) + ",\n" +
         json("ggml_cgraph", sizeof(ggml_cgraph), graph) + ",\n" +
         json("ggml_hash_set", sizeof(ggml_hash_set), set) + ",\n" +
         json("ggml_backend_buffer_type", sizeof(ggml_backend_buffer_type), type) + ",\n" +
         json("ggml_backend_buffer", sizeof(ggml_backend_buffer), buffer) + ",\n" +
         json("ggml_backend_buffer_i", sizeof(ggml_backend_buffer_i), buffer_table) + ",\n" +
         json("ggml_backend", sizeof(ggml_backend), backend) + ",\n" +
         json("ggml_backend_i", sizeof(ggml_backend_i), backend_table) + ",\n" +
         json("ggml_backend_device", sizeof(ggml_backend_device), device) + ",\n" +
         json("ggml_backend_device_i", sizeof(ggml_backend_device_i), device_table) + ",\n" +
         json("ggml_backend_dev_props", sizeof(ggml_backend_dev_props), props) + ",\n" +
         json("ggml_backend_reg", sizeof(ggml_backend_reg), reg) + "\n";
}

#undef MEMBER

using TextFunction = const char* (*)();

std::string call(void* handle, const char* name) {
  const auto function = reinterpret_cast<TextFunction>(::dlsym(handle, name));
  const char* text = function ? function() : nullptr;
  return text ? text : "";
}

// A commit without ggml's mark for changed files; "" where it is not known. Its length depends on
// the repository from which it was taken.
std::string known_commit(const std::string& commit) {
  const std::string hash = commit.substr(0, commit.find('-'));
  return hash == "unknown" ? "" : hash;
}

std::string text_of(const GgmlVersion& version) {
  return version.version + (version.commit.empty() ? "" : " (commit " + version.commit + ")");
}

}  // namespace

GgmlVersion built_for() { return {DFLASH_GGML_VERSION, DFLASH_GGML_COMMIT}; }

GgmlVersion running_ggml(const void* caller) {
  GgmlVersion running = {call(RTLD_DEFAULT, "ggml_version"), call(RTLD_DEFAULT, "ggml_commit")};
  if (!running.version.empty()) return running;
  // A program such as Python may have loaded llama.cpp without showing its symbols to others; the
  // library that called us is then found by its address. RTLD_NOLOAD never loads a second one.
  Dl_info library = {};
  if (::dladdr(caller, &library) == 0 || !library.dli_fname) return running;
  void* handle = ::dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return running;
  running = {call(handle, "ggml_version"), call(handle, "ggml_commit")};
  ::dlclose(handle);
  return running;
}

std::string mismatch(const GgmlVersion& built, const GgmlVersion& running) {
  const std::string ours = known_commit(built.commit), theirs = known_commit(running.commit);
  const bool has_other_version =
      !built.version.empty() && !running.version.empty() && built.version != running.version;
  const bool has_other_commit =
      !ours.empty() && !theirs.empty() && !ours.starts_with(theirs) && !theirs.starts_with(ours);
  if (!has_other_version && !has_other_commit) return {};
  return "libggml-dflash-moe.so was built for ggml " + text_of(built) + ", and this program has " +
         text_of(running) +
         "; build it for this one with 'make ggml LLAMA_CPP=DIR', where DIR has " +
         "this program's sources";
}

std::string build_record() {
  return std::string("{\n  \"ggml_version\": \"") + DFLASH_GGML_VERSION +
         "\",\n  \"ggml_commit\": \"" + DFLASH_GGML_COMMIT + "\",\n  \"llama_tag\": \"" +
         DFLASH_GGML_TAG +
         "\",\n  \"ggml_backend_api_version\": " + std::to_string(GGML_BACKEND_API_VERSION) +
         ",\n  \"layouts\": {\n" + layouts() + "  }\n}\n";
}

}  // namespace dflash::ggml_plugin
