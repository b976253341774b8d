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

// One block of keys of one key head, packed, and its gradients.
struct KeyBlock {
  int64_t s0, s1, width, Hp, Hvp;
  float *keys, *values, *keys_t, *values_t, *d_keys, *d_values, *poison;
  bool spoilt;

  static int64_t Floats(int64_t width, int64_t Hp, int64_t Hvp) {
    return width * (3 * Hp + 3 * Hvp + 1);
  }
  KeyBlock(const Problem& p, float* memory, int64_t most) : Hp(RoundUp(p.H)), Hvp(RoundUp(p.Hv)) {
    keys = memory;
    values = keys + most * Hp;
    keys_t = values + most * Hvp;
    values_t = keys_t + most * Hp;
    d_keys = values_t + most * Hvp;
    d_values = d_keys + most * Hp;
    poison = d_values + most * Hvp;
  }
  void Read(const Problem& p, int64_t b, int64_t kv, int64_t from, int64_t to) {
    s0 = from, s1 = to, width = RoundUp(to - from);
    std::fill_n(poison, width, 0.0f);
    spoilt = Pack(p.Keys(b, kv), s0, s1, p.H, 1.0f, keys, Hp, poison);
    spoilt |= Pack(p.Values(b, kv), s0, s1, p.Hv, 1.0f, values, Hvp, poison);
    TransposePadded(keys, Hp, s1 - s0, p.H, keys_t, width);
    TransposePadded(values, Hvp, s1 - s0, p.Hv, values_t, width);
    std::fill_n(d_keys, width * Hp, 0.0f);
    std::fill_n(d_values, width * Hvp, 0.0f);
  }
};

// The queries of all heads that share a key head, in one part of the sequence, packed; what is saved
// of each, and their gradient so far.
struct QueryPart {
  int64_t rows, Hp, Hvp;
  float *q, *d_q, *d_o, *peak, *factor, *delta, *poison;
  bool spoilt = false;

  static int64_t Floats(int64_t rows, int64_t Hp, int64_t Hvp) { return rows * (2 * Hp + Hvp + 4); }
  QueryPart(const Problem& p, float* memory, int64_t rows)
      : rows(rows), Hp(RoundUp(p.H)), Hvp(RoundUp(p.Hv)) {
    q = memory;
    d_q = q + rows * Hp;
    d_o = d_q + rows * Hp;
    peak = d_o + rows * Hvp;
    factor = peak + rows;
    delta = factor + rows;
    poison = delta + rows;
    std::fill_n(d_q, rows * Hp, 0.0f);
    std::fill_n(poison, rows, 0.0f);
  }
  // Head n, queries [t0, t1), into the rows from `at` on.
  void Read(const Problem& p, int64_t b, int64_t n, int64_t t0, int64_t t1, int64_t at,
            const float* out, Sums saved, const float* d_out, const float* d_lse) {
    const int64_t some = t1 - t0, first = (b * p.N + n) * p.T + t0;
    spoilt |= Pack(p.Queries(p.q, b, n, p.H), t0, t1, p.H, p.scale, q + at * Hp, Hp, poison + at);
    const Rows outs = p.Queries(out, b, n, p.Hv), d_outs = p.Queries(d_out, b, n, p.Hv);
    for (int64_t t = 0; t < some; ++t) {
      float* to = d_o + (at + t) * Hvp;
      std::copy_n(d_outs[t0 + t], p.Hv, to);
      std::fill(to + p.Hv, to + Hvp, 0.0f);
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
inline void Differentiate(float* weights, float* d_s, int64_t rows, int64_t width,
                          const float* peak, const float* factor, const float* delta) {
  for (int64_t t = 0; t < rows; ++t, weights += width, d_s += width) {
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
  const int64_t Sp = RoundUp(std::min<int64_t>(kKeyBlock, p.S)), some = t1 - t0;
  const int64_t rows = group * some, step = p.QueryBlock();
  float* memory = Scratch(KeyBlock::Floats(Sp, Hp, Hvp) + QueryPart::Floats(rows, Hp, Hvp) +
                          2 * step * Sp);
  float *weights = memory, *d_s = memory + step * Sp;
  KeyBlock x(p, d_s + step * Sp, Sp);
  QueryPart y(p, d_s + step * Sp + KeyBlock::Floats(Sp, Hp, Hvp), rows);
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
        float *q = y.q + i * Hp, *d_o = y.d_o + i * Hvp;
        Gemm(count, width, H, q, Hp, 1, x.keys_t + at, x.width, weights, width, false);
        Hide(weights, width, t, end, span, mask, y.poison + i, x.poison + at, x.spoilt | y.spoilt);
        Gemm(count, width, Hv, d_o, Hvp, 1, x.values_t + at, x.width, d_s, width, false);
        Differentiate(weights, d_s, count, width, y.peak + i, y.factor + i, y.delta + i);
        Gemm(keys, Hvp, count, weights, 1, width, d_o, Hvp, x.d_values + at * Hvp, Hvp, true);
        Gemm(keys, Hp, count, d_s, 1, width, q, Hp, x.d_keys + at * Hp, Hp, true);
        Gemm(count, Hp, keys, d_s, width, 1, x.keys + at * Hp, Hp, y.d_q + i * Hp, Hp, true);
      }
    }
    for (int64_t s = s0; s < s1; ++s) {
      float *d_k = d.k + ((b * p.S + s) * p.K + kv) * H, *d_v = d.v + ((b * p.S + s) * p.K + kv) * Hv;
      if (read) {
        std::copy_n(x.d_keys + (s - s0) * Hp, H, d_k);
        std::copy_n(x.d_values + (s - s0) * Hvp, Hv, d_v);
      } else {
        std::fill_n(d_k, H, 0.0f);
        std::fill_n(d_v, Hv, 0.0f);
      }
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t t = 0; t < some; ++t) {
      const float* from = y.d_q + (g * some + t) * Hp;
      float* to = d.q + ((b * p.T + t0 + t) * p.N + kv * group + g) * H;
      for (int64_t h = 0; h < H; ++h) to[h] = from[h] * p.scale;
    }
  }
}

}  // namespace crossattn
