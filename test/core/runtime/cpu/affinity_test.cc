#include "core/runtime/cpu/affinity.h"

#include <omp.h>
#include <sched.h>

#include "test/testing.h"

namespace tessera {
namespace {

/// The processors that each thread of a parallel region of `stream` may use.
std::vector<std::vector<int>> masks_of(const Stream& stream, int num_threads) {
  std::vector<std::vector<int>> masks(static_cast<size_t>(num_threads));
  stream.submit("masks", [&masks, num_threads] {
#pragma omp parallel num_threads(num_threads)
    {
      cpu_set_t set;
      CPU_ZERO(&set);
      sched_getaffinity(0, sizeof(set), &set);
      for (int i = 0; i < CPU_SETSIZE; ++i) {
        if (CPU_ISSET(i, &set)) masks[static_cast<size_t>(omp_get_thread_num())].push_back(i);
      }
    }
  });
  stream.synchronize();
  return masks;
}

TEST_CASE("affinity: threads of a stream run where they are bound, others anywhere", "[affinity]") {
  const auto& allowed = allowed_processors();
  const auto num_threads = static_cast<int>(std::min<size_t>(allowed.size(), 3));
  const Stream stream = make_stream({}, "bound", {.num_threads = num_threads});
  const Stream other = make_stream({}, "other", {.num_threads = num_threads});
  const std::vector<int> mine(allowed.end() - num_threads, allowed.end());
  pin_threads(stream, mine);
  const auto masks = masks_of(stream, num_threads);
  for (int i = 0; i < num_threads; ++i) {
    CHECK(masks[static_cast<size_t>(i)] == std::vector<int>{mine[static_cast<size_t>(i)]});
  }
  CHECK(masks_of(other, 1)[0] == allowed);
  CHECK(allowed_processors() == allowed);
}

TEST_CASE("affinity: a processor that is not there is an error of the stream", "[affinity]") {
  const Stream stream = make_stream({}, "bound", {.num_threads = 1});
  pin_threads(stream, {CPU_SETSIZE - 1});
  CHECK(testing::error_of([&] { stream.synchronize(); }) == "pin_threads: Invalid argument");
}

}  // namespace
}  // namespace tessera
