#include "apps/token_cache.h"

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "apps/chats.h"
#include "apps/data/byte_stream.h"
#include "apps/encode_documents.h"
#include "apps/token_check.h"
#include "core/check.h"
#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/formats/strict_json.h"
#include "core/log.h"
#include "core/runtime/cpu/affinity.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kVersion = "tessera token cache 2";
constexpr const char *kTokens = "tokens.bin", *kEnds = "ends.bin", *kTargets = "targets.bin",
                     *kRecord = "cache.json";

std::string hex(XXH128_hash_t hash) {
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

class Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_128bits_reset(state_); }
  ~Hash() { XXH3_freeState(state_); }
  Hash(const Hash&) = delete;
  Hash& operator=(const Hash&) = delete;
  void add(const void* data, size_t nbytes) { XXH3_128bits_update(state_, data, nbytes); }
  /// With its end.
  void add(const std::string& text) { add(text.c_str(), text.size() + 1); }
  std::string digest() const { return hex(XXH3_128bits_digest(state_)); }

 private:
  XXH3_state_t* state_;
};

/// cache.json.
struct Record {
  struct File {
    std::string path, identity, hash;
  };
  std::string key, tokens_hash, ends_hash, targets_hash;  // the last empty without any
  int64_t bytes_per_token = 0, num_tokens = 0, num_documents = 0;
  std::vector<File> files;
};

json to_json(const Record& r) {
  json files = json::array();
  for (const Record::File& file : r.files) files.push_back({file.path, file.identity, file.hash});
  return {{"format", kVersion},
          {"key", r.key},
          {"bytes_per_token", r.bytes_per_token},
          {"tokens", r.num_tokens},
          {"documents", r.num_documents},
          {"tokens_hash", r.tokens_hash},
          {"ends_hash", r.ends_hash},
          {"targets_hash", r.targets_hash},
          {"files", std::move(files)}};
}

/// InputError for what no cache has written.
Record read_record(const std::string& entry) {
  constexpr int64_t kMaxNbytes = int64_t{256} << 20;
  const std::string path = entry + "/" + kRecord;
  const json all =
      parse_strict_json(path, read_regular_file(path, kMaxNbytes),
                        JsonRules{.max_depth = 4, .num_free_elements = 1 << 20}, "a token cache");
  const auto text = [&](const json& value) {
    if (!value.is_string()) throw InputError(path + ": damaged, expected a token cache");
    return value.get<std::string>();
  };
  const auto member = [&](const char* name) {
    return all.is_object() && all.contains(name) ? all[name] : json();
  };
  if (text(member("format")) != kVersion) {
    throw InputError(path + ": of another version, expected " + std::string(kVersion));
  }
  Record record;
  record.key = text(member("key"));
  record.tokens_hash = text(member("tokens_hash"));
  record.ends_hash = text(member("ends_hash"));
  record.targets_hash = text(member("targets_hash"));
  record.bytes_per_token = json_size(member("bytes_per_token"));
  record.num_tokens = json_size(member("tokens"));
  record.num_documents = json_size(member("documents"));
  for (const json& file : member("files")) {
    if (!file.is_array() || file.size() != 3) continue;
    record.files.push_back({text(file[0]), text(file[1]), text(file[2])});
  }
  return record;
}

struct Entry {
  std::shared_ptr<const MappedFile> tokens, ends, targets;
  Record record;
};

/// InputError if it is not whole by its sizes.
Entry open_entry(const std::string& path) {
  Entry entry;
  entry.record = read_record(path);
  const Record& r = entry.record;
  entry.tokens = std::make_shared<MappedFile>(path + "/" + kTokens);
  entry.ends = std::make_shared<MappedFile>(path + "/" + kEnds);
  const int64_t width = r.bytes_per_token;
  const bool is_width = width == 1 || width == 2 || width == 4;
  if (!is_width || r.num_tokens < 1 || r.num_documents < 1 ||
      entry.tokens->nbytes() / width != r.num_tokens || entry.tokens->nbytes() % width != 0 ||
      entry.ends->nbytes() / 8 != r.num_documents || entry.ends->nbytes() % 8 != 0) {
    throw InputError(fmt::format(
        "{}: {} bytes of {} tokens and {} of the ends of {} documents, expected a whole cache",
        path, entry.tokens->nbytes(), r.num_tokens, entry.ends->nbytes(), r.num_documents));
  }
  if (r.targets_hash.empty()) return entry;
  entry.targets = std::make_shared<MappedFile>(path + "/" + kTargets);
  if (entry.targets->nbytes() != r.num_tokens) {
    throw InputError(fmt::format("{}: {} targets of {} tokens, expected a whole cache", path,
                                 entry.targets->nbytes(), r.num_tokens));
  }
  return entry;
}

std::string hash_of(const MappedFile& file, const std::function<void(int64_t)>& on_block = {}) {
  constexpr int64_t kBlock = 64 << 20;
  Hash hash;
  for (int64_t at = 0; at < file.nbytes(); at += kBlock) {
    hash.add(file.data() + at, static_cast<size_t>(std::min(kBlock, file.nbytes() - at)));
    if (on_block) on_block(at);
  }
  file.check();
  return hash.digest();
}

/// Whole, to the last byte.
bool is_whole(const std::string& path, const std::string& key) {
  std::error_code ignored;
  if (!fs::exists(path + "/" + kRecord, ignored)) return false;
  try {
    const Entry entry = open_entry(path);
    if (entry.record.key == key && hash_of(*entry.tokens) == entry.record.tokens_hash &&
        hash_of(*entry.ends) == entry.record.ends_hash &&
        (entry.targets == nullptr || hash_of(*entry.targets) == entry.record.targets_hash)) {
      return true;
    }
    log_warning("{}: not what was written there: made anew", path);
  } catch (const InputError& error) {
    log_warning("{}: made anew", error.what());
  }
  return false;
}

/// The folders in `directory` that have the name of a key.
std::vector<std::string> entries_in(const std::string& directory) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code ignored;
    const bool is_folder = it->symlink_status(ignored).type() == fs::file_type::directory;
    if (is_folder && name.size() == 32 &&
        name.find_first_not_of("0123456789abcdef") == std::string::npos) {
      paths.push_back(it->path().string());
    }
  }
  return paths;
}

/// Hashes of files as caches that are there say, by path and identity.
std::map<std::string, std::string> known_hashes(const std::string& directory) {
  std::map<std::string, std::string> known;
  for (const std::string& path : entries_in(directory)) {
    try {
      for (const Record::File& file : read_record(path).files) {
        known[file.path + "\n" + file.identity] = file.hash;
      }
    } catch (const InputError&) {
      // Not whole: it says nothing.
    }
  }
  return known;
}

std::string identity_or_throw(const std::string& path) {
  const auto identity = identity_of(path);
  if (!identity) throw InputError(path + ": cannot be found any more, expected a file");
  return *identity;
}

std::vector<Record::File> hash_files(const std::vector<std::string>& paths,
                                     const TokenCacheOptions& options) {
  const auto known = known_hashes(options.directory);
  std::vector<Record::File> files;
  for (const std::string& path : paths) {
    Record::File file{fs::absolute(path).lexically_normal().string(), identity_or_throw(path), ""};
    const auto found = known.find(file.path + "\n" + file.identity);
    if (found != known.end()) {
      file.hash = found->second;
    } else {
      const MappedFile bytes(path);
      file.hash = hash_of(bytes, [&](int64_t at) {
        if (options.progress) options.progress(at, 0);
      });
    }
    files.push_back(std::move(file));
  }
  return files;
}

void add_files(Hash& hash, const std::vector<std::string>& paths,
               const std::vector<Record::File>& files, FileFormat read_as) {
  for (size_t i = 0; i < files.size(); ++i) {
    // What the name says of the format; what it is called and where it lies does not matter.
    const FileFormat format = read_as == FileFormat::kAuto ? format_of_name(paths[i]) : read_as;
    hash.add(fmt::format("{} {} {}", static_cast<int>(format),
                         static_cast<int>(compression_of_name(paths[i])), files[i].hash));
  }
}

std::string key_of(const text::Tokenizer& tokenizer, const TextSource& source,
                   const std::vector<Record::File>& files) {
  Hash hash;
  hash.add(std::string(kVersion));
  hash.add(tokenizer.to_json());
  const DocumentOptions& d = source.documents;
  hash.add(fmt::format("{} {} {} {}", static_cast<int>(d.invalid), static_cast<int>(d.null),
                       static_cast<int>(d.format), d.field));
  add_files(hash, source.paths, files, d.format);
  return hash.digest();
}

/// A file of numbers, in blocks.
class NumbersFile {
 public:
  explicit NumbersFile(const std::string& path) : file_(path, 0) {}
  template <class T>
  void add(const std::vector<T>& values) {
    const auto* const bytes = reinterpret_cast<const char*>(values.data());
    block_.append(bytes, values.size() * sizeof(T));
    if (block_.size() >= kBlockNbytes) write();
  }
  /// The hash of all.
  std::string commit() {
    write();
    file_.commit();
    return hash_.digest();
  }

 private:
  static constexpr size_t kBlockNbytes = 8 << 20;
  void write() {
    hash_.add(block_.data(), block_.size());
    file_.write(block_.data(), static_cast<int64_t>(block_.size()));
    block_.clear();
  }
  DurableFile file_;
  Hash hash_;
  std::string block_;
};

/// What is in an entry, while it is written.
class EntryFiles {
 public:
  EntryFiles(const std::string& entry, Record& record, bool has_targets)
      : record_(record), tokens_(entry + "/" + kTokens), ends_(entry + "/" + kEnds) {
    if (has_targets) targets_.emplace(entry + "/" + kTargets);
  }
  void add(const std::vector<int32_t>& ids) {
    const auto write = [&]<class T>(T) { tokens_.add(std::vector<T>(ids.begin(), ids.end())); };
    if (record_.bytes_per_token == 1) {
      write(uint8_t{});
    } else if (record_.bytes_per_token == 2) {
      write(uint16_t{});
    } else {
      write(uint32_t{});
    }
    record_.num_tokens += std::ssize(ids);
  }
  void add_targets(const std::vector<uint8_t>& is_target) { targets_->add(is_target); }
  /// Of a document, which is none without a token.
  void end() {
    if (record_.num_tokens == last_end_) return;
    last_end_ = record_.num_tokens;
    ends_.add(std::vector<int64_t>{last_end_});
    ++record_.num_documents;
  }
  void commit() {
    record_.tokens_hash = tokens_.commit();
    record_.ends_hash = ends_.commit();
    if (targets_) record_.targets_hash = targets_->commit();
  }

 private:
  Record& record_;
  NumbersFile tokens_, ends_;
  std::optional<NumbersFile> targets_;
  int64_t last_end_ = 0;
};

/// The entry of a key: as it is there, or made by `encode`.
std::string make_entry(const std::string& key, std::vector<Record::File> files, int64_t vocab_size,
                       const std::vector<std::string>& paths, const TokenCacheOptions& options,
                       bool has_targets, const std::string& none,
                       const std::function<void(EntryFiles&)>& encode) {
  const std::string entry = options.directory + "/" + key;
  if (is_whole(entry, key)) return entry;
  Record record;
  record.key = key;
  record.files = std::move(files);
  record.bytes_per_token = vocab_size <= 256 ? 1 : vocab_size <= 65536 ? 2 : 4;
  make_directory_durably(entry);
  std::error_code ignored;
  fs::remove(entry + "/" + kRecord, ignored);  // of one that is damaged
  EntryFiles written(entry, record, has_targets);
  encode(written);
  if (record.num_tokens == 0) throw InputError(none);
  for (size_t i = 0; i < paths.size(); ++i) {
    if (identity_of(paths[i]) == record.files[i].identity) continue;
    throw InputError(
        fmt::format("{}: has changed while it was read, expected a file that stays", paths[i]));
  }
  written.commit();
  // A name may have any bytes.
  write_durably(entry + "/" + kRecord,
                to_json(record).dump(1, ' ', false, json::error_handler_t::replace) + "\n");
  return entry;
}

/// Runs `body` on the first rank in a thread while all ranks ask each other whether it is through,
/// so that no exchange takes long, whatever the body does. Its error is that of all.
void run_on_first_rank(dist::World& world,
                       const std::function<void(const std::atomic<bool>& is_to_end)>& body) {
  struct Worker {
    std::atomic<bool> is_done = false, is_to_end = false;
    std::exception_ptr error;
    std::thread thread;
    ~Worker() {
      is_to_end = true;
      if (thread.joinable()) thread.join();
    }
  } worker;
  if (world.rank() == 0) {
    worker.thread = std::thread([&] {
      try {
        body(worker.is_to_end);
      } catch (...) {
        worker.error = std::current_exception();
      }
      worker.is_done = true;
    });
  }
  std::chrono::milliseconds period{1};
  while (world.control().max(world.rank() == 0 && !worker.is_done ? 1 : 0) != 0) {
    std::this_thread::sleep_for(period);
    period = std::min(period * 2, std::chrono::milliseconds(100));
  }
  if (worker.thread.joinable()) worker.thread.join();
  world.control().verdict([&] {
    if (worker.error) std::rethrow_exception(worker.error);
  });
}

}  // namespace

std::string make_token_cache(const text::Tokenizer& tokenizer, const TextSource& source,
                             const TokenCacheOptions& options) {
  std::vector<Record::File> files = hash_files(source.paths, options);
  const std::string key = key_of(tokenizer, source, files);
  const std::string none =
      fmt::format("{}: no token in {} files, expected a text", source.name, source.paths.size());
  return make_entry(key, std::move(files), tokenizer.vocab_size(), source.paths, options,
                    /*has_targets=*/false, none, [&](EntryFiles& written) {
                      DocumentReader reader(source.paths, source.documents);
                      DocumentEncoder encoder(tokenizer, reader, {.threads = options.threads});
                      while (const auto batch = encoder.next()) {
                        for (size_t i = 0; i < batch->parts.size(); ++i) {
                          written.add(batch->ids[i]);
                          if (batch->parts[i].is_last) written.end();
                        }
                        if (options.progress) options.progress(batch->bytes_read, reader.nbytes());
                      }
                    });
}

std::string make_chat_cache(std::shared_ptr<const text::Tokenizer> tokenizer,
                            const ChatSource& source, const TokenCacheOptions& options) {
  std::vector<Record::File> files = hash_files(source.paths, options);
  Hash hash;
  hash.add(std::string(kVersion) + " of conversations");
  hash.add(tokenizer->to_json());
  hash.add(source.chat_template->identity());
  hash.add(std::string(name_of(source.train_on)));
  add_files(hash, source.paths, files, FileFormat::kAuto);
  const std::string none =
      fmt::format("data.chat = {}: no token in {} files, expected a conversation", source.name,
                  source.paths.size());
  return make_entry(hash.digest(), std::move(files), tokenizer->vocab_size(), source.paths, options,
                    /*has_targets=*/true, none, [&](EntryFiles& written) {
                      ChatReader reader(source.paths, source.chat_template, tokenizer,
                                        {.train_on = source.train_on, .threads = options.threads});
                      Chat chat;
                      while (reader.next(chat)) {
                        written.add(chat.tokens.ids);
                        written.add_targets(chat.tokens.is_trained);
                        written.end();
                        if (options.progress) {
                          options.progress(reader.documents().nbytes_read(),
                                           reader.documents().nbytes());
                        }
                      }
                    });
}

TokenDocuments open_token_cache(const std::string& entry, double wait_seconds) {
  const auto end = Clock::now() + std::chrono::duration<double>(wait_seconds);
  std::error_code ignored;
  while (!fs::exists(entry + "/" + kRecord, ignored) && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (!fs::exists(entry + "/" + kRecord, ignored)) {
    throw InputError(fmt::format(
        "{}: not there, although the first rank has made it, expected output.dir on a file system "
        "that all nodes share",
        entry));
  }
  const Entry found = open_entry(entry);
  const Record& r = found.record;
  TokenDocuments documents;
  documents.tokens =
      TokenArray(found.tokens, found.tokens->data(), static_cast<int>(r.bytes_per_token),
                 r.num_tokens, found.tokens->path());
  documents.ends.resize(static_cast<size_t>(r.num_documents));
  std::memcpy(documents.ends.data(), found.ends->data(), documents.ends.size() * sizeof(int64_t));
  found.ends->check();
  if (found.targets != nullptr) {
    documents.is_target =
        TokenArray(found.targets, found.targets->data(), 1, r.num_tokens, found.targets->path());
  }
  documents.begins.reserve(documents.ends.size());
  int64_t before = 0;
  for (const int64_t next : documents.ends) {
    if (next <= before || next > r.num_tokens) {
      throw InputError(
          fmt::format("{}: a document ends at token {} behind {} of {}, expected ends "
                      "that rise",
                      found.ends->path(), next, before, r.num_tokens));
    }
    documents.begins.push_back(before);
    before = next;
  }
  return documents;
}

std::vector<std::string> make_token_caches(const Texts& texts, const std::string& directory,
                                           dist::World& world) {
  std::vector<std::string> entries;
  run_on_first_rank(world, [&](const std::atomic<bool>& is_to_end) {
    constexpr std::chrono::seconds kPeriod{10};
    const auto options_of = [&](const std::string& name) {
      TokenCacheOptions options{.directory = directory, .threads = num_usable_processors()};
      options.progress = [&is_to_end, kPeriod, name, last = Clock::now()](int64_t done,
                                                                          int64_t total) mutable {
        if (is_to_end) throw IoError("token cache: ended with another rank");
        if (total == 0 || Clock::now() - last < kPeriod) return;
        last = Clock::now();
        log_info("tokens of {}: {:.0f} %", name,
                 100.0 * static_cast<double>(done) / static_cast<double>(total));
      };
      return options;
    };
    for (const TextSource& source : texts.sources) {
      entries.push_back(make_token_cache(*texts.tokenizer, source, options_of(source.name)));
    }
    if (texts.chats != nullptr) {
      entries.push_back(
          make_chat_cache(texts.tokenizer, *texts.chats, options_of(texts.chats->name)));
    }
  });
  std::string all;
  for (const std::string& entry : entries) all += entry + "\n";
  all = world.control().broadcast(all, 0);
  entries.clear();
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = all.find('\n', begin);
    entries.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  return entries;
}

void remove_other_token_caches(const std::string& directory, const std::vector<std::string>& used) {
  for (const std::string& path : entries_in(directory)) {
    if (std::find(used.begin(), used.end(), path) != used.end()) continue;
    std::error_code ignored;
    for (const std::string name : {kRecord, kTokens, kEnds, kTargets}) {
      fs::remove(path + "/" + name, ignored);
      fs::remove(path + "/" + name + ".tmp", ignored);
    }
    fs::remove(path, ignored);  // if nothing else is in it
  }
}

}  // namespace tessera::apps
