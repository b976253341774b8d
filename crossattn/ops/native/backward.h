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

// All gradients of one key head: its keys and values, and the queries of the heads that share it.
inline void BackwardHead(const Problem& p, int64_t b, int64_t kv, const float* out, Sums saved,
                  const float* d_out, Gradients d) {
  const int64_t H = p.H, Hp = RoundUp(H), Hv = p.Hv, Hvp = RoundUp(Hv);
  const int64_t blocks = (p.S + kKeyBlock - 1) / kKeyBlock;
  const int64_t Sp = RoundUp(std::min<int64_t>(kKeyBlock, p.S));
  const int64_t rows_most = std::min<int64_t>(kQueryBlock, p.T);
  const int64_t per_block = Sp * (2 * Hp + 2 * Hvp + Hp + Hvp + 1);
  float* memory = Scratch(blocks * per_block + rows_most * (2 * Hp + Hvp + 2 * Sp + 2) + Sp);
  // For each block of keys: keys, values, both transposed, both gradients, poison.
  float* q = memory + blocks * per_block;  // [rows, Hp]
  float* d_q = q + rows_most * Hp;         // [rows, Hp]
  float* d_o = d_q + rows_most * Hp;       // [rows, Hvp]
  float* weights = d_o + rows_most * Hvp;  // [rows, Sp]
  float* d_s = weights + rows_most * Sp;   // [rows, Sp]
  float* delta = d_s + rows_most * Sp;     // [rows]
  float* q_poison = delta + rows_most;     // [rows]
  std::vector<char> spoilt(blocks);

  struct Block {
    float *keys, *values, *keys_t, *values_t, *d_keys, *d_values, *poison;
  };
  auto block = [&](int64_t i) {
    Block x;
    x.keys = memory + i * per_block;
    x.values = x.keys + Sp * Hp;
    x.keys_t = x.values + Sp * Hvp;
    x.values_t = x.keys_t + Sp * Hp;
    x.d_keys = x.values_t + Sp * Hvp;
    x.d_values = x.d_keys + Sp * Hp;
    x.poison = x.d_values + Sp * Hvp;
    return x;
  };
  for (int64_t i = 0; i < blocks; ++i) {
    const Block x = block(i);
    const int64_t s0 = i * kKeyBlock, s1 = std::min(p.S, s0 + kKeyBlock), width = RoundUp(s1 - s0);
    std::fill_n(x.poison, Sp, 0.0f);
    spoilt[i] = Pack(p.Keys(b, kv), s0, s1, H, 1.0f, x.keys, Hp, x.poison);
    spoilt[i] |= Pack(p.Values(b, kv), s0, s1, Hv, 1.0f, x.values, Hvp, x.poison);
    Transpose(x.keys, s1 - s0, Hp, H, x.keys_t, width);
    Transpose(x.values, s1 - s0, Hvp, Hv, x.values_t, width);
    std::fill_n(x.d_keys, Sp * (Hp + Hvp), 0.0f);
  }

  const int64_t group = p.N / p.K;
  for (int64_t n = kv * group; n < (kv + 1) * group; ++n) {
    const Mask mask = p.MaskOf(b, n);
    const Rows outs = p.Queries(out, b, n, Hv), d_outs = p.Queries(d_out, b, n, Hv);
    for (int64_t t0 = 0; t0 < p.T; t0 += p.QueryBlock()) {
      const int64_t t1 = std::min(p.T, t0 + p.QueryBlock()), rows = t1 - t0;
      std::fill_n(q_poison, rows, 0.0f);
      std::fill_n(d_q, rows * Hp, 0.0f);
      const bool q_spoilt = Pack(p.Queries(p.q, b, n, H), t0, t1, H, p.scale, q, Hp, q_poison);
      for (int64_t t = 0; t < rows; ++t) {
        const float* g = d_outs[t0 + t];
        std::copy_n(g, Hv, d_o + t * Hvp);
        std::fill_n(d_o + t * Hvp + Hv, Hvp - Hv, 0.0f);
      }
      Deltas(outs, d_outs, t0, t1, Hv, delta);
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t s0 = i * kKeyBlock, all = RoundUp(std::min(kKeyBlock, int(p.S - s0)));
        const auto [from, to] = mask.Span(t0, t1, s0, std::min(p.S, s0 + kKeyBlock));
        const int64_t keys = to - from, width = RoundUp(keys), at = from - s0;
        if (from == to) continue;
        const Block x = block(i);
        Gemm(rows, width, H, q, Hp, 1, x.keys_t + at, all, weights, width, false);
        Hide(weights, width, t0, t1, from, to, mask, q_poison, x.poison + at, spoilt[i] | q_spoilt);
        Gemm(rows, width, Hv, d_o, Hvp, 1, x.values_t + at, all, d_s, width, false);
        for (int64_t t = 0; t < rows; ++t) {
          const float peak = saved.peak[(b * p.N + n) * p.T + t0 + t];
          const float total = saved.total[(b * p.N + n) * p.T + t0 + t];
          const float base = peak == -kInf ? 0.0f : peak;
          const float factor = total == 0.0f ? 0.0f : 1.0f / total;
          for (int64_t s = t * width; s < (t + 1) * width; s += kWidth) {
            const Vec logits = Load(weights + s);
            const Vec w = Exp(logits - base) * factor;
            Store(weights + s, w);
            const IntVec hidden = logits == Splat(-kInf);
            Store(d_s + s, hidden ? Vec{} : w * (Load(d_s + s) - delta[t]));
          }
        }
        Gemm(keys, Hvp, rows, weights, 1, width, d_o, Hvp, x.d_values + at * Hvp, Hvp, true);
        Gemm(keys, Hp, rows, d_s, 1, width, q, Hp, x.d_keys + at * Hp, Hp, true);
        Gemm(rows, Hp, keys, d_s, width, 1, x.keys + at * Hp, Hp, d_q, Hp, true);
      }
      for (int64_t t = 0; t < rows; ++t) {
        float* to = d.q + ((b * p.T + t0 + t) * p.N + n) * H;
        for (int64_t h = 0; h < H; ++h) to[h] = d_q[t * Hp + h] * p.scale;
      }
    }
  }
  for (int64_t s = 0; s < p.S; ++s) {
    const Block x = block(s / kKeyBlock);
    const int64_t i = s % kKeyBlock;
    std::copy_n(x.d_keys + i * Hp, H, d.k + ((b * p.S + s) * p.K + kv) * H);
    std::copy_n(x.d_values + i * Hvp, Hv, d.v + ((b * p.S + s) * p.K + kv) * Hv);
  }
}

}  // namespace crossattn
