#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/metrics.h"
#include "apps/model_command.h"
#include "apps/text/chat.h"
#include "core/files.h"
#include "core/text.h"
#include "core/utf8.h"

namespace tessera::apps {
namespace {

struct GenerateCommand {
  ModelOptions model;
  DrawOptions draw;
  std::string prompt = "\n", prompts;
  bool is_chat = false;
};

/// What a line of --prompts is, or --prompt, to the model.
std::vector<int32_t> encode_prompt(const SavedModel& saved, const text::ChatTemplate* chat,
                                   const std::string& prompt) {
  const std::string text = chat == nullptr ? prompt : chat->prompt(text::question(prompt));
  return saved.tokenizer->encode(text);
}

std::vector<std::string> read_lines(const std::string& path) {
  constexpr int64_t kMaxNbytes = 1 << 30;
  const std::string text = read_regular_file(path, kMaxNbytes);
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    if (lines.back().ends_with('\r')) lines.back().pop_back();
    if (lines.back().empty()) {
      throw InputError(
          fmt::format("{}: line {}: empty, expected a prompt a line", path, lines.size()));
    }
    begin = end + 1;
  }
  return lines;
}

/// One text, as it comes.
void generate_one(SavedModel& saved, const std::vector<int32_t>& ids, GenerateCommand& command,
                  bool prints) {
  // A file gets the text as it is; on a terminal a model must not act by what it says. The prompt
  // may end inside of a character, which a terminal gets when it is whole.
  PrintableStream shown("\n\t");
  const bool is_shown = prints_to_terminal();
  const auto add = [&](const std::string& text) {
    if (prints) print_out(is_shown ? shown.add(text) : text);
  };
  if (!command.is_chat) add(command.prompt);
  TextStream stream(*saved.tokenizer, ids, command.draw);
  nn::GenerateOptions& options = command.draw.generate;
  options.on_token = [&](int64_t, int32_t token) {
    add(stream.add(token));
    return !stream.is_over();
  };
  nn::generate(*saved.model, ids, options);
  add(stream.finish());
  if (prints) print_out(shown.finish() + "\n");
}

/// A JSON object a prompt, in their order.
void generate_all(SavedModel& saved, const std::vector<std::string>& lines,
                  const std::vector<std::vector<int32_t>>& prompts, GenerateCommand& command,
                  bool prints) {
  std::vector<TextStream> streams;
  for (const std::vector<int32_t>& ids : prompts) {
    streams.emplace_back(*saved.tokenizer, ids, command.draw);
  }
  std::vector<std::string> texts(prompts.size());
  nn::GenerateOptions& options = command.draw.generate;
  options.on_token = [&](int64_t prompt, int32_t token) {
    const auto i = static_cast<size_t>(prompt);
    texts[i] += streams[i].add(token);
    return !streams[i].is_over();
  };
  nn::generate(*saved.model, prompts, options);
  for (size_t i = 0; i < texts.size() && prints; ++i) {
    texts[i] += streams[i].finish();
    const nlohmann::ordered_json row{{"prompt", lines[i]},
                                     {"text", replace_invalid_utf8(texts[i])}};
    print_out(row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
}

}  // namespace

int generate_command(const std::vector<std::string>& arguments, dist::World& world) {
  GenerateCommand command;
  command.draw.generate.num_tokens = 200;
  command.draw.generate.sampling.temperature = 0.8;
  CommandLine app("Continues a text with a model that tessera-train saved, or of Hugging Face.",
                  "tessera-generate");
  command.model.add_to(app);
  command.model.add_adapter_to(app);
  app.add_option("--prompt", command.prompt, "text to continue");
  app.add_option(
      "--prompts", command.prompts,
      "a file with a prompt a line, in place of --prompt: prints a JSON object for each, "
      "whose text is drawn with the seed plus the number of lines before it");
  app.add_option("--batch", command.draw.generate.max_batch,
                 "prompts that are continued together; no text depends on it")
      ->check(in_range<int64_t>(1, 65536));
  app.add_flag("--chat", command.is_chat,
               "the prompt is a question, put into the model's chat template; up to the end of the "
               "answer");
  command.draw.add_to(app);
  std::optional<int> status;
  world.control().verdict([&] {
    status = app.read(arguments, world.rank() == 0 ? stdout : nullptr);
    command.draw.check();
  });
  if (status) return *status;
  std::shared_ptr<Context> context;
  world.control().verdict([&] { context = command.model.make_context(world); });
  const Context::Scope scope(context);
  SavedModel saved;
  std::vector<std::string> lines;
  std::vector<std::vector<int32_t>> prompts;
  world.control().verdict([&] {
    saved = command.model.load();
    std::optional<text::ChatTemplate> chat;
    if (command.is_chat) chat = text::load_chat_template(saved.home);
    command.draw.set_ends(saved, chat ? &*chat : nullptr);
    lines = command.prompts.empty() ? std::vector{command.prompt} : read_lines(command.prompts);
    for (const std::string& line : lines) {
      prompts.push_back(encode_prompt(saved, chat ? &*chat : nullptr, line));
      if (prompts.back().empty()) {
        throw ConfigError("command line: --prompt is empty, expected some text");
      }
    }
  });
  const bool prints = world.rank() == 0;
  if (prints) log_model(saved, command.model.checkpoint);
  if (command.prompts.empty()) {
    generate_one(saved, prompts[0], command, prints);
  } else {
    generate_all(saved, lines, prompts, command, prints);
  }
  return 0;
}

}  // namespace tessera::apps
