#include "apps/bench/gemm_sequence.h"

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "kernels/matmul/backend.h"
#include "nn/gpt2/gpt2.h"
#include "optim/adamw.h"
#include "test/simt/fake_cuda.h"
#include "test/testing.h"

// The bare sequence of a step's products, over the fake of cuBLASLt.

namespace tessera {
namespace {

using apps::GemmSequence;
using kernels::Matmul;
using testing::error_of;

/// What of a product does not depend on where its operands lie.
struct Form {
  std::vector<int64_t> sizes;
  bool operator==(const Form&) const = default;
};

Form form_of(const Matmul& p) {
  const auto has = [](const void* data) { return int64_t{data != nullptr}; };
  return {{p.m,
           p.n,
           p.k,
           p.lda,
           p.ldb,
           p.ldc,
           p.num_batches,
           p.ld_residual,
           p.trans_a,
           p.trans_b,
           p.accumulate,
           p.activate,
           static_cast<int64_t>(p.dtype),
           static_cast<int64_t>(p.c_dtype),
           has(p.bias),
           has(p.residual),
           has(p.pre_activation),
           has(p.row_sums),
           has(p.workspace),
           p.residual == p.c,
           p.workspace_nbytes}};
}

std::vector<Form> forms_of(const GemmSequence& sequence) {
  std::vector<Form> forms;
  for (const Matmul& p : sequence.products()) forms.push_back(form_of(p));
  return forms;
}

/// A tiny GPT-2 and its steps on one rank.
class Training {
 public:
  explicit Training(dist::World& world) {
    nn::Gpt2Config c;
    c.vocab_size = 40, c.context_length = 8, c.num_layers = 2, c.num_heads = 2, c.width = 16;
    {
      nn::DeferredInit deferred;
      model_ = std::make_unique<nn::Gpt2>(c);
    }
    dist::FsdpOptions options;
    options.precision.param_dtype = kBF16;
    options.precision.reduce_dtype = kF32;
    fsdp_ = dist::fully_shard(*model_, world, options);
    fsdp_->initialize(5);
    adamw_ = std::make_unique<optim::AdamW>(fsdp_->shards(), optim::AdamWOptions{.lr = 1e-2f});
  }

  double step() {
    const Tensor ids = from_values({3, 1, 4, 1, 5, 9, 2, 6}, {1, 8}, kI32);
    const Tensor targets = from_values({1, 4, 1, 5, 9, 2, 6, 5}, {1, 8}, kI32);
    const Tensor scale = full({}, 0.125);
    const LossSum loss = model_->loss(ids, targets, {}, {.grad_scale = scale});
    backward(loss.sum, scale);
    const dist::ClippedNorm clip = fsdp_->clip_grad_norm(1.0);
    adamw_->step(1e-2f, clip.factor, clip.found_inf);
    fsdp_->end_step();
    return loss.sum.item();
  }

 private:
  std::unique_ptr<nn::Gpt2> model_;
  std::unique_ptr<dist::Fsdp> fsdp_;
  std::unique_ptr<optim::AdamW> adamw_;
};

void on_one_device(const std::function<void(dist::World&)>& f) {
  dist::LocalOptions local;
  local.context.device = {DeviceType::kCuda, 0};
  dist::run_ranks(1, local, f);
  CHECK(simt::take_mistakes().empty());
  CHECK(simt::live_objects().empty());
}

TEST_CASE("gemm_sequence: has the products of a step in order, on memory of its own",
          "[bench][simt]") {
  on_one_device([](dist::World& world) {
    std::vector<double> expected;
    {
      Training plain(world);
      for (int i = 0; i < 4; ++i) expected.push_back(plain.step());
    }
    Training training(world);
    std::vector<double> losses = {training.step()};
    const GemmSequence sequence = GemmSequence::record([&] { losses.push_back(training.step()); });
    // Forward, dX and dW of 4 linear layers a block and of the head.
    CHECK(sequence.products().size() >= 3 * (2 * 4 + 1));
    const GemmSequence again = GemmSequence::record([&] { losses.push_back(training.step()); });
    CHECK(forms_of(again) == forms_of(sequence));
    // What it submits is what it has, and the training does not notice.
    const GemmSequence submitted = GemmSequence::record([&] {
      sequence.submit();
      sequence.submit();
    });
    Context::current()->compute().synchronize();
    const std::vector<Form> once = forms_of(sequence);
    std::vector<Form> twice = once;
    twice.insert(twice.end(), once.begin(), once.end());
    CHECK(forms_of(submitted) == twice);
    losses.push_back(training.step());
    CHECK(losses == expected);
  });
}

TEST_CASE("gemm_sequence: is empty where cuBLASLt multiplies nothing; an error ends the recording",
          "[bench][simt]") {
  on_one_device([](dist::World& world) {
    Training training(world);
    CHECK(error_of([&] {
            GemmSequence::record([&] {
              training.step();
              throw Error("stop");
            });
          }) == "stop");
    training.step();  // nobody listens any more
    set_gemm_backend(GemmBackend::kOwn);
    const GemmSequence sequence = GemmSequence::record([&] { training.step(); });
    set_gemm_backend(GemmBackend::kAuto);
    CHECK(sequence.products().empty());
    sequence.submit();
  });
}

}  // namespace
}  // namespace tessera
