#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/command_line.h"
#include "apps/saved_model.h"
#include "apps/text/chat.h"
#include "apps/text/stop_strings.h"
#include "core/runtime/context.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/generate.h"

// What the programs that run a trained model have in common: which model, where it runs, how it
// draws tokens, and its text as it comes.

namespace tessera::apps {

/// IoError if standard output cannot be written.
void print_out(const std::string& text);

/// Which model, and on what.
struct ModelOptions {
  std::string checkpoint, adapter, device = "auto", dtype = "f32";
  int threads = 0;

  void add_to(CommandLine& app);
  void add_adapter_to(CommandLine& app);
  DType param_dtype() const { return dtype == "bf16" ? kBF16 : kF32; }
  /// ConfigError for a device that is not there.
  std::shared_ptr<Context> make_context(dist::World& world) const;
  /// InputError without a tokenizer.
  SavedModel load() const;
};

/// How the tokens are drawn, and what ends a text.
struct DrawOptions {
  nn::GenerateOptions generate;
  std::vector<std::string> stops;
  bool ignores_end = false;

  void add_to(CommandLine& app);
  /// ConfigError for what a range does not see.
  void check() const;
  /// The tokens that end a text of the model, or an answer in its chat template (null: none).
  void set_ends(const SavedModel& saved, const text::ChatTemplate* chat);
};

/// "parameters of step 10 of out/model.safetensors", as a line on stderr.
void log_model(const SavedModel& saved, const std::string& checkpoint);

/// The text of generated tokens as they come, up to a token that ends it or a stop string.
class TextStream {
 public:
  TextStream(const text::Tokenizer& tokenizer, const std::vector<int32_t>& before,
             const DrawOptions& draw);

  /// What the token adds to the text.
  std::string add(int32_t token);
  /// What is left.
  std::string finish();
  bool is_over() const { return is_ended_ || stops_.is_found(); }

 private:
  text::StreamDecoder decoder_;
  text::StopStrings stops_;
  std::vector<int32_t> ends_;
  bool is_ended_ = false;
};

/// A model that is only run, its parameters sharded over the ranks.
struct ShardedModel {
  SavedModel saved;  ///< its `model` is sharded
  std::unique_ptr<dist::Fsdp> fsdp;
};
/// As `load_model`, but no rank reads or holds more of the model than its shards. Collective;
/// without a tokenizer InputError.
ShardedModel load_sharded(const std::string& path, DType dtype, dist::World& world,
                          const std::string& adapter = "");

int generate_command(const std::vector<std::string>& arguments, dist::World& world);
int chat_command(const std::vector<std::string>& arguments, dist::World& world);
int eval_command(const std::vector<std::string>& arguments, dist::World& world);

}  // namespace tessera::apps
