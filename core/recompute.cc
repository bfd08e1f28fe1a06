#include "core/recompute.h"

#include <algorithm>
#include <optional>

#include "core/autograd.h"
#include "core/host_checkpoints.h"
#include "core/random.h"

namespace tessera {
namespace {

thread_local bool checkpointing = false, recomputing = false;
thread_local int64_t region = 0, last_region = 0;

/// Says which region runs, for a scope.
struct RegionScope {
  explicit RegionScope(int64_t id) : previous(std::exchange(region, id)) {}
  ~RegionScope() { region = previous; }
  int64_t previous;
};

struct FlagScope {
  explicit FlagScope(bool& f) : flag(f), previous(std::exchange(f, true)) {}
  ~FlagScope() { flag = previous; }
  bool& flag;
  bool previous;
};

/// Puts this thread's random numbers back to where a forward began, for a scope.
struct RandomScope {
  explicit RandomScope(const RandomState& replay)
      : current(std::exchange(random_state(), replay)) {}
  ~RandomScope() { random_state() = current; }
  RandomState current;
};

/// Gradients of a leaf of the second run go to where those of the first run's input go, in the same
/// order and by the same kernels as if there were one run.
class Passage final : public GradSink {
 public:
  Passage(Grads& g, int input) : g_(g), input_(input) {}
  GradDst destination(const Tensor&) override { return g_.destination(input_); }
  void written(const Tensor&) override { g_.written(input_); }

 private:
  Grads& g_;
  int input_;
};

/// What a second run starts from: the inputs of the first, and its random numbers. Values that have
/// bytes are with `host`, if given.
class Replay {
 public:
  Replay(const std::vector<Tensor>& inputs, const RandomState& start,
         HostCheckpoints* host = nullptr)
      : start_(start) {
    for (const Tensor& input : inputs) {
      const bool is_away = host != nullptr && input.is_defined() && input.numel() > 0;
      away_.push_back(is_away ? host->keep(input) : nullptr);
      inputs_.push_back(save(is_away ? Tensor{} : input));
      wanted_.push_back(input.is_defined() && input.requires_grad());
    }
  }

  /// `fn` on leaves that share the inputs' bytes, recorded.
  template <class F>
  auto run(std::vector<Tensor>& leaves, F&& fn) const {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Tensor& input = away_[i] != nullptr ? away_[i]->bring() : inputs_[i].get();
      leaves.push_back(input.is_defined() ? input.detach() : input);
      if (wanted_[i]) leaves.back().set_requires_grad(true);
    }
    FlagScope scope(recomputing);
    RandomScope random(start_);
    GradMode grad(true);
    return fn(leaves);
  }

  /// For the backward of the second run, which must not outlive `g`.
  void connect(const std::vector<Tensor>& leaves, Grads& g) const {
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (wanted_[i]) set_grad_sink(leaves[i], std::make_shared<Passage>(g, static_cast<int>(i)));
    }
  }

  /// Hands on the gradients that came to the leaves.
  void deliver(const std::vector<Tensor>& leaves, Grads& g) const {
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (wanted_[i] && leaves[i].grad().is_defined()) {
        g.add(static_cast<int>(i), leaves[i].grad());
      }
    }
  }

 private:
  RandomState start_;
  std::vector<Saved> inputs_;
  std::vector<std::shared_ptr<HostCheckpoint>> away_;
  std::vector<bool> wanted_;
};

// ---- rows in tiles

/// The rows of a tensor [..., C], cut into tiles.
class RowTiles {
 public:
  RowTiles(const Tensor& x, int64_t tile_rows)
      : num_rows_(x.shape().with(-1, 1).numel()),
        tile_rows_(tile_rows),
        rows_per_sample_(x.num_dims() > 2 && x.dim(0) > 0 ? num_rows_ / x.dim(0) : 1) {}

  int64_t num_rows() const { return num_rows_; }
  int64_t count() const { return std::max<int64_t>(1, (num_rows_ + tile_rows_ - 1) / tile_rows_); }
  /// All of them as [R, C]; copied unless contiguous.
  Tensor as_rows(const Tensor& t) const { return t.contiguous().view({num_rows_, t.dim(-1)}); }
  Tensor tile(const Tensor& t_RC, int64_t index) const {
    if (!t_RC.is_defined()) return t_RC;
    const int64_t first = index * tile_rows_;
    return t_RC.narrow(0, first, std::min(tile_rows_, num_rows_ - first));
  }
  /// Of a tile, which has a sample a row.
  RandomState random_at(const RandomState& start, int64_t index) const {
    RandomState state = start;
    state.sample_offset = start.sample_offset * rows_per_sample_ + index * tile_rows_;
    return state;
  }

 private:
  int64_t num_rows_, tile_rows_, rows_per_sample_;
};

/// The gradient of x, which the backwards of tiles write where it is wanted, if that is contiguous.
class RowsGradient {
 public:
  RowsGradient(Grads& g, const RowTiles& tiles, const Tensor& x_RC) : g_(g) {
    if (!g.wanted(0)) return;
    dst_ = g.destination(0);
    const bool is_direct = dst_.view.is_contiguous();
    rows_ = is_direct ? tiles.as_rows(dst_.view) : empty(x_RC.shape(), x_RC.dtype());
    accumulate_ = is_direct && dst_.accumulate;
  }

  bool is_wanted() const { return rows_.is_defined(); }
  /// A leaf for rows of x whose gradient goes there.
  Tensor leaf_of(const RowTiles& tiles, const Tensor& x_RC, int64_t index) {
    Tensor leaf = tiles.tile(x_RC, index).detach();
    if (!is_wanted()) return leaf;
    leaf.set_requires_grad(true);
    sink_ = std::make_shared<Sink>(GradDst{tiles.tile(rows_, index), accumulate_});
    set_grad_sink(leaf, sink_);
    return leaf;
  }
  /// The backward of that leaf's tile is over.
  void finish_tile() {
    if (!is_wanted() || sink_->dst.accumulate) return;
    sink_->dst.view.fill_(0);
  }
  void finish() {
    if (!is_wanted()) return;
    if (!dst_.view.is_contiguous()) {
      const Tensor whole = rows_.view(dst_.view.shape());
      dst_.accumulate ? dst_.view.add_(whole) : dst_.view.copy_(whole);
    }
    g_.written(0);
  }

 private:
  struct Sink final : GradSink {
    explicit Sink(GradDst d) : dst(std::move(d)) {}
    GradDst destination(const Tensor&) override { return dst; }
    void written(const Tensor&) override { dst.accumulate = true; }
    GradDst dst;
  };

  Grads& g_;
  GradDst dst_;
  Tensor rows_;
  bool accumulate_ = false;
  std::shared_ptr<Sink> sink_;
};

/// Sums a leaf's gradients in f32 where its own memory for them is bf16 or f16, so that what comes
/// in several parts is rounded once. In the place of the leaf's sink while it lives.
class LeafSum {
 public:
  explicit LeafSum(const Tensor& leaf) : sink_(std::make_shared<Sink>(leaf)) {
    set_grad_sink(leaf, sink_);
  }
  ~LeafSum() { take_away(); }
  LeafSum(LeafSum&& other) noexcept = default;

  /// Adds the sum to the leaf's gradient.
  void deliver() {
    const std::shared_ptr<Sink> sink = sink_;
    take_away();
    if (!sink->is_written) return;
    GradDst dst = leaf_destination(sink->leaf);
    dst.accumulate ? dst.view.add_(sink->sum) : dst.view.copy_(sink->sum);
    leaf_written(sink->leaf);
  }

 private:
  struct Sink final : GradSink {
    explicit Sink(const Tensor& l) : leaf(l), own(l.impl()->grad_sink) {}
    GradDst destination(const Tensor&) override {
      if (sum.is_defined()) return {sum, is_written};
      const GradDst dst = own != nullptr ? own->destination(leaf) : GradDst{};
      if (dst && dst.view.dtype() != kBF16 && dst.view.dtype() != kF16) return dst;
      sum = empty(leaf.shape(), kF32);
      return {sum, false};
    }
    void written(const Tensor&) override {
      if (!sum.is_defined()) return own->written(leaf);
      is_written = true;
    }
    Tensor leaf;
    std::shared_ptr<GradSink> own;
    Tensor sum;
    bool is_written = false;
  };

  void take_away() {
    if (sink_ == nullptr) return;
    set_grad_sink(sink_->leaf, sink_->own);
    sink_ = nullptr;
  }

  std::shared_ptr<Sink> sink_;
};

std::vector<LeafSum> sums_of(const std::vector<Tensor>& leaves) {
  std::vector<LeafSum> sums;
  for (const Tensor& leaf : leaves) {
    const bool is_low = leaf.dtype() == kBF16 || leaf.dtype() == kF16;
    if (leaf.requires_grad() && (is_low || leaf.impl()->grad_sink != nullptr)) {
      sums.emplace_back(leaf);
    }
  }
  return sums;
}

}  // namespace

bool is_checkpointing() {
  return checkpointing;
}

bool is_recomputing() {
  return recomputing;
}

int64_t recompute_region() {
  return region;
}

Tensor recompute(const std::function<Tensor(const std::vector<Tensor>&)>& fn,
                 const std::vector<Tensor>& inputs, HostCheckpoints* host) {
  if (!grad_mode()) return fn(inputs);
  const RandomState start = random_state();
  const int64_t id = region != 0 ? region : ++last_region;
  Replay replay(inputs, start, host);
  Tensor output;
  {
    const RegionScope region_scope(id);
    NoGrad no_grad;
    FlagScope scope(checkpointing);
    output = fn(inputs);
  }
  auto outputs = record_multi_always(
      "recompute", inputs, {output},
      [fn, id, replay = std::move(replay)](std::span<const Tensor> dys, Grads& g) {
        std::vector<Tensor> leaves;
        Tensor again;
        {
          const RegionScope region_scope(id);
          again = replay.run(leaves, fn);
        }
        if (again.requires_grad()) backward(again, dys[0]);
        replay.deliver(leaves, g);
      });
  return outputs[0];
}

Tensor recompute_output(
    const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& produce,
    const std::function<Tensor(const std::vector<Tensor>&)>& consume,
    const std::vector<Tensor>& inputs) {
  if (!grad_mode()) return consume(produce(inputs));
  const RandomState start = random_state();
  std::vector<Tensor> outputs;
  {
    NoGrad no_grad;
    FlagScope scope(checkpointing);
    outputs = produce(inputs);
  }
  /// The second run, between the two nodes of the tape around what `consume` records.
  struct Again {
    std::vector<Tensor> leaves, outputs;
  };
  const auto again = std::make_shared<Again>();
  const std::shared_ptr<Storage> dropped = outputs[0].storage();
  const Replay replay(inputs, start);
  outputs = record_multi_always("recompute_output", inputs, outputs,
                                [again, dropped, replay](std::span<const Tensor> dys, Grads& g) {
                                  std::vector<Tensor> roots, grads;
                                  for (size_t i = 0; i < dys.size(); ++i) {
                                    const Tensor& root = again->outputs[i];
                                    if (!dys[i].is_defined() || !root.requires_grad()) continue;
                                    roots.push_back(root);
                                    grads.push_back(dys[i]);
                                  }
                                  replay.connect(again->leaves, g);
                                  if (!roots.empty()) backward(roots, grads);
                                  *again = {};
                                  dropped->release();
                                });
  const Tensor result = consume(outputs);
  TESSERA_CHECK(result.storage() != dropped,
                "recompute_output: consume must not return a view of what produce gave first");
  dropped->release();
  auto results =
      record_multi_always("recompute_again", {result}, {result},
                          [produce, again, dropped, replay](std::span<const Tensor> dys, Grads& g) {
                            again->leaves.clear();
                            again->outputs = replay.run(again->leaves, produce);
                            const Tensor& first = again->outputs[0];
                            dropped->attach(first.raw_data(), first.storage());
                            g.add(0, dys[0]);
                          });
  return results[0];
}

Tensor recompute_rows(const RowsFunction& fn, const Tensor& x, const Tensor& residual,
                      int64_t tile_rows, const std::function<std::vector<Tensor>()>& parameters) {
  TESSERA_CHECK(tile_rows >= 1, "recompute_rows: tile_rows must be at least 1, got {}", tile_rows);
  TESSERA_CHECK_SHAPE(x.num_dims() >= 2, "recompute_rows: x must be [..., C], got {}", x.shape());
  const RowTiles tiles(x, tile_rows);
  const RandomState start = random_state();
  // A tile is a region of its own, as if it were a call of `recompute`.
  const int64_t step = region != 0 ? 0 : 1, first_id = region != 0 ? region : last_region + 1;
  last_region += step * tiles.count();
  const Tensor x_RC = tiles.as_rows(x.detach());
  Tensor y_RN;
  {
    const Tensor residual_RN = residual.is_defined() ? tiles.as_rows(residual.detach()) : residual;
    std::optional<FlagScope> scope;
    if (grad_mode()) scope.emplace(checkpointing);
    const NoGrad no_grad;
    uint64_t end_of_ops = start.op_index;
    for (int64_t i = 0; i < tiles.count(); ++i) {
      const RegionScope region_scope(scope ? first_id + step * i : region);
      const RandomScope random(tiles.random_at(start, i));
      const Tensor y = fn(tiles.tile(x_RC, i), tiles.tile(residual_RN, i));
      end_of_ops = random_state().op_index;
      if (tiles.count() == 1) {
        y_RN = y;
        break;
      }
      if (!y_RN.is_defined()) y_RN = empty({tiles.num_rows(), y.dim(-1)}, y.dtype());
      tiles.tile(y_RN, i).copy_(y);
    }
    random_state().op_index = end_of_ops;
    y_RN = y_RN.view(x.shape().with(-1, y_RN.dim(-1)));
  }
  const auto outputs =
      record_multi_always("recompute_rows", {x, residual}, {y_RN},
                          [fn, parameters, tiles, start, first_id, step, x_RC = save(x_RC)](
                              std::span<const Tensor> dys, Grads& g) {
                            const Tensor dy_RN = tiles.as_rows(dys[0]);
                            RowsGradient dx(g, tiles, x_RC);
                            std::vector<LeafSum> sums;
                            if (tiles.count() > 1) sums = sums_of(parameters());
                            for (int64_t i = tiles.count(); i-- > 0;) {
                              const Tensor leaf = dx.leaf_of(tiles, x_RC, i);
                              Tensor again;
                              {
                                const RegionScope region_scope(first_id + step * i);
                                FlagScope scope(recomputing);
                                RandomScope random(tiles.random_at(start, i));
                                GradMode grad(true);
                                again = fn(leaf, {});
                              }
                              if (again.requires_grad()) backward(again, tiles.tile(dy_RN, i));
                              dx.finish_tile();
                            }
                            for (LeafSum& sum : sums) sum.deliver();
                            dx.finish();
                            g.add(1, dys[0]);
                          });
  return outputs[0];
}

}  // namespace tessera
