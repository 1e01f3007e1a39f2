// DeepSeek sparse attention, forward and backward, on one instruction set.
//
// T is the arithmetic: double for float64 tensors, float for all others (16-bit tensors are widened when a tile is
// loaded and results are rounded once, when they are stored). Per query i, with k_j the kv rows it lists (v_j their
// first D_v columns) and per head h:
//
//   s[j,h] = scale * k_j . q[h]          p[j,h] = exp(s[j,h] - Z[h]),  Z = logaddexp(lse, sink)
//   forward     out[h] = sum_j p[j,h] v_j                         lse[h] = log sum_j exp(s[j,h])
//   backward    ds[j,h] = p[j,h] * (v_j . dout[h] - delta[h]) * scale,    delta[h] = out[h] . dout[h]
//               dq[h] = sum_j ds[j,h] k_j          dkv[j] += sum_h ds[j,h] q[h] + p[j,h] dout[h]
//               d_sink[h] -= exp(sink[h] - Z[h]) * delta[h]
//
// Everything is a product C = A B whose B has whole vectors of heads or of columns (gemm.h):
//
//   scores      (keys, heads)    = K rows        (keys, D)     x  q transposed  (D, heads)
//   out, dq     (heads, columns) = p, ds         (heads, keys) x  K rows        (keys, columns)
//   dkv         (keys, columns)  = ds            (keys, heads) x  q             (heads, columns)   and p x dout
//
// Weights (scores, p, ds) lie as (keys, heads), heads padded to whole vectors. K rows are gathered and widened a segment
// at a time, once: all products of a segment take them from there, by element or by vector, in the one layout.
//
// Backward works on chunks of queries whose p and ds fit a budget, in two parallel steps:
//   query   per query: the list of valid keys, Z, delta, the query's term of d_sink; p and ds into the chunk's buffer; dq
//   dkv     per panel of columns and range of kv rows: dkv of all the chunk's queries, in order
//
// Results do not depend on the number of threads, nor on who runs what: a dkv element has one owner per chunk, which
// adds the terms query by query and, within a query, in the order of its list; every term is one chain over the heads.
// The list is the order of topk_idxs, stably partitioned into kKeyRanges ranges of kv rows so that an owner of a range
// finds its keys together.
#pragma once

#include "gemm.h"

namespace cudnn_dsa {
namespace DSA_ISA {

constexpr int64_t kKeySegment = 192;       // keys gathered at once; they stay in L2
constexpr int64_t kKeyTile = 96;           // keys that a sum over keys takes at once: a panel of them and their weights
                                           // stay in L1, and shorter chains round less
constexpr int64_t kDepth = 192;            // steps of D that a sum over D takes at once, likewise
constexpr int64_t kKeyRanges = 16;         // parts of the kv rows that lists are partitioned into
constexpr int64_t kChunkBytes = 1 << 20;   // p and ds of one chunk, per thread
constexpr int64_t kCacheLine = 64;

// Row length that is a whole number of vectors and an odd number of cache lines, so that the rows of a tile do not all
// fall into the same few sets of the cache.
template <class T>
constexpr int64_t row_length(int64_t n) {
  constexpr int64_t line = kCacheLine / sizeof(T);
  return (round_up(n, line) / line | 1) * line;
}

inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(static_cast<const char*>(p) + i);
}

template <class F>
void parallel(Runtime& runtime, int64_t tasks, F f) {
  runtime.parallel(
      runtime, tasks, [](void* context, int64_t i, int thread) { (*static_cast<F*>(context))(i, thread); }, &f);
}

template <class T>
T* allocate(Runtime& runtime, int64_t n) {
  return static_cast<T*>(runtime.allocate(runtime, n * sizeof(T)));
}

// The parts of a thread's scratch memory.
template <class T>
struct Scratch {
  T *q, *dout;           // transposed: (D, heads), (D_v, heads)
  T* columns;            // (2, heads, kPanel): of q and of dout
  T* rows;               // gathered rows (kKeySegment, row_length(D))
  T *scores, *products;  // (kKeySegment, heads)
  T* sums;               // (panels, H, kPanel)
  T *maximum, *total;    // (heads)
};

// What both directions share.
template <class T>
class Attention {
 public:
  Attention(const Problem& problem, Runtime& runtime)
      : p(problem), runtime(runtime), heads(round_up(problem.heads, kLanes<T>)) {}

 protected:
  const Problem& p;
  Runtime& runtime;
  const int64_t heads;  // padded

  // The valid keys of query i in order, partitioned into kKeyRanges ranges: range r is rows[offsets[r]:offsets[r + 1]].
  // Returns their number.
  int64_t list_keys(int64_t i, int32_t* rows, int32_t* offsets) const {
    const int32_t* const listed = p.topk_idxs + i * p.topk;
    const int64_t count = p.topk_length ? larger(0, smaller(p.topk_length[i], p.topk)) : p.topk;
    const auto valid = [&](int32_t row) { return row >= 0 && row < p.s_kv; };
    int shift = 0;
    while (((p.s_kv - 1) >> shift) >= kKeyRanges) ++shift;
    int32_t next[kKeyRanges + 1] = {};
    for (int64_t k = 0; k < count; ++k) {
      if (valid(listed[k])) ++next[(listed[k] >> shift) + 1];
    }
    for (int64_t r = 0; r < kKeyRanges; ++r) next[r + 1] += next[r];
    __builtin_memcpy(offsets, next, sizeof next);
    for (int64_t k = 0; k < count; ++k) {
      if (valid(listed[k])) rows[next[listed[k] >> shift]++] = listed[k];
    }
    return offsets[kKeyRanges];
  }

  // dst (n, heads) = source[i] (H, n) transposed, as T; padded heads are zero. `stage` holds kLanes rows.
  void load_transposed(T* dst, const Array& source, int64_t i, int64_t n, T* stage) const {
    const int64_t ld = row_length<T>(n);
    for (int64_t h0 = 0; h0 < heads; h0 += kLanes<T>) {
      for (int64_t h = 0; h < kLanes<T>; ++h) {
        if (h0 + h < p.heads) {
          load_row(stage + h * ld, at(source, (i * p.heads + h0 + h) * n), source.dtype, n);
        } else {
          __builtin_memset(stage + h * ld, 0, ld * sizeof(T));
        }
      }
      for (int64_t c = 0; c < n; c += kLanes<T>) {
        transpose_square(dst + c * heads + h0, heads, stage + c, ld, n - c);
      }
    }
  }

  // rows (count, row_length(D)) = the listed rows of kv.
  void gather(T* rows, const int32_t* list, int64_t count) const {
    for (int64_t j = 0; j < count; ++j) {
      load_row(rows + j * row_length<T>(p.head_dim), at(p.kv, list[j] * p.head_dim), p.kv.dtype, p.head_dim);
    }
  }

  // dst (count, heads) = gathered rows' first `depth` columns x transposed (depth, heads).
  void dot(T* dst, const T* gathered, int64_t count, const T* transposed, int64_t depth) const {
    const int64_t ld = row_length<T>(p.head_dim);
    const int64_t blocks = (depth + kDepth - 1) / kDepth, block = (depth + blocks - 1) / blocks;
    for (int64_t d = 0; d < depth; d += block) {
      gemm<T>(count, heads, smaller(block, depth - d), {gathered + d, ld, 1}, transposed + d * heads, heads, dst, heads,
              d > 0);
    }
  }

  // sums (panels, H, kPanel) (+)= weights (count, heads), transposed, x the first `columns` columns of gathered rows.
  // Rows of weights are `weight_ld` apart.
  void add_weighted_rows(T* sums, const T* weights, int64_t weight_ld, const T* gathered, int64_t count, int64_t columns,
                         bool add) const {
    const int64_t ld = row_length<T>(p.head_dim);
    for (int64_t c = 0; c < columns; c += kPanel<T>, sums += p.heads * kPanel<T>) {
      const int64_t width = round_up(smaller(kPanel<T>, columns - c), kLanes<T>);
      for (int64_t k = 0; k < count; k += kKeyTile) {
        gemm<T>(p.heads, width, smaller(kKeyTile, count - k), {weights + k * weight_ld, 1, weight_ld},
                gathered + k * ld + c, ld, sums, kPanel<T>, add || k > 0);
      }
    }
  }

  // Row h of sums.
  void clear_sums(T* sums, int64_t h, int64_t columns) const {
    for (int64_t c = 0; c < columns; c += kPanel<T>) {
      __builtin_memset(sums + (c / kPanel<T> * p.heads + h) * kPanel<T>, 0, kPanel<T> * sizeof(T));
    }
  }

  // target[i, h] = factor * row h of sums.
  void store_sums(const Array& target, int64_t i, int64_t h, const T* sums, int64_t columns, T factor) const {
    for (int64_t c = 0; c < columns; c += kPanel<T>) {
      store_row(at(target, (i * p.heads + h) * columns + c), target.dtype, sums + (c / kPanel<T> * p.heads + h) * kPanel<T>,
                smaller(kPanel<T>, columns - c), factor);
    }
  }
};

template <class T>
int64_t panels(int64_t columns) {
  return (columns + kPanel<T> - 1) / kPanel<T>;
}

// The sink's logit as the contract reads it: the hardware's exponentials are in base 2, so a float32 sink whose product
// with log2(e) overflows counts as infinite.
inline double sink_logit(const Array& sink, int64_t h) {
  const double x = load_statistic(sink, h);
  const double scaled = x * 1.4426950408889634;
  const bool overflows = sink.dtype == DType::Float32 && __builtin_isinf(static_cast<float>(scaled));
  return overflows || __builtin_isinf(scaled) ? (x > 0 ? __builtin_inf() : -__builtin_inf()) : x;
}

// log of the softmax's denominator, sink included.
inline double log_denominator(const Problem& p, double lse, int64_t h) {
  return p.attn_sink.data ? logaddexp(lse, sink_logit(p.attn_sink, h)) : lse;
}

template <class T>
class Forward : Attention<T> {
 public:
  using Base = Attention<T>;
  using Base::Base;
  using Base::heads, Base::p, Base::runtime;

  void run() {
    const int64_t width = row_length<T>(p.head_dim), segment = larger(kLanes<T>, smaller(kKeySegment, p.topk));
    Scratch<T>* const scratch = allocate<Scratch<T>>(runtime, runtime.threads);
    int32_t* const lists = allocate<int32_t>(runtime, runtime.threads * p.topk);
    for (int t = 0; t < runtime.threads; ++t) {
      scratch[t].q = allocate<T>(runtime, p.head_dim * heads);
      scratch[t].rows = allocate<T>(runtime, segment * width);
      scratch[t].scores = allocate<T>(runtime, segment * heads);
      scratch[t].sums = allocate<T>(runtime, panels<T>(p.head_dim_v) * p.heads * kPanel<T>);
      scratch[t].maximum = allocate<T>(runtime, heads);
      scratch[t].total = allocate<T>(runtime, heads);
    }
    parallel(runtime, p.s_q, [&](int64_t i, int thread) { query(i, scratch[thread], lists + thread * p.topk); });
  }

 private:
  void query(int64_t i, const Scratch<T>& s, int32_t* rows) {
    int32_t offsets[kKeyRanges + 1];
    const int64_t count = p.s_kv > 0 ? Base::list_keys(i, rows, offsets) : 0;
    for (int64_t h = 0; h < heads; ++h) {
      s.maximum[h] = -__builtin_inf();
      s.total[h] = 0;
    }
    if (count > 0) Base::load_transposed(s.q, p.q, i, p.head_dim, s.rows);
    for (int64_t k = 0; k < count; k += kKeySegment) {
      const int64_t segment = smaller(kKeySegment, count - k);
      Base::gather(s.rows, rows + k, segment);
      Base::dot(s.scores, s.rows, segment, s.q, p.head_dim);
      softmax(s, segment, k > 0);
      Base::add_weighted_rows(s.sums, s.scores, heads, s.rows, segment, p.head_dim_v, k > 0);
    }
    for (int64_t h = 0; h < p.heads; ++h) finish(i, h, s);
  }

  // scores become exp(score - maximum so far); what was summed before is rescaled to the new maximum.
  void softmax(const Scratch<T>& s, int64_t count, bool rescale) {
    using V = Vec<T>;
    const T scale = static_cast<T>(p.softmax_scale);
    for (int64_t h = 0; h < heads; h += kLanes<T>) {
      const V before = load<V>(s.maximum + h);
      V highest = before;
      for (int64_t j = 0; j < count; ++j) highest = maximum(load<V>(s.scores + j * heads + h) * scale, highest);
      // Without a finite score yet there is nothing to subtract: -inf - -inf would be NaN.
      const V shift = highest == V{} - __builtin_inf() ? V{} : highest;
      const V factor = exp<T>(before - shift);
      V total = {};  // of this segment: one chain over a long list would round at every key
      for (int64_t j = 0; j < count; ++j) {
        T* const score = s.scores + j * heads + h;
        const V weight = exp<T>(load<V>(score) * scale - shift);
        store(score, weight);
        total += weight;
      }
      store(s.maximum + h, highest);
      store(s.total + h, load<V>(s.total + h) * factor + total);
      if (!rescale) continue;
      for (int64_t n = 0; n < panels<T>(p.head_dim_v); ++n) {
        for (int64_t l = 0; l < smaller(kLanes<T>, p.heads - h); ++l) {
          T* const sum = s.sums + (n * p.heads + h + l) * kPanel<T>;
          for (int64_t c = 0; c < kPanel<T>; c += kLanes<T>) store(sum + c, load<V>(sum + c) * factor[l]);
        }
      }
    }
  }

  void finish(int64_t i, int64_t h, const Scratch<T>& s) {
    const double highest = s.maximum[h], total = s.total[h];
    const bool empty = total == 0;
    const double lse = empty ? -__builtin_inf() : highest + __builtin_log(total);
    const double factor = empty ? 0 : __builtin_exp(highest - log_denominator(p, lse, h));
    store_statistic(p.lse, i * p.heads + h, lse);
    // Not 0 times what was summed: that may have overflowed, and without a key nothing was written there.
    if (factor == 0) Base::clear_sums(s.sums, h, p.head_dim_v);
    Base::store_sums(p.out, i, h, s.sums, p.head_dim_v, static_cast<T>(factor));
  }
};

template <class T>
class Backward : Attention<T> {
 public:
  using Base = Attention<T>;
  using Base::Base;
  using Base::heads, Base::p, Base::runtime;

  void run() {
    allocate_buffers();
    start_dkv();
    for (first = 0; first < p.s_q; first += queries) {
      in_chunk = smaller(queries, p.s_q - first);
      from = 0;
      do {
        to = from + capacity;
        parallel(runtime, in_chunk, [&](int64_t g, int thread) { query(g, scratch[thread]); });
        const int64_t columns = panels<T>(p.head_dim);
        parallel(runtime, ranges * columns, [&](int64_t task, int thread) {
          dkv_task(task / columns, task % columns * kPanel<T>, scratch[thread]);
        });
        from = to;
      } while (from < p.topk);
      add_d_sink();
    }
    finish_dkv();
    for (int64_t h = 0; p.d_sink.data && h < p.heads; ++h) store_statistic(p.d_sink, h, d_sink[h]);
  }

 private:
  Scratch<T>* scratch;
  int64_t queries, capacity;      // of a chunk: queries, keys of one query
  int64_t ranges;                 // parts of the kv rows with an owner each
  T* weights;                     // (queries, capacity, 2, heads): ds and p
  T *denominator, *delta;         // (queries, heads)
  double *sink_terms, *d_sink;    // (queries, H), (H)
  int32_t *lists, *offsets;       // (queries, K), (queries, kKeyRanges + 1)
  int64_t* counts;                // (queries)
  T* dkv;                         // (S_kv, D)
  T* dq_sums;                     // (panels, H, kPanel), where a query takes more than one pass
  // The chunk and the keys [from, to) of every list that the current pass is at.
  int64_t first, in_chunk, from, to;

  void allocate_buffers() {
    const int64_t budget = runtime.threads * kChunkBytes / (2 * sizeof(T) * heads), row = larger(p.topk, 1);
    const int64_t segment = smaller(kKeySegment, row), size = panels<T>(p.head_dim) * p.heads * kPanel<T>;
    capacity = smaller(row, larger(budget / kKeySegment, 1) * kKeySegment);
    queries = row > capacity ? 1 : larger(1, smaller(p.s_q, budget / row));
    ranges = 1;
    while (ranges < kKeyRanges && ranges * panels<T>(p.head_dim) < 8 * runtime.threads) ranges *= 2;
    weights = allocate<T>(runtime, queries * capacity * 2 * heads);
    denominator = allocate<T>(runtime, queries * heads);
    delta = allocate<T>(runtime, queries * heads);
    sink_terms = allocate<double>(runtime, queries * p.heads);
    d_sink = allocate<double>(runtime, p.heads);
    __builtin_memset(d_sink, 0, p.heads * sizeof(double));
    lists = allocate<int32_t>(runtime, queries * p.topk);
    offsets = allocate<int32_t>(runtime, queries * (kKeyRanges + 1));
    counts = allocate<int64_t>(runtime, queries);
    dq_sums = row > capacity ? allocate<T>(runtime, size) : nullptr;
    scratch = allocate<Scratch<T>>(runtime, runtime.threads);
    for (int t = 0; t < runtime.threads; ++t) {
      scratch[t].q = allocate<T>(runtime, p.head_dim * heads);
      scratch[t].dout = allocate<T>(runtime, p.head_dim_v * heads);
      scratch[t].columns = allocate<T>(runtime, 2 * heads * kPanel<T>);
      scratch[t].rows = allocate<T>(runtime, larger(segment, kLanes<T>) * row_length<T>(p.head_dim));
      scratch[t].scores = allocate<T>(runtime, segment * heads);
      scratch[t].products = allocate<T>(runtime, segment * heads);
      scratch[t].sums = dq_sums ? dq_sums : allocate<T>(runtime, size);
    }
  }

  static DType native() { return sizeof(T) == 8 ? DType::Float64 : DType::Float32; }

  // dkv is summed in T: in place where the caller's has that type.
  void start_dkv() {
    const int64_t size = p.s_kv * p.head_dim;
    const bool in_place = p.dkv.dtype == native();
    dkv = in_place ? static_cast<T*>(p.dkv.data) : allocate<T>(runtime, round_up(size, kLanes<T>));
    if (!in_place || !p.accumulate) {
      parallel(runtime, p.s_kv, [&](int64_t j, int) { __builtin_memset(dkv + j * p.head_dim, 0, p.head_dim * sizeof(T)); });
    }
  }

  void finish_dkv() {
    if (p.dkv.dtype == native()) return;
    parallel(runtime, p.s_kv, [&](int64_t j, int thread) {
      T* const row = scratch[thread].rows;
      const T* const sum = dkv + j * p.head_dim;
      char* const target = at(p.dkv, j * p.head_dim);
      if (p.accumulate) {
        load_row(row, target, p.dkv.dtype, p.head_dim);
        for (int64_t c = 0; c < p.head_dim; ++c) row[c] += sum[c];
      } else {
        __builtin_memcpy(row, sum, p.head_dim * sizeof(T));
      }
      store_row(target, p.dkv.dtype, row, p.head_dim);
    });
  }

  void prepare(int64_t g, const Scratch<T>& s) {
    const int64_t i = first + g;
    counts[g] = p.s_kv > 0 ? Base::list_keys(i, lists + g * p.topk, offsets + g * (kKeyRanges + 1)) : 0;
    for (int64_t h = 0; h < heads; ++h) {
      T& z = denominator[g * heads + h];
      T& product = delta[g * heads + h];
      // Z = +inf makes every p of the head zero: padding, a sink of +inf, and an lse of -inf (no finite score).
      z = __builtin_inf();
      product = 0;
      if (h >= p.heads) continue;
      double& term = sink_terms[g * p.heads + h];
      term = 0;
      if (counts[g] == 0) continue;
      const int64_t statistic = i * p.heads + h;
      const double exact = p.delta.data ? load_statistic(p.delta, statistic) : dot_out_dout(statistic, s);
      product = exact;
      const double log_z = log_denominator(p, load_statistic(p.lse, statistic), h);
      if (log_z == -__builtin_inf()) continue;
      z = log_z;
      const double sink = p.attn_sink.data ? sink_logit(p.attn_sink, h) : -__builtin_inf();
      if (!__builtin_isinf(sink)) term = -__builtin_exp(sink - log_z) * exact;
    }
  }

  // In float64: d_sink is a sum of deltas that cancel, and this costs nothing beside the products.
  double dot_out_dout(int64_t row, const Scratch<T>& s) const {
    using Wide = Vec<double>;
    constexpr int64_t kStep = kLanes<double>;
    const int64_t n = p.head_dim_v;
    T *const out = s.rows, *const dout = s.rows + row_length<T>(n);
    load_row(out, at(p.out, row * n), p.out.dtype, n);
    load_row(dout, at(p.dout, row * n), p.dout.dtype, n);
    const auto wide = [](const T* x) { return __builtin_convertvector(load<typename VecOf<T, kStep>::type>(x), Wide); };
    Wide even = {}, odd = {};
    for (int64_t c = 0; c < n; c += 2 * kStep) {
      even += wide(out + c) * wide(dout + c);
      if (c + kStep < n) odd += wide(out + c + kStep) * wide(dout + c + kStep);
    }
    even += odd;
    double total = 0;
    for (int l = 0; l < kStep; ++l) total += even[l];
    return total;
  }

  void add_d_sink() {
    for (int64_t g = 0; p.d_sink.data && g < in_chunk; ++g) {
      for (int64_t h = 0; h < p.heads; ++h) d_sink[h] += sink_terms[g * p.heads + h];
    }
  }

  // Where the weights of key k of the list of query g lie.
  T* slot(int64_t g, int64_t k) const { return weights + (g * capacity + k - from) * 2 * heads; }

  // p and ds of the keys [from, to) of query g, and their part of dq.
  void query(int64_t g, const Scratch<T>& s) {
    if (from == 0) prepare(g, s);
    const int64_t i = first + g, end = smaller(to, counts[g]);
    if (from < end) {
      Base::load_transposed(s.q, p.q, i, p.head_dim, s.rows);
      Base::load_transposed(s.dout, p.dout, i, p.head_dim_v, s.rows);
    }
    for (int64_t k = from; k < end; k += kKeySegment) {
      const int64_t segment = smaller(kKeySegment, end - k);
      Base::gather(s.rows, lists + g * p.topk + k, segment);
      Base::dot(s.scores, s.rows, segment, s.q, p.head_dim);
      Base::dot(s.products, s.rows, segment, s.dout, p.head_dim_v);
      softmax_backward(g, k, segment, s);
      Base::add_weighted_rows(s.sums, slot(g, k), 2 * heads, s.rows, segment, p.head_dim, k > 0);
    }
    for (int64_t h = 0; to >= p.topk && h < p.heads; ++h) {
      if (counts[g] == 0) Base::clear_sums(s.sums, h, p.head_dim);
      Base::store_sums(p.dq, i, h, s.sums, p.head_dim, T(1));
    }
  }

  void softmax_backward(int64_t g, int64_t k, int64_t count, const Scratch<T>& s) {
    using V = Vec<T>;
    const T scale = static_cast<T>(p.softmax_scale), infinity = __builtin_inf();
    for (int64_t h = 0; h < heads; h += kLanes<T>) {
      const V z = load<V>(denominator + g * heads + h), d = load<V>(delta + g * heads + h);
      for (int64_t j = 0; j < count; ++j) {
        // Of a weight of zero nothing passes, whatever has overflowed beside it: 0 * inf and inf - inf are NaN.
        const V weight = z == V{} + infinity ? V{} : exp<T>(load<V>(s.scores + j * heads + h) * scale - z);
        const V passed = weight * (load<V>(s.products + j * heads + h) - d) * scale;
        const V gradient = weight == V{} ? V{} : passed;
        store(slot(g, k + j) + h, gradient);
        store(slot(g, k + j) + heads + h, weight);
      }
    }
  }

  // dst (heads, kPanel) = columns [c0, c0 + kPanel) of source[i] (H, length), zero beyond.
  void load_columns(T* dst, const Array& source, int64_t i, int64_t length, int64_t c0) const {
    const int64_t n = smaller(kPanel<T>, length - c0);
    if (n < kPanel<T> || p.heads < heads) __builtin_memset(dst, 0, heads * kPanel<T> * sizeof(T));
    load_rows(dst, kPanel<T>, at(source, i * p.heads * length + c0), source.dtype, length, p.heads, n);
  }

  // Columns [c0, c0 + kPanel) of the dkv rows in owned range `part`, all queries of the chunk.
  void dkv_task(int64_t part, int64_t c0, const Scratch<T>& s) {
    const int64_t ranges_each = kKeyRanges / ranges, n = smaller(kPanel<T>, p.head_dim - c0);
    for (int64_t g = 0; g < in_chunk; ++g) {
      if (counts[g] == 0) continue;
      const int32_t* const bounds = offsets + g * (kKeyRanges + 1) + part * ranges_each;
      const int64_t begin = larger(bounds[0], from), end = smaller(bounds[ranges_each], to);
      if (begin >= end) continue;
      // One product: ds x q and p x dout are a contraction over twice the heads.
      const bool has_value = c0 < p.head_dim_v;
      load_columns(s.columns, p.q, first + g, p.head_dim, c0);
      if (has_value) load_columns(s.columns + heads * kPanel<T>, p.dout, first + g, p.head_dim_v, c0);
      for (int64_t k = begin; k < end; k += kTileRows) {
        with_tile(smaller(kTileRows, end - k), round_up(n, kLanes<T>) / kLanes<T>, [&](auto rows, auto vectors) {
          add_to_dkv<decltype(rows)::value, decltype(vectors)::value>(g, k, c0, n, has_value ? heads + p.heads : p.heads, s);
        });
      }
    }
  }

  template <int kRows, int kVectors>
  void add_to_dkv(int64_t g, int64_t k, int64_t c0, int64_t n, int64_t depth, const Scratch<T>& s) {
    using V = Vec<T>;
    const int32_t* const rows = lists + g * p.topk + k;
    for (int m = 0; m < kRows; ++m) prefetch(dkv + rows[m] * p.head_dim + c0, n * sizeof(T));
    V acc[kRows][kVectors] = {};
    multiply<T, kRows, kVectors>(acc, depth, {slot(g, k), 2 * heads, 1}, s.columns, kPanel<T>);
    if (n == kVectors * kLanes<T>) {
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        T* const target = dkv + rows[m] * p.head_dim + c0;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          store(target + v * kLanes<T>, load<V>(target + v * kLanes<T>) + acc[m][v]);
        }
      }
    } else {  // the last vector reaches beyond the row
      T values[kRows][kVectors * kLanes<T>];
      __builtin_memcpy(values, acc, sizeof values);
      for (int m = 0; m < kRows; ++m) {
        T* const target = dkv + rows[m] * p.head_dim + c0;
        for (int64_t c = 0; c < n; ++c) target[c] += values[m][c];
      }
    }
  }
};

void forward(const Problem& problem, Runtime& runtime) {
  if (problem.q.dtype == DType::Float64) {
    Forward<double>(problem, runtime).run();
  } else {
    Forward<float>(problem, runtime).run();
  }
}

void backward(const Problem& problem, Runtime& runtime) {
  if (problem.q.dtype == DType::Float64) {
    Backward<double>(problem, runtime).run();
  } else {
    Backward<float>(problem, runtime).run();
  }
}

}  // namespace DSA_ISA
}  // namespace cudnn_dsa
