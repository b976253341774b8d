// Few rows times a matrix, float32, as decoding needs it.
//
// The matrix is read once, some columns at a time. Every element is summed up in one order, whatever
// the number of threads.

#include <memory>

#include "parallel.h"
#include "vector.h"

namespace crossattn {
namespace {

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kPanel = kTileVectors * kWidth, kDepth = 256, kAhead = 16;

// Rows [k0, k1) and columns [j0, j1) of w [.., N], as panels [k1 - k0, kPanel] one after the other;
// what is missing in the last is 0. Close together, they do not contend for the same few cache lines.
void PackPanels(const float* w, int64_t N, int64_t k0, int64_t k1, int64_t j0, int64_t j1,
                float* panels) {
  const int64_t some = j1 - j0, whole = some / kPanel * kPanel, size = (k1 - k0) * kPanel;
  for (int64_t k = k0; k < k1; ++k, panels += kPanel) {
    const float* row = w + k * N + j0;
    for (int64_t j = 0; j < some; j += 16) __builtin_prefetch(row + kAhead * N + j);
    for (int64_t j = 0; j < whole; j += kWidth)
      Store(panels + j / kPanel * size + j % kPanel, Load(row + j));
    float* last = panels + whole / kPanel * size;
    if (whole < some)
      std::fill(std::copy_n(row + whole, some - whole, last), last + kPanel, 0.0f);
  }
}

// y [M, N] = x [M, K] w [K, N].
void Plain(ffi::ThreadPool& pool, int64_t M, int64_t N, int64_t K, const float* x, const float* w,
           float* y) {
  const int64_t columns = std::max<int64_t>(kPanel, N <= 512 ? 32 : 64);
  Parallel(pool, (N + columns - 1) / columns, [&](int64_t task) {
    const int64_t j0 = task * columns, j1 = std::min(N, j0 + columns);
    float* panels = Scratch(columns * kDepth + M * kPanel);
    float* partial = panels + columns * kDepth;  // of the last panel, if its columns are not all there
    const int64_t whole = j0 + (j1 - j0) / kPanel * kPanel;
    for (int64_t k0 = 0; k0 < K; k0 += kDepth) {
      const int64_t k1 = std::min(K, k0 + kDepth), depth = k1 - k0;
      PackPanels(w, N, k0, k1, j0, j1, panels);
      for (int64_t j = j0; j < j1; j += kPanel) {
        float* to = j < whole ? y + j : partial;
        Column<kTileVectors>(M, depth, x + k0, K, 1, panels + (j - j0) * depth, kPanel, to,
                             j < whole ? N : kPanel, k0 > 0);
      }
    }
    for (int64_t i = 0; i < M; ++i) std::copy_n(partial + i * kPanel, j1 - whole, y + i * N + whole);
  });
}

// Has the rows of w that the next tile reads fetched while this one is computed, for that many tiles.
struct NextRows {
  const float* rows;
  int64_t K, tiles;
  void operator()(int64_t k) {
    if (k == 0 && tiles-- > 0) rows += kTileRows * K;
    if (tiles >= 0) __builtin_prefetch(rows + kTileRows * k);
  }
};

// y [M, N] = x [M, K] w^T, of w [N, K]: the rows of w meet the columns of x^T.
void Transposed(ffi::ThreadPool& pool, int64_t M, int64_t N, int64_t K, const float* x,
                const float* w, float* y) {
  constexpr int64_t kRows = 96;
  const int64_t width = RoundUp(M);
  std::unique_ptr<float[]> x_t(new float[K * width]);
  TransposePadded(x, K, M, K, x_t.get(), width);
  Parallel(pool, (N + kRows - 1) / kRows, [&](int64_t task) {
    const int64_t j0 = task * kRows, rows = std::min(N - j0, kRows);
    float* y_t = Scratch(kRows * width);
    const float* mine = w + j0 * K;
    Gemm(rows, width, K, mine, K, 1, x_t.get(), width, y_t, width, false,
         NextRows{mine, K, kRows / kTileRows});
    Transpose(y_t, width, rows, M, y + j0, N);
  });
}

ffi::Error Product(ffi::ThreadPool pool, Floats x, Floats w, bool transposed,
                   ffi::Result<Floats> out) {
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = out->dimensions()[1];
  (transposed ? Transposed : Plain)(pool, M, N, K, x.typed_data(), w.typed_data(), out->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnProduct, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<bool>("transposed")
                                  .Ret<Floats>());

}  // namespace crossattn
