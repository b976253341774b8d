// Vectors of floats, an exponential of them, and a matrix product of blocks that lie in cache.
#pragma once

#include <algorithm>
#include <cstdint>

namespace crossattn {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kTileVectors = 4;
#else
constexpr int kWidth = 8, kTileVectors = 2;
#endif
constexpr int kTileRows = 6;

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

inline void Gemm(int64_t M, int64_t N, int64_t K, const float* a, int64_t ai, int64_t ak,
                 const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + kTileVectors * kWidth <= N; j += kTileVectors * kWidth)
    Column<kTileVectors>(M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
  for (; j < N; j += kWidth) Column<1>(M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
}

}  // namespace crossattn
