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

// Memory of this thread, which its next call may take over; it begins a line of the cache.
inline float* Scratch(int64_t floats) {
  constexpr int64_t kLine = 16;
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + kLine) memory.resize(floats + kLine);
  const auto address = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float);
  return memory.data() + (kLine - address % kLine) % kLine;
}

}  // namespace crossattn
