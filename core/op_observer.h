#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/row_gradients.h"
#include "core/tensor.h"

namespace tessera {

/// Sees the operations of a thread: when their outputs are computed and when backward has written a
/// gradient. Whatever it submits to the current stream runs right after the operation's own tasks,
/// before anybody else reads the result. None by default: then an operation costs one test of a
/// pointer.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  /// An operation was submitted, recorded or not. Inputs may be undefined. The result is what
  /// `begin_backward` is told of it.
  virtual int64_t on_op(const char* op, std::span<const Tensor> inputs,
                        std::span<const Tensor> outputs) = 0;
  /// Around the backward function of an operation; they nest where one runs operations again. `id`:
  /// what `on_op` returned, 0 if it was not observed.
  virtual void begin_backward(const char* op, int64_t id) = 0;
  virtual void end_backward() = 0;
  /// The operation whose backward runs has submitted the gradient of its input number `input`.
  /// `leaf`: the input if it is a leaf, else null.
  virtual void on_gradient(int input, const TensorImpl* leaf, const Tensor& gradient) = 0;
  /// The operation that is observed next has submitted a leaf's gradient in its forward.
  virtual void on_early_gradient(const TensorImpl* leaf, const Tensor& gradient) = 0;
  /// A gradient of a leaf that is computed later, piece by piece: called with each piece.
  virtual std::function<void(const Tensor& piece)> on_later_gradient(const TensorImpl* leaf) = 0;
};

/// That of this thread; null without one.
OpObserver* op_observer();

/// Makes `observer` (or null) the one of this thread for a scope.
class OpObserverScope {
 public:
  explicit OpObserverScope(OpObserver* observer);
  ~OpObserverScope();
  OpObserverScope(const OpObserverScope&) = delete;
  OpObserverScope& operator=(const OpObserverScope&) = delete;

 private:
  OpObserver* previous_;
};

/// `rows` of a leaf's gradient, told to the observer as they are written; `rows` itself without one.
GradRows observed(const Tensor& leaf, GradRows rows);

}  // namespace tessera
