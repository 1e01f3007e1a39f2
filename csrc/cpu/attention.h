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
// Weights (scores, p, ds) lie as (keys, heads), heads padded to whole vectors. K rows are gathered a tile at a time.
//
// Backward works on chunks of queries whose p and ds fit a fixed budget, in three parallel steps:
//   prepare     per query: the list of valid keys, Z, delta, the query's term of d_sink
//   scores      per 512 keys of a query: p and ds into the chunk's buffer
//   gradients   per panel of columns and range of kv rows: dkv of all the chunk's queries, in order; and per panel of
//               columns and query: dq
//
// Results do not depend on the number of threads, nor on who runs what: a dkv element has one owner per chunk, which
// adds the terms query by query and, within a query, in the order of its list; every term is one chain over the heads.
// The list is the order of topk_idxs, stably partitioned into kKeyRanges ranges of kv rows so that an owner of a range
// finds its keys together.
#pragma once

#include "gemm.h"

namespace cudnn_dsa {
namespace DSA_ISA {

constexpr int64_t kKeyTile = 64;           // gathered rows in flight; a panel of them and its weights stay in L1
constexpr int64_t kDepth = 96;             // steps of D between which scores leave the registers: shorter chains
                                           // round less, and a block of transposed q stays in L1
constexpr int64_t kKeySegment = 8 * kKeyTile;  // keys scored at once; passes and segments start at whole tiles
constexpr int64_t kKeyRanges = 16;         // parts of the kv rows that lists are partitioned into
constexpr int64_t kChunkBytes = 4 << 20;   // p and ds of one chunk
constexpr int64_t kCacheLine = 64;
constexpr int64_t kRowsAhead = 4;          // distance at which gathered rows are prefetched

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
  T* rows;               // gathered rows (kKeyTile, row_length(D)), or panels of them
  T *scores, *products;  // (kKeySegment, heads), (kKeyTile, heads)
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

  // dst (count, ld) = columns [c0, c0 + n) of the given rows of kv.
  void gather(T* dst, int64_t ld, const int32_t* rows, int64_t count, int64_t c0, int64_t n) const {
    const int64_t bytes = n * element_size(p.kv.dtype);
    const auto row = [&](int64_t j) { return at(p.kv, rows[j] * p.head_dim + c0); };
    for (int64_t j = 0; j < count; ++j) {
      // No hardware prefetcher guesses the next row.
      if (j + kRowsAhead < count) prefetch(row(j + kRowsAhead), bytes);
      load_row(dst + j * ld, row(j), p.kv.dtype, n);
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

  // sums (H, kPanel) += weights (keys, heads), transposed, x columns [c0, c0 + n) of the given rows of kv.
  void add_weighted_rows(T* sums, const T* weights, const int32_t* rows, int64_t count, int64_t c0, int64_t n,
                         T* panel) const {
    const int64_t width = round_up(n, kLanes<T>);
    for (int64_t k = 0; k < count; k += kKeyTile) {
      const int64_t tile = smaller(kKeyTile, count - k);
      gather(panel, width, rows + k, tile, c0, n);
      gemm<T>(p.heads, width, tile, {weights + k * heads, 1, heads}, panel, width, sums, kPanel<T>, true);
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
    const int64_t width = row_length<T>(p.head_dim);
    Scratch<T>* const scratch = allocate<Scratch<T>>(runtime, runtime.threads);
    int32_t* const lists = allocate<int32_t>(runtime, runtime.threads * p.topk);
    for (int t = 0; t < runtime.threads; ++t) {
      scratch[t].q = allocate<T>(runtime, p.head_dim * heads);
      scratch[t].rows = allocate<T>(runtime, kKeyTile * width);
      scratch[t].scores = allocate<T>(runtime, kKeySegment * heads);
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
    const int64_t panel_size = p.heads * kPanel<T>;
    for (int64_t h = 0; h < heads; ++h) {
      s.maximum[h] = -__builtin_inf();
      s.total[h] = 0;
    }
    __builtin_memset(s.sums, 0, panels<T>(p.head_dim_v) * panel_size * sizeof(T));
    if (count > 0) Base::load_transposed(s.q, p.q, i, p.head_dim, s.rows);
    for (int64_t k = 0; k < count; k += kKeySegment) {
      const int64_t segment = smaller(kKeySegment, count - k);
      for (int64_t j = 0; j < segment; j += kKeyTile) {
        const int64_t tile = smaller(kKeyTile, segment - j);
        Base::gather(s.rows, row_length<T>(p.head_dim), rows + k + j, tile, 0, p.head_dim);
        Base::dot(s.scores + j * heads, s.rows, tile, s.q, p.head_dim);
      }
      softmax(s, segment, k > 0);
      for (int64_t c = 0; c < p.head_dim_v; c += kPanel<T>) {
        Base::add_weighted_rows(s.sums + c / kPanel<T> * panel_size, s.scores, rows + k, segment, c,
                                smaller(kPanel<T>, p.head_dim_v - c), s.rows);
      }
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
      V total = load<V>(s.total + h) * factor;
      for (int64_t j = 0; j < count; ++j) {
        T* const score = s.scores + j * heads + h;
        const V weight = exp<T>(load<V>(score) * scale - shift);
        store(score, weight);
        total += weight;
      }
      store(s.maximum + h, highest);
      store(s.total + h, total);
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
    for (int64_t c = 0; c < p.head_dim_v; c += kPanel<T>) {
      store_row(at(p.out, (i * p.heads + h) * p.head_dim_v + c), p.out.dtype,
                s.sums + (c / kPanel<T> * p.heads + h) * kPanel<T>, smaller(kPanel<T>, p.head_dim_v - c),
                static_cast<T>(factor));
    }
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
      parallel(runtime, in_chunk, [&](int64_t g, int thread) { prepare(g, scratch[thread]); });
      add_d_sink();
      int64_t longest = 0;
      for (int64_t g = 0; g < in_chunk; ++g) longest = larger(longest, counts[g]);
      for (from = 0; from < longest || from == 0; from = to) {
        to = from + capacity;
        last_pass = to >= longest;
        const int64_t segments = (smaller(longest - from, capacity) + kKeySegment - 1) / kKeySegment;
        parallel(runtime, in_chunk * segments, [&](int64_t task, int thread) {
          scores(task / segments, from + task % segments * kKeySegment, scratch[thread]);
        });
        // The large tasks first: the small ones then even out the threads.
        const int64_t columns = panels<T>(p.head_dim), owners = columns * ranges;
        parallel(runtime, owners + in_chunk * columns, [&](int64_t task, int thread) {
          if (task < owners) {
            dkv_task(task / columns, task % columns * kPanel<T>, scratch[thread]);
          } else {
            dq_task((task - owners) / columns, (task - owners) % columns * kPanel<T>, scratch[thread]);
          }
        });
      }
    }
    finish_dkv();
    for (int64_t h = 0; p.d_sink.data && h < p.heads; ++h) store_statistic(p.d_sink, h, d_sink[h]);
  }

 private:
  Scratch<T>* scratch;
  int64_t queries, capacity;      // of a chunk: queries, keys of one query
  int64_t ranges;                 // parts of the kv rows with an owner each
  T *weights_p, *weights_ds;      // (queries, capacity, heads)
  T *denominator, *delta;         // (queries, heads)
  double *sink_terms, *d_sink;    // (queries, H), (H)
  int32_t *lists, *offsets;       // (queries, K), (queries, kKeyRanges + 1)
  int64_t* counts;                // (queries)
  T* dkv;                         // (S_kv, D)
  T* dq_sums;                     // (panels, H, kPanel), where a query takes more than one pass
  // The chunk and the keys [from, to) of every list that the current pass is at.
  int64_t first, in_chunk, from, to;
  bool last_pass;

  void allocate_buffers() {
    const int64_t budget = kChunkBytes / (2 * sizeof(T) * heads);
    const int64_t row = round_up(larger(p.topk, 1), kKeyTile);
    capacity = smaller(row, larger(budget / kKeySegment, 1) * kKeySegment);
    queries = row > capacity ? 1 : larger(1, smaller(p.s_q, budget / row));
    ranges = 1;
    while (ranges < kKeyRanges && ranges * panels<T>(p.head_dim) < 8 * runtime.threads) ranges *= 2;
    weights_p = allocate<T>(runtime, queries * capacity * heads);
    weights_ds = allocate<T>(runtime, queries * capacity * heads);
    denominator = allocate<T>(runtime, queries * heads);
    delta = allocate<T>(runtime, queries * heads);
    sink_terms = allocate<double>(runtime, queries * p.heads);
    d_sink = allocate<double>(runtime, p.heads);
    __builtin_memset(d_sink, 0, p.heads * sizeof(double));
    lists = allocate<int32_t>(runtime, queries * p.topk);
    offsets = allocate<int32_t>(runtime, queries * (kKeyRanges + 1));
    counts = allocate<int64_t>(runtime, queries);
    dq_sums = row > capacity ? allocate<T>(runtime, panels<T>(p.head_dim) * p.heads * kPanel<T>) : nullptr;
    scratch = allocate<Scratch<T>>(runtime, runtime.threads);
    for (int t = 0; t < runtime.threads; ++t) {
      scratch[t].q = allocate<T>(runtime, larger(p.head_dim * heads, p.heads * kPanel<T>));
      scratch[t].dout = allocate<T>(runtime, larger(p.head_dim_v * heads, p.heads * kPanel<T>));
      scratch[t].rows = allocate<T>(runtime, kKeyTile * row_length<T>(p.head_dim));
      scratch[t].scores = allocate<T>(runtime, kKeyTile * heads);
      scratch[t].products = allocate<T>(runtime, kKeyTile * heads);
      scratch[t].sums = allocate<T>(runtime, p.heads * kPanel<T>);
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
    Wide sum = {};
    for (int64_t c = 0; c < n; c += kStep) sum += wide(out + c) * wide(dout + c);
    double total = 0;
    for (int l = 0; l < kStep; ++l) total += sum[l];
    return total;
  }

  void add_d_sink() {
    for (int64_t g = 0; p.d_sink.data && g < in_chunk; ++g) {
      for (int64_t h = 0; h < p.heads; ++h) d_sink[h] += sink_terms[g * p.heads + h];
    }
  }

  // Where the weights of key k of the list of query g lie.
  int64_t slot(int64_t g, int64_t k) const { return (g * capacity + k - from) * heads; }

  // p and ds of the keys [begin, begin + kKeySegment) of query g.
  void scores(int64_t g, int64_t begin, const Scratch<T>& s) {
    const int64_t end = smaller(smaller(begin + kKeySegment, to), counts[g]), i = first + g;
    if (begin >= end) return;
    Base::load_transposed(s.q, p.q, i, p.head_dim, s.rows);
    Base::load_transposed(s.dout, p.dout, i, p.head_dim_v, s.rows);
    for (int64_t k = begin; k < end; k += kKeyTile) {
      const int64_t tile = smaller(kKeyTile, end - k);
      Base::gather(s.rows, row_length<T>(p.head_dim), lists + g * p.topk + k, tile, 0, p.head_dim);
      Base::dot(s.scores, s.rows, tile, s.q, p.head_dim);
      Base::dot(s.products, s.rows, tile, s.dout, p.head_dim_v);
      softmax_backward(g, k, tile, s);
    }
  }

  void softmax_backward(int64_t g, int64_t k, int64_t count, const Scratch<T>& s) {
    using V = Vec<T>;
    const T scale = static_cast<T>(p.softmax_scale);
    for (int64_t h = 0; h < heads; h += kLanes<T>) {
      const V z = load<V>(denominator + g * heads + h), d = load<V>(delta + g * heads + h);
      for (int64_t j = 0; j < count; ++j) {
        const V weight = exp<T>(load<V>(s.scores + j * heads + h) * scale - z);
        const V gradient = weight * (load<V>(s.products + j * heads + h) - d) * scale;
        store(weights_p + slot(g, k + j) + h, weight);
        store(weights_ds + slot(g, k + j) + h, gradient);
      }
    }
  }

  // dst (H, kPanel) = columns [c0, c0 + n) of source[i] (H, length), zero beyond.
  void load_columns(T* dst, const Array& source, int64_t i, int64_t length, int64_t c0) const {
    const int64_t n = smaller(kPanel<T>, length - c0), loaded = round_up(n, kLanes<T>);
    for (int64_t h = 0; h < p.heads; ++h) {
      load_row(dst + h * kPanel<T>, at(source, (i * p.heads + h) * length + c0), source.dtype, n);
      __builtin_memset(dst + h * kPanel<T> + loaded, 0, (kPanel<T> - loaded) * sizeof(T));
    }
  }

  // Columns [c0, c0 + kPanel) of the dkv rows in owned range `part`, all queries of the chunk.
  void dkv_task(int64_t part, int64_t c0, const Scratch<T>& s) {
    const int64_t ranges_each = kKeyRanges / ranges, n = smaller(kPanel<T>, p.head_dim - c0);
    for (int64_t g = 0; g < in_chunk; ++g) {
      if (counts[g] == 0) continue;
      const int32_t* const bounds = offsets + g * (kKeyRanges + 1) + part * ranges_each;
      const int64_t begin = larger(bounds[0], from), end = smaller(bounds[ranges_each], to);
      if (begin >= end) continue;
      load_columns(s.q, p.q, first + g, p.head_dim, c0);
      const bool has_value = c0 < p.head_dim_v;
      if (has_value) load_columns(s.dout, p.dout, first + g, p.head_dim_v, c0);
      for (int64_t k = begin; k < end; k += kTileRows) {
        with_tile(smaller(kTileRows, end - k), round_up(n, kLanes<T>) / kLanes<T>, [&](auto rows, auto vectors) {
          add_to_dkv<decltype(rows)::value, decltype(vectors)::value>(g, k, c0, n, has_value, s);
        });
      }
    }
  }

  template <int kRows, int kVectors>
  void add_to_dkv(int64_t g, int64_t k, int64_t c0, int64_t n, bool has_value, const Scratch<T>& s) {
    using V = Vec<T>;
    const int32_t* const rows = lists + g * p.topk + k;
    for (int m = 0; m < kRows; ++m) prefetch(dkv + rows[m] * p.head_dim + c0, n * sizeof(T));
    V acc[kRows][kVectors] = {};
    multiply<T, kRows, kVectors>(acc, p.heads, {weights_ds + slot(g, k), heads, 1}, s.q, kPanel<T>);
    if (has_value) multiply<T, kRows, kVectors>(acc, p.heads, {weights_p + slot(g, k), heads, 1}, s.dout, kPanel<T>);
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

  // Columns [c0, c0 + kPanel) of dq of query g.
  void dq_task(int64_t g, int64_t c0, const Scratch<T>& s) {
    const int64_t n = smaller(kPanel<T>, p.head_dim - c0), size = p.heads * kPanel<T>;
    T* const sums = dq_sums ? dq_sums + c0 / kPanel<T> * size : s.sums;
    if (from == 0) __builtin_memset(sums, 0, size * sizeof(T));
    const int64_t count = smaller(to, counts[g]) - from;
    if (count > 0) {
      Base::add_weighted_rows(sums, weights_ds + slot(g, from), lists + g * p.topk + from, count, c0, n, s.rows);
    }
    if (!last_pass) return;
    for (int64_t h = 0; h < p.heads; ++h) {
      store_row(at(p.dq, ((first + g) * p.heads + h) * p.head_dim + c0), p.dq.dtype, sums + h * kPanel<T>, n);
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
