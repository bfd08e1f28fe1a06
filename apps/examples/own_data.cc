// Data of one's own, dealt to ranks by a rule of one's own: a file of sequences of very different
// lengths, of which each rank reads the ones that it computes, and nothing else. How many targets a step
// has is found from the lengths alone, so that the loss is the mean over all of them however they fall.
//
//   mpirun --bind-to none -n 2 own_data --output.dir=out/own_data

#include <fmt/format.h>
#include <tessera/apps/trainer.h>
#include <tessera/core/random.h>
#include <tessera/dist/comm/control.h>
#include <tessera/kernels/loss/loss.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

using namespace tessera;

constexpr int32_t kIds = 32;

/// Writes sequences: their number, where each begins and the last ends, then a byte an id.
void write_sequences(const std::string& path, int64_t num_sequences) {
  std::vector<int64_t> begins = {0};
  std::string ids;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const uint32_t word = philox(make_key(5, 0), 0, static_cast<uint64_t>(s))[0];
    for (uint32_t t = 0; t < 2 + word % 30; ++t) ids += static_cast<char>((word + 5 * t) % kIds);
    begins.push_back(std::ssize(ids));
  }
  std::ofstream file(path + ".new", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&num_sequences), sizeof num_sequences);
  file.write(reinterpret_cast<const char*>(begins.data()), 8 * std::ssize(begins));
  file << ids;
  file.close();
  if (!file) throw IoError(path + ": cannot be written");
  std::filesystem::rename(path + ".new", path);
}

/// The sequences of a file; sample g is sequence g modulo their number. All but its first id are
/// targets.
class Sequences : public apps::Samples {
 public:
  explicit Sequences(const std::string& path) : path_(path) {
    std::ifstream file(path, std::ios::binary);
    int64_t count = 0;
    file.read(reinterpret_cast<char*>(&count), sizeof count);
    begins_.resize(static_cast<size_t>(count + 1));
    file.read(reinterpret_cast<char*>(begins_.data()), 8 * (count + 1));
    if (!file || count < 1) throw InputError(path + ": expected sequences");
  }
  int64_t num_samples() const override { return std::ssize(begins_) - 1; }
  int64_t num_targets(int64_t first, int64_t count) const override {
    int64_t total = 0;
    for (int64_t g = first; g < first + count; ++g) total += length(g) - 1;
    return total;
  }
  /// Called by the rank that computes them.
  apps::Batch batch(int64_t first, int64_t B) const override {
    apps::Batch batch;
    batch.B = B;
    for (int64_t g = first; g < first + B; ++g) batch.T = std::max(batch.T, length(g) - 1);
    std::ifstream file(path_, std::ios::binary);
    for (int64_t g = first; g < first + B; ++g) {
      std::string ids(static_cast<size_t>(length(g)), '\0');
      file.seekg(8 * (1 + std::ssize(begins_)) + begins_[sequence(g)]);
      file.read(ids.data(), length(g));
      if (!file) throw InputError(fmt::format("{}: sequence {} is cut off", path_, sequence(g)));
      for (int64_t t = 0; t < batch.T; ++t) {
        const bool is_there = t + 1 < length(g);
        batch.inputs.push_back(is_there ? ids[static_cast<size_t>(t)] : 0);
        batch.targets.push_back(is_there ? ids[static_cast<size_t>(t + 1)] : apps::kIgnoredTarget);
      }
    }
    batch.num_valid = num_targets(first, B);
    return batch;
  }

 private:
  size_t sequence(int64_t g) const { return static_cast<size_t>(g % num_samples()); }
  int64_t length(int64_t g) const { return begins_[sequence(g) + 1] - begins_[sequence(g)]; }

  std::string path_;
  std::vector<int64_t> begins_;
};

/// Which id follows which.
struct Bigram : nn::Module {
  nn::Child<nn::Embedding> embed{this, "embed", kIds, 16};
  nn::Child<nn::Linear> out{this, "out", 16, kIds};
  Tensor forward(const Tensor& ids) { return out(embed(ids)); }
};

int main(int argc, char** argv) {
  return dist::run_main(argc, argv, [&](dist::World& world) {
    apps::Config defaults;
    defaults.train.steps = 60, defaults.optim.schedule.peak_lr = 3e-2;
    apps::Trainer trainer(apps::own_config({argv + 1, argv + argc}, defaults), world);
    const std::string path = trainer.config().output.dir + ".sequences";
    world.control().verdict([&] {  // an error of rank 0 is one of all, and they wait for it
      std::filesystem::create_directories(std::filesystem::absolute(path).parent_path());
      if (world.rank() == 0) write_sequences(path, 1000);
    });
    Bigram& model = trainer.make_model<Bigram>();
    std::unique_ptr<Sequences> sequences;
    world.control().verdict([&] { sequences = std::make_unique<Sequences>(path); });
    trainer.set_samples(std::move(sequences), nullptr, path);
    trainer.set_loss([&](const apps::Batch& batch) {
      const Shape shape{batch.B, batch.T};
      return cross_entropy(
          nn::call(model, from_values(std::span<const int32_t>(batch.inputs), shape)),
          from_values(std::span<const int32_t>(batch.targets), shape), apps::kIgnoredTarget);
    });
    const apps::TrainResult result = trainer.run();
    return result.is_preempted || result.loss < 2 ? 0 : 1;
  });
}
