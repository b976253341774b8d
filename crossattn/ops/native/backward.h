// The backward pass: weights are made again block by block (Dao et al. 2022, "FlashAttention").
#pragma once

#include "problem.h"

namespace crossattn {

// delta = sum of out d_out of each row: what the weights' gradients have in common.
//
// Added up in the order of `Gemm`, one product after the other: a query that reads one key alone
// then has a gradient of exactly 0, however large its logits. Several rows hide the latency.
inline void Deltas(Rows out, Rows d_out, int64_t t0, int64_t t1, int64_t size, float* delta) {
  constexpr int64_t kRows = 8;
  for (int64_t t = t0; t < t1; t += kRows) {
    float sums[kRows] = {};
    const int64_t rows = std::min(kRows, t1 - t);
    const float *o[kRows], *g[kRows];
    for (int64_t i = 0; i < kRows; ++i) {
      o[i] = out[t + std::min(i, rows - 1)];
      g[i] = d_out[t + std::min(i, rows - 1)];
    }
    for (int64_t h = 0; h < size; ++h)
      for (int64_t i = 0; i < kRows; ++i) sums[i] = __builtin_fmaf(g[i][h], o[i][h], sums[i]);
    std::copy_n(sums, rows, delta + t - t0);
  }
}

struct Gradients {
  float *q, *k, *v;
};

// From row to row of packed queries and keys, of values and their gradients, and of blocks of logits.
struct Strides {
  int64_t h, hv, s;
  explicit Strides(const Problem& p)
      : h(RowOf(p.H)), hv(RowOf(p.Hv)), s(RowOf(std::min<int64_t>(kKeyBlock, p.S))) {}
};

// One block of keys of one key head, packed, and its gradients.
struct KeyBlock {
  int64_t s0, s1;
  Strides row;
  float *keys, *values, *keys_t, *values_t, *d_keys, *d_values, *poison;
  bool spoilt;

  static int64_t Floats(const Problem& p) {
    const Strides row(p);
    return 2 * row.s * (row.h + row.hv) + row.s * (p.H + p.Hv + 1);
  }
  KeyBlock(const Problem& p, float* memory) : row(p) {
    keys = memory;
    values = keys + row.s * row.h;
    d_keys = values + row.s * row.hv;
    d_values = d_keys + row.s * row.h;
    keys_t = d_values + row.s * row.hv;
    values_t = keys_t + row.s * p.H;
    poison = values_t + row.s * p.Hv;
  }
  void Read(const Problem& p, int64_t b, int64_t kv, int64_t from, int64_t to) {
    s0 = from, s1 = to;
    std::fill_n(poison, s1 - s0, 0.0f);
    spoilt = Pack(p.Keys(b, kv), s0, s1, p.H, 1.0f, keys, row.h, poison);
    spoilt |= Pack(p.Values(b, kv), s0, s1, p.Hv, 1.0f, values, row.hv, poison);
    TransposePadded(keys, row.h, s1 - s0, p.H, keys_t, row.s);
    TransposePadded(values, row.hv, s1 - s0, p.Hv, values_t, row.s);
    std::fill_n(d_keys, (s1 - s0) * row.h, 0.0f);
    std::fill_n(d_values, (s1 - s0) * row.hv, 0.0f);
  }
};

// The queries of all heads that share a key head, in one part of the sequence, packed; what is saved
// of each, and their gradient so far.
struct QueryPart {
  Strides row;
  float *q, *d_q, *d_o, *peak, *factor, *delta, *poison;
  bool spoilt = false;

  static int64_t Floats(const Problem& p, int64_t rows) {
    const Strides row(p);
    return RoundUp(rows, 16) * (2 * row.h + row.hv + 4);
  }
  QueryPart(const Problem& p, float* memory, int64_t rows) : row(p) {
    const int64_t each = RoundUp(rows, 16);
    q = memory;
    d_q = q + each * row.h;
    d_o = d_q + each * row.h;
    peak = d_o + each * row.hv;
    factor = peak + each;
    delta = factor + each;
    poison = delta + each;
    std::fill_n(d_q, rows * row.h, 0.0f);
    std::fill_n(poison, rows, 0.0f);
  }
  // Head n, queries [t0, t1), into the rows from `at` on.
  void Read(const Problem& p, int64_t b, int64_t n, int64_t t0, int64_t t1, int64_t at,
            const float* out, Sums saved, const float* d_out, const float* d_lse) {
    const int64_t some = t1 - t0, first = (b * p.N + n) * p.T + t0;
    spoilt |= Pack(p.Queries(p.q, b, n, p.H), t0, t1, p.H, p.scale, q + at * row.h, row.h, poison + at);
    const Rows outs = p.Queries(out, b, n, p.Hv), d_outs = p.Queries(d_out, b, n, p.Hv);
    for (int64_t t = 0; t < some; ++t) {
      float* to = d_o + (at + t) * row.hv;
      std::copy_n(d_outs[t0 + t], p.Hv, to);
      std::fill(to + p.Hv, to + row.hv, 0.0f);
    }
    Deltas(outs, d_outs, t0, t1, p.Hv, delta + at);
    for (int64_t t = 0; t < some; ++t) {
      const float most = saved.peak[first + t], total = saved.total[first + t];
      peak[at + t] = most == -kInf ? 0.0f : most;
      factor[at + t] = total == 0.0f ? 0.0f : 1.0f / total;
      delta[at + t] -= d_lse[first + t];
    }
  }
};

// Logits [rows, width] become weights, and the gradients of the weights those of the logits.
inline void Differentiate(float* weights, float* d_s, int64_t row, int64_t rows, int64_t width,
                          const float* peak, const float* factor, const float* delta) {
  for (int64_t t = 0; t < rows; ++t, weights += row, d_s += row) {
    for (int64_t s = 0; s < width; s += kWidth) {
      const Vec logits = Load(weights + s), w = Exp(logits - peak[t]) * factor[t];
      Store(weights + s, w);
      const IntVec hidden = logits == Splat(-kInf);
      Store(d_s + s, hidden ? Vec{} : w * (Load(d_s + s) - delta[t]));
    }
  }
}

// Gradients from the queries [t0, t1) of the heads that share a key head: d.q of those queries, and
// their share in d.k and d.v, which is written, not added. A block of keys meets all those queries.
inline void BackwardPart(const Problem& p, int64_t b, int64_t kv, int64_t t0, int64_t t1,
                         const float* out, Sums saved, const float* d_out, const float* d_lse,
                         Gradients d) {
  const int64_t H = p.H, Hp = RoundUp(H), Hv = p.Hv, Hvp = RoundUp(Hv), group = p.N / p.K;
  const int64_t some = t1 - t0, rows = group * some, step = p.QueryBlock();
  const Strides row(p);
  float* memory =
      Scratch(KeyBlock::Floats(p) + QueryPart::Floats(p, rows) + 2 * step * row.s);
  float *weights = memory, *d_s = weights + step * row.s;
  KeyBlock x(p, d_s + step * row.s);
  QueryPart y(p, d_s + step * row.s + KeyBlock::Floats(p), rows);
  for (int64_t g = 0; g < group; ++g)
    y.Read(p, b, kv * group + g, t0, t1, g * some, out, saved, d_out, d_lse);

  for (int64_t s0 = 0; s0 < p.S; s0 += kKeyBlock) {
    const int64_t s1 = std::min(p.S, s0 + kKeyBlock);
    bool read = false;
    for (int64_t g = 0; g < group; ++g) {
      const Mask mask = p.MaskOf(b, kv * group + g);
      if (mask.Read(t0, t1, s0, s1).empty()) continue;
      if (!read) x.Read(p, b, kv, s0, s1);
      read = true;
      for (int64_t t = t0; t < t1; t += step) {
        const int64_t end = std::min(t1, t + step), count = end - t, i = g * some + t - t0;
        const Span span = mask.Read(t, end, s0, s1);
        if (span.empty()) continue;
        const int64_t keys = span.to - span.from, width = RoundUp(keys), at = span.from - s0;
        float *q = y.q + i * row.h, *d_o = y.d_o + i * row.hv;
        Gemm(count, width, H, q, row.h, 1, x.keys_t + at, row.s, weights, row.s, false);
        Hide(weights, row.s, width, t, end, span, mask, y.poison + i, x.poison + at,
             x.spoilt | y.spoilt);
        Gemm(count, width, Hv, d_o, row.hv, 1, x.values_t + at, row.s, d_s, row.s, false);
        Differentiate(weights, d_s, row.s, count, width, y.peak + i, y.factor + i, y.delta + i);
        float *d_values = x.d_values + at * row.hv, *d_keys = x.d_keys + at * row.h;
        Gemm(keys, Hvp, count, weights, 1, row.s, d_o, row.hv, d_values, row.hv, true);
        Gemm(keys, Hp, count, d_s, 1, row.s, q, row.h, d_keys, row.h, true);
        Gemm(count, Hp, keys, d_s, row.s, 1, x.keys + at * row.h, row.h, y.d_q + i * row.h, row.h,
             true);
      }
    }
    for (int64_t s = s0; s < s1; ++s) {
      float *d_k = d.k + ((b * p.S + s) * p.K + kv) * H, *d_v = d.v + ((b * p.S + s) * p.K + kv) * Hv;
      if (read) {
        std::copy_n(x.d_keys + (s - s0) * row.h, H, d_k);
        std::copy_n(x.d_values + (s - s0) * row.hv, Hv, d_v);
      } else {
        std::fill_n(d_k, H, 0.0f);
        std::fill_n(d_v, Hv, 0.0f);
      }
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t t = 0; t < some; ++t) {
      const float* from = y.d_q + (g * some + t) * row.h;
      float* to = d.q + ((b * p.T + t0 + t) * p.N + kv * group + g) * H;
      for (int64_t h = 0; h < H; ++h) to[h] = from[h] * p.scale;
    }
  }
}

}  // namespace crossattn
