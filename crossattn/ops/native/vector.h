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

// Floats from row to row of a block of n columns: whole lines of the cache, one more than are needed.
// Rows a power of two apart would share a few places in the cache and drive each other out.
inline int64_t RowOf(int64_t n) { return RoundUp(n, 16) + 16; }

// x with its lanes i and i ^ Distance exchanged, for a power of two below the width.
template <int Distance>
inline Vec Exchange(Vec x) {
  IntVec lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i ^ Distance;
#if defined(__clang__)
  Vec exchanged;
  for (int i = 0; i < kWidth; ++i) exchanged[i] = x[i ^ Distance];
  return exchanged;
#else
  return __builtin_shuffle(x, lanes);
#endif
}

// One step of transposing a square of kWidth rows: swaps the two squares off the diagonal in each
// square of 2 * Distance.
template <int Distance>
inline void ExchangeOffDiagonal(Vec* rows) {
  IntVec second;
  for (int i = 0; i < kWidth; ++i) second[i] = i & Distance ? -1 : 0;
  for (int i = 0; i < kWidth; ++i) {
    if (i & Distance) continue;
    const Vec a = rows[i], b = rows[i + Distance];
    rows[i] = second ? Exchange<Distance>(b) : a;
    rows[i + Distance] = second ? b : Exchange<Distance>(a);
  }
}

// out [kWidth, kWidth] = in [kWidth, kWidth]^T; rows are that many floats apart.
inline void TransposeSquare(const float* in, int64_t in_row, float* out, int64_t out_row) {
  Vec rows[kWidth];
  for (int i = 0; i < kWidth; ++i) rows[i] = Load(in + i * in_row);
  if constexpr (kWidth == 16) ExchangeOffDiagonal<8 % kWidth>(rows);
  ExchangeOffDiagonal<4>(rows);
  ExchangeOffDiagonal<2>(rows);
  ExchangeOffDiagonal<1>(rows);
  for (int i = 0; i < kWidth; ++i) Store(out + i * out_row, rows[i]);
}

// out [size, rows] = in [rows, size]^T; rows are that many floats apart.
inline void Transpose(const float* in, int64_t in_row, int64_t rows, int64_t size, float* out,
                      int64_t out_row) {
  int64_t h = 0;
  const int64_t whole = rows / kWidth * kWidth;
  for (; h + kWidth <= size; h += kWidth)
    for (int64_t i = 0; i < whole; i += kWidth)
      TransposeSquare(in + i * in_row + h, in_row, out + h * out_row + i, out_row);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t rest = i < whole ? h : 0; rest < size; ++rest)
      out[rest * out_row + i] = in[i * in_row + rest];
}

// The same, and 0 in the columns from `rows` to `out_row`.
inline void TransposePadded(const float* in, int64_t in_row, int64_t rows, int64_t size, float* out,
                            int64_t out_row) {
  Transpose(in, in_row, rows, size, out, out_row);
  for (int64_t h = 0; h < size; ++h)
    std::fill(out + h * out_row + rows, out + (h + 1) * out_row, 0.0f);
}

// NaN in b counts as less than anything.
inline Vec Larger(Vec a, Vec b) { return b > a ? b : a; }

inline float Sum(Vec x) {
  if constexpr (kWidth == 16) x += Exchange<8 % kWidth>(x);
  x += Exchange<4>(x);
  x += Exchange<2>(x);
  return (x + Exchange<1>(x))[0];
}

// The largest, where none is NaN.
inline float Max(Vec x) {
  if constexpr (kWidth == 16) x = Larger(x, Exchange<8 % kWidth>(x));
  x = Larger(x, Exchange<4>(x));
  x = Larger(x, Exchange<2>(x));
  return Larger(x, Exchange<1>(x))[0];
}

// The sum of each row of lanes.
inline Vec SumEach(Vec rows[kWidth]) {
  if constexpr (kWidth == 16) ExchangeOffDiagonal<8 % kWidth>(rows);
  ExchangeOffDiagonal<4>(rows);
  ExchangeOffDiagonal<2>(rows);
  ExchangeOffDiagonal<1>(rows);
  for (int step = kWidth / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) rows[i] += rows[i + step];
  return rows[0];
}

// The products of a with each of b [kWidth][size].
inline Vec Dots(const float* a, const float* const* b, int64_t size) {
  Vec sums[kWidth] = {};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const Vec x = Load(a + i);
    for (int r = 0; r < kWidth; ++r) sums[r] += x * Load(b[r] + i);
  }
  Vec found = SumEach(sums);
  for (; i < size; ++i)
    for (int r = 0; r < kWidth; ++r) found[r] += a[i] * b[r][i];
  return found;
}

// Has n floats fetched that will be read soon.
inline void Fetch(const float* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i);
}

// e^x within 2 units in the last place for x from -87.6 up to 88; 0 below; NaN stays NaN.
// 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (minimax in relative error, 2e-8).
inline Vec Exp(Vec x) {
  const Vec floor = Splat(-88.0f);  // n is -127 here, which is a power of exactly 0
  x = floor > x ? floor : x;
  // Adding 1.5 * 2^23 rounds to an integer; 127 more makes its low bits a float's exponent.
  const Vec magic = Splat(12583039.0f);
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = x - n * 0.693147180559945309f;
  Vec p = r * 1.3836794532834848e-3f + 8.374856784939766e-3f;
  p = p * r + 4.1668228805065155e-2f;
  p = p * r + 1.6666419804096222e-1f;
  p = p * r + 4.9999991059303284e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * (Vec)((IntVec)shifted << 23);
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

// Rows in tiles of nearly equal size: a small one at the end would wait for its own sums.
template <int V>
inline void Column(int64_t M, int64_t K, const float* a, int64_t ai, int64_t ak, const float* b,
                   int64_t ldb, float* c, int64_t ldc, bool add) {
  for (int64_t tiles = (M + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const int64_t rows = (M + tiles - 1) / tiles;
    switch (rows) {
      case 6: Tile<6, V>(a, ai, ak, b, ldb, c, ldc, K, add); break;
      case 5: Tile<5, V>(a, ai, ak, b, ldb, c, ldc, K, add); break;
      case 4: Tile<4, V>(a, ai, ak, b, ldb, c, ldc, K, add); break;
      case 3: Tile<3, V>(a, ai, ak, b, ldb, c, ldc, K, add); break;
      case 2: Tile<2, V>(a, ai, ak, b, ldb, c, ldc, K, add); break;
      case 1: Tile<1, V>(a, ai, ak, b, ldb, c, ldc, K, add); break;
    }
    M -= rows;
    a += rows * ai;
    c += rows * ldc;
  }
}

inline void Gemm(int64_t M, int64_t N, int64_t K, const float* a, int64_t ai, int64_t ak,
                 const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + kTileVectors * kWidth <= N; j += kTileVectors * kWidth)
    Column<kTileVectors>(M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
  if constexpr (kTileVectors > 2)
    for (; j + 2 * kWidth <= N; j += 2 * kWidth)
      Column<2>(M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
  for (; j < N; j += kWidth) Column<1>(M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
}

}  // namespace crossattn
