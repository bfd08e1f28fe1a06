#include "core/runtime/staging.h"

#include <cstring>
#include <future>

#include "core/runtime/context.h"
#include "core/runtime/order_check.h"
#include "core/tensor.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

std::shared_ptr<Context> make_context() {
  return std::make_shared<Context>(
      ContextOptions{.num_threads = 1, .poison = true, .order_check = true});
}

TEST_CASE("staging: values pass through a buffer in the order of the stream", "[staging]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  const Tensor x = from_values({1.0f, 2.0f, 3.0f}, {3});
  const HostCopy before(x);
  Tensor(x).fill_(7);
  const HostCopy after(x);
  CHECK(static_cast<const float*>(before.data())[2] == 3);
  CHECK(after.item() == 7);
  CHECK(HostCopy(full({}, 1, kU8)).item() == 1);
  CHECK(HostCopy(full({}, -5, kI64)).item() == -5);
  CHECK(HostCopy(full({}, 0.5, kBF16)).item() == 0.5);
  CHECK(HostCopy(empty({0})).data() != nullptr);
  CHECK(!HostCopy().is_defined());
  CHECK(error_of([&] {
          HostCopy(zeros({2, 3}).transpose(0, 1));
        }).find("HostCopy: expected a contiguous tensor") == 0);
  context->compute().synchronize();
  context->order_check()->throw_if_conflicts();
}

TEST_CASE("staging: a buffer in flight is not handed out, an idle one is", "[staging]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  HostStaging& staging = *context->staging();
  std::promise<void> gate;
  Tensor a = empty({4}, kI32), b = empty({4}, kI32);
  context->compute().submit("gate", [opened = gate.get_future().share()] { opened.wait(); });
  for (const auto& [value, tensor] : {std::pair(1, a), std::pair(2, b)}) {
    HostBuffer buffer = staging.acquire(16);
    for (int i = 0; i < 4; ++i) static_cast<int32_t*>(buffer.data())[i] = value;
    std::move(buffer).upload("upload", context->compute(), tensor.raw_data());
  }
  CHECK(staging.num_buffers() == 2);  // the host did not wait for the first
  gate.set_value();
  CHECK(a.to_vector() == std::vector<double>(4, 1));
  CHECK(b.to_vector() == std::vector<double>(4, 2));
  for (int i = 0; i < 10; ++i) staging.acquire(16);
  CHECK(staging.num_buffers() == 2);
  staging.acquire(100'000'000);  // not kept
  for (int i = 0; i < 2; ++i) staging.acquire(100'000'000);
  CHECK(staging.num_buffers() <= 5);
}

TEST_CASE("staging: buffers may outlive their owner and the stream's error reaches the reader",
          "[staging]") {
  HostBuffer buffer;
  HostCopy poisoned;
  {
    const auto context = make_context();
    const Context::Scope scope(context);
    buffer = context->staging()->acquire(1000);
    const Tensor x = zeros({3});
    context->compute().submit("fail", [] { throw InternalError("broken"); });
    poisoned = HostCopy(x);
  }
  std::memset(buffer.data(), 1, 1000);
  CHECK(error_of([&] { poisoned.data(); }) == "broken");
}

TEST_CASE("stream: copy_bytes is a task in the stream's order that the checker sees", "[stream]") {
  const auto context = make_context();
  const Stream a = context->make_stream("a"), b = context->make_stream("b");
  std::vector<char> x(64, 1), y(64), z(64);
  a.copy_bytes("copy", y.data(), x.data(), 64);
  a.copy_bytes("copy", z.data(), y.data(), 64);
  a.synchronize();
  CHECK(z == x);
  a.copy_bytes("first", y.data(), x.data(), 64);
  b.copy_bytes("second", z.data(), y.data(), 64);
  b.synchronize();
  a.synchronize();
  REQUIRE(context->order_check()->conflicts().size() == 1);
  CHECK(context->order_check()->conflicts()[0].find("second") != std::string::npos);
}

}  // namespace
}  // namespace tessera
