#include "apps/tokenize.h"

#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <thread>

#include "apps/chats.h"
#include "apps/command_line.h"
#include "apps/data.h"
#include "apps/encode_files.h"
#include "apps/text/pretokenize.h"
#include "apps/text/train.h"
#include "core/check.h"
#include "core/enum_names.h"
#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

/// What several subcommands take.
struct Common {
  std::string tokenizer, pattern = "gpt4";
  std::vector<std::string> files;
  DocumentOptions documents;
  std::string invalid = "error", null = "error", format = "auto";
  int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::string separator = "auto";
  bool special = false;
};

std::unique_ptr<text::Tokenizer> load(const Common& common) {
  if (common.tokenizer == "byte") return text::make_byte_tokenizer();
  if (fs::path(common.tokenizer).extension() != ".tiktoken") {
    return text::load_tokenizer(common.tokenizer);
  }
  const std::string_view named = text::pattern_by_name(common.pattern);
  constexpr int64_t kMaxNbytes = 64 << 20;
  return text::parse_tiktoken(read_regular_file(common.tokenizer, kMaxNbytes),
                              named.empty() ? common.pattern : named, {}, common.tokenizer);
}

/// https://no-color.org
bool has_no_colour() {
  const char* const value = std::getenv("NO_COLOR");
  return value != nullptr && *value != '\0';
}

std::vector<std::string> input_files(const Common& common) {
  return files_of_globs("tokenize: FILES", common.files, "texts, JSON lines or Parquet files");
}

template <class E>
E named(const std::string& name) {
  return enum_from_name<E>(name, "command line");
}
DocumentOptions document_options(const Common& common) {
  DocumentOptions options = common.documents;
  options.invalid = named<InvalidText>(common.invalid);
  options.null = named<NullText>(common.null);
  options.format = named<FileFormat>(common.format);
  return options;
}

/// The id that ends documents: of the token, or of the one that usually does.
int64_t separator_id(const Common& common, const text::Tokenizer& tokenizer) {
  if (common.separator == "none") return -1;
  if (common.separator != "auto") {
    const int32_t id = tokenizer.id_of(common.separator);
    if (id < 0) {
      throw ConfigError(
          fmt::format("command line: --separator={}, expected a token of {}, auto or "
                      "none",
                      shorten(common.separator), common.tokenizer));
    }
    return id;
  }
  return text::document_tokens(tokenizer).end;
}

/// A line on a terminal that says how far the work is.
class Bar {
 public:
  explicit Bar(std::string what) : what_(std::move(what)), is_shown_(::isatty(2) == 1) {}
  ~Bar() {
    if (is_drawn_) std::fputs("\r\033[K", stderr);
  }
  void update(int64_t done, int64_t total) {
    if (!is_shown_ || total <= 0) return;
    const double seconds = seconds_since(start_);
    if (seconds - last_ < 0.2) return;
    last_ = seconds;
    const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    const double left = share > 0 ? seconds / share - seconds : 0;
    is_drawn_ = true;
    fmt::print(stderr, "\r\033[K{} {:3.0f} % {:.1f} MB/s, {:.0f} s left", what_, share * 100,
               static_cast<double>(done) / seconds / 1e6, left);
    std::fflush(stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  std::string what_;
  bool is_shown_, is_drawn_ = false;
  Clock::time_point start_ = Clock::now();
  double last_ = 0;
};

void train(const Common& common, text::TrainBpeOptions options, const std::string& directory,
           std::FILE* out) {
  options.pattern = common.pattern;
  text::BpeTrainer trainer(std::move(options));
  DocumentReader reader(input_files(common), document_options(common));
  Document document;
  int64_t num_documents = 0, nbytes = 0;
  {
    Bar bar("count");
    while (reader.next(document)) {
      try {
        trainer.add(document.text);
      } catch (const InputError& error) {
        throw InputError(fmt::format("{}: {}", reader.where(document.position), error.what()));
      }
      ++num_documents;
      nbytes += static_cast<int64_t>(document.text.size());
      bar.update(reader.nbytes_read(), reader.nbytes());
    }
  }
  const auto tokenizer = trainer.train();
  make_directory_durably(directory);
  for (const auto& [name, text] : tokenizer->hf_files()) {
    write_durably(directory + "/" + name, text);
  }
  fmt::print(out, "{}: {} ids from {} different words of {} documents, {} bytes\n", directory,
             tokenizer->vocab_size(), trainer.num_words(), num_documents, nbytes);
}

void encode(const Common& common, EncodeFilesOptions options, std::FILE* out) {
  const auto tokenizer = load(common);
  options.documents = document_options(common);
  options.threads = common.threads;
  options.add_special_tokens = common.special;
  options.separator = separator_id(common, *tokenizer);
  const std::string json = tokenizer->to_json();
  options.tokenizer_id = fmt::format("{:016x}", XXH3_64bits(json.data(), json.size()));
  Bar bar("encode");
  const EncodeFilesResult result =
      encode_files(*tokenizer, input_files(common), options,
                   [&](int64_t done, int64_t total) { bar.update(done, total); });
  fmt::print(out, "{}: {} tokens of {} documents, {} bytes, in {} shards{}; separator {}\n",
             options.out, result.num_tokens, result.num_documents, result.num_text_bytes,
             result.num_shards, result.is_resumed ? " (some from an earlier run)" : "",
             options.separator);
}

/// Ids of each document in a line.
void print_ids(const Common& common, std::FILE* out) {
  const auto tokenizer = load(common);
  DocumentReader reader(input_files(common), document_options(common));
  Document document;
  std::vector<int32_t> ids;
  std::string line;
  while (reader.next(document)) {
    ids.clear();
    try {
      tokenizer->encode(document.text, ids, {.add_special_tokens = common.special});
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", reader.where(document.position), error.what()));
    }
    line = fmt::format("{}\n", fmt::join(ids, " "));
    std::fwrite(line.data(), 1, line.size(), out);
  }
}

/// Documents one by one, as decoders treat a text's first token apart; what has no separator for
/// long in parts.
void decode(const Common& common, std::FILE* out) {
  constexpr size_t kMaxCount = 1 << 22;
  const auto tokenizer = load(common);
  const int64_t separator = separator_id(common, *tokenizer);
  for (const std::string& path : common.files) {
    const TokenArray tokens = load_token_shard(path);
    std::vector<int32_t> ids;
    const auto flush = [&] {
      try {
        const std::string text = tokenizer->decode(ids, {.skip_special_tokens = common.special});
        std::fwrite(text.data(), 1, text.size(), out);
      } catch (const InputError& error) {
        throw InputError(fmt::format("{}: {}", path, error.what()));
      }
      ids.clear();
    };
    for (int64_t i = 0; i < tokens.num_tokens(); ++i) {
      ids.push_back(static_cast<int32_t>(tokens[i]));
      if (ids.back() == separator || ids.size() == kMaxCount) flush();
    }
    tokens.check();
    flush();
  }
}

void inspect(const Common& common, std::FILE* out) {
  const auto tokenizer = load(common);
  fmt::print(out, "{}: {}, {} ids, {} added tokens\n", common.tokenizer, tokenizer->name(),
             tokenizer->vocab_size(), tokenizer->added_tokens().size());
  for (const text::AddedToken& token : tokenizer->added_tokens()) {
    if (&token - tokenizer->added_tokens().data() >= 16) break;
    fmt::print(out, "  {:>7} {}{}\n", token.id, printable(shorten(token.content)),
               token.special ? " (special)" : "");
  }
  std::vector<std::pair<size_t, int32_t>> longest;
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    longest.emplace_back(tokenizer->token(id).size(), id);
  }
  const size_t count = std::min<size_t>(longest.size(), 10);
  std::partial_sort(longest.begin(), longest.begin() + static_cast<std::ptrdiff_t>(count),
                    longest.end(), [](auto& a, auto& b) {
                      return a.first != b.first ? a.first > b.first : a.second < b.second;
                    });
  fmt::print(out, "longest tokens\n");
  for (size_t i = 0; i < count; ++i) {
    fmt::print(out, "  {:>7} {}\n", longest[i].second,
               printable(shorten(tokenizer->token(longest[i].second))));
  }
  if (common.files.empty()) return;
  DocumentReader reader(input_files(common), document_options(common));
  Document document;
  std::vector<int32_t> ids;
  std::vector<int64_t> uses(static_cast<size_t>(tokenizer->vocab_size()));
  int64_t num_documents = 0, num_tokens = 0, nbytes = 0;
  while (reader.next(document)) {
    ids.clear();
    tokenizer->encode(document.text, ids);
    for (const int32_t id : ids) ++uses[static_cast<size_t>(id)];
    ++num_documents;
    num_tokens += static_cast<int64_t>(ids.size());
    nbytes += static_cast<int64_t>(document.text.size());
  }
  const auto used = std::count_if(uses.begin(), uses.end(), [](int64_t n) { return n > 0; });
  fmt::print(out, "{} documents, {} bytes, {} tokens, {:.3f} bytes a token, {} of {} ids in use\n",
             num_documents, nbytes, num_tokens,
             num_tokens == 0 ? 0.0 : static_cast<double>(nbytes) / static_cast<double>(num_tokens),
             used, tokenizer->vocab_size());
}

/// Conversations, with what of them is learned.
void show(const Common& common, const std::string& template_path, ChatReaderOptions reading,
          ShowChatsOptions options, std::FILE* out) {
  reading.format = named<FileFormat>(common.format);
  options.has_colour = out == stdout && ::isatty(STDOUT_FILENO) == 1 && !has_no_colour();
  const auto chat_template = std::make_shared<const text::ChatTemplate>(
      text::load_chat_template(folder_of_tokenizer(common.tokenizer), template_path));
  ChatReader reader(input_files(common), chat_template, load(common), reading);
  show_chats(reader, options, out);
}

void run_in_threads(int threads, const std::function<void()>& work) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (auto& helper : helpers) helper.join();
}

/// Encodes a text with several threads, each a part at a time; the number of ids.
int64_t encode_in_parts(const text::Tokenizer& tokenizer, std::string_view text, int threads) {
  constexpr size_t kPartNbytes = 256 << 10;  // threads end at about the same time
  std::vector<std::string_view> parts;
  for (size_t at = 0; at < text.size();) {
    const size_t end = tokenizer.next_cut(text, std::min(text.size(), at + kPartNbytes));
    parts.push_back(text.substr(at, end - at));
    at = end;
  }
  std::atomic<size_t> next = 0;
  std::atomic<int64_t> count = 0;
  run_in_threads(threads, [&] {
    std::vector<int32_t> ids;
    for (size_t i = next++; i < parts.size(); i = next++) {
      ids.clear();
      tokenizer.encode(parts[i], ids);
      count += static_cast<int64_t>(ids.size());
    }
  });
  return count;
}

void bench(const Common& common, const std::string& warm_up, std::FILE* out) {
  const auto tokenizer = load(common);
  if (!warm_up.empty()) {
    const MappedFile file(warm_up);
    run_in_threads(common.threads, [&] { tokenizer->encode(file.text()); });
  }
  for (const std::string& path : common.files) {
    const std::string text(MappedFile(path).text());
    const std::clock_t cpu = std::clock();
    const auto start = std::chrono::steady_clock::now();
    const int64_t count = encode_in_parts(*tokenizer, text, common.threads);
    const double wall =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double seconds = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
    const double mb = static_cast<double>(text.size()) / 1e6;
    fmt::print(out,
               "{}: {} bytes, {} tokens, {:.3f} s of {} threads, {:.1f} MB/s, {:.1f} MB a CPU "
               "second\n",
               path, text.size(), count, wall, common.threads, mb / wall, mb / seconds);
  }
}

template <class E>
CLI::IsMember names_of() {
  std::vector<std::string> names;
  for (const auto& each : kEnumNames<E>) names.emplace_back(each.name);
  return CLI::IsMember(names);
}

}  // namespace

int tokenize_command(const std::vector<std::string>& arguments, std::FILE* out) {
  Common common;
  text::TrainBpeOptions training;
  EncodeFilesOptions encoding;
  ChatReaderOptions chats;
  ShowChatsOptions showing;
  std::string directory, warm_up, template_path, train_on = "assistant", shape = "auto";
  CommandLine app("Trains tokenizers and turns texts into tokens.", "tessera-tokenize");
  app.require_subcommand(1);
  const auto add = [&](const char* name, const char* what, const char* files, bool required) {
    CLI::App* command = app.add_subcommand(name, what);
    command->add_option("FILES", common.files, files)->required(required);
    return command;
  };
  const char* const kTexts =
      "texts (.txt .md), JSON lines (.jsonl) or .parquet, each also .gz or .zst; patterns with * "
      "are expanded";
  const auto add_documents = [&](CLI::App* command) {
    command->add_option("--field", common.documents.field, "the text's field or column");
    command->add_option("--invalid", common.invalid, "bytes that are not UTF-8")
        ->check(names_of<InvalidText>());
    command->add_option("--null", common.null, "rows whose text is null")
        ->check(names_of<NullText>());
    command->add_option("--format", common.format, "of the files; auto: by their names")
        ->check(names_of<FileFormat>());
  };
  const auto add_tokenizer = [&](CLI::App* command) {
    command
        ->add_option("--tokenizer", common.tokenizer,
                     "tokenizer.json, a directory with one, vocab.bpe, *.tiktoken, or byte")
        ->required();
    command->add_option("--pattern", common.pattern, "of .tiktoken: as in train");
  };
  const auto add_threads = [&](CLI::App* command) {
    command->add_option("--threads", common.threads, "that encode")->check(in_range<int>(1, 1024));
  };
  CLI::App* trains = add("train", "Learns a byte-level BPE.", kTexts, true);
  trains->add_option("--out", directory, "directory of tokenizer.json and tokenizer_config.json")
      ->required();
  trains->add_option("--vocab", training.vocab_size, "ids, with 256 bytes and special tokens")
      ->check(in_range<int64_t>(256, 1 << 20));
  trains->add_option(
      "--pattern", common.pattern,
      "what cuts words: gpt2, gpt4 (llama3, cl100k), qwen2, gpt4o (o200k), tekken, or "
      "a regular expression");
  trains->add_option("--special", training.special_tokens, "special tokens, the first ids");
  trains->add_option("--min-frequency", training.min_frequency, "of a pair that is merged")
      ->check(in_range<int64_t>(0));
  add_documents(trains);
  CLI::App* encodes =
      add("encode", "Writes token shards; again, it goes on where it ended.", kTexts, true);
  add_tokenizer(encodes);
  add_documents(encodes);
  add_threads(encodes);
  encodes->add_option("--out", encoding.out, "directory of the shards")->required();
  encodes->add_option("--shard-tokens", encoding.shard_tokens, "of one file")
      ->check(in_range<int64_t>(1, 2'000'000'000));
  encodes->add_option("--bits", encoding.bits, "of a token, 16 or 32; 0: 16 if all ids fit")
      ->check(CLI::IsMember({0, 16, 32}));
  encodes->add_option("--separator", common.separator,
                      "token behind each document; auto: <|endoftext|> or the like; none");
  encodes->add_flag("--add-special-tokens", common.special, "as the tokenizer's template says");
  CLI::App* ids = add("ids", "Prints the ids of each document in a line.", kTexts, true);
  add_tokenizer(ids);
  add_documents(ids);
  ids->add_flag("--add-special-tokens", common.special, "as the tokenizer's template says");
  CLI::App* decodes = add("decode", "Prints the text of token shards.", "shards (.bin)", true);
  add_tokenizer(decodes);
  decodes->add_flag("--skip-special-tokens", common.special, "leave special tokens out");
  CLI::App* inspects =
      add("inspect", "Prints what a tokenizer is, and how it does on texts.", kTexts, false);
  add_tokenizer(inspects);
  add_documents(inspects);
  CLI::App* shows = add("show", "Prints conversations: what of them is learned, and what is not.",
                        "JSON lines (.jsonl) or .parquet, a conversation each row", true);
  add_tokenizer(shows);
  shows->add_option("--template", template_path,
                    "a chat template, or a directory with one; else that of the tokenizer");
  shows->add_option("--train-on", train_on, "what is learned")->check(names_of<text::TrainOn>());
  shows->add_option("--shape", shape, "of the rows; auto: by their keys")
      ->check(names_of<text::ChatShape>());
  shows->add_option("--context", showing.context, "tokens that a model sees; 0: any number")
      ->check(in_range<int64_t>(0));
  shows->add_option("--count", showing.count, "conversations; 0: all")->check(in_range<int64_t>(0));
  shows->add_option("--format", common.format, "of the files; auto: by their names")
      ->check(names_of<FileFormat>());
  CLI::App* benches = add("bench", "Measures how fast texts are encoded.", "plain texts", true);
  add_tokenizer(benches);
  add_threads(benches);
  benches->add_option("--warm-up", warm_up, "a text that is encoded before");
  if (const auto status = app.read(arguments, out)) return *status;
  if (trains->parsed()) train(common, std::move(training), directory, out);
  if (encodes->parsed()) encode(common, std::move(encoding), out);
  if (ids->parsed()) print_ids(common, out);
  if (decodes->parsed()) decode(common, out);
  if (inspects->parsed()) inspect(common, out);
  if (shows->parsed()) {
    chats.train_on = named<text::TrainOn>(train_on);
    chats.shape = named<text::ChatShape>(shape);
    show(common, template_path, chats, showing, out);
  }
  if (benches->parsed()) bench(common, warm_up, out);
  return 0;
}

}  // namespace tessera::apps
