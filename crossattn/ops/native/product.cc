// Few rows times a matrix, float32, as decoding needs it.
//
// For a dozen rows the matrix is first laid out as panels of some columns; in a loop XLA does that once,
// before it. A single row waits for the matrix alone, which is read where it lies. Every element is summed
// up in one order, whatever the number of threads.

#include "parallel.h"
#include "vector.h"

namespace crossattn {
namespace {

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kPanel = kTileVectors * kWidth, kDepth = 256;

int64_t Panels(int64_t N) { return (N + kPanel - 1) / kPanel; }

// w [K, N], or its transpose [N, K], as panels [K, kPanel] one after the other; what is missing in the
// last is 0. A panel is read from its beginning to its end, once.
ffi::Error Pack(ffi::ThreadPool pool, Floats w, bool transposed, ffi::Result<Floats> out) {
  const int64_t K = w.dimensions()[transposed], N = w.dimensions()[!transposed];
  const float* from = w.typed_data();
  float* to = out->typed_data();
  Parallel(pool, Panels(N), K * N, [&](int64_t task) {
    const int64_t j0 = task * kPanel, columns = std::min(kPanel, N - j0);
    float* panel = to + j0 * K;
    if (transposed) return TransposePadded(from + j0 * K, K, columns, K, panel, kPanel);
    for (int64_t k = 0; k < K; ++k, panel += kPanel)
      std::fill(std::copy_n(from + k * N + j0, columns, panel), panel + kPanel, 0.0f);
  });
  return ffi::Error::Success();
}

// y [M, N] = x [M, K] w, of the panels of w. Their depth goes in parts that stay in cache for all rows.
ffi::Error Product(ffi::ThreadPool pool, Floats x, Floats panels, ffi::Result<Floats> out) {
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = out->dimensions()[1];
  const float *rows = x.typed_data(), *packed = panels.typed_data();
  float* y = out->typed_data();
  const int64_t some = N <= 512 ? 2 : 4;
  Parallel(pool, (Panels(N) + some - 1) / some, M * K * N, [&](int64_t task) {
    float* partial = Scratch(M * kPanel);
    for (int64_t p = task * some; p < std::min(Panels(N), (task + 1) * some); ++p) {
      const int64_t columns = std::min(kPanel, N - p * kPanel);
      float* to = columns == kPanel ? y + p * kPanel : partial;
      const int64_t to_row = columns == kPanel ? N : kPanel;
      for (int64_t k = 0; k < K; k += kDepth)
        Column<kTileVectors>(M, std::min(kDepth, K - k), rows + k, K, 1,
                             packed + p * kPanel * K + k * kPanel, kPanel, to, to_row, k > 0);
      if (columns < kPanel)
        for (int64_t i = 0; i < M; ++i)
          std::copy_n(partial + i * kPanel, columns, y + i * N + p * kPanel);
    }
  });
  return ffi::Error::Success();
}

// The products of a with rows of a matrix, size floats apart, the last of them `last`. They are read one
// after the other, the page that follows asked for ahead: no more than one stream comes from memory.
inline Vec Dots(const float* a, const float* rows, int64_t last, int64_t size) {
  constexpr int kChains = 8;
  constexpr int64_t kPage = 4096 / sizeof(float);
  Vec lanes[kWidth];
  for (int64_t r = 0; r < kWidth; ++r) {
    const float* b = rows + std::min(r, last) * size;
    Vec sums[kChains] = {};
    int64_t i = 0;
    for (; i + kChains * kWidth <= size; i += kChains * kWidth)
      for (int c = 0; c < kChains; ++c) {
        __builtin_prefetch(b + i + c * kWidth + kPage);
        sums[c] += Load(a + i + c * kWidth) * Load(b + i + c * kWidth);
      }
    for (; i + kWidth <= size; i += kWidth) sums[0] += Load(a + i) * Load(b + i);
    for (int c = 1; c < kChains; ++c) sums[0] += sums[c];
    for (; i < size; ++i) sums[0][0] += a[i] * b[i];
    lanes[r] = sums[0];
  }
  return SumEach(lanes);
}

// y [1, N] = x [1, K] w, of w [K, N] or its transpose [N, K].
ffi::Error Row(ffi::ThreadPool pool, Floats x, Floats w, bool transposed, ffi::Result<Floats> out) {
  const int64_t K = x.dimensions()[1], N = out->dimensions()[1];
  const float *row = x.typed_data(), *from = w.typed_data();
  float* y = out->typed_data();
  constexpr int kVectors = 4 * kTileVectors;
  constexpr int64_t kWide = kVectors * kWidth;
  Parallel(pool, (N + kWide - 1) / kWide, K * N, [&](int64_t task) {
    int64_t j = task * kWide;
    const int64_t end = std::min(N, j + kWide);
    if (transposed) {
      for (; j < end; j += kWidth) {
        const Vec sums = Dots(row, from + j * K, N - 1 - j, K);
        for (int64_t r = 0; r < std::min<int64_t>(kWidth, end - j); ++r) y[j + r] = sums[r];
      }
      return;
    }
    if (end - j == kWide)
      return Tile<1, kVectors>(row, K, 1, from + j, N, y + j, N, K, false);
    for (; j + kWidth <= end; j += kWidth) Tile<1, 1>(row, K, 1, from + j, N, y + j, N, K, false);
    for (; j < end; ++j) {
      y[j] = 0;
      for (int64_t k = 0; k < K; ++k) y[j] += row[k] * from[k * N + j];
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnPack, Pack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Attr<bool>("transposed")
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnProduct, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnRow, Row,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<bool>("transposed")
                                  .Ret<Floats>());

}  // namespace crossattn
