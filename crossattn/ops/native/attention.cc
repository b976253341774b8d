// Attention on a CPU, forward and backward, float32: the score matrix exists one block at a time.
//
// A task owns one head of one batch entry (backward: one key head), so sums are added up in an
// order that does not depend on the number of threads. Here calls from XLA are cut into tasks.

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "backward.h"
#include "forward.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace crossattn {
namespace {

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
                    Floats out, Floats peak, Floats total, Floats d_out, float scale,
                    Result d_q, Result d_k, Result d_v) {
  const Problem p = Decode(q, k, v, mask, scale);
  const Gradients d{d_q->typed_data(), d_k->typed_data(), d_v->typed_data()};
  const Sums saved{peak.typed_data(), total.typed_data()};
  Parallel(pool, p.B * p.K, [&](int64_t task) {
    BackwardHead(p, task / p.K, task % p.K, out.typed_data(), saved, d_out.typed_data(), d);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace crossattn

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnForward, crossattn::Forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Attr<float>("scale")
                                  .Ret<crossattn::Floats>()
                                  .Ret<crossattn::Floats>()
                                  .Ret<crossattn::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnBackward, crossattn::Backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<crossattn::Floats>()
                                  .Arg<crossattn::Floats>()
                                  .Attr<float>("scale")
                                  .Ret<crossattn::Floats>()
                                  .Ret<crossattn::Floats>()
                                  .Ret<crossattn::Floats>());
