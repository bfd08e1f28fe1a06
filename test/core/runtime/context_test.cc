#include "core/runtime/context.h"

#include <thread>

#include "core/runtime/cpu/affinity.h"
#include "core/runtime/order_check.h"
#include "core/tensor.h"
#include "test/testing.h"

namespace tessera {
namespace {

std::shared_ptr<Context> make_context(ContextOptions options = {}) {
  options.num_threads = std::max(1, options.num_threads);
  return std::make_shared<Context>(options);
}

TEST_CASE("context: scopes nest, and belong to their thread", "[context]") {
  const std::shared_ptr<Context> outside = Context::current();
  const auto a = make_context(), b = make_context();
  {
    const Context::Scope scope_a(a);
    CHECK(Context::current() == a);
    CHECK(current_stream() == a->compute());
    {
      const Context::Scope scope_b(b);
      CHECK(Context::current() == b);
    }
    CHECK(Context::current() == a);
    std::shared_ptr<Context> there;
    std::thread([&] { there = Context::current(); }).join();
    CHECK(there == outside);
  }
  CHECK(Context::current() == outside);
}

TEST_CASE("context: a new process context is seen by threads that used the old one", "[context]") {
  const std::shared_ptr<Context> before = Context::current();
  const auto next = make_context();
  std::shared_ptr<Context> first, second;
  std::thread thread([&] {
    first = Context::current();
    Context::set_process_context(next);
    second = Context::current();
  });
  thread.join();
  CHECK(first == before);
  CHECK(second == next);
  CHECK(Context::current() == next);
  Context::set_process_context(before);
  CHECK(Context::current() == before);
}

TEST_CASE("context: its memory is limited and counted on its own", "[context]") {
  const auto small = make_context({.memory_limit = 4 << 20}), other = make_context();
  const Context::Scope scope(small);
  CHECK_THROWS_AS(empty({2 << 20}), OutOfMemoryError);
  const Tensor t = empty({1000});
  CHECK(small->allocator()->stats().allocated == 4096);
  CHECK(other->allocator()->stats().allocated == 0);
  CHECK(small->host_allocator()->stats().allocated == 0);
}

TEST_CASE("context: ranks on threads do not see each other", "[context]") {
  std::vector<std::vector<double>> results(3);
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const Context::Scope scope(make_context({.poison = true, .order_check = true}));
      Tensor sum = zeros({100});
      for (int i = 0; i < 50; ++i) {
        const Tensor t = full({100}, static_cast<double>(rank));
        sum.add_(t);
      }
      results[rank] = sum.to_vector();
      Context::current()->order_check()->throw_if_conflicts();
    });
  }
  for (std::thread& t : ranks) t.join();
  for (size_t rank = 0; rank < 3; ++rank) {
    CHECK(results[rank] == std::vector<double>(100, 50.0 * static_cast<double>(rank)));
  }
}

TEST_CASE("context: threads default to the processors the process may use", "[context]") {
  const Context context(ContextOptions{});
  CHECK(num_allowed_processors() >= 1);
  CHECK(context.options().num_threads == num_usable_processors());
}

TEST_CASE("device: names", "[context]") {
  CHECK(device_from_name("cpu") == Device{});
  CHECK(name_of(Device{}) == "cpu");
  CHECK(name_of(Device{DeviceType::kCuda, 3}) == "cuda:3");
  CHECK(testing::error_of([] { device_from_name("tpu"); }) ==
        "device: \"tpu\" is not one of auto, cpu, cuda");
}

}  // namespace
}  // namespace tessera
