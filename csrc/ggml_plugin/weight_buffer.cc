// Address space that is never backed by memory, and the comparison of what is written to it.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/weight_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "ggml_plugin/notice.h"

namespace dflash::ggml_plugin {
namespace {

// The name under which `-ot exps=DFLASH_MOE` finds this type; --list-devices shows the devices'.
constexpr char kTypeName[] = "DFLASH_MOE";
// ggml aligns tensors by it; nothing is computed here, so a cache line is as good as any.
constexpr size_t kAlignment = 64;

WeightBuffer& of(ggml_backend_buffer_t buffer) {
  return *static_cast<WeightBuffer*>(buffer->context);
}

const Plan& plan_of(ggml_backend_buffer_type_t type) {
  return *static_cast<const Plan*>(type->context);
}

void free_buffer(ggml_backend_buffer_t buffer) { delete &of(buffer); }
void* get_base(ggml_backend_buffer_t buffer) { return of(buffer).base(); }

// Reached only by tensors that were forced here past takes_weight(), by -ot or by a program of its
// own: failing now ends the loading with an error, where dropping the bytes would lose the layer.
// Views of tensors that were placed come here as well, with names of their own, for each graph.
ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  if (tensor->view_src) return GGML_STATUS_SUCCESS;
  const std::string reason = of(buffer).place(*tensor);
  if (reason.empty()) return GGML_STATUS_SUCCESS;
  const std::string name(name_of(*tensor));
  dflash_moe_report_tensor(plan_of(buffer->buft).client(), name.c_str(), reason.c_str());
  say_once("the workers cannot stand in for tensor '" + name + "', which was to be placed in " +
           kTypeName + ": " + reason +
           "; place experts by '--override-tensor exps=CPU', which asks for each one");
  return GGML_STATUS_FAILED;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  of(buffer).write(*tensor, data, offset, size);
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t, size_t, size_t) {
  of(buffer).spoil(*tensor, "the program overwrote it");
}

// Nobody can read what was never kept. All bits set are NaN in f32, f16 and bf16, so that whatever
// is computed from them is no number either.
void get_tensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, size_t, size_t size) {
  std::memset(data, 0xFF, size);
  say_once("the program asked for the bytes of tensor '" + std::string(name_of(*tensor)) +
           "', which only the workers hold, and got none; run it without dflash-moe");
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor*, ggml_tensor* destination) {
  of(buffer).spoil(*destination, "the program overwrote it");
  return true;
}

// There is nothing to clear; weights are written after it.
void clear(ggml_backend_buffer_t, uint8_t) {}

const char* get_name(ggml_backend_buffer_type_t) { return kTypeName; }
size_t get_alignment(ggml_backend_buffer_type_t) { return kAlignment; }
bool is_host(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t num_bytes) {
  std::unique_ptr<WeightBuffer> content = WeightBuffer::make(plan_of(type), num_bytes);
  if (!content) return nullptr;
  // ggml deletes it after free_buffer; it has no destructor, and `new` and `delete` are the
  // process's one pair.
  auto* buffer = new (std::nothrow) ggml_backend_buffer{};
  if (!buffer) return nullptr;
  buffer->iface.free_buffer = free_buffer;
  buffer->iface.get_base = get_base;
  buffer->iface.init_tensor = init_tensor;
  buffer->iface.memset_tensor = memset_tensor;
  buffer->iface.set_tensor = set_tensor;
  buffer->iface.get_tensor = get_tensor;
  buffer->iface.cpy_tensor = cpy_tensor;
  buffer->iface.clear = clear;
  buffer->buft = type;
  buffer->context = content.release();
  buffer->size = num_bytes;
  buffer->usage = GGML_BACKEND_BUFFER_USAGE_ANY;
  return buffer;
}

// llama.cpp has the whole file brought into memory when it maps it, holes too, and a stub is holes:
// its expert pages would stay resident, as large as the experts. Paging out keeps what the memory
// says, whether it is a mapping or a copy of the program's own, so that it may also be refused.
void let_go(const void* data, size_t size) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_PAGEOUT);
}

// "" where the workers stand in for the tensor; a sentence's end otherwise.
std::string why_kept(const Plan& plan, const ggml_tensor& tensor) {
  const Tensor* planned = plan.find(tensor.name);
  if (!planned) return "the workers' plan has no tensor of this name";
  if (!planned->layer->reason.empty()) return planned->layer->reason;
  return difference(*planned, tensor);
}

}  // namespace

std::unique_ptr<WeightBuffer> WeightBuffer::make(const Plan& plan, size_t num_bytes) {
  void* base =
      ::mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  return std::unique_ptr<WeightBuffer>(new WeightBuffer(plan, base, num_bytes));
}

WeightBuffer::WeightBuffer(const Plan& plan, void* base, size_t num_bytes)
    : plan_(plan),
      base_(base),
      num_bytes_(num_bytes),
      contents_(std::make_unique<std::atomic<Content>[]>(plan.num_tensors())) {}

WeightBuffer::~WeightBuffer() { ::munmap(base_, num_bytes_); }

std::string WeightBuffer::place(const ggml_tensor& tensor) const { return why_kept(plan_, tensor); }

void WeightBuffer::write(const ggml_tensor& tensor, const void* data, size_t offset, size_t size) {
  const Tensor* planned = plan_.find(tensor.name);
  if (!planned) return;  // init_tensor() failed for it, and nothing computes with it
  // llama.cpp writes whole tensors to a device that neither maps files nor copies asynchronously.
  if (offset != 0 || size != planned->num_bytes) {
    refuse(*planned, "it was written in parts, which cannot be compared");
    return;
  }
  const int checked = dflash_moe_check_tensor(plan_.client(), planned->name.c_str(), data, size);
  if (checked < DFLASH_MOE_OK) {
    refuse(*planned, dflash_moe_error());
    return;
  }
  if (checked == DFLASH_MOE_STUB) let_go(data, size);
  contents_[planned->position].store(Content::kVerified, std::memory_order_release);
  dflash_moe_report_tensor(plan_.client(), planned->name.c_str(), nullptr);
}

void WeightBuffer::spoil(const ggml_tensor& tensor, const std::string& reason) {
  if (const Tensor* planned = plan_.find(tensor.name)) refuse(*planned, reason);
}

void WeightBuffer::refuse(const Tensor& tensor, const std::string& reason) {
  const std::string sentence = "tensor '" + tensor.name + "': " + reason;
  {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = sentence;
  }
  contents_[tensor.position].store(Content::kRefused, std::memory_order_release);
  dflash_moe_report_tensor(plan_.client(), tensor.name.c_str(), reason.c_str());
  say_once("this program's model is not the one that the workers hold, " + sentence +
           "; give both the same file");
}

std::string WeightBuffer::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void fill_weight_buffer_type(ggml_backend_buffer_type* type, ggml_backend_dev_t device,
                             const Plan* plan) {
  *type = {};
  type->iface.get_name = get_name;
  type->iface.alloc_buffer = alloc_buffer;
  type->iface.get_alignment = get_alignment;
  type->iface.is_host = is_host;
  type->device = device;
  type->context = const_cast<Plan*>(plan);
}

bool takes_weight(const Plan& plan, const ggml_backend_buffer_type* type,
                  const ggml_tensor* question) {
  // The question is a made-up operation: its weight lies in an empty buffer of our type, and the
  // other operand is nobody's result. A node of a real graph is none of it.
  const int position = question->op == GGML_OP_ADD_ID ? 1 : 0;
  if (question->op != GGML_OP_MUL_MAT_ID && question->op != GGML_OP_ADD_ID) return false;
  const ggml_tensor* weight = question->src[position];
  const ggml_tensor* operand = question->src[1 - position];
  if (!weight || !weight->buffer || weight->buffer->buft != type || !operand) return false;
  if (operand->op != GGML_OP_NONE || operand->buffer || operand->view_src || operand->name[0])
    return false;
  const std::string reason = why_kept(plan, *weight);
  if (reason.empty()) return true;
  const std::string name(name_of(*weight));
  // The other tensors of a model are asked for as well, and so are factors for quantised
  // activations (input_scale), with which no graph computes.
  const bool is_of_experts =
      name.find("_exps.") != std::string::npos &&
      (name.ends_with(".weight") || name.ends_with(".bias") || name.ends_with("_exps.scale"));
  if (is_of_experts) {
    dflash_moe_report_tensor(plan.client(), name.c_str(), reason.c_str());
    // Once per reason, or a model of another plan would fill the screen. Files may have scales with
    // which their architecture's graph does not compute, so that these alone mean little.
    if (name.ends_with(".weight")) say_once("some experts stay with this program: " + reason);
  }
  return false;
}

std::string why_unverified(const Plan& plan, const ggml_tensor& tensor) {
  // Asked for every matrix of every call, so that a text is made only where it is needed.
  const auto named = [&tensor](const std::string& what) {
    return "tensor '" + std::string(name_of(tensor)) + "'" + what;
  };
  const Tensor* planned = plan.find(tensor.name);
  // A buffer without context is the empty one that stands for a model which is only measured.
  if (!planned || !tensor.buffer->context) return named(" was never loaded");
  const std::string difference_now = difference(*planned, tensor);
  if (!difference_now.empty()) return named(": " + difference_now);
  const WeightBuffer& buffer = of(tensor.buffer);
  switch (buffer.content(*planned)) {
    case Content::kVerified: return {};
    case Content::kUnseen:   return named(" was never loaded");
    case Content::kRefused:  break;
  }
  return buffer.reason();
}

}  // namespace dflash::ggml_plugin
