// Few rows times a matrix, float32, as decoding needs it.
//
// The matrix is first laid out as panels of some columns; in a loop XLA does that once, before it. Every
// element is summed up in one order, whatever the number of threads.

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
  Parallel(pool, Panels(N), [&](int64_t task) {
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
  Parallel(pool, (Panels(N) + some - 1) / some, [&](int64_t task) {
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

}  // namespace crossattn
