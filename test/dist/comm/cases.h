#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime/context.h"
#include "core/runtime/staging.h"
#include "core/tensor.h"
#include "core/text.h"
#include "dist/comm/mesh.h"
#include "dist/comm/world.h"

// Cases that run on any World: thread ranks (local_test.cc) and processes (mpi_test.cc).
// They throw instead of using the test framework's assertions, which are not for several threads.

namespace tessera::dist::testing {

template <class... Args>
void expect(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw Error(fmt::format(format, std::forward<Args>(args)...));
}

/// Element i of rank r's input: both signs, magnitudes over seven binary orders, so that the order
/// of a sum shows in its last bits.
inline double input_value(int rank, int64_t i) {
  uint64_t z = (static_cast<uint64_t>(rank) << 40) + static_cast<uint64_t>(i) + 1;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  const double magnitude = 1.0 + static_cast<double>(z & 0xffffff) / 0x1000000;
  return ((z >> 32) & 1 ? -1.0 : 1.0) * std::ldexp(magnitude, static_cast<int>((z >> 33) % 7) - 3);
}

template <class T>
std::vector<T> input(int rank, int64_t numel, int64_t first = 0) {
  std::vector<T> values(static_cast<size_t>(numel));
  for (int64_t i = 0; i < numel; ++i) {
    const double x = input_value(rank, first + i);
    if constexpr (std::is_same_v<T, double>)
      values[static_cast<size_t>(i)] = x;
    else
      values[static_cast<size_t>(i)] = T(static_cast<float>(x));
  }
  return values;
}

/// The definition of the sum over ranks [begin, end): halves, then halves of halves.
template <class T>
ComputeType<T> tree_sum(int begin, int end, int64_t i) {
  using C = ComputeType<T>;
  if (end - begin == 1) return static_cast<C>(input<T>(begin, 1, i)[0]);
  const int middle = begin + (end - begin + 1) / 2;
  return tree_sum<T>(begin, middle, i) + tree_sum<T>(middle, end, i);
}

template <class T>
void expect_bits(const std::vector<T>& actual, const std::vector<T>& expected, const char* what) {
  expect(actual.size() == expected.size(), "{}: {} elements, expected {}", what, actual.size(),
         expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    expect(std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0,
           "{}: element {} is {}, expected {}", what, i, static_cast<double>(actual[i]),
           static_cast<double>(expected[i]));
  }
}

/// Memory of the rank's device that holds some values; for any stream.
template <class T>
class Buffer {
 public:
  explicit Buffer(const std::vector<T>& values)
      : num_values_(values.size()),
        storage_(std::make_shared<Storage>(std::max<size_t>(1, values.size() * sizeof(T)),
                                           Context::current()->device())) {
    storage_->materialize();
    if (!values.empty()) {
      HostBuffer staged = Context::current()->staging()->acquire(nbytes());
      std::memcpy(staged.data(), values.data(), nbytes());
      std::move(staged).upload("upload", current_stream(), data());
    }
    current_stream().synchronize();
  }
  T* data() const { return static_cast<T*>(storage_->data()); }
  /// What is there once all streams that were synchronized have run.
  std::vector<T> values() const {
    std::vector<T> values(num_values_);
    if (values.empty()) return values;
    HostBuffer staged = Context::current()->staging()->acquire(nbytes());
    staged.download("download", current_stream(), data()).synchronize();
    std::memcpy(static_cast<void*>(values.data()), staged.data(), nbytes());
    return values;
  }

 private:
  size_t nbytes() const { return num_values_ * sizeof(T); }

  size_t num_values_;
  std::shared_ptr<Storage> storage_;
};

template <class T>
void expect_bits(const Buffer<T>& actual, const std::vector<T>& expected, const char* what) {
  expect_bits(actual.values(), expected, what);
}

/// Scratch of `nbytes`, as aligned as a caller's.
inline Buffer<double> scratch(int64_t nbytes) {
  return Buffer<double>(std::vector<double>(static_cast<size_t>((nbytes + 7) / 8), -1.0));
}

template <class T>
void case_all_gather(Comm& comm, const Stream& stream, int64_t numel, bool in_place) {
  const int n = comm.world_size(), rank = comm.rank();
  const std::vector<T> mine = input<T>(rank, numel);
  const Buffer<T> shard(mine);
  std::vector<T> initial(static_cast<size_t>(numel * n));
  if (in_place) std::copy(mine.begin(), mine.end(), initial.begin() + numel * rank);
  const Buffer<T> full(initial);
  T* place = full.data() + numel * rank;
  comm.all_gather(stream, full.data(), in_place ? place : shard.data(), numel, dtype_of<T>,
                  {"forward", "block0", 1});
  stream.synchronize();
  std::vector<T> expected;
  for (int r = 0; r < n; ++r) {
    const std::vector<T> part = input<T>(r, numel);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  expect_bits(full, expected, "all_gather");
}

template <class T, class Out>
void case_reduce_scatter(Comm& comm, const Stream& stream, int64_t numel, bool accumulate) {
  const int n = comm.world_size(), rank = comm.rank();
  const Buffer<T> full(input<T>(rank, numel * n));
  const Buffer<Out> shard(std::vector<Out>(static_cast<size_t>(numel), Out(0.375f)));
  const Buffer<double> staging = scratch(comm.reduce_scatter_staging_nbytes(numel, dtype_of<T>));
  comm.reduce_scatter(stream, shard.data(), full.data(), numel, dtype_of<T>, dtype_of<Out>,
                      accumulate, staging.data(), {"backward", "block0", 1});
  stream.synchronize();
  std::vector<Out> expected;
  for (int64_t i = 0; i < numel; ++i) {
    const auto sum = tree_sum<T>(0, n, rank * numel + i);
    if constexpr (std::is_same_v<Out, double>) {
      expected.push_back(static_cast<double>(sum) + (accumulate ? 0.375 : 0.0));
    } else {
      expected.push_back(Out(static_cast<float>(accumulate ? 0.375f + sum : sum)));
    }
  }
  expect_bits(shard, expected, "reduce_scatter");
}

template <class T>
void case_all_reduce(Comm& comm, const Stream& stream, int64_t numel) {
  const Buffer<T> data(input<T>(comm.rank(), numel));
  const Buffer<double> staging = scratch(comm.all_reduce_staging_nbytes(numel, dtype_of<T>));
  comm.all_reduce(stream, data.data(), numel, dtype_of<T>, staging.data(), {"backward", "head", 2});
  stream.synchronize();
  std::vector<T> expected;
  for (int64_t i = 0; i < numel; ++i) {
    const auto sum = tree_sum<T>(0, comm.world_size(), i);
    if constexpr (std::is_same_v<T, double>)
      expected.push_back(sum);
    else
      expected.push_back(T(static_cast<float>(sum)));
  }
  expect_bits(data, expected, "all_reduce");
}

/// Everything a communicator does, at sizes around chunks, blocks and the one-hop limit. Sums on
/// CUDA are of f64 only if they go into f64.
inline void check_collectives(World& world) {
  const bool is_on_cpu = Context::current()->device().type == DeviceType::kCpu;
  const auto comm = world.make_comm();
  const Stream stream = Context::current()->make_stream("comm");
  for (const int64_t numel : {0, 1, 3, 256, 1031, 20000}) {
    for (const bool flag : {false, true}) {
      case_all_gather<float>(*comm, stream, numel, flag);
      case_all_gather<BFloat16>(*comm, stream, numel, flag);
      case_reduce_scatter<float, float>(*comm, stream, numel, flag);
      case_reduce_scatter<BFloat16, float>(*comm, stream, numel, flag);
      case_reduce_scatter<BFloat16, BFloat16>(*comm, stream, numel, flag);
      case_reduce_scatter<Float16, float>(*comm, stream, numel, flag);
      case_reduce_scatter<float, BFloat16>(*comm, stream, numel, flag);
      if (is_on_cpu) case_reduce_scatter<float, double>(*comm, stream, numel, flag);
      case_reduce_scatter<double, double>(*comm, stream, numel, flag);
    }
    case_all_reduce<float>(*comm, stream, numel);
    case_all_reduce<BFloat16>(*comm, stream, numel);
    case_all_reduce<Float16>(*comm, stream, numel);
    case_all_reduce<double>(*comm, stream, numel);
  }
}

/// Calls queued on two communicators and two streams without waiting in between.
inline void check_queued(World& world) {
  const auto gather = world.make_comm(), reduce = world.make_comm();
  const Stream gathers = Context::current()->make_stream("all_gather");
  const Stream reduces = Context::current()->make_stream("reduce_scatter");
  constexpr int kUnits = 12;
  constexpr int64_t kNumel = 500;
  const int n = world.world_size(), rank = world.rank();
  std::vector<Buffer<float>> shards, fulls, grads, sums;
  std::vector<Buffer<double>> staging;
  for (int u = 0; u < kUnits; ++u) {
    shards.emplace_back(input<float>(rank, kNumel, u));
    fulls.emplace_back(std::vector<float>(static_cast<size_t>(kNumel * n)));
    grads.emplace_back(input<float>(rank, kNumel * n, u));
    sums.emplace_back(std::vector<float>(static_cast<size_t>(kNumel)));
    staging.push_back(scratch(reduce->reduce_scatter_staging_nbytes(kNumel, kF32)));
  }
  for (size_t u = 0; u < kUnits; ++u) {
    gather->all_gather(gathers, fulls[u].data(), shards[u].data(), kNumel, kF32);
    reduces.wait(gathers.record());
    reduce->reduce_scatter(reduces, sums[u].data(), grads[u].data(), kNumel, kF32, kF32, false,
                           staging[u].data());
  }
  gathers.synchronize();
  reduces.synchronize();
  for (int u = 0; u < kUnits; ++u) {
    const std::vector<float> full = fulls[static_cast<size_t>(u)].values();
    const std::vector<float> sum = sums[static_cast<size_t>(u)].values();
    for (int r = 0; r < n; ++r) {
      const auto begin = full.begin() + r * kNumel;
      expect_bits(std::vector<float>(begin, begin + kNumel), input<float>(r, kNumel, u), "gather");
    }
    for (int64_t i = 0; i < kNumel; ++i) {
      const float expected = tree_sum<float>(0, n, rank * kNumel + i + u);
      const float actual = sum[static_cast<size_t>(i)];
      expect(actual == expected, "unit {} element {}: {} instead of {}", u, i, actual, expected);
    }
  }
}

/// A mesh: sums inside shard groups followed by a sum across replicas have the bits of a flat sum.
inline void check_mesh(World& world) {
  const auto comm = world.make_comm();
  const Stream stream = Context::current()->make_stream("comm");
  const int n = world.world_size();
  constexpr int64_t kNumel = 96;
  for (int shard_size = 1; shard_size <= n; ++shard_size) {
    if (n % shard_size != 0) continue;
    const Mesh mesh = Mesh::make(n, world.rank(), shard_size);
    const auto shard_comm = mesh.split_shard(*comm), replicate_comm = mesh.split_replicate(*comm);
    expect(shard_comm->rank() == mesh.shard_rank && shard_comm->world_size() == shard_size &&
               replicate_comm->rank() == mesh.replicate_rank &&
               replicate_comm->world_size() == n / shard_size,
           "mesh: rank {} has another place in its groups", world.rank());
    const bool is_power_of_two = (mesh.replicate_size & (mesh.replicate_size - 1)) == 0;
    const Buffer<float> full(input<float>(world.rank(), kNumel * shard_size));
    const Buffer<float> shard(std::vector<float>(kNumel, 0.0f));
    const auto staging = scratch(shard_comm->reduce_scatter_staging_nbytes(kNumel, kF32) +
                                 replicate_comm->all_reduce_staging_nbytes(kNumel, kF32));
    shard_comm->reduce_scatter(stream, shard.data(), full.data(), kNumel, kF32, kF32, false,
                               staging.data());
    replicate_comm->all_reduce(stream, shard.data(), kNumel, kF32, staging.data());
    stream.synchronize();
    const std::vector<float> values = shard.values();
    for (int64_t i = 0; i < kNumel; ++i) {
      const float flat = tree_sum<float>(0, n, mesh.shard_rank * kNumel + i);
      const float actual = values[static_cast<size_t>(i)];
      expect(is_power_of_two ? actual == flat : std::abs(actual - flat) < 1e-4f,
             "mesh {} x {}: element {} is {} instead of {}", n / shard_size, shard_size, i, actual,
             flat);
    }
  }
  // Colors and keys need not be dense; keys reverse the order.
  const auto reversed = comm->split(3 + 100 * (world.rank() % 2), -world.rank());
  const int size = (n + 1 - world.rank() % 2) / 2;
  expect(reversed->world_size() == size && reversed->rank() == size - 1 - world.rank() / 2,
         "split: rank {} became {} of {}", world.rank(), reversed->rank(), reversed->world_size());
}

inline void check_control(World& world) {
  Control& control = world.control();
  const int n = world.world_size(), rank = world.rank();
  expect(control.rank() == rank && control.world_size() == n, "control: another world");
  control.barrier();
  const std::vector<std::string> texts =
      control.all_gather(std::string(static_cast<size_t>(rank), 'x'));
  for (int r = 0; r < n; ++r) {
    expect(texts[static_cast<size_t>(r)] == std::string(static_cast<size_t>(r), 'x'),
           "control: text of rank {} is \"{}\"", r, texts[static_cast<size_t>(r)]);
  }
  expect(control.all_gather(std::string()) == std::vector<std::string>(static_cast<size_t>(n)),
         "control: empty texts");
  const std::string last = fmt::format("from rank {}", n - 1);
  expect(control.broadcast(rank == n - 1 ? last : std::string("mine"), n - 1) == last,
         "control: broadcast");
  expect(control.all_agree(true), "control: all agree");
  expect(!control.all_agree(rank != n - 1), "control: the last rank does not agree");
  expect(control.max(rank) == n - 1 && control.min(rank + 3) == 3, "control: max and min");
  expect(control.sum(int64_t{rank + 1}) == n * (n + 1) / 2, "control: sum of integers");
  double total = 0;
  for (int r = 0; r < n; ++r) total += input_value(r, 0) / 3;
  expect(control.sum(input_value(rank, 0) / 3) == total, "control: sum of doubles");
}

/// What one rank sees ends all with the same class, status and message, and they can go on.
inline void check_verdict(World& world) {
  Control& control = world.control();
  const int n = world.world_size(), rank = world.rank();
  control.verdict([] {});
  control.verdict(nullptr);
  const auto expect_verdict = [&](int reporter, int status, const std::string& message,
                                  const std::function<void()>& body) {
    try {
      control.verdict(body);
    } catch (const Error& error) {
      expect(error.what() == message && error.exit_status() == status &&
                 control.verdict_rank(error) == reporter,
             "verdict: rank {} got \"{}\" (status {})", rank, error.what(), error.exit_status());
      return;
    }
    throw Error("verdict: no error");
  };
  expect_verdict(n - 1, 3, "tokens.bin: bad magic", [&] {
    if (rank == n - 1) throw InputError("tokens.bin: bad magic");
  });
  expect_verdict(0, 7, "disk of rank 0",
                 [&] { throw IoError(fmt::format("disk of rank {}", rank)); });
  expect_verdict(n - 1, 1, "shapes", [&] {
    if (rank == n - 1) throw ShapeError("shapes");
  });
  // Of a message that is no text for people, the ranks exchange the two ends.
  const std::string large = "begin" + std::string(10'000'000, 'x') + "end";
  expect_verdict(n - 1, 3, shorten(large, Control::kMaxVerdictNbytes), [&] {
    if (rank == n - 1) throw InputError(large);
  });
  expect(control.verdict_rank(Error("something else")) == -1, "verdict: another error is none");
}

inline void check_allocate(World& world) {
  const auto comm = world.make_comm();
  const int64_t before = Context::current()->allocator()->stats().allocated;
  const auto storage = comm->allocate(5000, MemoryClass::kGathered);
  const AllocatorStats stats = Context::current()->allocator()->stats();
  expect(storage->nbytes() == 5000 && stats.allocated >= before + 5000 &&
             stats.allocated_by_class[static_cast<size_t>(MemoryClass::kGathered)] >= 5000,
         "allocate: the bytes are not counted");
  Context::current()->compute().synchronize();  // fresh bytes are poisoned in stream order
  Context::current()->compute().fill_bytes("fill", storage->data(), 1, 5000);
  Context::current()->compute().synchronize();
  expect(comm->allocate(0, MemoryClass::kGathered)->is_materialized(), "allocate: nothing");
}

}  // namespace tessera::dist::testing
