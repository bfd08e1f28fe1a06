#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

// Threads of CPU kernels. Only the compute worker has more than one (StreamOptions::num_threads);
// on every other thread these helpers run serially. A kernel's result must not depend on the
// number of threads: reductions use a fixed number of chunks, added in order.

namespace tessera::cpu {

namespace detail {
inline thread_local int num_threads_of_this_thread = 1;
}

/// OpenMP threads that a kernel on the calling thread may use: those of a stream's worker, else 1.
inline int num_threads() {
  return detail::num_threads_of_this_thread;
}
/// For workers, when they start.
inline void set_num_threads(int num_threads) {
  detail::num_threads_of_this_thread = num_threads;
  omp_set_num_threads(num_threads);
}

/// f(begin, end), never inlined or specialized: the compiler may order the sums of two copies of a
/// loop differently, so the serial and the parallel path must run the very same instructions.
#if defined(__clang__)
template <class F>
[[gnu::noinline]] void call_range(F& f, int64_t begin, int64_t end) {
#else
template <class F>
[[gnu::noipa]] void call_range(F& f, int64_t begin, int64_t end) {
#endif
  f(begin, end);
}

/// Calls f(begin, end) over [0, count), split evenly over the threads in pieces of at least `grain`
/// items (choose it so that a piece is worth about 20 us: an OpenMP region costs as much).
/// f must not throw.
template <class F>
void parallel_for(int64_t count, int64_t grain, F&& f) {
  const int64_t max_pieces = (count + grain - 1) / std::max<int64_t>(grain, 1);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), max_pieces));
  if (threads <= 1 || omp_in_parallel()) {
    if (count > 0) call_range(f, int64_t{0}, count);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t t = omp_get_thread_num(), n = omp_get_num_threads();
    const int64_t begin = count * t / n, end = count * (t + 1) / n;
    if (begin < end) call_range(f, begin, end);
  }
}

}  // namespace tessera::cpu
