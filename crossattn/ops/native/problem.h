// What a call is about: heads as rows, which keys may be read, and how blocks of them are packed.
//
// Inf and NaN are taken out of the packed operands and come back as NaN logits, which the mask can
// hide: what a query may not read cannot reach it, not even as 0 * NaN.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "mask.h"
#include "parallel.h"

namespace crossattn {

constexpr int kQueryBlock = 64, kMaskedQueryBlock = 36, kKeyBlock = 128, kQueryChunk = 512;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One head of an operand [.., X, heads, size]: rows `stride` floats apart.
struct Rows {
  const float* data;
  int64_t stride;
  const float* operator[](int64_t i) const { return data + i * stride; }
};

// Copies rows [from, to) times `scale` into out [.., width]; beyond `size` it is 0. What is not
// finite becomes 0 and marks its row with NaN in `poison`. Returns whether there was any.
inline bool Pack(Rows rows, int64_t from, int64_t to, int64_t size, float scale, float* out,
                 int64_t width, float* poison) {
  constexpr int64_t kAhead = 8;  // rows of a head lie far apart, which no hardware foresees
  bool any = false;
  for (int64_t i = from; i < to; ++i, out += width) {
    const float* in = rows[i];
    for (int64_t h = 0; h < size; h += 16) __builtin_prefetch(in + kAhead * rows.stride + h);
    Vec zeros{};  // 0 * x is 0 for every finite x
    int64_t h = 0;
    for (; h + kWidth <= size; h += kWidth) {
      const Vec x = Load(in + h);
      zeros += x * 0.0f;
      Store(out + h, x * scale);
    }
    float spoilt = Sum(zeros);
    for (; h < size; ++h) {
      spoilt += in[h] * 0.0f;
      out[h] = in[h] * scale;
    }
    for (; h < width; ++h) out[h] = 0;
    if (spoilt != 0.0f) {
      any = true;
      poison[i - from] = kNaN;
      for (int64_t h = 0; h < size; ++h) out[h] = std::isfinite(in[h]) ? out[h] : 0.0f;
    }
  }
  return any;
}

// Everything that a call is about, decoded from its buffers.
struct Problem {
  int64_t B, T, S, N, K, H, Hv;
  float scale;
  const float *q, *k, *v;
  Mask mask;  // of the first batch entry and head
  // Where each batch entry's part of the mask begins.
  std::vector<int64_t> interval_of, numbers_of, limits_of, bytes_of;
  int64_t bytes_of_head = 0;

  int64_t Pairs() const { return B * N * T * S; }
  Rows Queries(const float* x, int64_t b, int64_t n, int64_t size) const {
    return {x + (b * T * N + n) * size, N * size};
  }
  Rows Keys(int64_t b, int64_t kv) const { return {k + (b * S * K + kv) * H, K * H}; }
  Rows Values(int64_t b, int64_t kv) const { return {v + (b * S * K + kv) * Hv, K * Hv}; }
  // Shorter blocks of queries span fewer keys, where each query has its own.
  int64_t QueryBlock() const {
    return mask.each_query_its_own() ? kMaskedQueryBlock : kQueryBlock;
  }
  Mask MaskOf(int64_t b, int64_t n) const {
    Mask own = mask;
    if (own.interval) own.interval += interval_of[b];
    if (own.conditions) own.numbers += numbers_of[b], own.limits += limits_of[b];
    if (own.bytes) own.bytes += bytes_of[b] + n * bytes_of_head;
    return own;
  }
};

// Logits of a block become what may be read of them: poison in, masked and padding keys to -inf.
inline void Hide(float* logits, int64_t row, int64_t width, int64_t t0, int64_t t1, Span span,
                 const Mask& mask, const float* q_poison, const float* k_poison, bool poisoned) {
  const int64_t keys = span.to - span.from;
  if (!poisoned && !span.partial && keys == width) return;
  for (int64_t t = t0; t < t1; ++t, logits += row) {
    if (poisoned)
      for (int64_t s = 0; s < keys; ++s) logits[s] += q_poison[t - t0] + k_poison[s];
    if (span.partial) mask.Hide(t, span.from, span.to, logits);
    for (int64_t s = keys; s < width; ++s) logits[s] = -kInf;
  }
}

// What the backward pass needs to make a row's weights again: exp(logits - peak) / total. As two
// numbers, for in their one log-sum-exp the small part is lost beside large logits.
struct Sums {
  float *peak, *total;  // [*B, N, T]
};

}  // namespace crossattn
