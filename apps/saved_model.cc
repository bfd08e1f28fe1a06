#include "apps/saved_model.h"

#include <cstring>
#include <filesystem>

#include "apps/options.h"
#include "core/autograd.h"
#include "dist/checkpoint/reader.h"
#include "dist/checkpoint/safetensors.h"
#include "dist/checkpoint/stream_full.h"

namespace tessera::apps {

void save_model(const std::string& path, nn::Module& model, dist::Fsdp& fsdp, dist::World& world) {
  std::unique_ptr<dist::SafetensorsWriter> writer;
  dist::FullSink sink;
  sink.begin = [&] {
    std::vector<dist::SafetensorsEntry> entries;
    for (const nn::NamedParameter& p : model.named_parameters()) {
      entries.push_back({p.name, kF32, p.parameter->tensor.shape()});
    }
    writer = std::make_unique<dist::SafetensorsWriter>(
        path, std::move(entries), std::map<std::string, std::string>{{"format", "tessera"}});
  };
  sink.write = [&](const std::string& name, const float* values, int64_t numel) {
    writer->write(name, values, numel * static_cast<int64_t>(sizeof(float)));
  };
  sink.finish = [&] { writer->finish(); };
  dist::stream_full(fsdp, world, sink);
}

namespace {

/// Parameters by name, of a model's file or of a checkpoint.
class Source {
 public:
  virtual ~Source() = default;
  virtual Shape shape_of(const std::string& name) const = 0;
  virtual void read(const std::string& name, std::vector<float>& values) const = 0;
  virtual size_t num_tensors() const = 0;
  virtual std::string path() const = 0;
};

class FileSource final : public Source {
 public:
  explicit FileSource(const std::string& path) : path_(path), file_(path) {}
  Shape shape_of(const std::string& name) const override {
    const dist::SafetensorsEntry& entry = file_.find(name);
    if (entry.dtype == kF32) return entry.shape;
    throw InputError(
        fmt::format("{}: tensor {} is {} {}, expected f32", path_, name, entry.dtype, entry.shape));
  }
  void read(const std::string& name, std::vector<float>& values) const override {
    std::memcpy(values.data(), file_.data(file_.find(name)), values.size() * sizeof(float));
  }
  size_t num_tensors() const override { return file_.entries().size(); }
  std::string path() const override { return path_; }

 private:
  std::string path_;
  dist::SafetensorsFile file_;
};

class CheckpointSource final : public Source {
 public:
  explicit CheckpointSource(const std::string& dir) : reader_(dir) {
    reader_.check_sizes();
    reader_.check_files();
  }
  const dist::CheckpointReader& reader() const { return reader_; }
  Shape shape_of(const std::string& name) const override {
    const dist::TensorRecord* tensor = reader_.manifest().find("parameters/" + name);
    if (tensor == nullptr) {
      throw InputError(fmt::format("{}: no tensor {}, expected it", path(), name));
    }
    return tensor->shape;
  }
  void read(const std::string& name, std::vector<float>& values) const override {
    reader_.read_f32("parameters/" + name, 0, static_cast<int64_t>(values.size()), values.data());
  }
  size_t num_tensors() const override {
    size_t count = 0;
    for (const dist::TensorRecord& t : reader_.manifest().tensors) {
      count += t.name.starts_with("parameters/") ? 1 : 0;
    }
    return count;
  }
  std::string path() const override { return reader_.dir(); }

 private:
  dist::CheckpointReader reader_;
};

/// The checkpoint that `dir` means if it is one, or has no exported model; else empty.
std::string checkpoint_in(const std::string& dir) {
  if (std::filesystem::exists(dir + "/model.safetensors")) return "";
  try {
    return dist::resolve_checkpoint(dir);
  } catch (const CheckpointError&) {
    return "";
  }
}

}  // namespace

SavedModel load_model(const std::string& dir) {
  SavedModel saved;
  std::unique_ptr<Source> source;
  std::string home = dir;
  if (const std::string checkpoint = checkpoint_in(dir); !checkpoint.empty()) {
    auto opened = std::make_unique<CheckpointSource>(checkpoint);
    saved.config =
        parse_config(opened->reader().manifest().progress.config, checkpoint + ": config");
    home = std::filesystem::path(checkpoint).parent_path().string();
    source = std::move(opened);
  } else {
    saved.config = load_config(dir + "/config.toml");
    source = std::make_unique<FileSource>(dir + "/model.safetensors");
  }
  if (std::filesystem::exists(home + "/tokenizer.json")) {
    saved.tokenizer = load_tokenizer(home + "/tokenizer.json");
  }
  const int64_t vocab_size = saved.config.model.vocab != 0 ? saved.config.model.vocab
                             : saved.tokenizer != nullptr  ? saved.tokenizer->vocab_size()
                                                           : 0;
  if (vocab_size == 0) {
    throw InputError(
        fmt::format("{}/tokenizer.json: No such file or directory, expected the tokenizer that "
                    "gives model.vocab = 0 its meaning",
                    home));
  }
  saved.model = make_model(saved.config.model, vocab_size);
  const auto parameters = saved.model->named_parameters();
  for (const nn::NamedParameter& p : parameters) {
    Tensor& tensor = p.parameter->tensor;
    const Shape shape = source->shape_of(p.name);
    if (shape != tensor.shape()) {
      throw InputError(fmt::format("{}: tensor {} is {}, expected {}", source->path(), p.name,
                                   shape, tensor.shape()));
    }
    std::vector<float> values(static_cast<size_t>(shape.numel()));
    source->read(p.name, values);
    NoGrad no_grad;
    tensor.copy_(from_values(std::span<const float>(values), shape));
  }
  if (source->num_tensors() != parameters.size()) {
    throw InputError(fmt::format("{}: {} tensors, expected the model's {}", source->path(),
                                 source->num_tensors(), parameters.size()));
  }
  saved.model->reset_buffers();
  return saved;
}

}  // namespace tessera::apps
