#include "core/autograd.h"

#include <thread>

#include "test/testing.h"

namespace tessera {
namespace {

using testing::check_close;
using testing::error_of;

/// y = a * x elementwise by hand, so that the tape is tested without any kernel family.
Tensor times(const Tensor& x, double a) {
  Tensor y = zeros(x.shape(), x.dtype());
  const std::vector<double> values = x.to_vector();
  std::vector<double> scaled;
  for (const double v : values) scaled.push_back(a * v);
  y.copy_(from_values(scaled, x.shape(), x.dtype()));
  return record("times", {x}, y, [a](const Tensor& dy, Grads& g) { g.add(0, times(dy, a)); });
}

Tensor plus(const Tensor& a, const Tensor& b) {
  Tensor y = a.detach().clone();
  y.add_(b);
  return record("plus", {a, b}, y, [](const Tensor& dy, Grads& g) {
    g.add(0, dy);
    g.add(1, dy);
  });
}

TEST_CASE("autograd: gradients of a diamond add up", "[autograd]") {
  Tensor x = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
  const Tensor y = plus(plus(times(x, 3), times(x, 4)), x);
  backward(y, from_values({1.0, 10.0}, {2}, kF64));
  check_close(x.grad().to_vector(), {8, 80}, 0);
}

TEST_CASE("autograd: the same tensor twice in one op", "[autograd]") {
  Tensor x = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
  const Tensor h = times(x, 2);
  backward(plus(h, h), from_values({1.0, 1.0}, {2}, kF64));
  check_close(x.grad().to_vector(), {4, 4}, 0);
}

TEST_CASE("autograd: walking a graph twice names the op", "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  const Tensor y = times(x, 2);
  backward(y, {}, {.retain_graph = true});
  backward(y);
  CHECK(x.grad().item() == 4);
  CHECK(error_of([&] { backward(y); }).find("\"times\" was already walked") != std::string::npos);
}

TEST_CASE("autograd: views hand their gradients to the base", "[autograd]") {
  Tensor x = from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, kF64).set_requires_grad(true);
  const Tensor y = times(x, 1);
  backward(times(y.narrow(1, 1, 2).contiguous(), 2), full({2, 2}, 1, kF64));
  check_close(x.grad().to_vector(), {0, 2, 2, 0, 2, 2}, 0);
  x.zero_grad();
  backward(times(x.transpose(0, 1).contiguous(), 3),
           from_values({1., 2., 3., 4., 5., 6.}, {3, 2}, kF64));
  check_close(x.grad().to_vector(), {3, 9, 15, 6, 12, 18}, 0);
}

// ---- gradient destinations

/// A slot in f32, as a sharded parameter has one; counts what is asked of it.
struct Slot final : GradSink {
  explicit Slot(const Shape& shape) : memory(full(shape, std::nan(""))) {}
  GradDst destination(const Tensor&) override {
    ++num_destinations;
    return {memory, is_written};
  }
  void written(const Tensor&) override {
    ++num_written;
    is_written = true;
  }

  Tensor memory;
  bool is_written = false;
  int num_destinations = 0, num_written = 0;
};

/// As a kernel does: writes or accumulates factor * dy.
void write_scaled(const GradDst& dst, const Tensor& dy, double factor) {
  if (!dst) return;
  Tensor view = dst.view;
  const Tensor scaled = times(dy.detach(), factor);
  dst.accumulate ? view.add_(scaled) : view.copy_(scaled);
}

/// What a test's op does with its two gradients, in order.
enum class Step { kClaim0, kClaim1, kWrite0, kWrite1, kAdd0, kAdd1 };

/// y = 2 a + 3 b; the kernels run between the last claim and the first `written`, as in real ops.
Tensor mix(const Tensor& a, const Tensor& b, std::vector<Step> steps) {
  const Tensor y = plus(times(a.detach(), 2), times(b.detach(), 3));
  return record("mix", {a, b}, y, [steps = std::move(steps)](const Tensor& dy, Grads& g) {
    GradDst dst[2];
    for (const Step step : steps) {
      if (step == Step::kClaim0) dst[0] = g.destination(0);
      if (step == Step::kClaim1) dst[1] = g.destination(1);
      if (step == Step::kWrite0) write_scaled(dst[0], dy, 2), g.written(0);
      if (step == Step::kWrite1) write_scaled(dst[1], dy, 3), g.written(1);
      if (step == Step::kAdd0) g.add(0, times(dy, 2));
      if (step == Step::kAdd1) g.add(1, times(dy, 3));
    }
  });
}

const std::vector<std::vector<Step>> kOrders = {
    {Step::kClaim0, Step::kClaim1, Step::kWrite0, Step::kWrite1},
    {Step::kClaim0, Step::kClaim1, Step::kWrite1, Step::kWrite0},
    {Step::kClaim1, Step::kClaim0, Step::kWrite0, Step::kWrite1},
    {Step::kClaim1, Step::kClaim0, Step::kWrite1, Step::kWrite0},
    {Step::kClaim0, Step::kWrite0, Step::kClaim1, Step::kWrite1},
    {Step::kClaim0, Step::kClaim0, Step::kWrite0, Step::kAdd1},
    {Step::kClaim0, Step::kAdd1, Step::kWrite0},
    {Step::kAdd0, Step::kClaim1, Step::kWrite1},
    {Step::kAdd1, Step::kAdd0},
};

TEST_CASE("autograd: one tensor as two inputs, whatever the order of the kernel's claims",
          "[autograd]") {
  for (size_t order = 0; order < kOrders.size(); ++order) {
    for (const bool had_gradient : {false, true}) {
      INFO("order " << order << ", had a gradient " << had_gradient);
      const double before = had_gradient ? 100 : 0;
      const Tensor dy = from_values({1.0, 10.0}, {2}, kF64);
      const std::vector<double> expected = {5 + before, 50 + before};

      Tensor leaf = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
      if (had_gradient) leaf.set_grad(full({2}, before, kF64));
      backward(mix(leaf, leaf, kOrders[order]), dy);
      check_close(leaf.grad().to_vector(), expected, 0, "leaf");

      Tensor sharded = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
      const auto slot = std::make_shared<Slot>(Shape{2});
      if (had_gradient) slot->memory.fill_(before), slot->is_written = true;
      set_grad_sink(sharded, slot);
      backward(mix(sharded, sharded, kOrders[order]), dy);
      check_close(slot->memory.to_vector(), expected, 0, "slot");
      CHECK(slot->num_written == 2);
      CHECK_FALSE(sharded.grad().is_defined());

      Tensor base = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
      const Tensor h = times(base, 1);
      const Tensor out = mix(h, h, kOrders[order]);
      backward(had_gradient ? plus(out, times(h, 10)) : out, dy);
      check_close(base.grad().to_vector(), {had_gradient ? 15. : 5., had_gradient ? 150. : 50.}, 0,
                  "inner tensor");
    }
  }
}

TEST_CASE("autograd: two different inputs have a destination each", "[autograd]") {
  for (const std::vector<Step>& order : kOrders) {
    Tensor a = from_values({1.0}, {1}, kF64).set_requires_grad(true);
    Tensor b = from_values({1.0}, {1}, kF64).set_requires_grad(true);
    backward(mix(times(a, 1), b, order));
    CHECK(a.grad().item() == 2);
    CHECK(b.grad().item() == 3);
  }
}

TEST_CASE("autograd: a slot has its own dtype, and later writers add", "[autograd]") {
  Tensor w = from_values({1.0, 2.0}, {2}, kBF16).set_requires_grad(true);
  const auto slot = std::make_shared<Slot>(Shape{2});
  set_grad_sink(w, slot);
  const Tensor ones = full({2}, 1, kBF16);
  const std::vector<Step> order = kOrders[0];
  backward(plus(mix(w, ones, order), mix(w, ones, order)), from_values({1.0, 0.5}, {2}, kBF16));
  CHECK(slot->memory.dtype() == kF32);
  check_close(slot->memory.to_vector(), {4, 2}, 0);
  CHECK(slot->num_written == 2);
  // A micro-batch later; through a cast and a view, which fall back to adding.
  backward(times(w.to(kF32).view({1, 2}), 0.25), full({1, 2}, 1, kF32));
  check_close(slot->memory.to_vector(), {4.25, 2.25}, 0);
  backward(times(w.narrow(0, 1, 1), 8), full({1}, 1, kBF16));
  check_close(slot->memory.to_vector(), {4.25, 10.25}, 0);
}

TEST_CASE("autograd: a part of a parameter as the first writer zeroes the rest of its slot",
          "[autograd]") {
  Tensor w = from_values({1.f, 2.f, 3.f}, {3}).set_requires_grad(true);
  const auto slot = std::make_shared<Slot>(Shape{3});  // NaN everywhere
  set_grad_sink(w, slot);
  backward(times(w.narrow(0, 1, 1), 8), full({1}, 1));
  check_close(slot->memory.to_vector(), {0, 8, 0}, 0);
}

TEST_CASE("autograd: an early gradient goes to the same place", "[autograd]") {
  Tensor w = from_values({1.0}, {1}).set_requires_grad(true);
  GradDst first = leaf_destination(w);
  CHECK_FALSE(first.accumulate);
  write_scaled(first, full({1}, 1), 3);
  leaf_written(w);
  backward(times(w, 4));
  CHECK(w.grad().item() == 7);
}

TEST_CASE("autograd: misuse of a destination names the op", "[autograd]") {
  Tensor a = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  CHECK(error_of([&] {
          backward(mix(a, a, {Step::kClaim0, Step::kClaim1, Step::kWrite1}));
        }).find("mix: destination(0) without written(0)") == 0);
  CHECK(error_of([&] {
          backward(mix(a, a, {Step::kWrite1}));
        }).find("mix: written(1) without destination(1)") == 0);
  const auto wrong = [&](const Tensor& gradient) {
    const Tensor h = times(a, 1);
    return record("wrong", {h}, h.clone(),
                  [gradient](const Tensor&, Grads& g) { g.add(0, gradient); });
  };
  CHECK(error_of([&] { backward(wrong(full({2}, 1, kF64))); }).find("wrong: gradient of input 0") ==
        0);
  CHECK_THROWS_AS(backward(wrong(full({2}, 1, kF64))), ShapeError);
  CHECK_THROWS_AS(backward(wrong(full({1}, 1, kF32))), DtypeError);
}

// ---- several outputs

/// The halves of x, whose gradients come into one buffer.
std::vector<Tensor> halves(const Tensor& x, std::shared_ptr<Tensor> buffer) {
  const Tensor base = x.detach();
  const int64_t half = x.dim(0) / 2;
  const auto slice = [buffer, half, shape = x.shape()](int i) {
    if (!buffer->is_defined()) *buffer = full(shape, std::nan(""), kF64);
    return buffer->narrow(0, i * half, half);
  };
  return record_multi(
      "halves", {x}, {base.narrow(0, 0, half), base.narrow(0, half, half)},
      [buffer, slice](std::span<const Tensor> dys, Grads& g) {
        for (int i = 0; i < 2; ++i) {
          const Tensor& dy = dys[static_cast<size_t>(i)];
          if (!dy.is_defined()) {
            slice(i).fill_(0);
          } else {
            CHECK(dy.raw_data() == slice(i).raw_data());
          }
        }
        g.add(0, *buffer);
      },
      slice);
}

TEST_CASE("autograd: gradients of a split come into one buffer, however they are given",
          "[autograd]") {
  Tensor x = from_values({1.0, 2.0, 3.0, 4.0}, {4}, kF64).set_requires_grad(true);
  const Tensor dy = from_values({1.0, 10.0}, {2}, kF64);
  for (const std::vector<Step>& order : kOrders) {
    x.zero_grad();
    const auto parts = halves(times(x, 1), std::make_shared<Tensor>());
    backward(mix(parts[0], parts[1], order), dy);
    check_close(x.grad().to_vector(), {2, 20, 3, 30}, 0);
    x.zero_grad();
    const auto again = halves(times(x, 1), std::make_shared<Tensor>());
    backward(plus(mix(again[1], again[1], order), again[1]), dy);
    check_close(x.grad().to_vector(), {0, 0, 6, 60}, 0);
  }
}

// ---- graphs

TEST_CASE("autograd: an unused parameter has no gradient, a frozen one wants none", "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  Tensor unused = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  Tensor frozen = from_values({1.0}, {1}, kF64);
  bool wanted[3];
  const Tensor y =
      record("probe", {x, frozen, Tensor{}}, x.clone(), [&](const Tensor& dy, Grads& g) {
        for (int i = 0; i < 3; ++i) wanted[i] = g.wanted(i);
        CHECK_FALSE(g.destination(1));
        g.written(1);
        g.add(1, dy);
        g.add(2, dy);
        g.add(0, dy);
      });
  backward(y);
  CHECK((wanted[0] && !wanted[1] && !wanted[2]));
  CHECK(x.grad().item() == 1);
  CHECK_FALSE(unused.grad().is_defined());
  CHECK_FALSE(frozen.grad().is_defined());
}

TEST_CASE("autograd: an op on frozen tensors is not on the tape", "[autograd]") {
  const Tensor frozen = from_values({1.0}, {1}, kF64);
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  CHECK_FALSE(times(frozen, 2).requires_grad());
  {
    const NoGrad no_grad;
    CHECK_FALSE(times(x, 2).requires_grad());
    const GradMode grad(true);
    CHECK(times(x, 2).requires_grad());
  }
  CHECK(needs_grad({frozen, x, Tensor{}}));
  CHECK_FALSE(needs_grad({frozen, Tensor{}}));
  const Tensor always =
      record_always("unit", {frozen}, frozen.clone(), [](const Tensor&, Grads&) {});
  CHECK(always.requires_grad());
  CHECK(error_of([&] {
          times(x, 2).set_requires_grad(false);
        }).find("set_requires_grad: the tensor is the result of an op") == 0);
}

TEST_CASE("autograd: a parameter used several times gets the sum", "[autograd]") {
  Tensor w = from_values({2.0}, {1}, kF64).set_requires_grad(true);
  Tensor h = times(w, 1);
  for (int call = 0; call < 3; ++call) h = plus(h, times(w, 10));
  backward(h);
  CHECK(w.grad().item() == 31);
  backward(times(w, 5));  // the next micro-batch adds
  CHECK(w.grad().item() == 36);
}

TEST_CASE("autograd: two losses over one graph, together or one after the other", "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  const Tensor h = times(x, 2);
  const Tensor first = times(h, 3), second = times(h, 5);
  backward(first, {}, {.retain_graph = true});
  backward(second, {}, {.retain_graph = true});
  CHECK(x.grad().item() == 16);
  x.zero_grad();
  const std::vector<Tensor> roots = {first, second};
  const std::vector<Tensor> grads = {Tensor{}, from_values({10.0}, {1}, kF64)};
  backward(roots, grads);
  CHECK(x.grad().item() == 106);
}

TEST_CASE("autograd: one tensor as two roots", "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  const Tensor y = times(x, 2);
  const std::vector<Tensor> roots = {y, y, x};
  backward(roots, {});
  CHECK(x.grad().item() == 5);
}

TEST_CASE("autograd: gradients handed over are not changed behind their owner's back",
          "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  const Tensor h = times(x, 1);
  const Tensor dy = from_values({1.0}, {1}, kF64);
  backward(plus(plus(h, h), times(h, 7)), dy);  // dy itself reaches h first, 7 dy is added to it
  CHECK(dy.item() == 1);
  CHECK(x.grad().item() == 9);
}

TEST_CASE("autograd: the roots of backward are checked", "[autograd]") {
  Tensor x = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
  const Tensor y = times(x, 2);
  CHECK(error_of([&] {
          backward(y);
        }).find("backward: a root of shape [2] needs a gradient; only a scalar has a default") ==
        0);
  CHECK(error_of([&] {
          backward(y, full({3}, 1, kF64));
        }).find("backward: gradient of root 0 (grad.shape() == root.shape(): [3] vs [2])") == 0);
  CHECK_THROWS_AS(backward(y, full({2}, 1, kF32)), DtypeError);
  CHECK(error_of([&] {
          backward(Tensor(y).detach(), full({2}, 1, kF64));
        }).find("backward: root 0 does not require a gradient") == 0);
  // Nothing of it stays behind, also not of the roots before the bad one.
  const std::vector<Tensor> roots = {y, y.detach()};
  const std::vector<Tensor> grads = {full({2}, 1, kF64), full({2}, 1, kF64)};
  CHECK_THROWS_AS(backward(roots, grads), Error);
  backward(y, full({2}, 1, kF64));
  check_close(x.grad().to_vector(), {2, 2}, 0);
}

TEST_CASE("autograd: a saved tensor that changed in place is found, and the op named",
          "[autograd]") {
  Tensor x = from_values({3.0}, {1}, kF64).set_requires_grad(true);
  const Tensor h = times(x, 1);
  const Tensor y = record("square", {h}, h.clone(), [h = save(h)](const Tensor& dy, Grads& g) {
    g.add(0, times(dy, 2 * h->item()));
  });
  SECTION("unchanged") {
    backward(y);
    CHECK(x.grad().item() == 6);
  }
  SECTION("changed itself") {
    h.detach().fill_(0);
    CHECK(error_of([&] { backward(y); })
              .find("square: a tensor of shape [1] that backward needs was changed in place after "
                    "the forward (version 3, saved at version 2)") == 0);
  }
  SECTION("changed through a view") {
    h.detach().view({1, 1}).add_(full({1, 1}, 1, kF64));
    CHECK_THROWS_AS(backward(y), Error);
  }
}

TEST_CASE("autograd: an exception in backward leaves the tape clean", "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  bool fails = true;
  const Tensor h = times(x, 2);
  const Tensor y = record("brittle", {h}, h.clone(), [&](const Tensor& dy, Grads& g) {
    g.add(0, dy);
    if (fails) throw NumericsError("brittle: boom");
  });
  const Tensor z = plus(times(y, 3), h);
  CHECK(error_of([&] { backward(z, {}, {.retain_graph = true}); }) == "brittle: boom");
  CHECK_FALSE(is_in_backward());
  CHECK(std::string(current_backward_op()).empty());
  CHECK(grad_mode());
  CHECK_FALSE(x.grad().is_defined());
  fails = false;
  backward(z, {}, {.retain_graph = true});
  CHECK(x.grad().item() == 8);  // nothing was left from the first walk
  // Without retain_graph what ran is gone; the rest can still be walked.
  fails = true;
  CHECK_THROWS_AS(backward(z), NumericsError);
  CHECK(error_of([&] { backward(z); }).find("\"plus\" was already walked") != std::string::npos);
  backward(h);
  CHECK(x.grad().item() == 10);
}

TEST_CASE("autograd: callbacks run once when the outermost backward ends", "[autograd]") {
  CHECK(error_of([] {
          on_backward_end([](bool) {});
        }).find("on_backward_end: called outside of a backward") == 0);
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  Tensor inner = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  std::vector<std::string> log;
  const auto probe = [&](bool fails) {
    return record("outer", {x}, x.clone(), [&, fails](const Tensor& dy, Grads& g) {
      on_backward_end([&](bool ok) { log.push_back(ok ? "end ok" : "end failed"); });
      CHECK(std::string(current_backward_op()) == "outer");
      {
        const GradMode grad(true);
        backward(times(inner, 2));
      }
      CHECK(std::string(current_backward_op()) == "outer");
      CHECK(is_in_backward());
      log.push_back("op");
      g.add(0, dy);
      if (fails) throw Error("boom");
    });
  };
  backward(probe(false));
  CHECK(log == std::vector<std::string>{"op", "end ok"});
  CHECK(inner.grad().item() == 2);
  log.clear();
  CHECK_THROWS_AS(backward(probe(true)), Error);
  CHECK(log == std::vector<std::string>{"op", "end failed"});
  log.clear();
  backward(times(x, 1));
  CHECK(log.empty());
}

TEST_CASE("autograd: a callback that throws does not keep the others from running", "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  std::vector<bool> oks;
  const Tensor y = record("op", {x}, x.clone(), [&](const Tensor&, Grads&) {
    on_backward_end([&](bool ok) {
      oks.push_back(ok);
      throw CommError("first");
    });
    on_backward_end([&](bool ok) { oks.push_back(ok); });
  });
  CHECK(error_of([&] { backward(y); }) == "first");
  CHECK(oks == std::vector<bool>{true, false});
  CHECK_FALSE(is_in_backward());
}

TEST_CASE("autograd: a chain of 100000 ops is walked and destroyed without recursion",
          "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  const auto chain = [&] {
    Tensor h = x;
    for (int i = 0; i < 50000; ++i) h = h.view({1, 1}).view({1});
    return h;
  };
  backward(chain());
  CHECK(x.grad().item() == 1);
  chain();                        // dropped without a walk
  const Tensor shared = chain();  // and while something else holds its middle
  { const Tensor end = times(shared, 2); }
  backward(shared);
  CHECK(x.grad().item() == 2);
}

TEST_CASE("autograd: a chain whose captures hold its tensors is destroyed without recursion",
          "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  std::weak_ptr<TensorImpl> first;
  {
    Tensor h = x;
    for (int i = 0; i < 100000; ++i) {
      // Not saved with `save`: the capture holds the node that made h as well.
      h = record("hold", {h}, h.view({1, 1}).detach().view({1}),
                 [h](const Tensor& dy, Grads& g) { g.add(0, h.is_defined() ? dy : Tensor{}); });
      if (i == 0) first = h.shared_impl();
    }
  }
  CHECK(first.expired());
}

TEST_CASE("autograd: backward drops what it has used as it goes", "[autograd]") {
  const auto context = std::make_shared<Context>(ContextOptions{.num_threads = 1});
  const Context::Scope scope(context);
  const auto live_mib = [&] { return context->allocator()->stats().allocated >> 20; };
  Tensor x = zeros({128, 1024}, kF64).set_requires_grad(true);  // 1 MiB
  std::vector<int64_t> live;
  Tensor h = x;
  for (int i = 0; i < 16; ++i) {
    h = record("hold", {h}, h.detach().clone(), [&, kept = save(h)](const Tensor& dy, Grads& g) {
      CHECK(kept->is_defined());
      live.push_back(live_mib());
      const GradDst dx = g.destination(0);
      write_scaled({dx.view, dx.accumulate}, dy, 1);
      g.written(0);
    });
  }
  const Tensor loss =
      record("sum", {h}, zeros({}, kF64),
             [shape = h.shape()](const Tensor&, Grads& g) { g.add(0, full(shape, 1, kF64)); });
  h = {};
  CHECK(live_mib() == 16);  // x and the 15 inner ones that the ops hold; the last is used by none
  context->allocator()->reset_peak();
  backward(loss);
  REQUIRE(live.size() == 16);
  for (size_t i = 0; i < 16; ++i) {
    // dy, and what the ops that are left hold.
    CHECK(live[i] == 1 + 16 - static_cast<int64_t>(i));
  }
  CHECK(live_mib() == 2);  // x and its gradient
  CHECK(context->allocator()->stats().peak_allocated >> 20 <= 20);
  const auto gradients = static_cast<size_t>(MemoryClass::kGradients);
  CHECK(context->allocator()->stats().allocated_by_class[gradients] == 1 << 20);
}

TEST_CASE("autograd: a graph built by one thread and extended by another is walked in order",
          "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  Tensor h;
  std::thread([&] {
    h = times(x, 2);
    for (int i = 0; i < 5; ++i) h = times(h, 1);
  }).join();
  Tensor y;
  std::thread([&] { y = plus(times(h, 3), h); }).join();
  backward(y);
  CHECK(x.grad().item() == 8);
}

}  // namespace
}  // namespace tessera
