#include "core/storage.h"

#include <cstring>

#include "core/tensor.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

std::shared_ptr<Context> make_context() {
  return std::make_shared<Context>(ContextOptions{.num_threads = 1, .poison = true});
}

TEST_CASE("storage: outlives its bytes", "[storage]") {
  const Context::Scope scope(make_context());
  auto storage = std::make_shared<Storage>(64, Device{});
  const Tensor view = view_of_storage(storage, 4, {4}, kF32);
  CHECK_FALSE(storage->is_materialized());
  CHECK(error_of([&] { view.raw_data(); }).find("Storage: its 64 bytes are released") == 0);

  storage->materialize();
  CHECK(storage->is_materialized());
  Tensor(view).fill_(3);
  CHECK(view.to_vector() == std::vector<double>{3, 3, 3, 3});

  storage->release();
  CHECK_THROWS_AS(view.to_vector(), InternalError);
  storage->materialize();
  Tensor(view).fill_(4);
  CHECK(view.to_vector() == std::vector<double>{4, 4, 4, 4});
}

TEST_CASE("storage: materialize keeps what is there", "[storage]") {
  const Context::Scope scope(make_context());
  Storage storage(16, Device{});
  storage.materialize();
  const void* first = storage.data();
  storage.materialize();
  CHECK(storage.data() == first);
  CHECK(Context::current()->allocator()->stats().num_allocations == 1);
}

TEST_CASE("storage: counts as the class it was materialized with", "[storage]") {
  const Context::Scope scope(make_context());
  Storage storage(1000, Device{});
  storage.materialize(MemoryClass::kOptimizer);
  const AllocatorStats stats = Context::current()->allocator()->stats();
  CHECK(stats.allocated_by_class[static_cast<size_t>(MemoryClass::kOptimizer)] == 1024);
  CHECK(stats.allocated == 1024);
  storage.release();
  CHECK(Context::current()->allocator()->stats().allocated == 0);
}

TEST_CASE("storage: holds the owner of attached memory until release", "[storage]") {
  const Context::Scope scope(make_context());
  auto owner = std::make_shared<std::vector<float>>(4, 2.5f);
  std::weak_ptr<std::vector<float>> watch = owner;
  auto storage = std::make_shared<Storage>(16, Device{});
  storage->attach(owner->data(), owner);
  owner = nullptr;
  CHECK_FALSE(watch.expired());
  CHECK(view_of_storage(storage, 0, {4}, kF32).to_vector() ==
        std::vector<double>{2.5, 2.5, 2.5, 2.5});
  storage->release();
  CHECK(watch.expired());
  CHECK_FALSE(storage->is_materialized());
}

TEST_CASE("storage: attaching gives own bytes back", "[storage]") {
  const Context::Scope scope(make_context());
  float slot[4] = {1, 2, 3, 4};
  Storage storage(16, Device{});
  storage.materialize();
  storage.attach(slot);
  CHECK(storage.data() == slot);
  CHECK(Context::current()->allocator()->stats().allocated == 0);
}

TEST_CASE("storage: none of zero bytes needs memory", "[storage]") {
  const Context::Scope scope(make_context());
  Storage storage(0, Device{});
  CHECK(storage.is_materialized());
  CHECK(storage.data() == nullptr);
  storage.materialize();
  CHECK(Context::current()->allocator()->stats().num_allocations == 0);
}

TEST_CASE("storage: its memory outlives the context it came from", "[storage]") {
  Tensor kept;
  {
    const Context::Scope scope(std::make_shared<Context>(
        ContextOptions{.num_threads = 1, .poison = true, .order_check = true}));
    kept = full({8}, 5);
  }
  // Its stream, the allocator and the checker are all still there for the free.
  const auto* values = static_cast<const float*>(kept.raw_data());
  CHECK(values[7] == 5);
  kept = {};
}

}  // namespace
}  // namespace tessera
