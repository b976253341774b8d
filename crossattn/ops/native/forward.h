// The forward pass: online softmax over blocks of keys (Milakov and Gimelshein 2018).
#pragma once

#include "problem.h"

namespace crossattn {

// Takes the exponentials of a block of logits [rows, width], in place, and brings what each row has
// summed up so far (its weighted values [rows, values_width], its total in lanes [rows, kWidth]) to
// the new peak.
inline void Exponentiate(float* logits, int64_t logits_row, int64_t rows, int64_t width, float* peak,
                         float* totals, float* mixed, int64_t values_width) {
  for (int64_t t = 0; t < rows; ++t) {
    float *row = logits + t * logits_row, *mine = mixed + t * values_width;
    Vec most = Splat(peak[t]);
    // NaN is no peak; a row that has one ends as NaN through its sum.
    for (int64_t s = 0; s < width; s += kWidth) most = Larger(most, Load(row + s));
    const float now = Max(most), base = now == -kInf ? 0.0f : now;
    Vec total = Load(totals + t * kWidth);
    if (now != peak[t]) {
      // NaN from an earlier block stays: 0 * NaN is NaN.
      const float before = peak[t] == -kInf ? 0.0f : std::exp(peak[t] - base);
      total *= before;
      for (int64_t h = 0; h < values_width; h += kWidth) Store(mine + h, Load(mine + h) * before);
      peak[t] = now;
    }
    for (int64_t s = 0; s < width; s += kWidth) {
      const Vec e = Exp(Load(row + s) - base);
      Store(row + s, e);
      total += e;
    }
    Store(totals + t * kWidth, total);
  }
}

// Output and sums of queries [t0, t1) of one head. Each block of keys is packed once and meets all
// blocks of queries.
inline void ForwardChunk(const Problem& p, int64_t b, int64_t n, int64_t t0, int64_t t1, float* out,
                         Sums saved) {
  const int64_t kv = n / (p.N / p.K), rows = t1 - t0, H = p.H, Hp = RoundUp(p.Hv);
  const int64_t Sp = std::min<int64_t>(kKeyBlock, p.S), block = p.QueryBlock();
  // From row to row: of queries and keys, of weighted sums, of values, of logits and transposed keys.
  const int64_t q_row = RoundUp(H, 16), mixed_row = RoundUp(Hp, 16), v_row = RowOf(Hp), row = RowOf(Sp);
  const int64_t each = RoundUp(rows, 16);  // numbers that each query has one of
  float* q = Scratch(each * (q_row + mixed_row + 2 + kWidth) + (block + H) * row +
                     Sp * (q_row + v_row) + row);
  float* mixed = q + each * q_row;             // weighted sums of values [rows, Hp]
  float* peak = mixed + each * mixed_row;      // [rows]
  float* q_poison = peak + each;               // [rows]
  float* totals = q_poison + each;             // [rows, kWidth], in lanes
  float* logits = totals + each * kWidth;      // [block, Sp]
  float* keys_t = logits + block * row;        // [H, Sp]
  float* keys = keys_t + H * row;              // [Sp, H]
  float* values = keys + Sp * q_row;           // [Sp, Hp]
  float* k_poison = values + Sp * v_row;       // [Sp]
  std::fill_n(mixed, rows * mixed_row, 0.0f);
  std::fill_n(peak, rows, -kInf);
  std::fill_n(totals, rows * kWidth, 0.0f);
  std::fill_n(q_poison, rows, 0.0f);
  const bool q_spoilt = Pack(p.Queries(p.q, b, n, H), t0, t1, H, p.scale, q, q_row, q_poison);
  const Mask mask = p.MaskOf(b, n);

  const Span reach = mask.Reach(t0, t1);
  for (int64_t s0 = reach.from / kKeyBlock * kKeyBlock; s0 < reach.to; s0 += kKeyBlock) {
    const int64_t s1 = std::min(p.S, s0 + kKeyBlock);
    if (mask.Read(t0, t1, s0, s1).empty()) continue;
    std::fill_n(k_poison, s1 - s0, 0.0f);
    bool spoilt = Pack(p.Keys(b, kv), s0, s1, H, 1.0f, keys, q_row, k_poison);
    spoilt |= Pack(p.Values(b, kv), s0, s1, p.Hv, 1.0f, values, v_row, k_poison);
    TransposePadded(keys, q_row, s1 - s0, H, keys_t, row);
    for (int64_t t = t0; t < t1; t += block) {
      const int64_t end = std::min(t1, t + block), some = end - t, i = t - t0;
      const Span span = mask.Read(t, end, s0, s1);
      if (span.empty()) continue;
      const int64_t keys = span.to - span.from, width = RoundUp(keys), at = span.from - s0;
      float* sums = mixed + i * mixed_row;
      Gemm(some, width, H, q + i * q_row, q_row, 1, keys_t + at, row, logits, row, false);
      Hide(logits, row, width, t, end, span, mask, q_poison + i, k_poison + at, spoilt | q_spoilt);
      Exponentiate(logits, row, some, width, peak + i, totals + i * kWidth, sums, mixed_row);
      Gemm(some, Hp, keys, logits, row, 1, values + at * v_row, v_row, sums, mixed_row, true);
    }
  }

  for (int64_t t = 0; t < rows; ++t) {
    const float total = Sum(Load(totals + t * kWidth)), factor = total == 0.0f ? 0.0f : 1.0f / total;
    float* to = out + ((b * p.T + t0 + t) * p.N + n) * p.Hv;
    for (int64_t h = 0; h < p.Hv; ++h) to[h] = mixed[t * mixed_row + h] * factor;
    saved.peak[(b * p.N + n) * p.T + t0 + t] = peak[t];
    saved.total[(b * p.N + n) * p.T + t0 + t] = total;
  }
}

// Some keys: those from `first` on, or those of a list.
struct Keys {
  int64_t first, count;
  const int32_t* list;
  int64_t operator[](int64_t i) const { return list ? list[i] : first + i; }
};

// out [V vectors] = factor times the sum of weights times values, of these keys.
template <int V>
inline void Mix(const float* weights, const Keys& keys, Rows values, int64_t at, float factor,
                float* out) {
  Vec sums[V] = {};
  for (int64_t i = 0; i < keys.count; ++i) {
    const float* value = values[keys[i]] + at;
    for (int j = 0; j < V; ++j) sums[j] += Load(value + j * kWidth) * weights[i];
  }
  for (int j = 0; j < V; ++j) Store(out + at + j * kWidth, sums[j] * factor);
}

// One query of one head, as in cached decoding: what it may read of the memory is read once, where it
// lies, and nothing else is.
inline void ForwardRow(const Problem& p, int64_t b, int64_t n, int64_t t, float* out, Sums saved) {
  const int64_t kv = n / (p.N / p.K);
  const float* query = p.Queries(p.q, b, n, p.H)[t];
  const Rows all = p.Keys(b, kv), values = p.Values(b, kv);
  const Mask mask = p.MaskOf(b, n);
  const Span span = mask.Read(t, t + 1, 0, p.S);
  const int64_t room = RoundUp(span.to - span.from);
  float* weights = Scratch(2 * room);
  Keys keys{span.from, span.to - span.from, nullptr};
  if (span.partial) {
    int32_t* list = reinterpret_cast<int32_t*>(weights + room);
    keys.count = mask.List(t, span.from, span.to, list);
    keys.list = list;
  }
  Vec most = Splat(-kInf), sum{};
  for (int64_t i = 0; i < keys.count; i += kWidth) {
    const int64_t last = keys.count - 1;
    const float* rows[kWidth];
    for (int64_t r = 0; r < kWidth; ++r) {
      Fetch(all[keys[std::min(i + r + kWidth, last)]], p.H);
      Fetch(values[keys[std::min(i + r, last)]], p.Hv);
      rows[r] = all[keys[std::min(i + r, last)]];
    }
    Vec logits = Dots(query, rows, p.H) * p.scale;
    logits += logits * 0.0f;  // Inf becomes NaN
    for (int64_t r = keys.count - i; r < kWidth; ++r) logits[r] = -kInf;
    Store(weights + i, logits);
    most = Larger(most, logits);
  }
  const float peak = Max(most), base = peak == -kInf ? 0.0f : peak;
  for (int64_t i = 0; i < keys.count; i += kWidth) {
    const Vec e = Exp(Load(weights + i) - base);
    Store(weights + i, e);
    sum += e;
  }
  const float total = Sum(sum), factor = total == 0.0f ? 0.0f : 1.0f / total;
  float* mine = out + ((b * p.T + t) * p.N + n) * p.Hv;
  int64_t h = 0;
  for (; h + 8 * kWidth <= p.Hv; h += 8 * kWidth) Mix<8>(weights, keys, values, h, factor, mine);
  for (; h + kWidth <= p.Hv; h += kWidth) Mix<1>(weights, keys, values, h, factor, mine);
  for (; h < p.Hv; ++h) {
    float mixed = 0;
    for (int64_t i = 0; i < keys.count; ++i) mixed += weights[i] * values[keys[i]][h];
    mine[h] = mixed * factor;
  }
  saved.peak[(b * p.N + n) * p.T + t] = peak;
  saved.total[(b * p.N + n) * p.T + t] = total;
}

}  // namespace crossattn
