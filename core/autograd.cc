#include "core/autograd.h"

#include <algorithm>
#include <atomic>

#include "core/elementary/kernel.h"
#include "core/op_observer.h"

namespace tessera {

/// One op on the tape.
struct Node {
  /// Where the gradient of an input goes: output `output_index` of `node`, a leaf, or nowhere.
  struct Input {
    std::shared_ptr<Node> node;
    int output_index = 0;
    std::shared_ptr<TensorImpl> leaf;
    Shape shape;  // the gradient has the input's shape and dtype; the input itself may go
    DType dtype = kF32;
  };
  /// The gradient of one output, while the engine runs.
  struct Slot {
    Tensor grad;
    bool is_own_destination = false;  // memory that `destination` supplied
  };

  const char* name;
  uint64_t sequence;
  std::vector<Input> inputs;
  int num_outputs = 1;
  int64_t observed_as = 0;  // by an OpObserver
  MultiBackwardFn backward;
  std::function<Tensor(int)> destination;

  std::vector<Slot> slots;
  bool is_visited = false;

  ~Node();
};

namespace {

struct ThreadState {
  bool grad_mode = true;
  int backward_depth = 0;
  const char* current_op = "";
  OpObserver* observer = nullptr;
  std::span<const Tensor> dys;  // of the node that runs, for the observer
  std::vector<std::function<void(bool)>> callbacks;
};
ThreadState& state() {
  thread_local ThreadState s;
  return s;
}

// One numbering for all threads: a graph that several of them built is still sorted by it.
std::atomic<uint64_t> next_sequence{1};

/// `grad` is referred to by nobody but its slot: adding in place changes no one else's value.
bool is_exclusive(const Tensor& grad) {
  return grad.shared_impl().use_count() == 1 && grad.storage().use_count() == 1;
}

/// A view of what others have computed says nothing new.
bool shares_storage(const Tensor& tensor, std::span<const Tensor> others) {
  return std::any_of(others.begin(), others.end(), [&](const Tensor& other) {
    return other.is_defined() && other.storage() == tensor.storage();
  });
}

int64_t observe_op(const char* name, std::span<const Tensor> inputs,
                   std::span<const Tensor> outputs) {
  OpObserver* const observer = state().observer;
  return observer == nullptr ? 0 : observer->on_op(name, inputs, outputs);
}

/// Before whoever owns the gradient's memory hears of it and hands it on.
void observe_gradient(int input, const TensorImpl* leaf, const Tensor& gradient) {
  ThreadState& s = state();
  if (s.observer == nullptr || shares_storage(gradient, s.dys)) return;
  s.observer->on_gradient(input, leaf, gradient);
}

void write_to(GradDst dst, const Tensor& grad) {
  dst.accumulate ? dst.view.add_(grad) : dst.view.copy_(grad);
}

}  // namespace

// A long chain of nodes would be destroyed recursively, one stack frame each: unlink iteratively. A
// node that something else holds too is left whole; its last holder comes here again.
Node::~Node() {
  std::vector<std::shared_ptr<Node>> chain;
  const auto unlink = [&chain](Node& node) {
    for (Input& input : node.inputs) {
      if (input.node != nullptr) chain.push_back(std::move(input.node));
    }
    // After that: captures may be outputs of the same nodes, which `chain` keeps from going here.
    node.backward = nullptr;
    node.destination = nullptr;
  };
  unlink(*this);
  while (!chain.empty()) {
    const std::shared_ptr<Node> node = std::move(chain.back());
    chain.pop_back();
    if (node.use_count() == 1) unlink(*node);
  }
}

bool grad_mode() {
  return state().grad_mode;
}
GradMode::GradMode(bool enabled) : previous_(state().grad_mode) {
  state().grad_mode = enabled;
}
GradMode::~GradMode() {
  state().grad_mode = previous_;
}
bool is_in_backward() {
  return state().backward_depth > 0;
}
const char* current_backward_op() {
  return state().current_op;
}

OpObserver* op_observer() {
  return state().observer;
}
OpObserverScope::OpObserverScope(OpObserver* observer)
    : previous_(std::exchange(state().observer, observer)) {}
OpObserverScope::~OpObserverScope() {
  state().observer = previous_;
}

GradRows observed(const Tensor& leaf, GradRows rows) {
  OpObserver* const observer = state().observer;
  if (observer == nullptr) return rows;
  return [rows = std::move(rows), told = observer->on_later_gradient(leaf.impl())](
             const GradDst& dst, int64_t begin) {
    rows(dst, begin);
    told(dst.view);
  };
}

void on_backward_end(std::function<void(bool)> callback) {
  TESSERA_CHECK(is_in_backward(), "on_backward_end: called outside of a backward");
  state().callbacks.push_back(std::move(callback));
}

Saved::Saved(Tensor tensor)
    : tensor_(std::move(tensor)), version_(tensor_.is_defined() ? *tensor_.impl()->version : 0) {}

const Tensor& Saved::get() const {
  if (tensor_.is_defined()) {
    TESSERA_CHECK(*tensor_.impl()->version == version_,
                  "{}: a tensor of shape {} that backward needs was changed in place after the "
                  "forward (version {}, saved at version {})",
                  current_backward_op(), tensor_.shape(), *tensor_.impl()->version, version_);
  }
  return tensor_;
}

void set_grad_sink(const Tensor& leaf, std::shared_ptr<GradSink> sink) {
  TESSERA_CHECK(leaf.is_leaf(), "set_grad_sink: the tensor is the result of an op, not a leaf");
  leaf.impl()->grad_sink = std::move(sink);
}

GradDst leaf_destination(const Tensor& leaf) {
  if (leaf.impl()->grad_sink != nullptr) return leaf.impl()->grad_sink->destination(leaf);
  if (leaf.impl()->grad.is_defined()) return {leaf.impl()->grad, true};
  MemoryScope scope(MemoryClass::kGradients);
  leaf.impl()->grad = empty(leaf.shape(), leaf.dtype());
  return {leaf.impl()->grad, false};
}

namespace {

void tell_sink(const Tensor& leaf) {
  if (leaf.impl()->grad_sink != nullptr) leaf.impl()->grad_sink->written(leaf);
}

}  // namespace

void leaf_written(const Tensor& leaf) {
  if (OpObserver* const observer = state().observer; observer != nullptr) {
    observer->on_early_gradient(leaf.impl(), leaf_destination(leaf).view);
  }
  tell_sink(leaf);
}

// ---- recording

bool needs_grad(std::initializer_list<Tensor> inputs) {
  return grad_mode() && std::any_of(inputs.begin(), inputs.end(), [](const Tensor& t) {
           return t.is_defined() && t.requires_grad();
         });
}

namespace {

void put_on_tape(const char* name, std::span<const Tensor> inputs, std::span<Tensor> outputs,
                 int64_t observed_as, MultiBackwardFn backward,
                 std::function<Tensor(int)> destination) {
  auto node = std::make_shared<Node>();
  node->name = name;
  node->observed_as = observed_as;
  node->sequence = next_sequence.fetch_add(1, std::memory_order_relaxed);
  node->num_outputs = static_cast<int>(outputs.size());
  node->backward = std::move(backward);
  node->destination = std::move(destination);
  node->inputs.resize(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].is_defined()) continue;
    TensorImpl& t = *inputs[i].impl();
    Node::Input& input = node->inputs[i];
    input.shape = t.shape;
    input.dtype = t.dtype;
    if (t.node != nullptr) {
      input.node = t.node;
      input.output_index = t.output_index;
    } else if (t.requires_grad) {
      input.leaf = inputs[i].shared_impl();
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    TensorImpl& t = *outputs[i].impl();
    // An output that is an input itself (an identity) needs a graph position of its own.
    if (t.node != nullptr || t.requires_grad) outputs[i] = outputs[i].detach();
    TensorImpl& own = *outputs[i].impl();
    own.requires_grad = true;
    own.node = node;
    own.output_index = static_cast<int>(i);
  }
}

bool any_requires_grad(std::span<const Tensor> tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor& t) { return t.is_defined() && t.requires_grad(); });
}

MultiBackwardFn single(BackwardFn backward) {
  return [backward = std::move(backward)](std::span<const Tensor> dys, Grads& g) {
    backward(dys[0], g);
  };
}

}  // namespace

Tensor record(const char* name, std::initializer_list<Tensor> inputs, Tensor output,
              BackwardFn backward) {
  const int64_t observed_as = observe_op(name, {inputs.begin(), inputs.size()}, {&output, 1});
  if (!needs_grad(inputs)) return output;
  put_on_tape(name, {inputs.begin(), inputs.size()}, {&output, 1}, observed_as,
              single(std::move(backward)), nullptr);
  return output;
}

Tensor record_always(const char* name, std::initializer_list<Tensor> inputs, Tensor output,
                     BackwardFn backward) {
  const int64_t observed_as = observe_op(name, {inputs.begin(), inputs.size()}, {&output, 1});
  if (!grad_mode()) return output;
  put_on_tape(name, {inputs.begin(), inputs.size()}, {&output, 1}, observed_as,
              single(std::move(backward)), nullptr);
  return output;
}

std::vector<Tensor> record_multi(const char* name, std::vector<Tensor> inputs,
                                 std::vector<Tensor> outputs, MultiBackwardFn backward,
                                 std::function<Tensor(int)> destination) {
  const int64_t observed_as = observe_op(name, inputs, outputs);
  if (!grad_mode() || !any_requires_grad(inputs)) return outputs;
  put_on_tape(name, inputs, outputs, observed_as, std::move(backward), std::move(destination));
  return outputs;
}

std::vector<Tensor> record_multi_always(const char* name, std::vector<Tensor> inputs,
                                        std::vector<Tensor> outputs, MultiBackwardFn backward) {
  const int64_t observed_as = observe_op(name, inputs, outputs);
  if (!grad_mode()) return outputs;
  put_on_tape(name, inputs, outputs, observed_as, std::move(backward), nullptr);
  return outputs;
}

// ---- the engine

class Engine {
 public:
  explicit Engine(bool retain_graph) : retain_graph_(retain_graph) {}

  /// Leaves the nodes clean whether or not `run` got through.
  ~Engine() {
    for (const auto& node : nodes_) {
      node->slots.clear();
      node->is_visited = false;
    }
  }

  void run(std::span<const Tensor> roots, std::span<const Tensor> grads) {
    for (size_t i = 0; i < roots.size(); ++i) {
      const Tensor& root = roots[i];
      TESSERA_CHECK(root.is_defined() && root.requires_grad(),
                    "backward: root {} does not require a gradient", i);
      Tensor grad = i < grads.size() ? grads[i] : Tensor{};
      if (!grad.is_defined()) {
        TESSERA_CHECK(root.numel() == 1,
                      "backward: a root of shape {} needs a gradient; only a scalar has a default",
                      root.shape());
        grad = full(root.shape(), 1, root.dtype());
      }
      TESSERA_CHECK_EQ(grad.shape(), root.shape(), "backward: gradient of root {}", i);
      TESSERA_CHECK_EQ(grad.dtype(), root.dtype(), "backward: gradient of root {}", i);
      if (root.is_leaf()) {
        deliver_to_leaf(root, grad);
        continue;
      }
      visit(root.impl()->node);
      deliver_to_node(*root.impl()->node, root.impl()->output_index, grad);
    }
    // Inputs always have a smaller sequence number than the node, so this is a topological order.
    std::sort(nodes_.begin(), nodes_.end(),
              [](const auto& a, const auto& b) { return a->sequence > b->sequence; });
    for (const std::shared_ptr<Node>& node : nodes_) run_node(*node);
  }

  static void deliver_to_leaf(const Tensor& leaf, const Tensor& grad) {
    if (GradDst dst = leaf_destination(leaf)) {
      write_to(dst, grad);
      tell_sink(leaf);
    }
  }

  static void deliver_to_node(Node& node, int output_index, const Tensor& grad) {
    Node::Slot& slot = node.slots[static_cast<size_t>(output_index)];
    if (slot.grad.is_defined() || node.destination != nullptr) {
      write_to(slot_destination(node, output_index, grad.shape(), grad.dtype()), grad);
    } else {
      slot.grad = grad.is_contiguous() ? grad : grad.clone();
    }
  }

  static GradDst slot_destination(Node& node, int output_index, const Shape& shape, DType dtype) {
    Node::Slot& slot = node.slots[static_cast<size_t>(output_index)];
    if (slot.grad.is_defined()) {
      // What `add` handed over may be another node's dy or a view of it.
      if (!slot.is_own_destination && !is_exclusive(slot.grad)) slot.grad = slot.grad.clone();
      return {slot.grad, true};
    }
    if (node.destination != nullptr) slot.grad = node.destination(output_index);
    slot.is_own_destination = slot.grad.is_defined();
    if (!slot.grad.is_defined()) slot.grad = empty(shape, dtype);
    return {slot.grad, false};
  }

 private:
  void visit(const std::shared_ptr<Node>& root) {
    std::vector<std::shared_ptr<Node>> stack{root};
    while (!stack.empty()) {
      std::shared_ptr<Node> node = std::move(stack.back());
      stack.pop_back();
      if (node->is_visited) continue;
      node->is_visited = true;
      node->slots.resize(static_cast<size_t>(node->num_outputs));
      for (const Node::Input& input : node->inputs) {
        if (input.node != nullptr && !input.node->is_visited) stack.push_back(input.node);
      }
      nodes_.push_back(std::move(node));
    }
  }

  /// Tells an observer which backward runs, for a scope.
  class Observation {
   public:
    Observation(const Node& node, std::span<const Tensor> dys)
        : observer_(state().observer), dys_(state().dys) {
      if (observer_ == nullptr) return;
      state().dys = dys;
      observer_->begin_backward(node.name, node.observed_as);
    }
    ~Observation() {
      if (observer_ == nullptr) return;
      state().dys = dys_;
      observer_->end_backward();
    }
    Observation(const Observation&) = delete;
    Observation& operator=(const Observation&) = delete;

   private:
    OpObserver* const observer_;
    const std::span<const Tensor> dys_;
  };

  void run_node(Node& node) {
    const bool has_grad = std::any_of(node.slots.begin(), node.slots.end(),
                                      [](const Node::Slot& s) { return s.grad.is_defined(); });
    state().current_op = node.name;
    if (has_grad) {
      TESSERA_CHECK(node.backward != nullptr,
                    "backward: the graph of \"{}\" was already walked and its saved tensors are "
                    "gone; pass retain_graph to walk it twice",
                    node.name);
      std::vector<Tensor> dys;
      dys.reserve(node.slots.size());
      for (Node::Slot& slot : node.slots) dys.push_back(std::move(slot.grad));
      const Observation observation(node, dys);
      Grads g(node);
      node.backward(dys, g);
      g.finish();
    }
    if (!retain_graph_) {
      node.backward = nullptr;
      node.destination = nullptr;
    }
    node.slots.assign(node.slots.size(), {});
    state().current_op = "";
  }

  bool retain_graph_;
  std::vector<std::shared_ptr<Node>> nodes_;
};

Grads::Grads(Node& node) : node_(node), claims_(node.inputs.size()) {}

bool Grads::wanted(int i) const {
  const Node::Input& input = node_.inputs[static_cast<size_t>(i)];
  return input.node != nullptr || input.leaf != nullptr;
}

/// The memory for the gradient of input i is claimed, not yet written, and maybe for another input.
bool Grads::is_target_open(int i) const {
  const Node::Input& input = node_.inputs[static_cast<size_t>(i)];
  for (size_t j = 0; j < claims_.size(); ++j) {
    const Node::Input& other = node_.inputs[j];
    if (claims_[j].state == Claim::kOpen && !claims_[j].is_private && other.leaf == input.leaf &&
        other.node == input.node && other.output_index == input.output_index) {
      return true;
    }
  }
  return false;
}

GradDst Grads::destination(int i) {
  if (!wanted(i)) return {};
  Claim& claim = claims_[static_cast<size_t>(i)];
  if (claim.state == Claim::kOpen) return claim.dst;
  const Node::Input& input = node_.inputs[static_cast<size_t>(i)];
  claim.is_private = is_target_open(i);
  if (claim.is_private) {
    claim.dst = {empty(input.shape, input.dtype), false};
  } else if (input.leaf != nullptr) {
    claim.dst = leaf_destination(Tensor(input.leaf));
  } else {
    claim.dst = Engine::slot_destination(*input.node, input.output_index, input.shape, input.dtype);
  }
  claim.state = Claim::kOpen;
  return claim.dst;
}

void Grads::written(int i) {
  if (!wanted(i)) return;
  Claim& claim = claims_[static_cast<size_t>(i)];
  TESSERA_CHECK_AS(InternalError, claim.state == Claim::kOpen,
                   "{}: written({}) without destination({})", node_.name, i, i);
  claim.state = Claim::kWritten;
  const Node::Input& input = node_.inputs[static_cast<size_t>(i)];
  observe_gradient(i, input.leaf.get(), claim.dst.view);
  if (claim.is_private) {
    deferred_.emplace_back(i, claim.dst.view);
  } else if (input.leaf != nullptr) {
    tell_sink(Tensor(input.leaf));
  }
}

void Grads::add(int i, const Tensor& grad) {
  if (!wanted(i)) return;
  const Node::Input& input = node_.inputs[static_cast<size_t>(i)];
  TESSERA_CHECK_EQ(grad.shape(), input.shape, "{}: gradient of input {}", node_.name, i);
  if (input.leaf == nullptr) {
    TESSERA_CHECK_EQ(grad.dtype(), input.dtype, "{}: gradient of input {}", node_.name, i);
  }
  observe_gradient(i, input.leaf.get(), grad);
  is_target_open(i) ? void(deferred_.emplace_back(i, grad)) : deliver(i, grad);
}

void Grads::deliver(int i, const Tensor& grad) {
  const Node::Input& input = node_.inputs[static_cast<size_t>(i)];
  if (input.leaf != nullptr) {
    Engine::deliver_to_leaf(Tensor(input.leaf), grad);
  } else {
    Engine::deliver_to_node(*input.node, input.output_index, grad);
  }
}

void Grads::finish() {
  for (size_t i = 0; i < claims_.size(); ++i) {
    TESSERA_CHECK_AS(InternalError, claims_[i].state != Claim::kOpen,
                     "{}: destination({}) without written({})", node_.name, i, i);
  }
  claims_.clear();  // their references would make the gradients look shared
  for (const auto& [i, grad] : deferred_) deliver(i, grad);
}

void backward(std::span<const Tensor> roots, std::span<const Tensor> grads,
              const BackwardOptions& options) {
  NoGrad no_grad;
  ThreadState& s = state();
  const char* outer_op = s.current_op;
  ++s.backward_depth;
  const auto finish = [&](bool ok) {
    s.current_op = outer_op;
    if (--s.backward_depth > 0) return;
    // All of them run: each has something of its own to put back in order.
    std::exception_ptr error;
    for (const auto& callback : std::exchange(s.callbacks, {})) {
      try {
        callback(ok && error == nullptr);
      } catch (...) {
        if (error == nullptr) error = std::current_exception();
      }
    }
    if (ok && error != nullptr) std::rethrow_exception(error);
  };
  try {
    Engine(options.retain_graph).run(roots, grads);
  } catch (...) {
    finish(false);
    throw;
  }
  finish(true);
}

void backward(const Tensor& root, const Tensor& grad, const BackwardOptions& options) {
  backward({&root, 1}, {&grad, 1}, options);
}

}  // namespace tessera
