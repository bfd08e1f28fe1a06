#include "apps/token_cache.h"

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

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

constexpr std::string_view kVersion = "tessera token cache 1";
constexpr const char *kTokens = "tokens.bin", *kEnds = "ends.bin", *kRecord = "cache.json";

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
  std::string key, tokens_hash, ends_hash;
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
  std::shared_ptr<const MappedFile> tokens, ends;
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
        hash_of(*entry.ends) == entry.record.ends_hash) {
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

std::vector<Record::File> hash_files(const TextSource& source, const TokenCacheOptions& options) {
  const auto known = known_hashes(options.directory);
  std::vector<Record::File> files;
  for (const std::string& path : source.paths) {
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

std::string key_of(const text::Tokenizer& tokenizer, const TextSource& source,
                   const std::vector<Record::File>& files) {
  Hash hash;
  hash.add(std::string(kVersion));
  hash.add(tokenizer.to_json());
  const DocumentOptions& d = source.documents;
  hash.add(fmt::format("{} {} {} {}", static_cast<int>(d.invalid), static_cast<int>(d.null),
                       static_cast<int>(d.format), d.field));
  for (size_t i = 0; i < files.size(); ++i) {
    // What the name says of the format; what it is called and where it lies does not matter.
    const std::string& path = source.paths[i];
    const FileFormat format = d.format == FileFormat::kAuto ? format_of_name(path) : d.format;
    hash.add(fmt::format("{} {} {}", static_cast<int>(format),
                         static_cast<int>(compression_of_name(path)), files[i].hash));
  }
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

void encode_into(const std::string& entry, const text::Tokenizer& tokenizer,
                 const TextSource& source, const TokenCacheOptions& options, Record& record) {
  DocumentReader reader(source.paths, source.documents);
  NumbersFile tokens(entry + "/" + kTokens), ends(entry + "/" + kEnds);
  const auto add = [&]<class T>(T, const std::vector<int32_t>& ids) {
    tokens.add(std::vector<T>(ids.begin(), ids.end()));
  };
  int64_t last_end = 0;
  {
    DocumentEncoder encoder(tokenizer, reader, {.threads = options.threads});
    while (const auto batch = encoder.next()) {
      for (size_t i = 0; i < batch->parts.size(); ++i) {
        const std::vector<int32_t>& ids = batch->ids[i];
        if (record.bytes_per_token == 1) {
          add(uint8_t{}, ids);
        } else if (record.bytes_per_token == 2) {
          add(uint16_t{}, ids);
        } else {
          add(uint32_t{}, ids);
        }
        record.num_tokens += static_cast<int64_t>(ids.size());
        if (!batch->parts[i].is_last || record.num_tokens == last_end) continue;
        last_end = record.num_tokens;
        ends.add(std::vector<int64_t>{last_end});
        ++record.num_documents;
      }
      if (options.progress) options.progress(batch->bytes_read, reader.nbytes());
    }
  }
  if (record.num_tokens == 0) {
    throw InputError(
        fmt::format("{}: no token in {} files, expected a text", source.name, source.paths.size()));
  }
  for (size_t i = 0; i < source.paths.size(); ++i) {
    if (identity_of(source.paths[i]) == record.files[i].identity) continue;
    throw InputError(fmt::format("{}: has changed while it was read, expected a file that stays",
                                 source.paths[i]));
  }
  record.tokens_hash = tokens.commit();
  record.ends_hash = ends.commit();
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
  Record record;
  record.files = hash_files(source, options);
  record.key = key_of(tokenizer, source, record.files);
  const std::string entry = options.directory + "/" + record.key;
  if (is_whole(entry, record.key)) return entry;
  make_directory_durably(entry);
  std::error_code ignored;
  fs::remove(entry + "/" + kRecord, ignored);  // of one that is damaged
  const int64_t num_ids = tokenizer.vocab_size();
  record.bytes_per_token = num_ids <= 256 ? 1 : num_ids <= 65536 ? 2 : 4;
  encode_into(entry, tokenizer, source, options, record);
  // A name may have any bytes.
  write_durably(entry + "/" + kRecord,
                to_json(record).dump(1, ' ', false, json::error_handler_t::replace) + "\n");
  return entry;
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

bool needs_token_caches(const Config& config, dist::World& world) {
  bool needs_cache = false;
  world.control().verdict([&] {
    const std::vector<TextSource> sources = text_sources(config);
    needs_cache = !sources.empty() && needs_token_cache(sources, open_tokenizer(config).get());
  });
  return world.control().max(needs_cache ? 1 : 0) != 0;
}

std::vector<std::string> make_token_caches(const Config& config, dist::World& world) {
  const std::string directory = config.output.dir + "/token_cache";
  std::vector<std::string> entries;
  run_on_first_rank(world, [&](const std::atomic<bool>& is_to_end) {
    constexpr std::chrono::seconds kPeriod{10};
    const auto tokenizer = open_tokenizer(config);
    for (const TextSource& source : text_sources(config)) {
      auto last = Clock::now();
      TokenCacheOptions options{.directory = directory, .threads = num_usable_processors()};
      options.progress = [&](int64_t done, int64_t total) {
        if (is_to_end) throw IoError("token cache: ended with another rank");
        if (total == 0 || Clock::now() - last < kPeriod) return;
        last = Clock::now();
        log_info("tokens of {}: {:.0f} %", source.name,
                 100.0 * static_cast<double>(done) / static_cast<double>(total));
      };
      entries.push_back(make_token_cache(*tokenizer, source, options));
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

void remove_other_token_caches(const Config& config, const std::vector<std::string>& used) {
  for (const std::string& path : entries_in(config.output.dir + "/token_cache")) {
    if (std::find(used.begin(), used.end(), path) != used.end()) continue;
    std::error_code ignored;
    for (const std::string name : {kRecord, kTokens, kEnds}) {
      fs::remove(path + "/" + name, ignored);
      fs::remove(path + "/" + name + ".tmp", ignored);
    }
    fs::remove(path, ignored);  // if nothing else is in it
  }
}

}  // namespace tessera::apps
