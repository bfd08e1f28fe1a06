#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "apps/metrics.h"
#include "apps/model_command.h"
#include "apps/text/chat.h"
#include "core/log.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

std::atomic<bool> is_interrupted = false;

/// While one lives, the first Ctrl-C ends the answer and a second one the program.
class AnswerInterrupt {
 public:
  AnswerInterrupt() {
    is_interrupted = false;
    struct sigaction action = {};
    action.sa_handler = [](int) { is_interrupted = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    ::sigaction(SIGINT, &action, &previous_);
  }
  ~AnswerInterrupt() { ::sigaction(SIGINT, &previous_, nullptr); }
  AnswerInterrupt(const AnswerInterrupt&) = delete;
  AnswerInterrupt& operator=(const AnswerInterrupt&) = delete;

 private:
  struct sigaction previous_ = {};
};

constexpr const char* kHelp =
    "/reset        forgets the conversation\n"
    "/system TEXT  forgets it, and tells the model TEXT before the next one; without TEXT nothing\n"
    "/quit         ends, as the end of the input does\n";

/// A conversation with a model: what was said, as far as it fits.
class ChatSession {
 public:
  ChatSession(SavedModel& saved, text::ChatTemplate chat_template, DrawOptions draw)
      : saved_(saved), template_(std::move(chat_template)), draw_(std::move(draw)) {
    context_ = saved.model->shape().context_length;
    draw_.set_ends(saved, &template_);
  }

  void reset() { turns_.clear(); }
  void set_system(const std::string& text) {
    reset();
    system_ = text;
  }

  /// Streams the answer to `add`. InputError for a question that does not fit, or that the template
  /// refuses; the conversation is then as before.
  void ask(const std::string& question, const std::function<void(const std::string&)>& add) {
    turns_.push_back({"user", question});
    std::vector<int32_t> ids;
    try {
      ids = prompt();
    } catch (const InputError&) {
      turns_.pop_back();
      throw;
    }
    nn::GenerateOptions options = draw_.generate;
    options.num_tokens = std::min(options.num_tokens, context_ - std::ssize(ids));
    TextStream stream(*saved_.tokenizer, ids, draw_);
    std::string answer;
    const auto say = [&](const std::string& text) {
      answer += text;
      add(text);
    };
    options.on_token = [&](int64_t, int32_t token) {
      say(stream.add(token));
      return !stream.is_over() && !is_interrupted;
    };
    {
      const AnswerInterrupt interrupt;
      nn::generate(*saved_.model, ids, options);
    }
    say(stream.finish());
    draw_.generate.sampling.seed += 1;  // the same question again has another answer
    turns_.push_back({"assistant", answer});
  }

 private:
  struct Turn {
    std::string role, content;
  };

  /// The conversation up to the question, without its oldest turns where it leaves no room for an
  /// answer.
  std::vector<int32_t> prompt() {
    const int64_t room = std::min(draw_.generate.num_tokens, std::max<int64_t>(1, context_ / 4));
    while (true) {
      std::vector<int32_t> ids = saved_.tokenizer->encode(template_.prompt(conversation()));
      if (std::ssize(ids) + room <= context_) return ids;
      if (turns_.size() < 3) {
        throw InputError(fmt::format(
            "the question has {} tokens in the template, expected at most {}: a context of {} "
            "without {} for the answer",
            ids.size(), context_ - room, context_, room));
      }
      turns_.erase(turns_.begin(), turns_.begin() + 2);
    }
  }

  text::Conversation conversation() const {
    nlohmann::ordered_json messages = nlohmann::ordered_json::array();
    if (!system_.empty()) messages.push_back({{"role", "system"}, {"content", system_}});
    for (const Turn& turn : turns_) {
      messages.push_back({{"role", turn.role}, {"content", turn.content}});
    }
    const std::string row = nlohmann::ordered_json{{"messages", messages}}.dump(
        -1, ' ', false, nlohmann::json::error_handler_t::replace);
    return text::parse_conversation(text::jinja::parse_json("conversation", row),
                                    text::ChatShape::kMessages);
  }

  SavedModel& saved_;
  text::ChatTemplate template_;
  DrawOptions draw_;
  int64_t context_ = 0;
  std::string system_;
  std::vector<Turn> turns_;
};

/// A line that is no question; false for one that is. `ends` if the program is to.
bool run_chat_command(const std::string& line, ChatSession& chat, bool& ends) {
  if (!line.starts_with('/')) return false;
  const size_t space = std::min(line.find(' '), line.size());
  const std::string name = line.substr(0, space),
                    rest = line.substr(std::min(space + 1, line.size()));
  if (name == "/quit") {
    ends = true;
  } else if (name == "/reset") {
    chat.reset();
  } else if (name == "/system") {
    chat.set_system(rest);
  } else if (name == "/help") {
    print_out(kHelp);
  } else {
    log_warning("{}: no such command, expected /reset, /system TEXT, /quit or /help",
                shorten(name));
  }
  return true;
}

}  // namespace

int chat_command(const std::vector<std::string>& arguments, dist::World& world) {
  ModelOptions model;
  DrawOptions draw;
  std::string system, template_path;
  draw.generate.num_tokens = 512;
  draw.generate.sampling.temperature = 0.7;
  CommandLine app(
      "A conversation with a model that tessera-train saved, or of Hugging Face, in its chat "
      "template. One question a line; /help tells the commands. Ctrl-C ends an answer.",
      "tessera-chat");
  model.add_to(app);
  model.add_adapter_to(app);
  app.add_option("--system", system, "what the model is told before the conversation");
  app.add_option("--template", template_path,
                 "a chat template's file, or a directory with one, in place of the model's");
  draw.add_to(app);
  std::optional<int> status;
  world.control().verdict([&] {
    status = app.read(arguments, world.rank() == 0 ? stdout : nullptr);
    draw.check();
    if (!status && world.world_size() > 1) {
      throw ConfigError(fmt::format("tessera-chat: {} ranks, expected one", world.world_size()));
    }
  });
  if (status) return *status;
  const std::shared_ptr<Context> context = model.make_context(world);
  const Context::Scope scope(context);
  SavedModel saved = model.load();
  ChatSession chat(saved, text::load_chat_template(saved.home, template_path), draw);
  chat.set_system(system);
  log_model(saved, model.checkpoint);

  const bool asks = ::isatty(STDIN_FILENO) == 1, is_shown = prints_to_terminal();
  bool ends = false;
  for (std::string line; !ends;) {
    if (asks) print_out("> ");
    if (!std::getline(std::cin, line)) break;
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    if (run_chat_command(line, chat, ends)) continue;
    PrintableStream shown("\n\t");
    try {
      chat.ask(line,
               [&](const std::string& text) { print_out(is_shown ? shown.add(text) : text); });
    } catch (const InputError& error) {
      if (!asks) throw;
      log_error("{}", error.what());
      continue;
    }
    print_out(shown.finish() + "\n");
  }
  if (asks) print_out("\n");
  return 0;
}

}  // namespace tessera::apps
