#include "apps/model_command.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "apps/options.h"
#include "apps/run_dir.h"
#include "core/log.h"
#include "dist/checkpoint/state.h"

namespace tessera::apps {
namespace {

void check_tokenizer(const SavedModel& saved, const std::string& path) {
  if (saved.tokenizer != nullptr) return;
  throw InputError(fmt::format("{}: no tokenizer.json, expected a model trained on text", path));
}

}  // namespace

void print_out(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw IoError(fmt::format("standard output: cannot be written: {}", std::strerror(errno)));
  }
}

void ModelOptions::add_to(CommandLine& app) {
  app.add_option("--checkpoint", checkpoint,
                 "output.dir of the training run, a checkpoint, or a model of Hugging Face")
      ->required();
  app.add_option("--device", device, "auto, cpu or cuda");
  app.add_option("--dtype", dtype, "of parameters and arithmetic")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--threads", threads, "CPU threads; 0: all allowed processors")
      ->check(in_range(0, std::optional(4096)));
}

void ModelOptions::add_adapter_to(CommandLine& app) {
  app.add_option("--adapter", adapter,
                 "adapters of its layers: directory with adapter_config.json and "
                 "adapter_model.safetensors of Hugging Face's peft");
}

std::shared_ptr<Context> ModelOptions::make_context(dist::World& world) const {
  ContextOptions options;
  options.device = world.device(device);
  options.num_threads = world.num_threads(threads);
  return std::make_shared<Context>(options);
}

SavedModel ModelOptions::load() const {
  SavedModel saved = load_model(checkpoint, param_dtype(), adapter);
  check_tokenizer(saved, checkpoint);
  return saved;
}

void DrawOptions::add_to(CommandLine& app) {
  nn::SamplingOptions& sampling = generate.sampling;
  app.add_option("--tokens", generate.num_tokens, "tokens to generate at most")
      ->check(in_range<int64_t>(0));
  app.add_option("--temperature", sampling.temperature,
                 "sampling temperature; 0: greedy, the likeliest token")
      ->check(in_range(0.0, std::optional(1e6)));
  app.add_option("--top-k", sampling.top_k,
                 "top-k sampling: draws from the k likeliest tokens; 0: from all")
      ->check(in_range<int64_t>(0));
  app.add_option("--top-p", sampling.top_p,
                 "nucleus sampling: draws from the likeliest tokens with this total probability")
      ->check(in_range(1e-9, std::optional(1.0)));
  app.add_option("--min-p", sampling.min_p,
                 "draws from tokens with this share of the likeliest one's probability")
      ->check(in_range(0.0, std::optional(1.0)));
  app.add_option("--repetition-penalty", sampling.repetition_penalty,
                 "logits of tokens that the text has: divided by it if positive, else multiplied")
      ->check(in_range(0.01, std::optional(100.0)));
  app.add_option("--seed", sampling.seed, "seed of the sampling");
  app.add_option("--stop", stops, "ends the text where it stands, itself left out; several times");
  app.add_flag("--ignore-end", ignores_end, "goes on behind a token that ends the text");
}

void DrawOptions::check() const {
  const nn::SamplingOptions& sampling = generate.sampling;
  for (const auto& [name, value] :
       {std::pair{"--temperature", sampling.temperature}, std::pair{"--top-p", sampling.top_p},
        std::pair{"--min-p", sampling.min_p},
        std::pair{"--repetition-penalty", sampling.repetition_penalty}}) {
    if (!std::isnan(value)) continue;
    throw ConfigError(fmt::format("command line: {}: nan is not a number (see --help)", name));
  }
}

void DrawOptions::set_ends(const SavedModel& saved, const text::ChatTemplate* chat) {
  if (ignores_end) return;
  generate.stop_tokens = end_tokens_of(saved.config, saved.tokenizer.get());
  if (chat == nullptr) return;
  const int32_t end = saved.tokenizer->id_of(chat->special_token("eos_token"));
  if (end >= 0) generate.stop_tokens.push_back(end);
}

void log_model(const SavedModel& saved, const std::string& checkpoint) {
  const std::string run = describe_unfinished(checkpoint);
  log_info("parameters of step {} of {}{}", saved.step, saved.path,
           run.empty() ? "" : ", of a run that " + run);
}

TextStream::TextStream(const text::Tokenizer& tokenizer, const std::vector<int32_t>& before,
                       const DrawOptions& draw)
    : decoder_(tokenizer, before), stops_(draw.stops), ends_(draw.generate.stop_tokens) {}

std::string TextStream::add(int32_t token) {
  is_ended_ = std::find(ends_.begin(), ends_.end(), token) != ends_.end();
  if (is_ended_) return "";
  return stops_.add(decoder_.add(token));
}

std::string TextStream::finish() {
  std::string text = stops_.add(decoder_.finish());
  if (!stops_.is_found()) text += stops_.finish();
  return text;
}

ShardedModel load_sharded(const std::string& path, DType dtype, dist::World& world,
                          const std::string& adapter) {
  ShardedModel sharded;
  SavedModel& saved = sharded.saved;
  OpenedModel opened;
  std::unique_ptr<dist::PeftReader> adapters;
  world.control().verdict([&] {
    opened = open_any_model(path);
    int64_t vocab_size = 0;
    saved = describe_model(opened, vocab_size);
    check_tokenizer(saved, path);
    const nn::DeferredInit deferred;
    saved.model = make_model(saved.config, vocab_size);
    if (!adapter.empty()) adapters = attach_adapter(saved, adapter);
    // Nothing is trained: no gradients, no optimizer's f32 values.
    for (const nn::NamedParameter& p : saved.model->named_parameters()) {
      p.parameter->tensor.set_requires_grad(false);
    }
  });
  dist::FsdpOptions fsdp;
  fsdp.precision.param_dtype = dtype;
  sharded.fsdp = dist::fully_shard(*saved.model, world, fsdp);
  std::vector<std::string> of_adapter;
  if (adapters != nullptr) of_adapter = adapters->names();
  const auto is_of_adapter = [&](const nn::NamedParameter& p) {
    return std::find(of_adapter.begin(), of_adapter.end(), p.name) != of_adapter.end();
  };
  dist::load_parameters(*opened.state.parameters, *sharded.fsdp, *saved.model,
                        [&](const nn::NamedParameter& p) { return !is_of_adapter(p); });
  if (adapters != nullptr) {
    dist::load_parameters(*adapters, *sharded.fsdp, *saved.model, is_of_adapter);
  }
  return sharded;
}

}  // namespace tessera::apps
