#include "dist/checkpoint/hf_files.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "core/formats/strict_json.h"
#include "core/log.h"
#include "core/text.h"

namespace tessera::dist {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr size_t kMaxNameNbytes = 4096;  // each part of a wrapper moves what is after it

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Names of files that an index gives, each once.
std::vector<std::string> files_of_index(const std::string& path) {
  const MappedFile file(path);
  const json index = parse_strict_json(path, file.text(), 8, "an index of tensors");
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) {
    throw InputError(fmt::format("{}: no weight_map, expected an object of tensor: file", path));
  }
  std::set<std::string> names;
  for (const auto& [tensor, name] : map->items()) {
    const std::string text = name.is_string() ? name.get<std::string>() : "";
    const bool is_plain = !text.empty() && text.find('/') == std::string::npos &&
                          text.find('\\') == std::string::npos &&
                          text.find('\0') == std::string::npos && text != "." && text != "..";
    if (!is_plain) {
      throw InputError(fmt::format("{}: tensor {} is in {}, expected the name of a file beside it",
                                   path, shorten(tensor), json_text(name)));
    }
    names.insert(text);
  }
  return {names.begin(), names.end()};
}

bool is_index_of_single(const std::string& dir) {
  try {
    return files_of_index(dir + "/" + HfFiles::kIndexName) ==
           std::vector<std::string>{HfFiles::kSingleName};
  } catch (const InputError&) {
    return false;  // damaged, but not what is read
  }
}

/// Where links of the directory may lead: a snapshot in the cache of Hugging Face
/// (models--org--name/snapshots/REVISION) links to blobs/ of its repository.
fs::path repository_of(const std::string& dir) {
  std::error_code error;
  const fs::path real = fs::canonical(dir, error);
  if (error) return dir;
  const fs::path snapshots = real.parent_path();
  const bool is_cached = snapshots.filename() == "snapshots" &&
                         fs::is_directory(snapshots.parent_path() / "blobs", error);
  return is_cached ? snapshots.parent_path() : real;
}

/// A name in an index is somebody else's: it may not lead out of the repository.
void check_link(const std::string& dir, const std::string& name) {
  const std::string path = dir + "/" + name;
  std::error_code error;
  if (!fs::is_symlink(path, error)) return;
  const fs::path target = fs::canonical(path, error), repository = repository_of(dir);
  if (error) return;  // opening it says what is wrong
  const auto [end, ignored] =
      std::mismatch(repository.begin(), repository.end(), target.begin(), target.end());
  if (end == repository.end()) return;
  throw InputError(fmt::format("{}: is a link to {}, expected a file in {}", path, target.string(),
                               repository.string()));
}

/// A cache whose file was cleaned away is another matter than a directory without a model.
void check_not_dangling(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error) || fs::exists(path, error)) return;
  const fs::path target = fs::read_symlink(path, error);
  throw InputError(fmt::format("{}: is a link to {}, which is not there, expected the file", path,
                               shorten(target.string())));
}

/// The name without the parts that wrappers of modules put in; adds those to `wrappers`.
std::string unwrapped(std::string_view name, std::set<std::string, std::less<>>& wrappers) {
  constexpr std::string_view kLeading[] = {"module.", "base_model.model."};
  constexpr std::string_view kAnywhere[] = {"_orig_mod.", "_fsdp_wrapped_module.",
                                            "_checkpoint_wrapped_module.", "_forward_module."};
  std::string rest(name);
  for (const std::string_view part : kAnywhere) {
    for (size_t at = 0; (at = rest.find(part, at)) != std::string::npos;) {
      if (at > 0 && rest[at - 1] != '.') {
        ++at;
        continue;
      }
      rest.erase(at, part.size());
      wrappers.emplace(part);
    }
  }
  for (bool found = true; found;) {
    found = false;
    for (const std::string_view part : kLeading) {
      if (!rest.starts_with(part)) continue;
      rest.erase(0, part.size());
      wrappers.emplace(part);
      found = true;
    }
  }
  return rest;
}

/// What transformers once called the parameters of a LayerNorm, and still reads.
void rename_norm(std::string& name) {
  for (const auto& [old, now] :
       {std::pair<std::string_view, std::string_view>{"LayerNorm.gamma", "LayerNorm.weight"},
        {"LayerNorm.beta", "LayerNorm.bias"}}) {
    if (name.ends_with(old)) name.replace(name.size() - old.size(), old.size(), now);
  }
}

bool is_of_adapter(std::string_view name) {
  for (const std::string_view part : {".lora_A.", ".lora_B.", ".lora_embedding_", ".base_layer."}) {
    if (name.find(part) != std::string_view::npos) return true;
  }
  return false;
}

bool same_values(const HfFiles::Place& a, const HfFiles::Place& b) {
  const SafetensorsEntry &x = *a.entry, &y = *b.entry;
  const bool are_same =
      x.dtype == y.dtype && x.shape == y.shape &&
      std::memcmp(a.file->data(x), b.file->data(y), static_cast<size_t>(x.nbytes())) == 0;
  a.file->check();
  b.file->check();
  return are_same;
}

}  // namespace

bool HfFiles::exist_in(const std::string& dir) {
  return exists(dir + "/" + kSingleName) || exists(dir + "/" + kIndexName);
}

HfFiles::HfFiles(const std::string& dir, const nn::FamilyConfig& config)
    : dir_(dir), names_(config.hf_layout()), is_classifier_(config.classifier() != nullptr) {
  if (!exist_in(dir)) {
    for (const char* name : {kSingleName, kIndexName}) check_not_dangling(dir + "/" + name);
    const bool has_pickle = exists(dir + "/pytorch_model.bin");
    const bool has_adapter = exists(dir + "/adapter_model.safetensors");
    throw InputError(fmt::format(
        "{}: no {} and no {}{}", dir_, kSingleName, kIndexName,
        has_pickle    ? " (pytorch_model.bin is a Python pickle, which is not read; save it with "
                        "safe_serialization=True)"
        : has_adapter ? " (it has a PEFT adapter; merge it into its model with merge_and_unload)"
                      : ""));
  }
  if (exists(dir + "/" + kSingleName)) {
    add_file(kSingleName);
    if (exists(dir + "/" + kIndexName) && !is_index_of_single(dir)) {
      log_once(
          "warning",
          fmt::format("{}: has {}, which is read as transformers does, and {}, whose files are "
                      "not: if those are the newer ones, move the first away",
                      dir, kSingleName, kIndexName));
    }
    return;
  }
  for (const std::string& name : files_of_index(dir + "/" + kIndexName)) {
    check_link(dir, name);
    add_file(name);
  }
}

void HfFiles::add_file(const std::string& name) {
  files_.push_back(std::make_unique<SafetensorsFile>(dir_ + "/" + name));
  const SafetensorsFile& file = *files_.back();
  std::set<std::string, std::less<>> wrappers;
  for (const SafetensorsEntry& entry : file.entries()) {
    if (entry.name.size() > kMaxNameNbytes) {
      throw InputError(fmt::format("{}/{}: tensor {} has a name of {} bytes, expected at most {}",
                                   dir_, name, shorten(entry.name), entry.name.size(),
                                   kMaxNameNbytes));
    }
    if (is_of_adapter(entry.name)) {
      throw InputError(fmt::format(
          "{}/{}: tensor {} is part of a PEFT adapter, expected it merged into the model "
          "(merge_and_unload)",
          dir_, name, shorten(entry.name)));
    }
    std::string full = unwrapped(entry.name, wrappers);
    // Models saved without their head lack the prefix.
    const bool is_named = full.starts_with(names_.prefix) || full.starts_with(names_.head_prefix) ||
                          (is_classifier_ && full.starts_with(names_.score_prefix));
    if (!is_named) {
      full = std::string(names_.prefix) + full;
    }
    rename_norm(full);
    if (!tensors_.emplace(full, Place{&file, &entry}).second) {
      throw InputError(
          fmt::format("{}/{}: tensor {} comes twice", dir_, name, shorten(entry.name)));
    }
  }
  if (wrappers.empty()) return;
  log_once("info", fmt::format("{}: names of tensors are read without {} of a wrapped module", dir_,
                               join_few(wrappers)));
}

void HfFiles::settle_tied(nn::FamilyConfig& config) {
  if (!config.is_tied()) return;
  const std::string embedding(names_.embedding);
  const auto head = tensors_.find(names_.head), embed = tensors_.find(embedding);
  if (head == tensors_.end()) return;
  if (embed == tensors_.end()) {
    tensors_.emplace(embedding, head->second);
    log_once("info",
             fmt::format("{}: has no {}; tied to it, {} is both", dir_, embedding, names_.head));
    return;
  }
  if (same_values(head->second, embed->second)) return;
  config.set_tied(false);
  log_once("warning",
           fmt::format("{}: tie_word_embeddings is true, but {} is not {}: both are used, untied",
                       dir_, names_.head, embedding));
}

}  // namespace tessera::dist
