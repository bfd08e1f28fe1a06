#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/chat_options.h"
#include "apps/text/jinja/template.h"
#include "apps/text/tokenizer.h"

// Conversations as texts to train on: the shapes in which they come, what a model's chat template
// makes of them, and which part of it is to be learned.

namespace tessera::text {

/// A conversation in the shape that templates read, whatever shape its row had.
struct Conversation {
  jinja::Value messages;  ///< a list of dicts: role, content and what else a message has
  jinja::Value tools = jinja::Value::none();  ///< a list of dicts, or none
  /// How many of the messages are the prompt of a completion; -1 where the shape does not say.
  int64_t num_prompt_messages = -1;
};

/// The conversation in a row: a JSON object. By its keys, unless `shape` says which it is:
///   messages           {"messages": [{"role": "user", "content": "..."}, ...]}
///   prompt_completion  {"prompt": ..., "completion": ...}, each a list of messages, or a text,
///                      which is one message of the user or of the assistant
///   sharegpt           {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}
///   alpaca             {"instruction", "input", "output", "system", "history": [[user, model], ...]}
/// and with each "tools", a list or JSON text of one. As transformers does it, keys of a message
/// that are null are left out, and its reasoning is found under each of the names it has had.
/// Errors   InputError without the name of the file: a key that is missing, a message that is none,
///          an unknown role
Conversation parse_conversation(const jinja::Value& row, ChatShape shape = ChatShape::kAuto);

/// Two answers to one prompt, of which the first is preferred.
struct Preference {
  Conversation chosen, rejected;  ///< both begin with the prompt, `num_prompt_messages`
};

/// The pair in a row: a JSON object with "chosen" and "rejected", each a list of messages, a message
/// (ShareGPT's too), or a text, which is one message of the assistant; before them
///   "prompt"           a list of messages, or a text, which is one message of the user; where both
///                      answers begin with it, they have it once
///   "conversations"    ShareGPT's, with "system"
///   nothing            then what both begin with, messages that are equal, is the prompt
/// and with each "tools".
/// Errors   InputError without the name of the file: a key that is missing, an empty prompt or answer,
///          two answers that are equal, and as parse_conversation
Preference parse_preference(const jinja::Value& row);

/// A conversation of one message, the user's.
Conversation question(std::string_view text);

/// The conversation in a message: its roles and the beginnings of its texts.
std::string describe(const Conversation& conversation);

/// What a template makes of a conversation, and which of its bytes are to be learned.
struct RenderedChat {
  std::string text;
  std::vector<jinja::Span> trained;  ///< bytes of `text`, in order, apart and not empty
};

/// A model's chat template: Jinja, as transformers runs it, in a sandbox with limits.
class ChatTemplate {
 public:
  /// `variables` is a dict of what templates find besides the conversation: bos_token, eos_token ...
  /// Errors   InputError that begins with `name`
  ChatTemplate(std::string_view source, std::string name, jinja::Value variables,
               jinja::RenderOptions options = {});

  /// The whole conversation and which bytes are to be learned:
  ///   assistant   what the assistant writes: within generation blocks where the template has them;
  ///               else, for each turn, from the end of the prompt that asks for it to the end of
  ///               what the template writes after it, the end-of-turn token included
  ///   last        the last of these turns
  ///   completion  all that comes after the prompt: of a prompt and completion what the shape says,
  ///               else the conversation up to the last message that is not the assistant's
  ///   all         everything
  /// A turn is found by rendering the conversation before it with add_generation_prompt, and up to
  /// it: both have to be beginnings of the whole. Where a later message changes how the turn is
  /// written (templates leave out earlier reasoning), its end is found by writing another answer in
  /// its place.
  /// Errors   InputError that shows the conversation: one that the template refuses; in which a turn
  ///          is not found, or nothing is to be learned. Never a guess.
  RenderedChat render(const Conversation& conversation, TrainOn train_on) const;

  /// The text that asks for the next answer.
  std::string prompt(const Conversation& conversation) const;

  bool has_generation() const { return template_.has_generation(); }
  const std::string& source() const { return source_; }
  /// What a conversation becomes depends on these: the source and the variables, as JSON text.
  std::string identity() const;
  /// "eos_token" and the like as the tokenizer's files have it; empty if they do not.
  std::string special_token(std::string_view name) const;

 private:
  struct Turn;

  jinja::Rendered render_messages(const jinja::Value& messages, const Conversation& conversation,
                                  bool asks) const;
  std::vector<jinja::Span> find_turns(const Conversation& conversation, const std::string& text,
                                      bool only_last) const;
  jinja::Span find_turn(const Conversation& conversation, const std::string& text,
                        size_t index) const;
  size_t end_of_changed_turn(const Conversation& conversation, const std::string& text,
                             size_t index, size_t begin) const;
  jinja::Span find_completion(const Conversation& conversation, const std::string& text) const;
  [[noreturn]] void fail(const Conversation& conversation, const std::string& why) const;

  std::string source_, name_;
  jinja::Template template_;
  jinja::Value variables_;
  jinja::RenderOptions options_;
};

/// The template of a model's directory (chat_template.jinja, or chat_template in
/// tokenizer_config.json) with the special tokens that are named there. In its place that of the
/// file `path`, or of the directory `path` with the tokens there, unless that is empty; then `dir`
/// may be.
/// Errors   InputError that names the file, also where there is no template
ChatTemplate load_chat_template(const std::string& dir, const std::string& path = "",
                                jinja::RenderOptions options = {});

/// The conversation for a terminal: what is learned in green, what is not dimmed, control characters
/// escaped but for line breaks. Without colour [[what is learned]] stands in brackets.
std::string show(const RenderedChat& chat, bool has_colour);

/// The ids of a text and the bytes [begin, end) that each is of.
using EncodeWithOffsets = std::function<void(std::string_view text, std::vector<int32_t>& ids,
                                             std::vector<jinja::Span>& offsets)>;

/// The offsets of a tokenizer that has none: `decode` gives the bytes of one id, and a text is its
/// ids' bytes one behind the other, but for spaces that a token is written without, and one before
/// a word that the tokenizer adds.
/// Errors   InputError at the first byte that no id accounts for: the tokenizer changes the text
EncodeWithOffsets with_offsets(std::function<std::vector<int32_t>(std::string_view text)> encode,
                               std::function<std::string(int32_t id)> decode);

/// A conversation as a model is trained on it.
struct TokenizedChat {
  std::vector<int32_t> ids;
  std::vector<uint8_t> is_trained;  ///< 1 for an id that is to be predicted and learned
};

/// The tokens of a rendered conversation. A token is trained if it has a byte that is; so is what
/// has no bytes of its own between two of them.
/// Errors   InputError where no token is left of a part that is to be learned
TokenizedChat tokenize(const RenderedChat& chat, const EncodeWithOffsets& encode);

/// The same by a tokenizer. Where it composes characters (NFC) that the conversation has not
/// composed, what is to be learned is found in the composed text.
/// Threads  one at a time
class ChatTokenizer {
 public:
  explicit ChatTokenizer(std::shared_ptr<const Tokenizer> tokenizer);
  /// Errors   InputError as above
  TokenizedChat tokenize(const RenderedChat& chat) const;

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  EncodeWithOffsets encode_;
};

}  // namespace tessera::text
