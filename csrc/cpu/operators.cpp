// The CPU implementation of cudnn_dsa::forward_out and cudnn_dsa::backward_out.
//
// A plain shared library: torch.ops.load_library() loads it, and registration is all it does. The Python layer has
// checked the whole contract by the time a call arrives here; the checks below are those without which a wrong call
// would read or write out of bounds.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "problem.h"

namespace cudnn_dsa {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// ---- instruction sets -----------------------------------------------------------------------------------------------

// Those that this machine runs, the widest first.
const std::vector<const Kernels*>& instruction_sets() {
  static const auto sets = [] {
    std::vector<const Kernels*> found;
    for (const Kernels* kernels : {
#if defined(__x86_64__)
             &kernels_avx512, &kernels_avx2,
#endif
             &kernels_generic}) {
      if (kernels->available()) found.push_back(kernels);
    }
    return found;
  }();
  return sets;
}

const Kernels* find_instruction_set(const std::string& name) {
  for (const Kernels* kernels : instruction_sets()) {
    if (name == kernels->name) return kernels;
  }
  std::string known;
  for (const Kernels* kernels : instruction_sets()) known += std::string(known.empty() ? "" : ", ") + kernels->name;
  TORCH_CHECK_VALUE(false, "instruction set: expected one that this machine runs (", known, "), got ", name);
}

// The one in use: CUDNN_DSA_CPU_ISA, or the widest.
std::atomic<const Kernels*>& current_kernels() {
  static std::atomic<const Kernels*> current = [] {
    const char* const name = std::getenv("CUDNN_DSA_CPU_ISA");
    return name && *name ? find_instruction_set(name) : instruction_sets().front();
  }();
  return current;
}

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : instruction_sets()) names.push_back(kernels->name);
  return names;
}

std::string cpu_use_instruction_set(const std::string& name) {
  return current_kernels().exchange(find_instruction_set(name))->name;
}

// ---- the process around a kernel ------------------------------------------------------------------------------------

struct TorchRuntime : Runtime {
  std::vector<at::Tensor> memory;

  TorchRuntime() {
    threads = std::max(1, at::in_parallel_region() ? 1 : at::get_num_threads());
    parallel = run_parallel;
    allocate = allocate_memory;
  }

  // Threads take the next task when they are free; results do not depend on who runs what.
  static void run_parallel(Runtime& runtime, int64_t tasks, void (*task)(void*, int64_t, int), void* context) {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(runtime.threads, tasks), 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) {
        for (int64_t i = next++; i < tasks; i = next++) task(context, i, static_cast<int>(thread));
      }
    });
  }

  static void* allocate_memory(Runtime& runtime, size_t bytes) {
    auto& memory = static_cast<TorchRuntime&>(runtime).memory;
    memory.push_back(at::empty({static_cast<int64_t>(std::max<size_t>(bytes, 1))}, at::kByte));
    return memory.back().data_ptr();
  }
};

// ---- arguments ------------------------------------------------------------------------------------------------------

DType dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return DType::Float64;
    case at::kFloat: return DType::Float32;
    case at::kBFloat16: return DType::BFloat16;
    case at::kHalf: return DType::Float16;
    default: TORCH_CHECK_TYPE(false, name, ": expected dtype float64, float32, bfloat16 or float16, got ", tensor.dtype());
  }
}

void check_dense(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), name, ": expected device cpu, got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, ": expected shape ", shape, ", got ", tensor.sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_contiguous(), name, ": expected a contiguous tensor, got strides ", tensor.strides());
}

// A tensor of q's dtype, or, where `wider` is given, of that one.
Array element(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, DType dtype, DType wider) {
  check_dense(tensor, name, shape);
  const DType own = dtype_of(tensor, name);
  TORCH_CHECK_TYPE(own == dtype || own == wider, name, ": expected the dtype of q or float32, got ", tensor.dtype());
  return {tensor.data_ptr(), own};
}

Array element(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, DType dtype) {
  return element(tensor, name, shape, dtype, dtype);
}

// A float32 statistic; float64 problems may use float64.
Array statistic(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, DType dtype) {
  check_dense(tensor, name, shape);
  const DType own = dtype_of(tensor, name);
  TORCH_CHECK_TYPE(own == DType::Float32 || (own == DType::Float64 && dtype == DType::Float64), name,
                   ": expected dtype float32, or float64 where q has it, got ", tensor.dtype());
  return {tensor.data_ptr(), own};
}

Array statistic(const OptionalTensor& tensor, const char* name, at::IntArrayRef shape, DType dtype) {
  return tensor ? statistic(*tensor, name, shape, dtype) : Array{};
}

const int32_t* indices(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  check_dense(tensor, name, shape);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, name, ": expected dtype int32, got ", tensor.dtype());
  return tensor.const_data_ptr<int32_t>();
}

// What forward and backward have in common.
Problem common_problem(const at::Tensor& q, const at::Tensor& kv, const at::Tensor& out, const at::Tensor& lse,
                       const OptionalTensor& attn_sink, const at::Tensor& topk_idxs, const OptionalTensor& topk_length,
                       double softmax_scale) {
  TORCH_CHECK_VALUE(q.dim() == 3, "q: expected shape (S_q, H, D), got ", q.sizes());
  TORCH_CHECK_VALUE(kv.dim() == 2, "kv: expected shape (S_kv, D), got ", kv.sizes());
  TORCH_CHECK_VALUE(out.dim() == 3, "out: expected shape (S_q, H, D_v), got ", out.sizes());
  TORCH_CHECK_VALUE(topk_idxs.dim() == 2, "topk_idxs: expected shape (S_q, K), got ", topk_idxs.sizes());
  Problem p;
  p.s_q = q.size(0), p.heads = q.size(1), p.head_dim = q.size(2);
  p.s_kv = kv.size(0), p.head_dim_v = out.size(2), p.topk = topk_idxs.size(1);
  p.softmax_scale = softmax_scale;
  TORCH_CHECK_VALUE(p.heads >= 1 && p.head_dim >= 1, "q: expected H >= 1 and D >= 1, got ", q.sizes());
  TORCH_CHECK_VALUE(1 <= p.head_dim_v && p.head_dim_v <= p.head_dim, "out: expected 1 <= D_v <= D, got ", out.sizes());
  const DType dtype = dtype_of(q, "q");
  p.q = element(q, "q", q.sizes(), dtype);
  p.kv = element(kv, "kv", {p.s_kv, p.head_dim}, dtype);
  p.out = element(out, "out", {p.s_q, p.heads, p.head_dim_v}, dtype, DType::Float32);
  p.lse = statistic(lse, "lse", {p.s_q, p.heads}, dtype);
  p.attn_sink = statistic(attn_sink, "attn_sink", {p.heads}, dtype);
  p.topk_idxs = indices(topk_idxs, "topk_idxs", {p.s_q, p.topk});
  p.topk_length = topk_length ? indices(*topk_length, "topk_length", {p.s_q}) : nullptr;
  return p;
}

void forward_out(const at::Tensor& q, const at::Tensor& kv, const at::Tensor& topk_idxs,
                 const OptionalTensor& attn_sink, const OptionalTensor& topk_length, double softmax_scale,
                 const at::Tensor& out, const at::Tensor& lse) {
  const Problem p = common_problem(q, kv, out, lse, attn_sink, topk_idxs, topk_length, softmax_scale);
  TorchRuntime runtime;
  current_kernels().load()->forward(p, runtime);
}

void backward_out(const at::Tensor& q, const at::Tensor& kv, const at::Tensor& out, const at::Tensor& dout,
                  const at::Tensor& lse, const OptionalTensor& attn_sink, const at::Tensor& topk_idxs,
                  const OptionalTensor& topk_length, const OptionalTensor& delta, double softmax_scale,
                  bool accumulate, const at::Tensor& dq, const at::Tensor& dkv, const OptionalTensor& d_sink) {
  Problem p = common_problem(q, kv, out, lse, attn_sink, topk_idxs, topk_length, softmax_scale);
  const DType dtype = p.q.dtype;
  p.dout = element(dout, "dout", {p.s_q, p.heads, p.head_dim_v}, dtype);
  p.delta = statistic(delta, "delta", {p.s_q, p.heads}, dtype);
  p.dq = element(dq, "dq", {p.s_q, p.heads, p.head_dim}, dtype);
  p.dkv = element(dkv, "dkv", {p.s_kv, p.head_dim}, dtype, DType::Float32);
  p.d_sink = statistic(d_sink, "d_sink", {p.heads}, dtype);
  p.accumulate = accumulate;
  TORCH_CHECK_VALUE(!d_sink || attn_sink, "d_sink: expected None without attn_sink, got a tensor");
  TORCH_CHECK_TYPE(!accumulate || p.dkv.dtype == DType::Float32 || p.dkv.dtype == DType::Float64,
                   "dkv: expected dtype float32 or float64 to accumulate into, got ", dkv.dtype());
  TorchRuntime runtime;
  current_kernels().load()->backward(p, runtime);
}

}  // namespace

TORCH_LIBRARY_IMPL(cudnn_dsa, CPU, m) {
  m.impl("forward_out", forward_out);
  m.impl("backward_out", backward_out);
}

// For tests and measurements: the instruction sets of this machine, and a switch that returns the one before.
TORCH_LIBRARY_FRAGMENT(cudnn_dsa, m) {
  m.def("_cpu_instruction_sets() -> str[]", cpu_instruction_sets);
  m.def("_cpu_use_instruction_set(str name) -> str", cpu_use_instruction_set);
}

}  // namespace cudnn_dsa
