#include "core/autograd.h"

#include <algorithm>

#include "core/elementary/kernel.h"

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
    const Node* writer = nullptr;     // the node whose backward function claimed it
  };

  const char* name;
  uint64_t sequence;
  std::vector<Input> inputs;
  int num_outputs = 1;
  MultiBackwardFn backward;
  std::function<Tensor(int)> destination;

  std::vector<Slot> slots;
  bool is_visited = false;

  ~Node();
};

namespace {

struct ThreadState {
  bool grad_mode = true;
  uint64_t next_sequence = 1;
  int backward_depth = 0;
  const char* current_op = "";
  std::vector<std::function<void(bool)>> callbacks;
};
ThreadState& state() {
  thread_local ThreadState s;
  return s;
}

/// `grad` is referred to by nobody but its slot: adding in place changes no one else's value.
bool is_exclusive(const Tensor& grad) {
  return grad.shared_impl().use_count() == 1 && grad.storage().use_count() == 1;
}

void accumulate_into(const Tensor& destination, const Tensor& grad) {
  Tensor target = destination;
  target.add_(grad);
}

}  // namespace

// A long chain of nodes would be destroyed recursively, one stack frame each: unlink iteratively.
Node::~Node() {
  std::vector<std::shared_ptr<Node>> chain;
  const auto take = [&chain](Node& node) {
    for (Input& input : node.inputs) {
      if (input.node != nullptr) chain.push_back(std::move(input.node));
    }
  };
  take(*this);
  while (!chain.empty()) {
    const std::shared_ptr<Node> node = std::move(chain.back());
    chain.pop_back();
    if (node.use_count() == 1) {
      node->backward = nullptr;  // captures may hold further nodes
      take(*node);
    }
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

void leaf_written(const Tensor& leaf) {
  if (leaf.impl()->grad_sink != nullptr) leaf.impl()->grad_sink->written(leaf);
}

// ---- recording

bool needs_grad(std::initializer_list<Tensor> inputs) {
  return grad_mode() && std::any_of(inputs.begin(), inputs.end(), [](const Tensor& t) {
           return t.is_defined() && t.requires_grad();
         });
}

namespace {

void put_on_tape(const char* name, std::span<const Tensor> inputs, std::span<Tensor> outputs,
                 MultiBackwardFn backward, std::function<Tensor(int)> destination) {
  auto node = std::make_shared<Node>();
  node->name = name;
  node->sequence = state().next_sequence++;
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
  if (!needs_grad(inputs)) return output;
  put_on_tape(name, {inputs.begin(), inputs.size()}, {&output, 1}, single(std::move(backward)),
              nullptr);
  return output;
}

Tensor record_always(const char* name, std::initializer_list<Tensor> inputs, Tensor output,
                     BackwardFn backward) {
  if (!grad_mode()) return output;
  put_on_tape(name, {inputs.begin(), inputs.size()}, {&output, 1}, single(std::move(backward)),
              nullptr);
  return output;
}

std::vector<Tensor> record_multi(const char* name, std::vector<Tensor> inputs,
                                 std::vector<Tensor> outputs, MultiBackwardFn backward,
                                 std::function<Tensor(int)> destination) {
  if (!grad_mode() || !any_requires_grad(inputs)) return outputs;
  put_on_tape(name, inputs, outputs, std::move(backward), std::move(destination));
  return outputs;
}

std::vector<Tensor> record_multi_always(const char* name, std::vector<Tensor> inputs,
                                        std::vector<Tensor> outputs, MultiBackwardFn backward) {
  if (!grad_mode()) return outputs;
  put_on_tape(name, inputs, outputs, std::move(backward), nullptr);
  return outputs;
}

// ---- the engine

class Engine {
 public:
  Engine(std::span<const Tensor> roots, std::span<const Tensor> grads, bool retain_graph)
      : retain_graph_(retain_graph) {
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
      if (root.is_leaf()) {
        deliver_to_leaf(root, grad);
        continue;
      }
      visit(root.impl()->node);
      deliver_to_node(*root.impl()->node, root.impl()->output_index, grad);
    }
  }

  /// Leaves the nodes clean whether or not `run` got through.
  ~Engine() {
    for (const auto& node : nodes_) {
      node->slots.clear();
      node->is_visited = false;
    }
  }

  void run() {
    // Inputs always have a smaller sequence number than the node, so this is a topological order.
    std::sort(nodes_.begin(), nodes_.end(),
              [](const auto& a, const auto& b) { return a->sequence > b->sequence; });
    for (const std::shared_ptr<Node>& node : nodes_) run_node(*node);
  }

  static void deliver_to_leaf(const Tensor& leaf, const Tensor& grad) {
    GradDst dst = leaf_destination(leaf);
    if (dst) {
      dst.accumulate ? accumulate_into(dst.view, grad) : void(dst.view.copy_(grad));
      leaf_written(leaf);
    }
  }

  static void deliver_to_node(Node& node, int output_index, const Tensor& grad) {
    Node::Slot& slot = node.slots[static_cast<size_t>(output_index)];
    if (!slot.grad.is_defined()) {
      slot.grad = grad.is_contiguous() ? grad : grad.clone();
    } else {
      make_exclusive(slot);
      accumulate_into(slot.grad, grad);
    }
  }

  static void make_exclusive(Node::Slot& slot) {
    if (!slot.is_own_destination && !is_exclusive(slot.grad)) slot.grad = slot.grad.clone();
  }

  static GradDst claim(const Node& writer, Node& node, int output_index, const Shape& shape,
                       DType dtype) {
    Node::Slot& slot = node.slots[static_cast<size_t>(output_index)];
    if (slot.writer == &writer) return {};  // the same tensor is two inputs of one op
    slot.writer = &writer;
    if (slot.grad.is_defined()) {
      make_exclusive(slot);
      return {slot.grad, true};
    }
    if (node.destination != nullptr) {
      slot.grad = node.destination(output_index);
      slot.is_own_destination = true;
    } else {
      slot.grad = empty(shape, dtype);
    }
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
      Grads g;
      g.node_ = &node;
      g.claimed_.resize(node.inputs.size());
      node.backward(dys, g);
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

bool Grads::wanted(int i) const {
  const Node::Input& input = node_->inputs[static_cast<size_t>(i)];
  return input.node != nullptr || input.leaf != nullptr;
}

GradDst Grads::destination(int i) {
  if (!wanted(i)) return {};
  const auto index = static_cast<size_t>(i);
  const Node::Input& input = node_->inputs[index];
  if (claimed_[index].view.is_defined()) return claimed_[index];
  // One op may name a tensor twice; its kernel must not write both gradients to one place.
  const bool is_repeated = [&] {
    for (size_t j = 0; j < claimed_.size(); ++j) {
      const Node::Input& other = node_->inputs[j];
      if (j != index && claimed_[j].view.is_defined() && input.leaf != nullptr &&
          other.leaf == input.leaf) {
        return true;
      }
    }
    return false;
  }();
  GradDst dst;
  if (input.leaf != nullptr) {
    if (!is_repeated) dst = leaf_destination(Tensor(input.leaf));
  } else {
    dst = Engine::claim(*node_, *input.node, input.output_index, input.shape, input.dtype);
  }
  if (!dst) dst = {empty(input.shape, input.dtype), false};  // added by `written`
  claimed_[index] = dst;
  return dst;
}

void Grads::written(int i) {
  if (!wanted(i)) return;
  const auto index = static_cast<size_t>(i);
  const Node::Input& input = node_->inputs[index];
  const Tensor& view = claimed_[index].view;
  TESSERA_CHECK(view.is_defined(), "{}: written({}) without destination({})", node_->name, i, i);
  if (input.leaf != nullptr) {
    const Tensor leaf(input.leaf);
    bool is_private = false;  // `destination` gave a private buffer for a repeated input
    for (size_t j = 0; j < index; ++j) {
      is_private =
          is_private || (node_->inputs[j].leaf == input.leaf && claimed_[j].view.is_defined() &&
                         claimed_[j].view.impl() != view.impl() &&
                         claimed_[j].view.raw_data() != view.raw_data());
    }
    is_private ? Engine::deliver_to_leaf(leaf, view) : leaf_written(leaf);
    return;
  }
  Node::Slot& slot = input.node->slots[static_cast<size_t>(input.output_index)];
  if (slot.grad.impl() != view.impl()) {
    Engine::deliver_to_node(*input.node, input.output_index, view);
  }
  slot.writer = nullptr;
}

void Grads::add(int i, const Tensor& grad) {
  if (!wanted(i)) return;
  const Node::Input& input = node_->inputs[static_cast<size_t>(i)];
  TESSERA_CHECK_EQ(grad.shape(), input.shape, "{}: gradient of input {}", node_->name, i);
  if (input.leaf != nullptr) {
    Engine::deliver_to_leaf(Tensor(input.leaf), grad);
  } else {
    Engine::deliver_to_node(*input.node, input.output_index, grad);
  }
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
    const auto callbacks = std::exchange(s.callbacks, {});
    for (const auto& callback : callbacks) callback(ok);
  };
  try {
    Engine(roots, grads, options.retain_graph).run();
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
