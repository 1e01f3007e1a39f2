// What the operators hand to the kernels: plain structures, no torch, no standard library.
//
// The instruction-set units (isa_*.cpp) are compiled for wider instructions than the rest of the library. Everything
// they share with it is declared here and is data or a function pointer: an inline function from a common header,
// compiled in such a unit, could be the copy that the linker keeps for the whole library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cudnn_dsa {

enum class DType : int { Float64, Float32, BFloat16, Float16 };

// A dense tensor; its shape follows from Problem. data is null where an optional tensor is not given.
struct Array {
  void* data = nullptr;
  DType dtype = DType::Float32;
};

// One call, forward or backward, with the names and shapes of the operator's contract.
struct Problem {
  int64_t s_q = 0, s_kv = 0, heads = 0, head_dim = 0, head_dim_v = 0, topk = 0;
  double softmax_scale = 1.0;
  bool accumulate = false;
  const int32_t* topk_idxs = nullptr;    // (S_q, K)
  const int32_t* topk_length = nullptr;  // (S_q,) or null
  Array q, kv, attn_sink, out, lse;
  Array dout, delta, dq, dkv, d_sink;    // backward only
};

// What a kernel needs from the process that it runs in.
struct Runtime {
  int threads = 1;
  // Run task(context, i, thread) for every i in [0, tasks), 0 <= thread < threads. Returns when all have run.
  void (*parallel)(Runtime&, int64_t tasks, void (*task)(void* context, int64_t i, int thread), void* context);
  // Uninitialised memory on a 64-byte boundary that lives until the call returns.
  void* (*allocate)(Runtime&, size_t bytes);
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  bool (*available)();
  void (*forward)(const Problem&, Runtime&);
  void (*backward)(const Problem&, Runtime&);
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace cudnn_dsa
