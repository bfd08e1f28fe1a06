#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "core/tensor.h"

// Eager reverse-mode autograd. An op computes its output, then `record`s a backward function whose
// captures are the saved tensors. The engine walks the tape iteratively from the newest node to the
// oldest, drops a node's captures right after use, and adds gradients in that fixed order.
//
//   Tensor y = ...;
//   return record("rms_norm", {x, w}, y, [x = save(x), w = save(w)](const Tensor& dy, Grads& g) {
//     GradDst dx = g.destination(0), dw = g.destination(1);
//     kernels::rms_norm_bwd(current_stream(), args(dx, dw, dy, x, w));
//     g.written(0), g.written(1);
//   });
//
// All of this is per thread: the grad mode, the engine, its callbacks.

namespace tessera {

/// Where a backward kernel writes one gradient: `view` (undefined: nobody wants it) and whether to
/// add to what is there. The view's dtype may differ from the tensor's (a sharded parameter's slot
/// has reduce_dtype) and it may be row-strided.
struct GradDst {
  Tensor view;
  bool accumulate = false;

  explicit operator bool() const { return view.is_defined(); }
};

/// Owner of a leaf's gradient memory. Set on a leaf, it replaces `Tensor::grad`.
class GradSink {
 public:
  virtual ~GradSink() = default;
  /// The leaf's place in the gradient buffer; the first writer gets accumulate = false. Calls
  /// without `written` in between return the same.
  virtual GradDst destination(const Tensor& leaf) = 0;
  /// The place was written by a task submitted to the current stream.
  virtual void written(const Tensor& leaf) = 0;
};
/// Null: none. Error if the tensor is the result of an op.
void set_grad_sink(const Tensor& leaf, std::shared_ptr<GradSink> sink);

/// The gradient memory of a leaf outside of its op's backward function, for ops that compute a
/// gradient early (linear_cross_entropy with a known scale): as `Grads::destination`/`written`.
/// Without a sink it is `leaf.grad()`, created here if there is none yet.
GradDst leaf_destination(const Tensor& leaf);
void leaf_written(const Tensor& leaf);

/// The gradients of one node's inputs, as seen by its backward function.
class Grads {
 public:
  /// Input i needs a gradient.
  bool wanted(int i) const;
  /// Memory for the gradient of input i (undefined view if not wanted). Call `written(i)` once the
  /// kernel that writes it is submitted; until then repeated calls return the same. The shape is
  /// the input's. Two inputs that are one tensor get memory of their own each.
  GradDst destination(int i);
  /// What `destination(i)` gave has been submitted to be written.
  void written(int i);
  /// Hands over a whole gradient of input i, of its shape and dtype (a leaf's may have another
  /// dtype); `grad` may be dy itself. Ignored if not wanted. For ops that cannot write into a
  /// destination.
  void add(int i, const Tensor& grad);

 private:
  friend class Engine;
  struct Claim {
    enum State { kNone, kOpen, kWritten } state = kNone;
    GradDst dst;
    bool is_private = false;  // not the target's memory: that is in the hands of another input
  };

  explicit Grads(Node& node);
  bool is_target_open(int i) const;
  void deliver(int i, const Tensor& grad);
  void finish();

  Node& node_;
  std::vector<Claim> claims_;
  std::vector<std::pair<int, Tensor>> deferred_;  // delivered once no claim is open
};

/// The backward function of an op with one output: dy to gradients of inputs.
using BackwardFn = std::function<void(const Tensor& dy, Grads& g)>;
/// For ops with several outputs; dys[i] is undefined if no gradient came to output i.
using MultiBackwardFn = std::function<void(std::span<const Tensor> dys, Grads& g)>;

/// A tensor saved for backward: reading it later checks that nobody changed it in place since
/// (Error that names the op).
class Saved {
 public:
  explicit Saved(Tensor tensor);
  const Tensor& get() const;
  operator const Tensor&() const { return get(); }
  const Tensor* operator->() const { return &get(); }

 private:
  Tensor tensor_;
  uint32_t version_;
};
/// What a backward function captures of a tensor: its values, and not its history.
inline Saved save(const Tensor& tensor) {
  return Saved(tensor.is_defined() ? tensor.detach() : tensor);
}

/// True if grad mode is on and any of the (possibly undefined) inputs requires a gradient.
bool needs_grad(std::initializer_list<Tensor> inputs);

/// Returns `output` with `backward` on the tape, or `output` as it is if `!needs_grad(inputs)`.
/// Undefined inputs (an absent bias) are never wanted.
Tensor record(const char* name, std::initializer_list<Tensor> inputs, Tensor output,
              BackwardFn backward);

/// Several outputs. `destination`, if given, supplies memory for the gradient of output i, so
/// that the ops that consumed it write there directly (a split's outputs: slices of one buffer).
/// It is called when the first gradient comes to output i; dys[i] is then what it returned.
std::vector<Tensor> record_multi(const char* name, std::vector<Tensor> inputs,
                                 std::vector<Tensor> outputs, MultiBackwardFn backward,
                                 std::function<Tensor(int)> destination = nullptr);

/// A node that is on the tape whenever grad mode is on, whether or not an input requires a
/// gradient (recompute: parameters inside may; unit boundaries).
Tensor record_always(const char* name, std::initializer_list<Tensor> inputs, Tensor output,
                     BackwardFn backward);
std::vector<Tensor> record_multi_always(const char* name, std::vector<Tensor> inputs,
                                        std::vector<Tensor> outputs, MultiBackwardFn backward);

/// Options of `backward`.
struct BackwardOptions {
  bool retain_graph = false;  ///< keep the captures, so that the graph can be walked again
};

/// Gradients of sum_i <roots[i], grads[i]> for every leaf that requires one. An undefined grad is
/// 1 for a scalar root (Error otherwise). Walking a graph twice without retain_graph is an Error
/// that names the op. After an exception the gradients of leaves are unspecified, and the tape is
/// as if the part that ran had been walked.
void backward(std::span<const Tensor> roots, std::span<const Tensor> grads,
              const BackwardOptions& options = {});
void backward(const Tensor& root, const Tensor& grad = {}, const BackwardOptions& options = {});

/// Runs once when this thread's outermost backward ends; `ok` is false if it or an earlier callback
/// ended by an exception (the callback must not throw then). Error outside of a backward.
void on_backward_end(std::function<void(bool ok)> callback);
bool is_in_backward();

/// The name of the op whose backward runs now, else "".
const char* current_backward_op();

/// Whether operations of this thread are recorded.
bool grad_mode();
/// Sets grad mode of this thread for a scope.
class GradMode {
 public:
  explicit GradMode(bool enabled);
  ~GradMode();
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  bool previous_;
};
/// Nothing is recorded in its scope.
struct NoGrad : GradMode {
  NoGrad() : GradMode(false) {}
};

}  // namespace tessera
