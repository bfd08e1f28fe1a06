#include "apps/encode_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/encode_documents.h"
#include "apps/text/shards.h"
#include "core/check.h"
#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/formats/strict_json.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kStateFile = "tokenize.json";

/// Where in documents a shard ends: in one of them, behind so many of its tokens.
struct Progress {
  DocumentPosition position;
  int64_t num_tokens_of_document = 0;
  int64_t num_documents = 0, num_tokens = 0, num_shards = 0, num_text_bytes = 0;
  bool is_finished = false;
};

json settings_of(const std::vector<std::string>& paths, const EncodeFilesOptions& options,
                 int bits) {
  json files = json::array();
  for (const std::string& path : paths) {
    std::error_code ignored;
    files.push_back({path, fs::file_size(path, ignored)});
  }
  return {{"tokenizer", options.tokenizer_id},
          {"files", files},
          {"shard_tokens", options.shard_tokens},
          {"bits", bits},
          {"separator", options.separator},
          {"add_special_tokens", options.add_special_tokens},
          {"field", options.documents.field},
          {"invalid", static_cast<int>(options.documents.invalid)},
          {"null", static_cast<int>(options.documents.null)},
          {"format", static_cast<int>(options.documents.format)}};
}

json to_json(const Progress& p) {
  return {{"file", p.position.file},      {"row", p.position.row},
          {"byte", p.position.byte},      {"tokens_of_document", p.num_tokens_of_document},
          {"documents", p.num_documents}, {"tokens", p.num_tokens},
          {"shards", p.num_shards},       {"text_bytes", p.num_text_bytes},
          {"finished", p.is_finished}};
}

/// What an earlier run has completed; nothing if there was none.
Progress read_progress(const std::string& directory, const json& settings) {
  const std::string path = directory + "/" + std::string(kStateFile);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    if (fs::exists(text::ShardWriter::path_of(directory, 0), ignored)) {
      throw ConfigError(fmt::format("{}: has shards but no {}, expected an empty directory",
                                    directory, kStateFile));
    }
    return {};
  }
  const json state = parse_strict_json(path, read_regular_file(path, 64 << 20),
                                       JsonRules{.max_depth = 6, .num_free_elements = 1 << 20},
                                       "what tessera-tokenize wrote");
  const auto member = [&](const json& object, const char* key) {
    const json found = object.is_object() && object.contains(key) ? object[key] : json();
    return found;
  };
  if (member(state, "settings") != settings) {
    throw ConfigError(
        fmt::format("{}: of other files, another tokenizer or other settings, expected "
                    "the same or another output directory",
                    path));
  }
  const json done = member(state, "done");
  const auto number = [&](const char* key) {
    const int64_t value = json_size(member(done, key));
    if (value < 0) {
      throw InputError(fmt::format("{}: done.{} = {}, expected a number", path, key,
                                   json_text(member(done, key))));
    }
    return value;
  };
  Progress p{{number("file"), number("row"), number("byte")}};
  p.num_tokens_of_document = number("tokens_of_document");
  p.num_documents = number("documents");
  p.num_tokens = number("tokens");
  p.num_shards = number("shards");
  p.num_text_bytes = number("text_bytes");
  p.is_finished = member(done, "finished") == true;
  return p;
}

int bits_for(const text::Tokenizer& tokenizer, const EncodeFilesOptions& options) {
  const int64_t num_ids = std::max(tokenizer.vocab_size(), options.separator + 1);
  const int bits = options.bits != 0 ? options.bits : num_ids <= 65536 ? 16 : 32;
  if (bits == 16 && num_ids > 65536) {
    throw ConfigError(
        fmt::format("tokenize: {} ids in 16 bits, expected at most 65536 or 32 bits", num_ids));
  }
  return bits;
}

}  // namespace

EncodeFilesResult encode_files(const text::Tokenizer& tokenizer, std::vector<std::string> paths,
                               const EncodeFilesOptions& options,
                               const std::function<void(int64_t, int64_t)>& progress) {
  const int bits = bits_for(tokenizer, options);
  make_directory_durably(options.out);
  const json settings = settings_of(paths, options, bits);
  Progress done = read_progress(options.out, settings);
  EncodeFilesResult result;
  result.is_resumed = done.num_shards > 0;
  DocumentReader reader(std::move(paths), options.documents);
  Progress now = done;
  const auto save = [&] {
    const json state = {{"settings", settings}, {"done", to_json(now)}};
    write_durably(options.out + "/" + std::string(kStateFile), state.dump(1) + "\n");
  };
  if (!done.is_finished) {
    if (done.num_shards > 0) reader.seek(done.position);
    text::ShardWriter writer(options.out, bits, options.shard_tokens, done.num_shards);
    int64_t to_skip = done.num_tokens_of_document;  // of the first document: they are written
    now.num_tokens_of_document = 0;
    DocumentEncoder encoder(tokenizer, reader,
                            {.threads = options.threads,
                             .separator = options.separator,
                             .add_special_tokens = options.add_special_tokens});
    while (const auto batch = encoder.next()) {
      for (size_t i = 0; i < batch->parts.size(); ++i) {
        const EncodedDocuments::Part& part = batch->parts[i];
        const std::vector<int32_t>& ids = batch->ids[i];
        const auto count = static_cast<int64_t>(ids.size());
        now.position = part.document.position;
        for (int64_t at = 0; at < count;) {
          if (to_skip > 0) {
            const int64_t skipped = std::min(to_skip, count - at);
            to_skip -= skipped;
            at += skipped;
            now.num_tokens_of_document += skipped;
            continue;
          }
          const int64_t added = writer.add(ids.data() + at, count - at);
          at += added;
          now.num_tokens += added;
          now.num_tokens_of_document += added;
          if (writer.num_complete() == now.num_shards) continue;
          now.num_shards = writer.num_complete();
          save();
        }
        if (!part.is_last) continue;
        ++now.num_documents;
        now.num_text_bytes += static_cast<int64_t>(part.document.text.size());
        now.num_tokens_of_document = 0;
      }
      if (progress) progress(batch->bytes_read, reader.nbytes());
    }
    writer.finish();
    now.num_shards = writer.num_complete();
    now.is_finished = true;
    save();
  }
  result.num_documents = now.num_documents;
  result.num_tokens = now.num_tokens;
  result.num_shards = now.num_shards;
  result.num_text_bytes = now.num_text_bytes;
  return result;
}

}  // namespace tessera::apps
