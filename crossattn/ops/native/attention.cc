// Attention on a CPU, forward and backward, float32: the score matrix exists one block at a time.
//
// A task owns one head of one batch entry (backward: one key head), so sums are added up in an order
// that does not depend on the number of threads. Operands are packed into contiguous blocks that stay
// in cache; every product is then one call of `gemm`, a register-tiled loop over vectors.
//
// Inf and NaN are taken out of the packed operands and come back as NaN logits, which the mask can
// hide: what a query may not read cannot reach it, not even as 0 * NaN.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kTileVectors = 4;
#else
constexpr int kWidth = 8, kTileVectors = 2;
#endif
constexpr int kTileRows = 6;
constexpr int kQueryBlock = 64, kMaskedQueryBlock = 36, kKeyBlock = 128, kQueryChunk = 512;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4), aligned(4)));
typedef uint8_t ByteVec __attribute__((vector_size(kWidth), aligned(1)));

inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void Store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
inline Vec Splat(float x) { return x - Vec{}; }
inline int64_t RoundUp(int64_t n, int64_t to = kWidth) { return (n + to - 1) / to * to; }

inline float Sum(Vec x) {
  float parts[kWidth];
  Store(parts, x);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

inline float Max(Vec x) {
  float parts[kWidth];
  Store(parts, x);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] = std::max(parts[i], parts[i + half]);
  return parts[0];
}

inline float Dot(const float* a, const float* b, int64_t size) {
  Vec sum{};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) sum += Load(a + i) * Load(b + i);
  float total = Sum(sum);
  for (; i < size; ++i) total += a[i] * b[i];
  return total;
}

// e^x within 2 units in the last place for x up to 88; 0 below -87.3; NaN stays NaN.
// 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf).
inline Vec Exp(Vec x) {
  const Vec floor = Splat(-87.3f);
  const IntVec tiny = x < floor;
  x = tiny ? floor : x;
  const Vec magic = Splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec power = ((IntVec)shifted << 23) + (127 << 23);
  return tiny ? Vec{} : p * (Vec)power;
}

// C[M, N] (+)= A[M, K] B[K, N]. A is read element by element with any strides; the rows of B and C
// are contiguous, N a multiple of the vector width.
template <int R, int V>
inline void Tile(const float* a, int64_t ai, int64_t ak, const float* b, int64_t ldb, float* c,
                 int64_t ldc, int64_t K, bool add) {
  Vec sums[R][V];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < V; ++j) sums[i][j] = add ? Load(c + i * ldc + j * kWidth) : Vec{};
  for (int64_t k = 0; k < K; ++k) {
    Vec row[V];
    for (int j = 0; j < V; ++j) row[j] = Load(b + k * ldb + j * kWidth);
    for (int i = 0; i < R; ++i) {
      const Vec x = Splat(a[i * ai + k * ak]);
      for (int j = 0; j < V; ++j) sums[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < V; ++j) Store(c + i * ldc + j * kWidth, sums[i][j]);
}

template <int V>
inline void Column(int64_t M, int64_t K, const float* a, int64_t ai, int64_t ak, const float* b,
                   int64_t ldb, float* c, int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + kTileRows <= M; i += kTileRows)
    Tile<kTileRows, V>(a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc, K, add);
  a += i * ai;
  c += i * ldc;
  switch (M - i) {
    case 5: return Tile<5, V>(a, ai, ak, b, ldb, c, ldc, K, add);
    case 4: return Tile<4, V>(a, ai, ak, b, ldb, c, ldc, K, add);
    case 3: return Tile<3, V>(a, ai, ak, b, ldb, c, ldc, K, add);
    case 2: return Tile<2, V>(a, ai, ak, b, ldb, c, ldc, K, add);
    case 1: return Tile<1, V>(a, ai, ak, b, ldb, c, ldc, K, add);
  }
}

void Gemm(int64_t M, int64_t N, int64_t K, const float* a, int64_t ai, int64_t ak, const float* b,
          int64_t ldb, float* c, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + kTileVectors * kWidth <= N; j += kTileVectors * kWidth)
    Column<kTileVectors>(M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
  for (; j < N; j += kWidth) Column<1>(M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
}

// One head of an operand [.., X, heads, size]: rows `stride` floats apart.
struct Rows {
  const float* data;
  int64_t stride;
  const float* operator[](int64_t i) const { return data + i * stride; }
};

// Copies rows [from, to) times `scale` into out [.., width]; beyond `size` it is 0. What is not finite
// becomes 0 and marks its row with NaN in `poison`. Returns whether there was any.
bool Pack(Rows rows, int64_t from, int64_t to, int64_t size, float scale, float* out, int64_t width,
          float* poison) {
  bool any = false;
  for (int64_t i = from; i < to; ++i, out += width) {
    const float* in = rows[i];
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

// out [size, width] = in [rows, stride]^T; columns beyond `rows` are 0.
void Transpose(const float* in, int64_t rows, int64_t stride, int64_t size, float* out,
               int64_t width) {
  constexpr int64_t kStep = 8;
  for (int64_t i = 0; i < rows; i += kStep) {
    const int64_t end = std::min(rows, i + kStep);
    for (int64_t h = 0; h < size; ++h)
      for (int64_t k = i; k < end; ++k) out[h * width + k] = in[k * stride + h];
  }
  for (int64_t h = 0; h < size; ++h)
    for (int64_t k = rows; k < width; ++k) out[h * width + k] = 0;
}

// Which keys a query may read: bytes [S], or null for all.
struct Mask {
  const uint8_t* data = nullptr;  // of one batch entry and head
  int64_t row = 0;                // bytes from one query to the next; 0 when all share one row
  const uint8_t* operator[](int64_t t) const { return data ? data + t * row : nullptr; }
  // The smallest range of keys, from a multiple of the vector width on, that holds every key of
  // [s0, s1) which some query of [t0, t1) may read; an empty one when there is none.
  std::pair<int64_t, int64_t> Span(int64_t t0, int64_t t1, int64_t s0, int64_t s1) const {
    if (!data) return {s0, s1};
    int64_t first = s1, last = s0;
    for (int64_t t = t0; t < (row ? t1 : t0 + 1); ++t) {
      const uint8_t* allowed = data + t * row;
      int64_t s = s0;
      while (s < first && !allowed[s]) ++s;
      first = std::min(first, s);
      s = s1;
      while (s > last && !allowed[s - 1]) --s;
      last = std::max(last, s);
    }
    if (last <= first) return {s0, s0};
    return {s0 + (first - s0) / kWidth * kWidth, last};
  }
};

// Everything that a call is about, decoded from its buffers.
struct Problem {
  int64_t B, T, S, N, K, H, Hv;
  float scale;
  const float *q, *k, *v;
  const uint8_t* mask;
  std::vector<int64_t> mask_of_batch;  // offsets
  int64_t mask_head, mask_row;

  Rows Queries(const float* x, int64_t b, int64_t n, int64_t size) const {
    return {x + (b * T * N + n) * size, N * size};
  }
  Rows Keys(int64_t b, int64_t kv) const { return {k + (b * S * K + kv) * H, K * H}; }
  Rows Values(int64_t b, int64_t kv) const { return {v + (b * S * K + kv) * Hv, K * Hv}; }
  // Shorter blocks of queries span fewer keys, where each query has its own.
  int64_t QueryBlock() const { return mask && mask_row ? kMaskedQueryBlock : kQueryBlock; }
  Mask MaskOf(int64_t b, int64_t n) const {
    if (!mask) return {};
    return {mask + mask_of_batch[b] + n * mask_head, mask_row};
  }
};

float* Scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

// Logits of a block become what may be read of them: poison in, masked and padding keys to -inf.
void Hide(float* logits, int64_t width, int64_t t0, int64_t t1, int64_t s0, int64_t s1, Mask mask,
          const float* q_poison, const float* k_poison, bool poisoned) {
  const int64_t keys = s1 - s0;
  for (int64_t t = t0; t < t1; ++t, logits += width) {
    if (poisoned)
      for (int64_t s = 0; s < keys; ++s) logits[s] += q_poison[t - t0] + k_poison[s];
    if (const uint8_t* allowed = mask[t]) {
      allowed += s0;
      int64_t s = 0;
      for (; s + kWidth <= keys; s += kWidth) {
        const ByteVec bytes = *reinterpret_cast<const ByteVec*>(allowed + s);
        const IntVec readable = __builtin_convertvector(bytes, IntVec) != 0;
        Store(logits + s, readable ? Load(logits + s) : Splat(-kInf));
      }
      for (; s < keys; ++s) logits[s] = allowed[s] ? logits[s] : -kInf;
    }
    for (int64_t s = keys; s < width; ++s) logits[s] = -kInf;
  }
}

// What the backward pass needs to make a row's weights again: exp(logits - peak) / total. As two
// numbers, for in their one log-sum-exp the small part is lost beside large logits.
struct Sums {
  float *peak, *total;  // [*B, N, T]
};

// Takes the exponentials of a block of logits [rows, width], in place, and brings what each row has
// summed up so far (its weighted values [rows, values_width] and its total) to the new peak.
void Exponentiate(float* logits, int64_t rows, int64_t width, float* peak, float* total,
                  float* mixed, int64_t values_width) {
  for (int64_t t = 0; t < rows; ++t) {
    float *row = logits + t * width, *mine = mixed + t * values_width;
    Vec most = Splat(-kInf);
    for (int64_t s = 0; s < width; s += kWidth) {
      const Vec x = Load(row + s);
      most = x > most ? x : most;
    }
    // NaN is no peak; a row that has one ends as NaN through its sum.
    const float now = std::max(peak[t], Max(most)), base = now == -kInf ? 0.0f : now;
    Vec sum{};
    for (int64_t s = 0; s < width; s += kWidth) {
      const Vec e = Exp(Load(row + s) - base);
      Store(row + s, e);
      sum += e;
    }
    if (now != peak[t]) {
      const float before = peak[t] == -kInf ? 0.0f : std::exp(peak[t] - base);
      // NaN from an earlier block stays: 0 * NaN is NaN.
      total[t] *= before;
      for (int64_t h = 0; h < values_width; h += kWidth) Store(mine + h, Load(mine + h) * before);
      peak[t] = now;
    }
    total[t] += Sum(sum);
  }
}

// Output and sums of queries [t0, t1) of one head, by online softmax over blocks of keys. Each block
// of keys is packed once and meets all blocks of queries.
void ForwardChunk(const Problem& p, int64_t b, int64_t n, int64_t t0, int64_t t1, float* out,
                  Sums saved) {
  const int64_t kv = n / (p.N / p.K), rows = t1 - t0, H = p.H, Hp = RoundUp(p.Hv);
  const int64_t Sp = RoundUp(std::min<int64_t>(kKeyBlock, p.S)), block = p.QueryBlock();
  float* q = Scratch(rows * (H + Hp + 3) + block * Sp + Sp * (2 * H + Hp + 1));
  float* mixed = q + rows * H;         // weighted sums of values [rows, Hp]
  float* peak = mixed + rows * Hp;     // [rows]
  float* total = peak + rows;          // [rows]
  float* q_poison = total + rows;      // [rows]
  float* logits = q_poison + rows;     // [block, Sp]
  float* keys_t = logits + block * Sp; // [H, Sp]
  float* keys = keys_t + H * Sp;       // [Sp, H]
  float* values = keys + Sp * H;       // [Sp, Hp]
  float* k_poison = values + Sp * Hp;  // [Sp]
  std::fill_n(mixed, rows * Hp, 0.0f);
  std::fill_n(peak, rows, -kInf);
  std::fill_n(total, rows, 0.0f);
  std::fill_n(q_poison, rows, 0.0f);
  const bool q_spoilt = Pack(p.Queries(p.q, b, n, H), t0, t1, H, p.scale, q, H, q_poison);
  const Mask mask = p.MaskOf(b, n);

  for (int64_t s0 = 0; s0 < p.S; s0 += kKeyBlock) {
    const int64_t s1 = std::min(p.S, s0 + kKeyBlock), all = RoundUp(s1 - s0);
    if (mask.Span(t0, t1, s0, s1).second == s0) continue;
    std::fill_n(k_poison, all, 0.0f);
    bool spoilt = Pack(p.Keys(b, kv), s0, s1, H, 1.0f, keys, H, k_poison);
    spoilt |= Pack(p.Values(b, kv), s0, s1, p.Hv, 1.0f, values, Hp, k_poison);
    Transpose(keys, s1 - s0, H, H, keys_t, all);
    for (int64_t t = t0; t < t1; t += block) {
      const int64_t end = std::min(t1, t + block), some = end - t, i = t - t0;
      const auto [from, to] = mask.Span(t, end, s0, s1);
      if (from == to) continue;
      const int64_t width = RoundUp(to - from), at = from - s0;
      Gemm(some, width, H, q + i * H, H, 1, keys_t + at, all, logits, width, false);
      Hide(logits, width, t, end, from, to, mask, q_poison + i, k_poison + at, spoilt | q_spoilt);
      Exponentiate(logits, some, width, peak + i, total + i, mixed + i * Hp, Hp);
      Gemm(some, Hp, to - from, logits, width, 1, values + at * Hp, Hp, mixed + i * Hp, Hp, true);
    }
  }

  for (int64_t t = 0; t < rows; ++t) {
    const float factor = total[t] == 0.0f ? 0.0f : 1.0f / total[t];
    float* to = out + ((b * p.T + t0 + t) * p.N + n) * p.Hv;
    for (int64_t h = 0; h < p.Hv; ++h) to[h] = mixed[t * Hp + h] * factor;
    saved.peak[(b * p.N + n) * p.T + t0 + t] = peak[t];
    saved.total[(b * p.N + n) * p.T + t0 + t] = total[t];
  }
}

// out [V vectors] = sum of weights[s] values[s], over the keys that may be read.
template <int V>
inline void Mix(const float* weights, Rows values, const uint8_t* allowed, int64_t S, int64_t at,
                float factor, float* out) {
  Vec sums[V] = {};
  for (int64_t s = 0; s < S; ++s) {
    if (allowed && !allowed[s]) continue;
    for (int j = 0; j < V; ++j) sums[j] += Load(values[s] + at + j * kWidth) * weights[s];
  }
  for (int j = 0; j < V; ++j) Store(out + at + j * kWidth, sums[j] * factor);
}

// One query of one head, as in cached decoding: the memory is read once, where it lies.
void ForwardRow(const Problem& p, int64_t b, int64_t n, int64_t t, float* out, Sums saved) {
  const int64_t kv = n / (p.N / p.K), width = RoundUp(p.S);
  const float* query = p.Queries(p.q, b, n, p.H)[t];
  const Rows keys = p.Keys(b, kv), values = p.Values(b, kv);
  const uint8_t* allowed = p.MaskOf(b, n)[t];
  float* weights = Scratch(width);
  for (int64_t s = 0; s < p.S; ++s) {
    const float dot = allowed && !allowed[s] ? -kInf : Dot(query, keys[s], p.H) * p.scale;
    weights[s] = std::isfinite(dot) || (allowed && !allowed[s]) ? dot : kNaN;
  }
  std::fill(weights + p.S, weights + width, -kInf);
  Vec most = Splat(-kInf), sum{};
  for (int64_t s = 0; s < width; s += kWidth) {
    const Vec x = Load(weights + s);
    most = x > most ? x : most;
  }
  const float peak = Max(most), base = peak == -kInf ? 0.0f : peak;
  for (int64_t s = 0; s < width; s += kWidth) {
    const Vec e = Exp(Load(weights + s) - base);
    Store(weights + s, e);
    sum += e;
  }
  const float total = Sum(sum);
  const bool empty = total == 0.0f;
  const float factor = empty ? 0.0f : 1.0f / total;
  float* to = out + ((b * p.T + t) * p.N + n) * p.Hv;
  int64_t h = 0;
  for (; h + 4 * kWidth <= p.Hv; h += 4 * kWidth)
    Mix<4>(weights, values, allowed, p.S, h, factor, to);
  for (; h + kWidth <= p.Hv; h += kWidth) Mix<1>(weights, values, allowed, p.S, h, factor, to);
  for (; h < p.Hv; ++h) {
    float mixed = 0;
    for (int64_t s = 0; s < p.S; ++s)
      if (!allowed || allowed[s]) mixed += weights[s] * values[s][h];
    to[h] = mixed * factor;
  }
  saved.peak[(b * p.N + n) * p.T + t] = peak;
  saved.total[(b * p.N + n) * p.T + t] = total;
}

// delta = sum of out d_out of each row: what the weights' gradients have in common.
//
// Added up in the order of `Gemm`, one product after the other: a query that reads one key alone then
// has a gradient of exactly 0, however large its logits. Several rows at once, to hide the latency.
void Deltas(Rows out, Rows d_out, int64_t t0, int64_t t1, int64_t size, float* delta) {
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
void BackwardHead(const Problem& p, int64_t b, int64_t kv, const float* out, Sums saved,
                  const float* d_out, Gradients d) {
  const int64_t H = p.H, Hp = RoundUp(H), Hv = p.Hv, Hvp = RoundUp(Hv);
  const int64_t blocks = (p.S + kKeyBlock - 1) / kKeyBlock;
  const int64_t Sp = RoundUp(std::min<int64_t>(kKeyBlock, p.S)), rows_most = std::min<int64_t>(kQueryBlock, p.T);
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
          const float base = peak == -kInf ? 0.0f : peak, factor = total == 0.0f ? 0.0f : 1.0f / total;
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

// Runs task(0) .. task(count - 1) on the caller's thread and XLA's pool.
template <typename F>
void Parallel(ffi::ThreadPool& pool, int64_t count, F task) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto shared = std::make_shared<Shared>();
  // A helper that starts after the last task was taken touches nothing but `shared`.
  auto work = [shared, count, &task] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      task(i);
      if (shared->done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->finished.notify_all();
      }
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, count - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(work)>(work));
  work();
  for (int spin = 0; spin < 2000 && shared->done.load() < count; ++spin) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done.load() == count; });
}

int64_t Product(ffi::Span<const int64_t> dims, size_t from, size_t to) {
  int64_t product = 1;
  for (size_t i = from; i < to; ++i) product *= dims[i];
  return product;
}

using Floats = ffi::Buffer<ffi::F32>;
using Result = ffi::Result<ffi::Buffer<ffi::F32>>;

// The mask is [*#B, #N, #T, S], or has no elements when everything may be read.
Problem Decode(Floats& q, Floats& k, Floats& v, ffi::Buffer<ffi::PRED>& mask, float scale) {
  Problem p;
  auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions(), md = mask.dimensions();
  const size_t lead = qd.size() - 3;
  p.B = Product(qd, 0, lead);
  p.T = qd[lead], p.N = qd[lead + 1], p.H = qd[lead + 2];
  p.S = kd[lead], p.K = kd[lead + 1], p.Hv = vd[lead + 2];
  p.scale = scale;
  p.q = q.typed_data(), p.k = k.typed_data(), p.v = v.typed_data();
  p.mask = mask.element_count() ? reinterpret_cast<const uint8_t*>(mask.typed_data()) : nullptr;
  p.mask_row = md[lead + 1] == 1 ? 0 : p.S;
  const int64_t head = md[lead + 1] * md[lead + 2];
  p.mask_head = md[lead] == 1 ? 0 : head;
  p.mask_of_batch.resize(p.B);
  for (int64_t b = 0; b < p.B; ++b) {
    int64_t rest = b, offset = 0, stride = md[lead] * head;
    for (size_t axis = lead; axis-- > 0;) {
      const int64_t index = rest % qd[axis];
      rest /= qd[axis];
      if (md[axis] != 1) offset += index * stride;
      stride *= md[axis];
    }
    p.mask_of_batch[b] = offset;
  }
  return p;
}

ffi::Error Forward(ffi::ThreadPool pool, Floats q, Floats k, Floats v, ffi::Buffer<ffi::PRED> mask,
                   float scale, Result out, Result peak, Result total) {
  const Problem p = Decode(q, k, v, mask, scale);
  float* o = out->typed_data();
  const Sums saved{peak->typed_data(), total->typed_data()};
  const bool few = p.T < 4;
  const int64_t chunk = few ? p.T : kQueryChunk, parts = (p.T + chunk - 1) / chunk;
  // Few queries are little work each: a task takes all heads of a batch entry.
  const int64_t heads = few ? p.N : 1;
  Parallel(pool, p.B * p.N / heads * parts, [&](int64_t task) {
    const int64_t part = task % parts, first = task / parts * heads;
    const int64_t t0 = part * chunk, t1 = std::min(p.T, t0 + chunk);
    for (int64_t i = first; i < first + heads; ++i) {
      if (!few) {
        ForwardChunk(p, i / p.N, i % p.N, t0, t1, o, saved);
        continue;
      }
      for (int64_t t = t0; t < t1; ++t) ForwardRow(p, i / p.N, i % p.N, t, o, saved);
    }
  });
  return ffi::Error::Success();
}

ffi::Error Backward(ffi::ThreadPool pool, Floats q, Floats k, Floats v, ffi::Buffer<ffi::PRED> mask,
                    Floats out, Floats peak, Floats total, Floats d_out, float scale, Result d_q, Result d_k,
                    Result d_v) {
  const Problem p = Decode(q, k, v, mask, scale);
  const Gradients d{d_q->typed_data(), d_k->typed_data(), d_v->typed_data()};
  const Sums saved{peak.typed_data(), total.typed_data()};
  Parallel(pool, p.B * p.K, [&](int64_t task) {
    BackwardHead(p, task / p.K, task % p.K, out.typed_data(), saved, d_out.typed_data(), d);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnForward, Forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Attr<float>("scale")
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnBackward, Backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<float>("scale")
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());
