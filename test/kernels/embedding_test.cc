#include "kernels/embedding/embedding.h"

#include "kernels/elementwise/elementwise.h"
#include "kernels/embedding/kernel.h"
#include "kernels/pointwise/pointwise.h"
#include "test/kernels/row_sink.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Tensors = std::vector<Tensor>;

void check_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  const std::string text = error_of(f);
  INFO(text);
  for (const std::string& part : parts) CHECK(text.find(part) != std::string::npos);
}

class BufferSink : public GradSink {
 public:
  BufferSink(const Tensor& buffer, bool accumulate) : buffer_(buffer), accumulate_(accumulate) {}
  GradDst destination(const Tensor&) override { return {buffer_, accumulate_}; }
  void written(const Tensor&) override { accumulate_ = true; }

 private:
  Tensor buffer_;
  bool accumulate_;
};

/// dw in f64 by the definition.
std::vector<double> reference_dw(const Tensor& ids, const Tensor& dy, int64_t vocab) {
  const std::vector<double> id = ids.to_vector(), g = dy.to_vector();
  const auto cols = static_cast<size_t>(dy.dim(-1));
  std::vector<double> dw(static_cast<size_t>(vocab) * cols, 0);
  for (size_t r = 0; r < id.size(); ++r) {
    for (size_t c = 0; c < cols; ++c) dw[static_cast<size_t>(id[r]) * cols + c] += g[r * cols + c];
  }
  return dw;
}

template <class F>
auto on_threads(int num_threads, F&& f) {
  Context::Scope scope(std::make_shared<Context>(
      ContextOptions{.device = {}, .num_threads = num_threads, .poison = true}));
  return f();
}

}  // namespace

TEST_CASE("embedding: gathers rows for ids of any shape and integer type", "[embedding]") {
  const Tensor w = from_values({0.0, 1.0, 10.0, 11.0, 20.0, 21.0}, {3, 2}, kF32);
  for (const DType dtype : {kI32, kI64}) {
    const Tensor ids = from_values(std::vector<int64_t>{2, 0, 0, 1}, {2, 2}, dtype);
    const Tensor y = embedding(ids, w);
    CHECK(y.shape() == Shape{2, 2, 2});
    check_close(y.to_vector(), {20, 21, 0, 1, 0, 1, 10, 11}, 0);
    check_close(embedding(ids.transpose(0, 1), w).to_vector(), {20, 21, 0, 1, 0, 1, 10, 11}, 0);
  }
  CHECK(embedding(from_values({int32_t{1}}, {}), w).shape() == Shape{2});
  CHECK(embedding(empty({0, 4}, kI32), w).shape() == Shape{0, 4, 2});
  for (const DType dtype : {kBF16, kF16, kF64}) {
    const Tensor y = embedding(from_values({int32_t{1}}, {1}), w.to(dtype));
    CHECK(y.dtype() == dtype);
    check_close(y.to_vector(), {10, 11}, 0);
  }
}

TEST_CASE("embedding: backward matches finite differences", "[embedding]") {
  const Tensor ids = from_values({int32_t{4}, 0, 4, 2, 4, 0}, {2, 3});
  gradcheck([&](const Tensors& t) { return embedding(ids, t[0]); },
            {randn({5, 3}, kF64).set_requires_grad(true)});
  gradcheck([&](const Tensors& t) { return add(embedding(ids, t[0]), embedding(ids, t[0])); },
            {randn({5, 3}, kF64).set_requires_grad(true)});
}

TEST_CASE("embedding: dw in every dtype, written or accumulated, repeated and missing ids",
          "[embedding]") {
  for (const Shape& shape : {Shape{1, 1}, Shape{7, 5}, Shape{97, 33}, Shape{13, 1500}}) {
    const int64_t vocab = shape[0];
    const Tensor ids = randint(0, (vocab + 1) / 2, {3, 41}, kI64);  // the upper half never occurs
    for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
      const Tensor dy = randn({3, 41, shape[1]}, dtype, 2);
      const std::vector<double> expected = reference_dw(ids, dy, vocab);
      for (const DType dw_dtype : {dtype, dtype == kF64 ? kF64 : kF32}) {
        for (const bool accumulate : {false, true}) {
          CAPTURE(fmt::format("{}", shape), name_of(dtype), name_of(dw_dtype), accumulate);
          Tensor w = randn(shape, dtype).set_requires_grad(true);
          // Where nothing is accumulated, old bytes must not matter.
          const Tensor dw = full(shape, accumulate ? 1 : NAN, dw_dtype);
          set_grad_sink(w, std::make_shared<BufferSink>(dw, accumulate));
          backward(embedding(ids, w), dy);
          std::vector<double> sums = expected;
          for (double& v : sums) v += accumulate ? 1 : 0;
          check_close(dw.to_vector(), sums, tol(dw_dtype, 123));
        }
      }
    }
  }
}

TEST_CASE("embedding: rows of dw that are asked for later have the bits of the whole",
          "[embedding]") {
  const Tensor ids = randint(0, 60, {3, 41}, kI64), more = randint(0, 97, {50}, kI32, 3);
  for (const DType dtype : {kF32, kBF16}) {
    for (const DType dw_dtype : {dtype, kF32}) {
      const Tensor dy = randn({3, 41, 33}, dtype, 2), dy_more = randn({50, 33}, dtype, 4);
      Tensor w = randn({97, 33}, dtype).set_requires_grad(true);
      const Tensor whole = empty({97, 33}, dw_dtype);
      set_grad_sink(w, std::make_shared<BufferSink>(whole, false));
      backward(embedding(ids, w), dy);
      backward(embedding(more, w), dy_more);
      const auto sink = set_row_sink(w);
      backward(embedding(ids, w), dy);
      backward(embedding(more, w), dy_more);
      REQUIRE(sink->num_added() == 2);
      for (const int64_t at_once : {1, 7, 96, 97}) {
        CAPTURE(name_of(dtype), name_of(dw_dtype), at_once);
        CHECK(sink->gradient({97, 33}, dw_dtype, at_once).to_vector() == whole.to_vector());
      }
    }
  }
}

TEST_CASE("embedding: many uses of one id keep their precision", "[embedding]") {
  Tensor w = full({2, 3}, 0, kBF16).set_requires_grad(true);
  const Tensor dw = empty({2, 3}, kF32);
  set_grad_sink(w, std::make_shared<BufferSink>(dw, false));
  backward(embedding(full({20000}, 1, kI32), w), full({20000, 3}, 0.1, kBF16));
  const double one = full({1}, 0.1, kBF16).item();
  check_close(dw.to_vector(), {0, 0, 0, 20000 * one, 20000 * one, 20000 * one}, 1e-6);
}

TEST_CASE("embedding: a strided destination", "[embedding]") {
  const Tensor ids = from_values({int32_t{1}, 1, 0}, {3});
  gradcheck(
      [&](const Tensors& t) {
        const int64_t sizes[] = {2, 3};
        const Tensors parts = split(t[0], sizes);
        return add(embedding(ids, parts[1]), embedding(ids, parts[1]));
      },
      {randn({2, 5}, kF64).set_requires_grad(true)});
}

TEST_CASE("embedding: no ids give a zero gradient", "[embedding]") {
  Tensor w = randn({4, 3}, kF32).set_requires_grad(true);
  backward(embedding(empty({0}, kI32), w), empty({0, 3}));
  check_close(w.grad().to_vector(), std::vector<double>(12, 0), 0);
}

TEST_CASE("embedding: results do not depend on the number of threads", "[embedding]") {
  const auto f = [] {
    Tensor w = randn({1009, 130}, kF32).set_requires_grad(true);
    const Tensor ids = randint(0, 50, {2000}, kI32);
    backward(embedding(ids, w), randn({2000, 130}, kF32, 3));
    const Tensor dense = w.grad();
    backward(embedding(ids, w), randn({2000, 130}, kF32, 4));  // accumulates
    return w.grad().to_vector();
  };
  CHECK(on_threads(1, f) == on_threads(2, f));
}

TEST_CASE("embedding: an id out of range names itself, its position and the range", "[embedding]") {
  const std::vector<std::pair<std::vector<int64_t>, const char*>> cases = {
      {{0, 4, -1, 9}, "embedding: id -1 at position 2 is out of range [0, 5)"},
      {{0, 4, 5, 9}, "embedding: id 5 at position 2 is out of range [0, 5)"},
      {{7, 4, 1, 0}, "embedding: id 7 at position 0 is out of range [0, 5)"}};
  for (const auto& c : cases) {
    for (const DType dtype : {kI32, kI64}) {
      // The error poisons the stream: one of its own.
      Context::Scope scope(
          std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = 2}));
      const Tensor w = full({5, 3}, 1);
      const Tensor ids = from_values(c.first, {4}, dtype);
      const Tensor y = embedding(ids, w);
      check_error([] { current_stream().synchronize(); }, {c.second});
    }
  }
}

TEST_CASE("embedding: errors and costs", "[embedding]") {
  const Tensor ids = full({2}, 0, kI32), w = full({5, 3}, 1);
  check_error([&] { embedding(w, w); }, {"embedding: ids must be i32 or i64, got f32"});
  check_error(
      [&] {
        embedding(ids, full({5, 3}, 1, kI32));
      },
      {"embedding: expected a floating dtype, got i32"});
  check_error([&] { embedding(ids, full({5}, 1)); }, {"embedding: weight must be [V, C], got [5]"});

  char dummy[1];
  int32_t order[1];
  const kernels::EmbeddingFwd fwd{dummy, dummy, dummy, kBF16, kI32, 10, 4, 100};
  CHECK(fwd.cost().flops() == 0);
  CHECK(fwd.cost().bytes_read() == 10 * 4 + 100 * 4 * 2);
  CHECK(fwd.cost().bytes_written() == 10 * 4 * 2);
  const kernels::EmbeddingBwd bwd{dummy, order, dummy, dummy, kF32, kBF16,
                                  kI64,  10,    4,     100,   4,    false};
  CHECK(bwd.cost().flops() == 40);
  CHECK(bwd.cost().bytes_read() == 10 * 4 * 2 + 10 * 8);
  CHECK(bwd.cost().bytes_written() == 100 * 4 * 4 + 110 * 4);
}
