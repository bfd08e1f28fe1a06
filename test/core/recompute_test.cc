#include "core/recompute.h"

#include "core/autograd.h"
#include "core/host_checkpoints.h"
#include "core/random.h"
#include "core/runtime/order_check.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::error_of;
using testing::randn;

using Tensors = std::vector<Tensor>;

/// y = x * noise, with the noise that the random state gives now, and x saved for backward.
Tensor noisy(const Tensor& x) {
  const RandomState& r = random_state();
  const Tensor noise = randn(x.shape(), x.dtype(), r.seed * 1000 + r.step * 100 + r.op_index);
  ++random_state().op_index;
  const std::vector<double> a = x.to_vector(), b = noise.to_vector();
  std::vector<double> product;
  for (size_t i = 0; i < a.size(); ++i) product.push_back(a[i] * b[i]);
  return record("noisy", {x}, from_values(product, x.shape(), x.dtype()),
                [x = save(x), noise](const Tensor& dy, Grads& g) {
                  const std::vector<double> d = dy.to_vector(), n = noise.to_vector();
                  std::vector<double> dx;
                  for (size_t i = 0; i < d.size(); ++i) dx.push_back(d[i] * n[i]);
                  CHECK(x->is_defined());
                  g.add(0, from_values(dx, dy.shape(), dy.dtype()));
                });
}

Tensor plus(const Tensor& a, const Tensor& b) {
  Tensor y = a.detach().clone();
  y.add_(b);
  return record("plus", {a, b}, y, [](const Tensor& dy, Grads& g) {
    g.add(0, dy);
    g.add(1, dy);
  });
}

struct Result {
  Tensor y, dx, dw;
  uint64_t op_index;
};

template <class F>
Result run(F&& net) {
  Tensor x = randn({3, 4}, kF64, 1).set_requires_grad(true);
  Tensor w = randn({3, 4}, kF64, 2).set_requires_grad(true);
  random_state() = {.seed = 3, .step = 4};
  const Tensor y = net(x, w);
  backward(y, randn({3, 4}, kF64, 5));
  return {y, x.grad(), w.grad(), random_state().op_index};
}

void check_same(const Result& a, const Result& b) {
  check_bitwise(a.y, b.y, "y");
  check_bitwise(a.dx, b.dx, "dx");
  check_bitwise(a.dw, b.dw, "dw");
  CHECK(a.op_index == b.op_index);
}

TEST_CASE("recompute: same bits as without, random numbers included", "[recompute]") {
  const auto block = [](const Tensor& x, const Tensor& w) {
    return noisy(plus(noisy(x), noisy(w)));
  };
  const Result plain =
      run([&](const Tensor& x, const Tensor& w) { return noisy(block(block(x, w), w)); });
  const Result again = run([&](const Tensor& x, const Tensor& w) {
    const auto fn = [&, w](const Tensors& in) { return block(in[0], w); };
    return noisy(recompute(fn, {recompute(fn, {x})}));
  });
  check_same(plain, again);
}

TEST_CASE("recompute_output: same bits, and the first output has no bytes until backward",
          "[recompute]") {
  // Two outputs, of which the consumer saves the first.
  const auto produce = [](const Tensors& in) { return Tensors{noisy(in[0]), plus(in[0], in[0])}; };
  const auto consume = [](const Tensors& in) { return plus(noisy(in[0]), in[1]); };
  const Result plain = run([&](const Tensor& x, const Tensor& w) {
    const Tensor a = consume(produce({plus(x, w)}));
    return plus(a, consume(produce({w})));
  });
  std::vector<std::shared_ptr<Storage>> first, second;
  const Result again = run([&](const Tensor& x, const Tensor& w) {
    const auto watched = [&](const Tensors& in) {
      first.push_back(in[0].storage());
      second.push_back(in[1].storage());
      CHECK(first.back()->is_materialized());
      return consume(in);
    };
    const Tensor a = recompute_output(produce, watched, {plus(x, w)});
    CHECK_FALSE(first.back()->is_materialized());
    CHECK(second.back()->is_materialized());
    return plus(a, recompute_output(produce, watched, {w}));
  });
  check_same(plain, again);
  for (const auto& storage : first) CHECK_FALSE(storage->is_materialized());
  NoGrad no_grad;
  const Tensor x = randn({3, 4}, kF64, 1);
  recompute_output(produce,
                   [&](const Tensors& in) {
                     first.push_back(in[0].storage());
                     return consume(in);
                   },
                   {x});
  CHECK(first.back()->is_materialized());
}

TEST_CASE("recompute_output: a view of what is dropped is refused", "[recompute]") {
  const Tensor x = randn({3, 4}, kF64, 1).set_requires_grad(true);
  const auto message = error_of([&] {
    recompute_output([](const Tensors& in) { return Tensors{noisy(in[0])}; },
                     [](const Tensors& in) { return in[0]; }, {x});
  });
  CHECK(message.find("recompute_output: consume must not return a view") != std::string::npos);
}

TEST_CASE("recompute: regions may lie inside regions", "[recompute]") {
  const Result plain =
      run([](const Tensor& x, const Tensor& w) { return noisy(plus(noisy(noisy(x)), w)); });
  int inner_calls = 0;
  const Result nested = run([&](const Tensor& x, const Tensor& w) {
    return recompute(
        [&, w](const Tensors& in) {
          const Tensor h = recompute(
              [&](const Tensors& inner) {
                ++inner_calls;
                return noisy(noisy(inner[0]));
              },
              in);
          return noisy(plus(h, w));
        },
        {x});
  });
  check_same(plain, nested);
  CHECK(inner_calls == 3);  // forward, the outer's second run, and its own
}

TEST_CASE("recompute: an input without gradient still gives the parameters theirs", "[recompute]") {
  Tensor w = randn({2}, kF64, 2).set_requires_grad(true);
  const Tensor x = randn({2}, kF64, 1), ids = from_values({1, 2}, {2});
  const Tensor y = recompute(
      [&](const Tensors& in) {
        CHECK(in[1].dtype() == kI32);
        return plus(noisy(in[0]), w);
      },
      {x, ids});
  backward(y, full({2}, 1, kF64));
  CHECK(w.grad().to_vector() == std::vector<double>{1, 1});
  CHECK_FALSE(x.grad().is_defined());
}

TEST_CASE("recompute: nothing to do without grad mode", "[recompute]") {
  const NoGrad no_grad;
  int calls = 0;
  const Tensor y = recompute(
      [&](const Tensors& in) {
        ++calls;
        return noisy(in[0]);
      },
      {randn({2}, kF64)});
  CHECK_FALSE(y.requires_grad());
  CHECK(calls == 1);
}

TEST_CASE("recompute: each run can tell which it is", "[recompute]") {
  Tensor x = randn({2}, kF64).set_requires_grad(true);
  std::vector<bool> first, second, in_backward;
  const Tensor y = recompute(
      [&](const Tensors& in) {
        first.push_back(is_checkpointing());
        second.push_back(is_recomputing());
        return record("probe", {in[0]}, in[0].clone(), [&](const Tensor& dy, Grads& g) {
          in_backward.push_back(is_recomputing() || is_checkpointing());
          g.add(0, dy);
        });
      },
      {x});
  backward(y, full({2}, 1, kF64));
  CHECK(first == std::vector<bool>{true, false});
  CHECK(second == std::vector<bool>{false, true});
  CHECK(in_backward == std::vector<bool>{false});
  CHECK_FALSE((is_recomputing() || is_checkpointing()));
}

TEST_CASE("recompute: an exception in the second run leaves the thread as it was", "[recompute]") {
  Tensor x = randn({2}, kF64).set_requires_grad(true);
  random_state() = {.seed = 1};
  int calls = 0;
  const Tensor y = recompute(
      [&](const Tensors& in) {
        if (++calls == 2) throw Error("block: boom");
        return noisy(in[0]);
      },
      {x});
  random_state().op_index = 17;
  CHECK(error_of([&] { backward(y, full({2}, 1, kF64), {.retain_graph = true}); }) ==
        "block: boom");
  CHECK_FALSE((is_recomputing() || is_checkpointing()));
  CHECK(grad_mode());
  CHECK_FALSE(is_in_backward());
  CHECK(random_state().op_index == 17);
  backward(y, full({2}, 1, kF64));
  CHECK(x.grad().is_defined());
}

TEST_CASE("recompute: an exception in the forward leaves the thread as it was", "[recompute]") {
  const Tensor x = randn({2}, kF64);
  CHECK(error_of([&] { recompute([](const Tensors&) -> Tensor { throw Error("boom"); }, {x}); }) ==
        "boom");
  CHECK(grad_mode());
}

TEST_CASE("recompute: a changed input is found and named", "[recompute]") {
  Tensor w = randn({2}, kF64).set_requires_grad(true);
  Tensor x = randn({2}, kF64);
  const Tensor y = recompute([&](const Tensors& in) { return plus(in[0], w); }, {x});
  x.fill_(0);
  CHECK(error_of([&] {
          backward(y, full({2}, 1, kF64));
        }).find("recompute: a tensor of shape [2] that backward needs was changed in place") == 0);
}

TEST_CASE("recompute: returns an input unchanged", "[recompute]") {
  Tensor x = randn({2}, kF64).set_requires_grad(true);
  const Tensor y = recompute([](const Tensors& in) { return in[0]; }, {x});
  CHECK_FALSE(y.is_leaf());
  backward(y, full({2}, 3, kF64));
  CHECK(x.grad().to_vector() == std::vector<double>{3, 3});
}

TEST_CASE("recompute: what the region saves is not kept between forward and backward",
          "[recompute]") {
  const auto context = std::make_shared<Context>(ContextOptions{.num_threads = 1});
  const Context::Scope scope(context);
  Tensor x = zeros({128, 1024}, kF64).set_requires_grad(true);  // 1 MiB
  const auto chain = [](const Tensors& in) {
    Tensor h = in[0];
    for (int i = 0; i < 8; ++i) {
      h = record("hold", {h}, h.clone(), [kept = save(h)](const Tensor& dy, Grads& g) {
        CHECK(kept->is_defined());
        g.add(0, dy);
      });
    }
    return h;
  };
  const auto live = [&] { return context->allocator()->stats().allocated >> 20; };
  const Tensor plain = chain({x});
  CHECK(live() == 9);
  const Tensor again = recompute(chain, {x});
  CHECK(live() == 10);
}

// ---- rows in tiles

/// y[r, c] = x[r, c] w[c] z[r, c], with a number z that belongs to the row wherever it is computed.
Tensor weigh_rows(const Tensor& x, const Tensor& w) {
  const RandomState state = random_state();
  ++random_state().op_index;
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const auto factor = [=](int64_t r, int64_t c) {
    const auto row = static_cast<double>(state.sample_offset + r);
    return 1 + static_cast<double>(state.op_index) + row / 8 + static_cast<double>(c) / 16;
  };
  const auto product = [=](const Tensor& a, const Tensor& b, bool is_row) {
    const std::vector<double> x = a.to_vector(), y = b.to_vector();
    std::vector<double> z;
    for (int64_t i = 0; i < rows * cols; ++i) {
      const auto at = static_cast<size_t>(i);
      z.push_back(x[at] * y[is_row ? at % static_cast<size_t>(cols) : at] *
                  factor(i / cols, i % cols));
    }
    return z;
  };
  Tensor y = from_values(product(x, w, true), {rows, cols}, x.dtype());
  return record("weigh_rows", {x, w}, y, [=, x = save(x), w = save(w)](const Tensor& dy, Grads& g) {
    g.add(0, from_values(product(dy, w, true), {rows, cols}, dy.dtype()));
    const std::vector<double> all = product(dy, x, false);
    std::vector<double> dw(static_cast<size_t>(cols));
    for (size_t i = 0; i < all.size(); ++i) dw[i % dw.size()] += all[i];
    const GradDst dst = g.destination(1);
    Tensor view = dst.view;
    const Tensor sum = from_values(dw, {cols}, view.dtype());
    dst.accumulate ? view.add_(sum) : view.copy_(sum);
    g.written(1);
  });
}

struct RowsResult {
  Tensor y, dx, dr, dw, dv;
  uint64_t op_index = 0;
  int calls = 0;
};

/// residual + ((x w z) v z) of 2 x 5 rows, by tiles of `tile` rows, or at once (0).
RowsResult run_rows(int64_t tile, bool has_residual = true, bool uses_x_twice = false) {
  RowsResult result;
  Tensor x = randn({2, 5, 3}, kF64, 1).set_requires_grad(true);
  Tensor r = randn({2, 5, 3}, kF64, 2).set_requires_grad(true);
  Tensor w = randn({3}, kF64, 3).set_requires_grad(true);
  Tensor v = randn({3}, kF64, 4).set_requires_grad(true);
  random_state() = {.seed = 3, .step = 4, .op_index = 2, .sample_offset = 6};
  const auto fn = [&](const Tensor& x_RC, const Tensor& r_RC) {
    ++result.calls;
    Tensor y = weigh_rows(weigh_rows(x_RC, w), v);
    if (uses_x_twice) y = plus(y, x_RC);
    return r_RC.is_defined() ? plus(y, r_RC) : y;
  };
  const Tensor residual = has_residual ? r : Tensor{};
  if (tile > 0) {
    result.y = recompute_rows(fn, x, residual, tile, [&] { return std::vector{w, v}; });
  } else {
    random_state().sample_offset *= 5;  // rows are samples
    const Tensor r_RC = has_residual ? r.view({10, 3}) : r;
    result.y = fn(x.view({10, 3}), has_residual ? r_RC : Tensor{}).view({2, 5, 3});
  }
  result.op_index = random_state().op_index;
  backward(result.y, randn({2, 5, 3}, kF64, 5));
  result.dx = x.grad(), result.dr = r.grad(), result.dw = w.grad(), result.dv = v.grad();
  return result;
}

TEST_CASE("recompute_rows: values, random numbers and gradients of rows are those of all at once",
          "[recompute]") {
  for (const bool has_residual : {true, false}) {
    for (const bool uses_x_twice : {false, true}) {
      const RowsResult whole = run_rows(0, has_residual, uses_x_twice);
      for (const int64_t tile : {1, 3, 4, 5, 9, 10, 64}) {
        CAPTURE(has_residual, uses_x_twice, tile);
        const RowsResult tiled = run_rows(tile, has_residual, uses_x_twice);
        check_bitwise(tiled.y, whole.y, "y");
        check_bitwise(tiled.dx, whole.dx, "dx");
        if (has_residual) check_bitwise(tiled.dr, whole.dr, "dr");
        CHECK(tiled.op_index == whole.op_index);
        const bool is_one = tile >= 10;  // else sums are in another order
        if (is_one) {
          check_bitwise(tiled.dw, whole.dw, "dw");
          check_bitwise(tiled.dv, whole.dv, "dv");
        } else {
          testing::check_close(tiled.dw, whole.dw, testing::tol(kF64));
          testing::check_close(tiled.dv, whole.dv, testing::tol(kF64));
        }
        CHECK(tiled.calls == 2 * ((10 + tile - 1) / tile));
      }
    }
  }
}

TEST_CASE("recompute_rows: bf16 gradients of parameters add up in f32 and round once",
          "[recompute]") {
  // 600 rows of ones: a bf16 sum that grows by one stays at 256.
  for (const int64_t tile : {1, 7, 600}) {
    CAPTURE(tile);
    Tensor x = full({600, 1}, 1, kBF16), w = full({1}, 1, kBF16).set_requires_grad(true);
    const auto fn = [&](const Tensor& x_RC, const Tensor&) {
      return record("sum_rows", {x_RC, w}, x_RC.clone(),
                    [rows = x_RC.dim(0)](const Tensor&, Grads& g) {
                      const GradDst dst = g.destination(1);
                      Tensor view = dst.view;
                      const Tensor sum = full({1}, static_cast<double>(rows), view.dtype());
                      dst.accumulate ? view.add_(sum) : view.copy_(sum);
                      g.written(1);
                    });
    };
    for (const double expected : {600.0, 1200.0}) {  // and added to what is there
      backward(recompute_rows(fn, x, {}, tile, [&] { return std::vector{w}; }),
               full({600, 1}, 1, kBF16));
      CHECK(w.grad().dtype() == kBF16);
      CHECK(w.grad().item() == full({}, expected, kBF16).item());
    }
    CHECK(w.impl()->grad_sink == nullptr);
  }
}

TEST_CASE("recompute_rows: an exception in a second run leaves thread and parameters as they were",
          "[recompute]") {
  Tensor x = randn({4, 2}, kBF16).set_requires_grad(true);
  Tensor w = randn({2}, kBF16).set_requires_grad(true);
  int calls = 0;
  const auto fn = [&](const Tensor& x_RC, const Tensor&) {
    if (++calls == 4) throw Error("mlp: boom");
    return record("hand_on", {x_RC, w}, x_RC.clone(),
                  [](const Tensor& dy, Grads& g) { g.add(0, dy); });
  };
  const Tensor y = recompute_rows(fn, x, {}, 2, [&] { return std::vector{w}; });
  CHECK(calls == 2);
  CHECK(error_of([&] { backward(y, randn({4, 2}, kBF16)); }) == "mlp: boom");
  CHECK_FALSE((is_recomputing() || is_checkpointing() || is_in_backward()));
  CHECK(recompute_region() == 0);
  CHECK(w.impl()->grad_sink == nullptr);
}

TEST_CASE("recompute_rows: without grad mode it is recorded by nobody, and wrong sizes are refused",
          "[recompute]") {
  const Tensor x = randn({4, 2}, kF64);
  std::vector<int64_t> rows;
  const auto fn = [&](const Tensor& x_RC, const Tensor&) {
    rows.push_back(x_RC.dim(0));
    CHECK_FALSE((is_checkpointing() || grad_mode()));
    return x_RC.clone();
  };
  const auto none = [] { return std::vector<Tensor>{}; };
  {
    const NoGrad no_grad;
    const Tensor y = recompute_rows(fn, x, {}, 3, none);
    CHECK_FALSE(y.requires_grad());
    check_bitwise(y, x, "y");
  }
  CHECK(rows == std::vector<int64_t>{3, 1});
  CHECK(error_of([&] {
          recompute_rows(fn, x, {}, 0, none);
        }).find("recompute_rows: tile_rows must be at least 1, got 0") == 0);
  CHECK(error_of([&] {
          recompute_rows(fn, randn({3}, kF64), {}, 2, none);
        }).find("recompute_rows: x must be [..., C], got [3]") == 0);
}

// ---- checkpoints in host memory

/// A chain of blocks around a residual stream of 1 MiB each, recomputed; with `host`, its inputs are
/// there. Freed bytes are NaN, and accesses that no event orders are errors.
struct Chain {
  explicit Chain(bool is_away) : host(is_away ? HostCheckpoints::make() : nullptr) {}

  Tensor forward(Tensor h) const {
    for (int i = 0; i < 6; ++i) {
      h = recompute(
          [this, i](const Tensors& in) {
            if (is_recomputing() && i == failing) throw Error("block: boom");
            Tensor y = in[0].detach().clone();
            y.add_(in[0]);
            const auto twice = [kept = save(in[0])](const Tensor& dy, Grads& g) {
              Tensor dx = dy.clone();
              dx.add_(kept);
              g.add(0, dx);
            };
            return record("block", {in[0]}, y, twice);
          },
          {h}, host.get());
    }
    return h;
  }

  std::shared_ptr<HostCheckpoints> host;
  int failing = -1;  // block whose second run throws
};

std::shared_ptr<Context> strict_context() {
  return std::make_shared<Context>(
      ContextOptions{.num_threads = 1, .poison = true, .order_check = true});
}

constexpr int64_t kMiB = 1 << 20;
const Shape kStream{256, 512};  // 1 MiB of f64

TEST_CASE("host checkpoints: the same bits, and two of them on the device at a time",
          "[recompute]") {
  std::vector<std::vector<double>> gradients;
  for (const bool is_away : {false, true}) {
    const auto context = strict_context();
    const Context::Scope scope(context);
    const auto live = [&] { return context->allocator()->stats().allocated >> 20; };
    const auto on_host = [&] { return context->host_allocator()->stats().allocated >> 20; };
    const Chain chain(is_away);
    Tensor x = randn(kStream, kF64, 1).set_requires_grad(true);
    // Whatever the number of forwards before a backward, and the order of backwards.
    for (const int num_forwards : {1, 2}) {
      std::vector<Tensor> outputs;
      for (int i = 0; i < num_forwards; ++i) outputs.push_back(chain.forward(plus(x, x)));
      // Of each forward the output; of the last one the input of the last block; x and its gradient.
      const int64_t others = num_forwards == 1 ? 1 : 2;
      CHECK(live() == others + (is_away ? num_forwards + 1 : 7 * num_forwards));
      CHECK(on_host() == (is_away ? 6 * num_forwards : 0));
      while (!outputs.empty()) {
        backward(outputs.back(), randn(kStream, kF64, 5));
        outputs.pop_back();
      }
      CHECK(on_host() == 0);
    }
    gradients.push_back(x.grad().to_vector());
    CHECK(live() == 2);
    if (!is_away) continue;
    CHECK(chain.host->num_live() == 0);
    // Three forwards of six: the input of each one's last block is there when its backward begins,
    // but for the first of two.
    CHECK(chain.host->traffic().d2h_nbytes == 18 * kMiB);
    CHECK(chain.host->traffic().h2d_nbytes == (5 + 5 + 6) * kMiB);
    CHECK(context->order_check()->conflicts().empty());
  }
  CHECK(gradients[1] == gradients[0]);
}

TEST_CASE("host checkpoints: forwards without a backward leave nothing behind", "[recompute]") {
  const auto context = strict_context();
  const Context::Scope scope(context);
  const Chain chain(true);
  {
    Tensor x = randn(kStream, kF64, 1).set_requires_grad(true);
    Tensor dropped = chain.forward(plus(x, x));
    const Tensor y = chain.forward(plus(x, x));
    dropped = {};
    CHECK(chain.host->num_live() == 6);
    backward(y, randn(kStream, kF64, 5));
    const NoGrad no_grad;
    chain.forward(x);
    CHECK(chain.host->num_live() == 0);
  }
  CHECK(chain.host->traffic().d2h_nbytes == 12 * kMiB);
  CHECK(chain.host->traffic().h2d_nbytes == 5 * kMiB);
  context->compute().synchronize();
  CHECK(context->allocator()->stats().allocated == 0);
  CHECK(context->host_allocator()->stats().allocated == 0);
  CHECK(context->order_check()->conflicts().empty());
}

TEST_CASE("host checkpoints: a backward that fails gives back what was on its way", "[recompute]") {
  const auto context = strict_context();
  const Context::Scope scope(context);
  Chain chain(true);
  chain.failing = 3;
  {
    Tensor x = randn(kStream, kF64, 1).set_requires_grad(true);
    Tensor y = chain.forward(plus(x, x));
    CHECK(error_of([&] { backward(y, randn(kStream, kF64, 5)); }) == "block: boom");
    CHECK(chain.host->traffic().h2d_nbytes == 3 * kMiB);  // of blocks 4, 3 and, ahead of it, 2
    y = {};
    CHECK(chain.host->num_live() == 0);
    chain.failing = -1;
    backward(chain.forward(plus(x, x)), randn(kStream, kF64, 5));
  }
  context->compute().synchronize();
  CHECK(context->allocator()->stats().allocated == 0);
  CHECK(context->host_allocator()->stats().allocated == 0);
  CHECK(context->order_check()->conflicts().empty());
}

TEST_CASE("host checkpoints: an input that is changed while it is copied is found", "[recompute]") {
  const auto host = HostCheckpoints::make();
  const auto fn = [](const Tensors& in) { return noisy(in[0]); };
  for (const bool is_last : {true, false}) {
    Tensor x = randn({2}, kF64).set_requires_grad(true);
    Tensor h = plus(x, x);
    Tensor y = recompute(fn, {h}, host.get());
    h.fill_(0);
    if (!is_last) y = recompute(fn, {y}, host.get());
    CHECK(error_of([&] {
            backward(y, full({2}, 1, kF64));
          }).find("recompute: an input of shape [2] was changed in place after the forward") == 0);
  }
}

TEST_CASE(
    "host checkpoints: a graph may be walked twice, and inputs may be views or of no elements",
    "[recompute]") {
  const auto host = HostCheckpoints::make();
  const auto fn = [](const Tensors& in) { return noisy(plus(in[0], in[1])); };
  std::vector<std::vector<double>> gradients;
  for (HostCheckpoints* const where : {static_cast<HostCheckpoints*>(nullptr), host.get()}) {
    Tensor x = randn({4, 3}, kF64).set_requires_grad(true);
    const Tensor empty_one = randn({0, 3}, kF64);
    random_state() = {.seed = 3};
    const Tensor a = recompute(fn, {x.transpose(0, 1), x.transpose(0, 1)}, where);
    const Tensor y = recompute(fn, {a, a}, where);
    recompute([](const Tensors& in) { return in[0]; }, {empty_one}, where);
    for (const bool retain : {true, false}) {
      backward(y, full({3, 4}, 1, kF64), {.retain_graph = retain});
    }
    gradients.push_back(x.grad().to_vector());
  }
  CHECK(gradients[0] == gradients[1]);
  CHECK(host->num_live() == 0);
}

}  // namespace
}  // namespace tessera
