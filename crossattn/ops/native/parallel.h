// Tasks on XLA's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace crossattn {

// Multiply-adds that take about as long as it takes to wake a thread.
constexpr int64_t kWorthAThread = 1 << 18;

// Runs task(0) .. task(count - 1), of so much work in all, on the caller's thread and on as many of
// XLA's pool as have enough to do.
template <typename F>
void Parallel(ffi::ThreadPool& pool, int64_t count, int64_t work, F task) {
  const int64_t helpers = std::min({pool.num_threads() - 1, count - 1, work / kWorthAThread});
  if (helpers < 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto shared = std::make_shared<Shared>();
  // A helper that starts after the last task was taken touches nothing but `shared`.
  auto run = [shared, count, &task] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      task(i);
      if (shared->done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->finished.notify_all();
      }
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(run)>(run));
  run();
  for (int spin = 0; spin < 2000 && shared->done.load() < count; ++spin) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done.load() == count; });
}

// Memory of this thread, which its next call may take over; it begins a line of the cache.
inline float* Scratch(int64_t floats) {
  constexpr int64_t kLine = 16;
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + kLine) memory.resize(floats + kLine);
  const auto address = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float);
  return memory.data() + (kLine - address % kLine) % kLine;
}

}  // namespace crossattn
