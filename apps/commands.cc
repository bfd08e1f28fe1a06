#include <algorithm>

#include "apps/command_line.h"
#include "apps/model_command.h"
#include "apps/run_control.h"
#include "apps/trainer.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

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
Config parse_arguments(const std::vector<std::string>& arguments, Config defaults = {}) {
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
  if (path.empty() && overrides.empty() && !defaults.is_own) {
    throw ConfigError("command line: no arguments, expected CONFIG.toml (see --help)");
  }
  return load_config_over(std::move(defaults), path, overrides);
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

Config own_config(const std::vector<std::string>& arguments, Config defaults) {
  defaults.is_own = true;
  return parse_arguments(arguments, std::move(defaults));
}

int train_command(const std::vector<std::string>& arguments, dist::World& world) {
  if (std::find(arguments.begin(), arguments.end(), "--version") != arguments.end()) {
    if (world.rank() == 0) print_out(version_text("tessera-train"));
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
    if (world.rank() == 0) print_out(text);
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

}  // namespace tessera::apps
