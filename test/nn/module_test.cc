#include "nn/module.h"

#include <set>

#include "core/random.h"
#include "core/runtime/context.h"
#include "test/testing.h"

namespace tessera::nn {
namespace {

using testing::check_bitwise;
using testing::error_of;

struct Leaf : Module {
  explicit Leaf(int64_t width)
      : weight(register_parameter("weight", {width, 3}, Init::normal(1, 2))),
        bias(register_parameter("bias", {width}, Init::zeros())) {}
  Tensor forward(const Tensor& x) { return x; }
  std::string kind() const override { return fmt::format("Leaf({})", weight.dim(0)); }

  Tensor& weight;
  Tensor& bias;
};

struct TiedLeaf : Module {
  explicit TiedLeaf(Leaf& other) : weight(tie("weight", other, "weight")) {}
  Tensor forward(const Tensor& x) { return x; }

  Tensor& weight;
};

struct Pair {
  Tensor first, second;
  template <class F>
  void for_each_tensor(F&& f) {
    f(first);
    f(second);
  }
};

struct Net : Module {
  explicit Net(int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) blocks.emplace_back(4);
    head.emplace(this, "head", *in);
    register_buffer("count", zeros({2}), /*persistent=*/true);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = in(x);
    for (const auto& block : blocks) h = block(h);
    return head(h);
  }

  Tensor& scale = register_parameter("scale", {5}, Init::ones(), {.is_norm = true});
  Child<Leaf> in{this, "in", 2};
  ChildList<Leaf> blocks{this, "blocks"};
  Child<TiedLeaf> head;
};

std::vector<std::string> names_of(const std::vector<NamedParameter>& parameters) {
  std::vector<std::string> names;
  for (const NamedParameter& entry : parameters) names.push_back(entry.name);
  return names;
}

using Names = std::vector<std::string>;

TEST_CASE("module: parameters come in registration order, tied ones at first use", "[module]") {
  Net net(2);
  CHECK(names_of(net.named_parameters()) == Names{"scale", "in.weight", "in.bias",
                                                  "blocks.0.weight", "blocks.0.bias",
                                                  "blocks.1.weight", "blocks.1.bias"});
  CHECK(names_of(net.named_parameters(true)).back() == "head.weight");
  CHECK(&net.parameter("head.weight") == &net.parameter("in.weight"));
  CHECK(net.head->weight.impl() == net.in->weight.impl());
  CHECK(net.num_parameters() == 5 + 8 + 2 * 16);
  CHECK(net.named_parameters()[1].owner == net.in.get());

  const auto modules = net.named_modules();
  Names paths;
  for (const NamedModule& entry : modules) paths.push_back(entry.name);
  CHECK(paths == Names{"", "in", "blocks", "blocks.0", "blocks.1", "head"});
  CHECK(modules[0].module == &net);

  const auto buffers = net.named_buffers();
  REQUIRE(buffers.size() == 1);
  CHECK(buffers[0].name == "count");
  CHECK(buffers[0].buffer->persistent);
}

TEST_CASE("module: matrices decay, norms and vectors do not", "[module]") {
  Net net(0);
  CHECK(net.parameter("in.weight").decay);
  CHECK_FALSE(net.parameter("in.bias").decay);
  CHECK_FALSE(net.parameter("scale").decay);
  CHECK(net.parameter("scale").is_norm);
  CHECK_FALSE(net.parameter("in.weight").is_norm);
  CHECK(net.parameter("in.weight").tensor.requires_grad());
}

TEST_CASE("module: a replaced tensor is what the module reads", "[module]") {
  Net net(0);
  const Tensor other = full({2, 3}, 7);
  net.parameter("in.weight").tensor = other;
  CHECK(net.in->weight.impl() == other.impl());
  CHECK(net.head->weight.impl() == other.impl());
}

TEST_CASE("module: initial values depend on seed, name and element only", "[module]") {
  Net a(2), b(3);
  a.initialize(5);
  b.initialize(5);
  for (const NamedParameter& entry : a.named_parameters()) {
    INFO(entry.name);
    check_bitwise(entry.parameter->tensor, b.parameter(entry.name).tensor);
  }
  CHECK(a.parameter("blocks.0.weight").tensor.to_vector() !=
        a.parameter("blocks.1.weight").tensor.to_vector());
  const std::vector<double> before = a.parameter("in.weight").tensor.to_vector();
  a.initialize(6);
  CHECK(a.parameter("in.weight").tensor.to_vector() != before);
  CHECK(a.parameter("in.bias").tensor.to_vector() == std::vector<double>(2, 0.0));
  CHECK(a.parameter("scale").tensor.to_vector() == std::vector<double>(5, 1.0));
}

TEST_CASE("module: a shard of a parameter starts as that part of the whole", "[module]") {
  for (const Init& init : {Init::normal(1, 2), Init::uniform(-3, -1), Init::ones()}) {
    const Tensor whole = empty({1000}), shard = empty({333});
    fill_init(whole, init, 9, "a.b");
    fill_init(shard, init, 9, "a.b", 501);
    check_bitwise(shard, whole.narrow(0, 501, 333));
  }
  const Tensor uniform = empty({1000});
  fill_init(uniform, Init::uniform(-3, -1), 9, "a.b");
  for (const double value : uniform.to_vector()) {
    REQUIRE(value >= -3);
    REQUIRE(value < -1);
  }
}

TEST_CASE("module: deferred parameters have shapes and no bytes until materialize", "[module]") {
  const auto allocated = [] { return Context::current()->allocator()->stats().allocated; };
  const int64_t before = allocated();
  std::unique_ptr<Leaf> leaf;
  {
    DeferredInit deferred;
    CHECK(DeferredInit::is_active());
    leaf = std::make_unique<Leaf>(1000);
  }
  CHECK_FALSE(DeferredInit::is_active());
  CHECK(allocated() == before);
  CHECK(leaf->weight.shape() == Shape{1000, 3});
  leaf->initialize(1);  // nothing to fill
  CHECK_FALSE(leaf->weight.storage()->is_materialized());
  leaf->materialize();
  leaf->initialize(1);
  Leaf eager(1000);
  eager.initialize(1);
  check_bitwise(leaf->weight, eager.weight);
  CHECK(allocated() > before);
}

struct Ramp : Module {
  Ramp() {
    values = &register_buffer("values", new_tensor({3}, kF32), /*persistent=*/false);
    if (values->storage()->is_materialized()) reset_buffers();
  }
  void reset_buffers() override { values->copy_(from_values({1.0, 2.0, 3.0}, {3}, kF32)); }
  Tensor* values;
};

TEST_CASE("module: buffers of a deferred module are recomputed", "[module]") {
  Ramp eager;
  std::unique_ptr<Ramp> late;
  {
    DeferredInit deferred;
    late = std::make_unique<Ramp>();
  }
  CHECK_FALSE(late->values->storage()->is_materialized());
  late->materialize();
  CHECK(late->values->to_vector() == std::vector<double>{1, 2, 3});
  CHECK(eager.values->to_vector() == std::vector<double>{1, 2, 3});
}

TEST_CASE("module: the parameter dtype holds for a scope", "[module]") {
  {
    ParameterDtype scope(kBF16);
    Leaf leaf(2);
    CHECK(leaf.weight.dtype() == kBF16);
  }
  Leaf leaf(2);
  CHECK(leaf.weight.dtype() == kF32);
  CHECK(error_of([] {
          ParameterDtype scope(kI32);
        }).starts_with("ParameterDtype: expected a floating dtype, got i32"));
}

TEST_CASE("module: training mode reaches every child", "[module]") {
  Net net(1);
  CHECK(net.blocks[0]->is_training());
  net.train(false);
  CHECK_FALSE(net.is_training());
  CHECK_FALSE(net.blocks[0]->is_training());
  net.train();
  CHECK(net.head->is_training());
}

struct LogHook : ModuleHook {
  explicit LogHook(Names& log) : log(log) {}
  void pre_forward(Module& module, std::span<Tensor*> inputs) override {
    log.push_back(fmt::format("pre {} {}", module.kind(), inputs.size()));
    if (replacement.is_defined()) *inputs[0] = replacement;
  }
  void post_forward(Module& module, std::span<Tensor*> outputs) override {
    log.push_back(fmt::format("post {} {}", module.kind(), outputs.size()));
    if (replacement.is_defined()) *outputs[0] = replacement;
  }
  void on_forward_error(Module& module) noexcept override {
    log.push_back(fmt::format("error {}", module.kind()));
  }

  Names& log;
  Tensor replacement;
};

TEST_CASE("module: hooks run around the forward of root and children", "[module]") {
  Net net(1);
  Names log;
  for (const NamedModule& entry : net.named_modules()) {
    entry.module->set_hook(std::make_shared<LogHook>(log));
  }
  const Tensor x = zeros({1});
  CHECK(call(net, x).impl() == x.impl());
  CHECK(log == Names{"pre Net 1", "pre Leaf(2) 1", "post Leaf(2) 1", "pre Leaf(4) 1",
                     "post Leaf(4) 1", "pre TiedLeaf 1", "post TiedLeaf 1", "post Net 1"});
  log.clear();
  net.forward(x);
  CHECK(log.front() == "pre Leaf(2) 1");
}

struct Many : Module {
  Pair forward(const Tensor& a, const std::vector<Tensor>& more, int factor, const Tensor& absent,
               const std::unique_ptr<int>& not_copyable) {
    seen = {a};
    seen.insert(seen.end(), more.begin(), more.end());
    seen.push_back(absent);
    CHECK(factor == 3);
    CHECK(*not_copyable == 4);
    if (throws) throw ShapeError("Many: planted");
    return {a, more[1]};
  }
  std::vector<Tensor> seen;
  bool throws = false;
};

TEST_CASE("module: a hook sees and replaces all tensors of arguments and results", "[module]") {
  Many many;
  Names log;
  auto hook = std::make_shared<LogHook>(log);
  hook->replacement = full({1}, 9);
  many.set_hook(hook);
  const Tensor a = zeros({1}), b = zeros({1}), c = zeros({1});
  const Pair result =
      call(many, a, std::vector<Tensor>{b, c}, 3, Tensor{}, std::make_unique<int>(4));
  CHECK(log == Names{"pre Many 3", "post Many 2"});  // the undefined one is left out
  CHECK(many.seen[0].impl() == hook->replacement.impl());
  CHECK(many.seen[1].impl() == b.impl());
  CHECK_FALSE(many.seen[3].is_defined());
  CHECK(result.first.impl() == hook->replacement.impl());
  CHECK(result.second.impl() == c.impl());
  CHECK(a.item() == 0);  // the caller's tensor is another
}

TEST_CASE("module: a hook hears of a forward that throws", "[module]") {
  Many many;
  many.throws = true;
  Names log;
  many.set_hook(std::make_shared<LogHook>(log));
  const Tensor a = zeros({1});
  CHECK(error_of([&] {
          call(many, a, std::vector<Tensor>{a, a}, 3, Tensor{}, std::make_unique<int>(4));
        }) == "Many: planted");
  CHECK(log == Names{"pre Many 3", "error Many"});
}

struct Named : Module {
  void parameter_named(const std::string& name) { register_parameter(name, {1}, Init::zeros()); }
  void tie_missing(Module& other) { tie("w", other, "w"); }
};

TEST_CASE("module: wrong names are errors", "[module]") {
  Named module;
  module.parameter_named("w");
  CHECK(error_of([&] {
          module.parameter_named("w");
        }).starts_with("Module: 'w' is registered twice in Named"));
  CHECK(error_of([&] {
          module.parameter_named("a.b");
        }).starts_with("Module: a name is not empty and has no '.', got 'a.b'"));
  CHECK(error_of([&] {
          module.parameter_named("");
        }).starts_with("Module: a name is not empty and has no '.', got ''"));
  CHECK(error_of([&] { module.parameter("v"); }).starts_with("Module: Named has no parameter 'v'"));
  Named other;
  CHECK(error_of([&] {
          other.tie_missing(other);
        }).starts_with("Module::tie: Named has no parameter 'w'"));
  Child<Leaf> leaf(&module, "leaf", 1);
  CHECK(error_of([&] {
          leaf.emplace(&module, "leaf", 1);
        }).starts_with("Child: 'leaf' exists already"));
}

TEST_CASE("module: print_tree shows names, shapes, parameters and notes", "[module]") {
  Net net(12);
  CHECK(print_tree(net) ==
        "Net  # scale [5] f32, 205 parameters\n"
        "  (in): Leaf(2)  # weight [2, 3] f32, bias [2] f32, 8 parameters\n"
        "  (blocks): ModuleList  # 192 parameters\n"
        "    (0-11): 12 x Leaf(4)  # weight [4, 3] f32, bias [4] f32, 16 parameters\n"
        "  (head): TiedLeaf  # weight [2, 3] f32, 6 parameters\n");
  const std::string noted = print_tree(
      net, [&](const Module& module) { return &module == net.blocks[3].get() ? "unit 4" : ""; });
  CHECK(noted.find("(0-2): 3 x Leaf(4)") != std::string::npos);
  CHECK(noted.find("(3): Leaf(4)  # weight [4, 3] f32, bias [4] f32, 16 parameters, unit 4\n") !=
        std::string::npos);
  CHECK(noted.find("(4-11): 8 x Leaf(4)") != std::string::npos);
  // A unit a block: notes that differ by the block's own name are one.
  const std::string units = print_tree(net, [&](const Module& module) {
    for (int i = 0; i < 12; ++i) {
      if (&module == net.blocks[i].get()) return fmt::format("blocks.{}", i);
    }
    return std::string();
  });
  CHECK(units.find("(0-11): 12 x Leaf(4)  # weight [4, 3] f32, bias [4] f32, 16 parameters, "
                   "blocks.*\n") != std::string::npos);
  Leaf big(1000);
  CHECK(print_tree(big).find("4,000 parameters") != std::string::npos);
  struct Gain : Module {
    Tensor& gain = register_parameter("gain", {1}, Init::ones());
  };
  Gain one;
  const std::string tree = print_tree(one);
  CAPTURE(tree);
  CHECK(tree.ends_with("Gain  # gain [1] f32, 1 parameter\n"));
}

}  // namespace
}  // namespace tessera::nn
