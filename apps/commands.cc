#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "apps/command_line.h"
#include "apps/metrics.h"
#include "apps/run_control.h"
#include "apps/run_dir.h"
#include "apps/text/chat.h"
#include "apps/trainer.h"
#include "core/files.h"
#include "core/log.h"
#include "core/runtime/context.h"
#include "core/text.h"
#include "nn/generate.h"

namespace tessera::apps {
namespace {

void print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw IoError(fmt::format("standard output: cannot be written: {}", std::strerror(errno)));
  }
}

/// The short names of keys that belong on the command line.
std::string full_name(const std::string& argument) {
  if (argument == "--resume.override") return "--checkpoint.resume_override=true";
  if (argument == "--output.overwrite") return "--output.overwrite=true";
  if (argument == "--resume.skip_unreadable") return "--checkpoint.resume_skip_unreadable=true";
  for (const auto& [name, key] :
       {std::pair{"--resume.override", "--checkpoint.resume_override"},
        std::pair{"--resume.skip_unreadable", "--checkpoint.resume_skip_unreadable"},
        std::pair{"--resume", "--checkpoint.resume"}}) {
    if (argument == name || argument.starts_with(std::string(name) + "=")) {
      return key + argument.substr(std::string(name).size());
    }
  }
  return argument;
}

/// CONFIG and the overrides, which may stand on either side of it.
Config parse_arguments(const std::vector<std::string>& arguments) {
  std::string path;
  std::vector<std::string> overrides;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string argument = full_name(arguments[i]);
    if (argument.starts_with("--")) {
      overrides.push_back(argument);
      const bool has_value = argument.find('=') != std::string::npos;
      if (!has_value && i + 1 < arguments.size() && !arguments[i + 1].starts_with("--")) {
        overrides.push_back(arguments[++i]);
      }
    } else if (path.empty()) {
      path = argument;
    } else {
      throw ConfigError(fmt::format("command line: {} and {}, expected one configuration file",
                                    shorten(path), shorten(argument)));
    }
  }
  if (path.empty() && overrides.empty()) {
    throw ConfigError("command line: no arguments, expected CONFIG.toml (see --help)");
  }
  return load_config(path, overrides);
}

/// The World's own words, and the key that they are about.
void check_launcher(dist::World& world, bool single_process) {
  world.control().verdict([&] {
    try {
      world.check_launcher(single_process);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format(
          "{} ({})", error.what(),
          single_process ? "dist.single_process = true" : "or dist.single_process = true"));
    }
  });
}

}  // namespace

int train_command(const std::vector<std::string>& arguments, dist::World& world) {
  if (std::find(arguments.begin(), arguments.end(), "--version") != arguments.end()) {
    if (world.rank() == 0) print(version_text("tessera-train"));
    return 0;
  }
  const auto help = std::find_if(arguments.begin(), arguments.end(),
                                 [](const std::string& a) { return a == "--help" || a == "-h"; });
  if (help != arguments.end()) {
    std::string text;
    const std::string what = help + 1 == arguments.end() ? "" : *(help + 1);
    world.control().verdict([&] { text = config_help(what); });
    if (what.empty()) {
      text =
          "tessera-train [CONFIG.toml] [--section.key=value ...]\n"
          "tessera-train --help [SECTION | KEY]\n\n"
          "Trains a language model on this process, or on all ranks of mpirun -n N.\n\n" +
          text;
    }
    if (world.rank() == 0) print(text);
    return 0;
  }
  Config config;
  world.control().verdict([&] { config = parse_arguments(arguments); });
  check_launcher(world, config.dist.single_process);
  const SignalHandlers handlers;
  train(config, world);
  SignalHandlers::end_run();
  return 0;
}

int generate_command(const std::vector<std::string>& arguments, dist::World& world) {
  std::string checkpoint, prompt = "\n", device = "auto";
  nn::GenerateOptions options;
  options.num_tokens = 200;
  options.sampling.temperature = 0.8;
  int threads = 0;
  bool is_chat = false;
  CommandLine app("Continues a text with a model that tessera-train saved.", "tessera-generate");
  app.add_option("--checkpoint", checkpoint, "output.dir of the training run, or a checkpoint")
      ->required();
  app.add_option("--prompt", prompt, "text to continue");
  app.add_flag("--chat", is_chat,
               "the prompt is a question, put into the model's chat template; up to the end of the "
               "answer");
  app.add_option("--tokens", options.num_tokens, "tokens to generate")->check(in_range<int64_t>(0));
  app.add_option("--temperature", options.sampling.temperature,
                 "sampling temperature; 0: greedy, the likeliest token")
      ->check(in_range(0.0, std::optional(1e6)));
  app.add_option("--top-k", options.sampling.top_k,
                 "top-k sampling: draws from the k likeliest tokens; 0: from all")
      ->check(in_range<int64_t>(0));
  app.add_option("--top-p", options.sampling.top_p,
                 "nucleus sampling: draws from the likeliest tokens with this total probability")
      ->check(in_range(1e-9, std::optional(1.0)));
  app.add_option("--seed", options.sampling.seed, "seed of the sampling");
  app.add_option("--device", device, "auto, cpu or cuda");
  app.add_option("--threads", threads, "CPU threads; 0: all allowed processors")
      ->check(in_range(0, std::optional(4096)));
  std::optional<int> status;
  world.control().verdict([&] {
    status = app.read(arguments, world.rank() == 0 ? stdout : nullptr);
    if (std::isnan(options.sampling.temperature) || std::isnan(options.sampling.top_p)) {
      throw ConfigError("command line: --temperature, --top-p: nan is not a number (see --help)");
    }
  });
  if (status) return *status;
  std::shared_ptr<Context> context;
  world.control().verdict([&] {
    ContextOptions context_options;
    context_options.device = world.device(device);
    context_options.num_threads = world.num_threads(threads);
    context = std::make_shared<Context>(context_options);
  });
  const Context::Scope scope(context);
  SavedModel saved;
  std::vector<int32_t> ids;
  int32_t end = -1;
  world.control().verdict([&] {
    saved = load_model(checkpoint);
    if (saved.tokenizer == nullptr) {
      throw InputError(
          fmt::format("{}: no tokenizer.json, expected a model trained on text", checkpoint));
    }
    if (is_chat) {
      const text::ChatTemplate chat = text::load_chat_template(saved.home);
      ids = saved.tokenizer->encode(chat.prompt(text::question(prompt)));
      end = saved.tokenizer->id_of(chat.special_token("eos_token"));
    } else {
      ids = saved.tokenizer->encode(prompt);
    }
    if (ids.empty()) throw ConfigError("command line: --prompt is empty, expected some text");
  });
  const bool prints = world.rank() == 0;
  if (prints) {
    const std::string run = describe_unfinished(checkpoint);
    log_info("parameters of step {} of {}{}", saved.step, saved.path,
             run.empty() ? "" : ", of a run that " + run);
  }
  // A file gets the text as it is; on a terminal a model must not act by what it says. The prompt
  // may end inside of a character, which a terminal gets when it is whole.
  PrintableStream shown("\n\t");
  const bool is_shown = prints_to_terminal();
  const auto add = [&](const std::string& text) {
    if (prints) print(is_shown ? shown.add(text) : text);
  };
  if (!is_chat) add(prompt);
  text::StreamDecoder decoder(*saved.tokenizer, ids);
  options.on_token = [&](int32_t id) {
    if (id == end) return false;
    add(decoder.add(id));
    return true;
  };
  nn::generate(*saved.model, ids, options);
  add(decoder.finish());
  if (prints) print(shown.finish() + "\n");
  return 0;
}

}  // namespace tessera::apps
