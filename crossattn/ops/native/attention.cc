// Attention on a CPU, forward and backward, float32: the score matrix exists one block at a time.
//
// Calls from XLA are cut into tasks by shape alone, and what several tasks add to is summed up in the
// order of the tasks, so results do not depend on the number of threads.

#include <memory>

#include "backward.h"
#include "forward.h"
#include "parallel.h"

namespace crossattn {
namespace {

// Queries below which each looks at the keys by itself, and up to which it does under a sparse mask.
constexpr int64_t kFew = 4, kMaybeSparse = 16;

using Dims = ffi::Span<const int64_t>;
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Bytes = ffi::Buffer<ffi::PRED>;
using Result = ffi::Result<Floats>;

int64_t Product(Dims dims, size_t from, size_t to) {
  int64_t product = 1;
  for (size_t i = from; i < to; ++i) product *= dims[i];
  return product;
}

// Where each batch entry begins in an operand whose leading axes, of size 1 or the batch's, are
// followed by `inner` elements.
std::vector<int64_t> Begins(Dims own, Dims batch, size_t lead, int64_t inner) {
  std::vector<int64_t> begins(Product(batch, 0, lead));
  for (size_t b = 0; b < begins.size(); ++b) {
    int64_t rest = b, stride = inner;
    for (size_t axis = lead; axis-- > 0;) {
      if (own[axis] != 1) begins[b] += rest % batch[axis] * stride;
      rest /= batch[axis];
      stride *= own[axis];
    }
  }
  return begins;
}

struct MaskOperands {
  Integers interval;  // [*#B, #T, 2], or no elements
  Integers numbers;   // [*#B, conditions, S], or no elements
  Integers limits;    // [*#B, conditions, #T, 2]
  Bytes bytes;        // [*#B, #N, #T, S], or no elements
};

Problem Decode(Floats& q, Floats& k, Floats& v, MaskOperands m, float scale) {
  Problem p;
  const Dims qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  const size_t lead = qd.size() - 3;
  p.B = Product(qd, 0, lead);
  p.T = qd[lead], p.N = qd[lead + 1], p.H = qd[lead + 2];
  p.S = kd[lead], p.K = kd[lead + 1], p.Hv = vd[lead + 2];
  p.scale = scale;
  p.q = q.typed_data(), p.k = k.typed_data(), p.v = v.typed_data();
  p.mask.S = p.S;
  if (m.interval.element_count()) {
    const Dims d = m.interval.dimensions();
    p.mask.interval = m.interval.typed_data();
    p.mask.interval_row = d[lead] == 1 ? 0 : 2;
    p.interval_of = Begins(d, qd, lead, d[lead] * 2);
  }
  if (m.numbers.element_count()) {
    const Dims d = m.limits.dimensions();
    p.mask.conditions = d[lead];
    p.mask.numbers = m.numbers.typed_data();
    p.mask.limits = m.limits.typed_data();
    p.mask.limits_row = d[lead + 1] == 1 ? 0 : 2;
    p.mask.limits_of_condition = d[lead + 1] * 2;
    p.numbers_of = Begins(m.numbers.dimensions(), qd, lead, d[lead] * p.S);
    p.limits_of = Begins(d, qd, lead, d[lead] * d[lead + 1] * 2);
  }
  if (m.bytes.element_count()) {
    const Dims d = m.bytes.dimensions();
    p.mask.bytes = reinterpret_cast<const uint8_t*>(m.bytes.typed_data());
    p.mask.bytes_row = d[lead + 1] == 1 ? 0 : p.S;
    p.bytes_of_head = d[lead] == 1 ? 0 : d[lead + 1] * p.S;
    p.bytes_of = Begins(d, qd, lead, d[lead] * d[lead + 1] * p.S);
  }
  return p;
}

ffi::Error Forward(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Integers interval,
                   Integers numbers, Integers limits, Bytes bytes, float scale, Result out,
                   Result peak, Result total) {
  const Problem p = Decode(q, k, v, {interval, numbers, limits, bytes}, scale);
  float* o = out->typed_data();
  const Sums saved{peak->typed_data(), total->typed_data()};
  const bool few = p.T < kFew, may_be_sparse = p.T <= kMaybeSparse && p.mask.bytes;
  const int64_t chunk = few ? p.T : kQueryChunk, parts = (p.T + chunk - 1) / chunk;
  // Few queries are little work each: a task takes all heads of a batch entry, if there are several.
  const int64_t heads = (few || may_be_sparse) && p.B > 1 ? p.N : 1;
  Parallel(pool, p.B * p.N / heads * parts, p.Pairs() * (p.H + p.Hv), [&](int64_t task) {
    const int64_t part = task % parts, first = task / parts * heads;
    const int64_t t0 = part * chunk, t1 = std::min(p.T, t0 + chunk);
    for (int64_t i = first; i < first + heads; ++i) {
      const int64_t b = i / p.N, n = i % p.N;
      if (few || (may_be_sparse && p.MaskOf(b, n).Sparse(p.T)))
        for (int64_t t = t0; t < t1; ++t) ForwardRow(p, b, n, t, o, saved);
      else
        ForwardChunk(p, b, n, t0, t1, o, saved);
    }
  });
  return ffi::Error::Success();
}

// In how many parts the queries of a key head are taken, so that there is work for many threads;
// each part but the first needs gradients of keys and values of its own.
int64_t Parts(const Problem& p) {
  constexpr int64_t kTasks = 16, kRows = 512, kFloats = 1 << 26;
  const int64_t by_tasks = (kTasks + p.B * p.K - 1) / (p.B * p.K);
  const int64_t by_rows = std::max<int64_t>(1, p.T / kRows);
  const int64_t by_memory = 1 + kFloats / (p.B * p.S * p.K * (p.H + p.Hv) + 1);
  return std::min({by_tasks, by_rows, by_memory});
}

ffi::Error Backward(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Integers interval,
                    Integers numbers, Integers limits, Bytes bytes, Floats out, Floats peak,
                    Floats total, Floats d_out, Floats d_lse, float scale, Result d_q, Result d_k,
                    Result d_v) {
  const Problem p = Decode(q, k, v, {interval, numbers, limits, bytes}, scale);
  const Sums saved{peak.typed_data(), total.typed_data()};
  const int64_t parts = Parts(p), size_k = p.B * p.S * p.K * p.H, size_v = p.B * p.S * p.K * p.Hv;
  const int64_t blocks = (p.T + p.QueryBlock() - 1) / p.QueryBlock();
  std::unique_ptr<float[]> others(new float[(parts - 1) * (size_k + size_v)]);
  Gradients d{d_q->typed_data(), d_k->typed_data(), d_v->typed_data()};
  auto of_part = [&](int64_t part) {
    float* own = others.get() + (part - 1) * (size_k + size_v);
    return part == 0 ? d : Gradients{d.q, own, own + size_k};
  };
  Parallel(pool, p.B * p.K * parts, p.Pairs() * (3 * p.H + 2 * p.Hv), [&](int64_t task) {
    const int64_t part = task % parts, head = task / parts;
    const int64_t t0 = blocks * part / parts * p.QueryBlock();
    const int64_t t1 = std::min(p.T, blocks * (part + 1) / parts * p.QueryBlock());
    BackwardPart(p, head / p.K, head % p.K, t0, t1, out.typed_data(), saved, d_out.typed_data(),
                 d_lse.typed_data(), of_part(part));
  });
  if (parts == 1) return ffi::Error::Success();
  constexpr int64_t kSlice = 1 << 16;
  auto add = [&](float* to, int64_t size, int64_t offset) {
    Parallel(pool, (size + kSlice - 1) / kSlice, parts * size, [&](int64_t slice) {
      const int64_t from = slice * kSlice, end = std::min(size, from + kSlice);
      for (int64_t part = 1; part < parts; ++part) {
        const float* own = others.get() + (part - 1) * (size_k + size_v) + offset;
        for (int64_t i = from; i < end; ++i) to[i] += own[i];
      }
    });
  };
  add(d.k, size_k, 0);
  add(d.v, size_v, size_k);
  return ffi::Error::Success();
}

}  // namespace

#define CROSSATTN_OPERANDS        \
  ffi::Ffi::Bind()                \
      .Ctx<ffi::ThreadPool>()     \
      .Arg<Floats>()   \
      .Arg<Floats>()   \
      .Arg<Floats>()   \
      .Arg<Integers>() \
      .Arg<Integers>() \
      .Arg<Integers>() \
      .Arg<Bytes>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnForward, Forward,
                              CROSSATTN_OPERANDS.Attr<float>("scale")
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossattnBackward, Backward,
                              CROSSATTN_OPERANDS.Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<float>("scale")
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

}  // namespace crossattn
