#include "apps/saved_model.h"

#include <cstring>
#include <filesystem>
#include <optional>

#include "apps/options.h"
#include "core/autograd.h"
#include "dist/checkpoint/safetensors.h"

namespace tessera::apps {

void save_model(const std::string& path, nn::Module& model, dist::Fsdp& fsdp, dist::World& world) {
  std::unique_ptr<dist::SafetensorsWriter> writer;
  std::optional<IoError> failed;  // the other ranks go on with the gathers until all know
  const auto attempt = [&](auto&& f) {
    if (failed || world.rank() != 0) return;
    try {
      f();
    } catch (const IoError& error) {
      failed = error;
    }
  };
  attempt([&] {
    std::vector<dist::SafetensorsEntry> entries;
    for (const nn::NamedParameter& p : model.named_parameters()) {
      entries.push_back({p.name, kF32, p.parameter->tensor.shape()});
    }
    writer = std::make_unique<dist::SafetensorsWriter>(
        path, std::move(entries), std::map<std::string, std::string>{{"format", "tessera"}});
  });
  fsdp.for_each_full(dist::Fsdp::State::kMaster, [&](const std::string& name, const Tensor& x) {
    attempt([&] {
      const std::vector<float> values = x.to_vector_of<float>();
      writer->write(name, values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
    });
  });
  attempt([&] { writer->finish(); });
  world.control().verdict(failed ? &*failed : nullptr);
}

SavedModel load_model(const std::string& dir) {
  SavedModel saved;
  saved.config = load_config(dir + "/config.toml");
  const dist::SafetensorsFile file(dir + "/model.safetensors");
  if (std::filesystem::exists(dir + "/tokenizer.json")) {
    saved.tokenizer = load_tokenizer(dir + "/tokenizer.json");
  }
  const int64_t vocab_size = saved.config.model.vocab != 0 ? saved.config.model.vocab
                             : saved.tokenizer != nullptr  ? saved.tokenizer->vocab_size()
                                                           : 0;
  saved.model = make_model(saved.config.model, vocab_size);
  const auto parameters = saved.model->named_parameters();
  for (const nn::NamedParameter& p : parameters) {
    const dist::SafetensorsEntry& entry = file.find(p.name);
    Tensor& tensor = p.parameter->tensor;
    if (entry.shape != tensor.shape() || entry.dtype != kF32) {
      throw InputError(fmt::format("{}/model.safetensors: tensor {} is {} {}, expected f32 {}", dir,
                                   entry.name, entry.dtype, entry.shape, tensor.shape()));
    }
    std::vector<float> values(static_cast<size_t>(entry.shape.numel()));
    std::memcpy(values.data(), file.data(entry), values.size() * sizeof(float));
    NoGrad no_grad;
    tensor.copy_(from_values(std::span<const float>(values), entry.shape));
  }
  if (file.entries().size() != parameters.size()) {
    throw InputError(fmt::format("{}/model.safetensors: {} tensors, expected the model's {}", dir,
                                 file.entries().size(), parameters.size()));
  }
  saved.model->reset_buffers();
  return saved;
}

}  // namespace tessera::apps
