// A vision transformer (Dosovitskiy et al. 2021) that tells stripes from each other: images of 16 x 16
// in patches of 4 x 4, an encoder whose positions see each other, the mean of them, four classes. In the
// trainer, with its checkpoints and metrics.
//
//   mpirun --bind-to none -n 2 vision --train.steps=100 --output.dir=out/vision

#include <fmt/format.h>
#include <tessera/apps/trainer.h>
#include <tessera/core/random.h>
#include <tessera/kernels/loss/loss.h>
#include <tessera/kernels/pointwise/pointwise.h>
#include <tessera/kernels/reduce/reduce.h>
#include <tessera/nn/block.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

#include <cmath>

using namespace tessera;

constexpr int64_t kSide = 16, kPatch = 4, kPatches = (kSide / kPatch) * (kSide / kPatch),
                  kPixels = kPatch * kPatch, kClasses = 4;

/// A block of an encoder: each position sees all.
struct EncoderBlock final : nn::PreNormBlock<nn::LayerNorm, nn::Mlp> {
  EncoderBlock(int64_t width, int64_t heads)
      : PreNormBlock({.width = width, .num_heads = heads, .causal = false},
                     {.width = width, .ffn_width = 4 * width}, /*dropout=*/std::nullopt) {}
};

class Vit : public nn::Module {
 public:
  Vit(int64_t width, int64_t heads, int layers)
      : patch_(this, "patch", kPixels, width),
        positions_(register_parameter("positions", {kPatches, width}, nn::Init::normal(0, 0.02))),
        blocks_(this, "blocks"),
        norm_(this, "norm", width),
        head_(this, "head", width, kClasses) {
    for (int i = 0; i < layers; ++i) blocks_.emplace_back(width, heads);
  }
  /// Patches [B, P, pixels] -> logits [B, classes].
  Tensor forward(const Tensor& images) {
    Tensor x = patch_(images) + positions_;
    for (auto& block : blocks_) x = block(x);
    return head_(mean(norm_(x), 1));
  }

 private:
  nn::Child<nn::Linear> patch_;
  Tensor& positions_;
  nn::ChildList<EncoderBlock> blocks_;
  nn::Child<nn::LayerNorm> norm_;
  nn::Child<nn::Linear> head_;
};

struct Images {
  std::vector<float> patches;
  std::vector<int32_t> classes;
};

/// Image i: stripes of class i mod 4 (rows, columns, the two diagonals), their phase and noise by i.
apps::Batch read_images(std::span<const int64_t> indices) {
  Images images;
  for (const int64_t i : indices) {
    const auto words = [&](int64_t pixel) {
      return philox(make_key(11, static_cast<uint64_t>(i)), 0, static_cast<uint64_t>(pixel));
    };
    const int64_t kind = i % kClasses;
    const double phase = 6.28 * uniform_from_bits(words(-1)[0]);
    for (int64_t patch = 0; patch < kPatches; ++patch) {
      for (int64_t pixel = 0; pixel < kPixels; ++pixel) {
        const int64_t y = patch / (kSide / kPatch) * kPatch + pixel / kPatch,
                      x = patch % (kSide / kPatch) * kPatch + pixel % kPatch;
        const int64_t along[] = {y, x, x + y, x - y};
        const double noise = uniform_from_bits(words(y * kSide + x)[0]) - 0.5;
        images.patches.push_back(
            static_cast<float>(std::sin(1.2 * static_cast<double>(along[kind]) + phase) + noise));
      }
    }
    images.classes.push_back(static_cast<int32_t>(kind));
  }
  apps::Batch batch;
  batch.own = std::move(images);
  return batch;
}

int main(int argc, char** argv) {
  return dist::run_main(argc, argv, [&](dist::World& world) {
    apps::Config defaults;
    defaults.train.steps = 100, defaults.train.eval_every = 50;
    defaults.optim.schedule.peak_lr = 2e-3;
    apps::Trainer trainer(apps::own_config({argv + 1, argv + argc}, defaults), world);
    Vit& vit = trainer.make_model<Vit>(/*width=*/32, /*heads=*/2, /*layers=*/2);
    trainer.set_wrap(dist::wrap::by_class<EncoderBlock>());
    trainer.set_samples(std::make_unique<apps::OwnSamples>(4096, read_images, /*shuffle_seed=*/1),
                        std::make_unique<apps::OwnSamples>(64, read_images), "stripes");
    trainer.set_loss([&](const apps::Batch& batch) {
      const auto& images = std::any_cast<const Images&>(batch.own);
      const Tensor x = from_values(std::span<const float>(images.patches),
                                   {batch.B, kPatches, kPixels}, trainer.param_dtype());
      const Tensor targets = from_values(std::span<const int32_t>(images.classes), {batch.B});
      return cross_entropy(nn::call(vit, x), targets);
    });
    const apps::TrainResult result = trainer.run();
    return result.is_preempted || result.loss < std::log(kClasses) ? 0 : 1;
  });
}
