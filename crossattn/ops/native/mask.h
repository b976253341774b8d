// Which keys a query may read, in memory linear in length, and which blocks hold any of them.
#pragma once

#include <algorithm>
#include <limits>

#include "vector.h"

namespace crossattn {

constexpr float kInf = std::numeric_limits<float>::infinity();
// A mask is sparse if at most one pair of so many may be read.
constexpr int64_t kSparse = 3;

// Some of the keys of a block: every key that some query of a block may read lies in [from, to).
struct Span {
  int64_t from, to;
  bool partial;  // whether some query may not read some of them
  bool empty() const { return from >= to; }
};

// Which keys the queries of one batch entry and head may read: a conjunction of an interval of
// indices, limits on numbers that the keys carry, and bytes. Each part may be absent.
struct Mask {
  int64_t S = 0;
  // For each query the first key and one past the last, [T, 2]; `interval_row` is 0 for one for all.
  const int32_t* interval = nullptr;
  int64_t interval_row = 0;
  // Conditions low <= number <= high: numbers [conditions, S], limits [conditions, T, 2].
  int64_t conditions = 0;
  const int32_t *numbers = nullptr, *limits = nullptr;
  int64_t limits_row = 0, limits_of_condition = 0;
  const uint8_t* bytes = nullptr;  // [T, S]
  int64_t bytes_row = 0;

  const int32_t* Interval(int64_t t) const { return interval + t * interval_row; }
  const int32_t* Limits(int64_t condition, int64_t t) const {
    return limits + condition * limits_of_condition + t * limits_row;
  }
  bool any() const { return interval || conditions || bytes; }
  bool each_query_its_own() const {
    return (interval && interval_row) || (conditions && limits_row) || (bytes && bytes_row);
  }

  // The keys of [s0, s1) that the queries [t0, t1) may read. `from` is a multiple of the vector
  // width away from s0.
  Span Read(int64_t t0, int64_t t1, int64_t s0, int64_t s1) const {
    Span span{s0, s1, bytes != nullptr};
    if (interval) NarrowToInterval(t0, t1, span);
    for (int64_t c = 0; c < conditions && !span.empty(); ++c) NarrowToLimits(c, t0, t1, span);
    if (bytes && !span.empty()) NarrowToBytes(t0, t1, span);
    if (span.empty()) return {s0, s0, false};
    const int64_t aligned = s0 + (span.from - s0) / kWidth * kWidth;
    span.partial |= aligned != span.from;
    span.from = aligned;
    return span;
  }

  // The keys that the interval leaves to the queries [t0, t1), among all.
  Span Reach(int64_t t0, int64_t t1) const {
    Span span{0, S, false};
    if (interval) NarrowToInterval(t0, t1, span);
    return span;
  }

  void NarrowToInterval(int64_t t0, int64_t t1, Span& span) const {
    int32_t first = INT32_MAX, last = 0, latest_first = 0, earliest_last = INT32_MAX;
    for (int64_t t = t0; t < (interval_row ? t1 : t0 + 1); ++t) {
      const int32_t *own = Interval(t), low = own[0], high = own[1];
      latest_first = std::max(latest_first, low);
      earliest_last = std::min(earliest_last, high);
      first = low < high ? std::min(first, low) : first;
      last = low < high ? std::max(last, high) : last;
    }
    span.from = std::max<int64_t>(span.from, first);
    span.to = std::min<int64_t>(span.to, last);
    span.partial |= latest_first > span.from || earliest_last < span.to;
  }

  void NarrowToLimits(int64_t c, int64_t t0, int64_t t1, Span& span) const {
    int32_t low = INT32_MAX, high = INT32_MIN, highest_low = INT32_MIN, lowest_high = INT32_MAX;
    for (int64_t t = t0; t < (limits_row ? t1 : t0 + 1); ++t) {
      const int32_t* own = Limits(c, t);
      highest_low = std::max(highest_low, own[0]);
      lowest_high = std::min(lowest_high, own[1]);
      if (own[0] > own[1]) continue;
      low = std::min(low, own[0]);
      high = std::max(high, own[1]);
    }
    const int32_t* own = numbers + c * S;
    while (!span.empty() && (own[span.from] < low || own[span.from] > high)) ++span.from;
    while (!span.empty() && (own[span.to - 1] < low || own[span.to - 1] > high)) --span.to;
    for (int64_t s = span.from; s < span.to && !span.partial; ++s)
      span.partial = own[s] < highest_low || own[s] > lowest_high;
  }

  void NarrowToBytes(int64_t t0, int64_t t1, Span& span) const {
    int64_t first = span.to, last = span.from;
    for (int64_t t = t0; t < (bytes_row ? t1 : t0 + 1); ++t) {
      const uint8_t* allowed = bytes + t * bytes_row;
      int64_t s = span.from;
      while (s < first && !allowed[s]) ++s;
      first = std::min(first, s);
      s = span.to;
      while (s > last && !allowed[s - 1]) --s;
      last = std::max(last, s);
    }
    span.from = first;
    span.to = last;
  }

  // The keys of [from, to) that query t may read, in order; returns how many they are.
  int64_t List(int64_t t, int64_t from, int64_t to, int32_t* keys) const {
    if (interval) {
      from = std::max<int64_t>(from, Interval(t)[0]);
      to = std::min<int64_t>(to, Interval(t)[1]);
    }
    const uint8_t* allowed = bytes ? bytes + t * bytes_row : nullptr;
    int64_t count = 0;
    for (int64_t s = from; s < to; ++s) {
      bool readable = !allowed || allowed[s];
      for (int64_t c = 0; c < conditions; ++c) {
        const int32_t number = numbers[c * S + s], *own = Limits(c, t);
        readable &= own[0] <= number && number <= own[1];
      }
      keys[count] = static_cast<int32_t>(s);
      count += readable;
    }
    return count;
  }

  // Whether so few of the pairs of T queries and their keys may be read, by bytes, that each query had
  // better look at its own: beams of a search, which share a cache, read one slot of each position.
  bool Sparse(int64_t T) const {
    if (!bytes || !bytes_row) return false;
    const Span reach = Reach(0, T);
    int64_t pairs = 0;
    for (int64_t t = 0; t < T; ++t)
      for (int64_t s = reach.from; s < reach.to; ++s) pairs += bytes[t * bytes_row + s] != 0;
    return pairs * kSparse <= T * (reach.to - reach.from);
  }

  // Sets logits of query t to -inf for the keys of [from, to) that it may not read.
  void Hide(int64_t t, int64_t from, int64_t to, float* logits) const {
    const int64_t keys = to - from;
    if (interval) {
      const int64_t first = std::clamp<int64_t>(Interval(t)[0] - from, 0, keys);
      const int64_t last = std::clamp<int64_t>(Interval(t)[1] - from, first, keys);
      std::fill(logits, logits + first, -kInf);
      std::fill(logits + last, logits + keys, -kInf);
    }
    for (int64_t c = 0; c < conditions; ++c) {
      const int32_t low = Limits(c, t)[0], high = Limits(c, t)[1], *own = numbers + c * S + from;
      int64_t s = 0;
      for (; s + kWidth <= keys; s += kWidth) {
        const IntVec number = *reinterpret_cast<const IntVec*>(own + s);
        const IntVec readable = (number >= low) & (number <= high);
        Store(logits + s, readable ? Load(logits + s) : Splat(-kInf));
      }
      for (; s < keys; ++s)
        if (own[s] < low || own[s] > high) logits[s] = -kInf;
    }
    if (!bytes) return;
    const uint8_t* allowed = bytes + t * bytes_row + from;
    int64_t s = 0;
    for (; s + kWidth <= keys; s += kWidth) {
      const ByteVec some = *reinterpret_cast<const ByteVec*>(allowed + s);
      const IntVec readable = __builtin_convertvector(some, IntVec) != 0;
      Store(logits + s, readable ? Load(logits + s) : Splat(-kInf));
    }
    for (; s < keys; ++s) logits[s] = allowed[s] ? logits[s] : -kInf;
  }
};

}  // namespace crossattn
