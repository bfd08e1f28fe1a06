#include "dist/checkpoint/export_dir.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/check.h"
#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/formats/strict_json.h"
#include "core/log.h"
#include "dist/checkpoint/manifest.h"

namespace tessera::dist {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kExportFormat = "tessera export";
constexpr int64_t kMaxHashedNbytes = int64_t{64} << 20;  // weights are told by their size alone

/// The files of a directory that an export has made, as they are now: {name: {nbytes, xxh64}}.
json list_files(const std::string& dir) {
  json files = json::object();
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (name == kExportListName) continue;
    if (entry.symlink_status().type() != fs::file_type::regular) {
      files[name] = nullptr;
      continue;
    }
    const MappedFile file(entry.path().string());
    json& facts = files[name] = {{"nbytes", file.nbytes()}};
    if (file.nbytes() > kMaxHashedNbytes) continue;
    facts["xxh64"] = fmt::format("{:016x}", hash_of(file.data(), file.nbytes()));
    file.check();
  }
  return files;
}

/// What is in the way of an export to `dir`; empty: nothing.
std::string obstacle(const std::string& dir) {
  std::error_code error;
  const fs::file_status status = fs::status(dir, error);
  if (status.type() == fs::file_type::not_found) return "";
  if (status.type() != fs::file_type::directory) return "no directory";
  if (fs::is_empty(dir, error)) return "";
  json listed = json::object();
  const std::string path = dir + "/" + kExportListName;
  try {
    if (fs::exists(path, error)) {
      const MappedFile file(path);
      const json list = parse_strict_json(path, file.text(), 8, "the files of an export");
      if (list.is_object() && list.contains("files") && list["files"].is_object()) {
        listed = list["files"];
      }
    }
    const json found = list_files(dir);
    for (const auto& [name, facts] : found.items()) {
      if (!listed.contains(name)) return fmt::format("has {}, which no export has written", name);
      if (facts != listed[name]) return fmt::format("has {}, changed since its export", name);
    }
  } catch (const InputError& e) {
    return fmt::format("cannot be read ({})", e.what());
  }
  return "";
}

void check_target(const std::string& target) {
  const std::string found = obstacle(target);
  if (found.empty()) return;
  throw ConfigError(fmt::format(
      "{}: {}; expected none, an empty directory, or an earlier export, which is replaced whole",
      target, found));
}

/// Removes the files in a directory that is all ours, and it.
void remove_flat(const std::string& dir) {
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    if (it->symlink_status().type() == fs::file_type::regular) files.push_back(it->path());
  }
  for (const fs::path& file : files) fs::remove(file, error);
  if (::rmdir(dir.c_str()) != 0) log_warning("{}: not removed: {}", dir, std::strerror(errno));
}

/// Without a "/" at the end, and where a link leads.
std::string place_of(const std::string& target) {
  std::error_code error;
  const fs::path canonical = fs::canonical(target, error);
  if (!error) return canonical.string();
  const fs::path path = fs::path(target).lexically_normal();
  return path.has_filename() ? path.string() : path.parent_path().string();
}

}  // namespace

ExportDirectory::ExportDirectory(const std::string& target)
    : target_(place_of(target)), partial_(target_ + std::string(kPartialSuffix)) {
  check_target(target_);
  const std::string parent = fs::path(target_).parent_path().string();
  if (!parent.empty()) make_directory_durably(parent);
  if (::mkdir(partial_.c_str(), 0755) == 0) return;
  if (errno != EEXIST) throw IoError(describe_io_error(partial_, errno, 0));
  throw ConfigError(fmt::format(
      "{}: is there, of an export that is running or was killed; expected none", partial_));
}

ExportDirectory::~ExportDirectory() {
  if (!is_committed_) remove_flat(partial_);
}

void ExportDirectory::commit() {
  const json list = {{"format", kExportFormat}, {"files", list_files(partial_)}};
  write_durably(partial_ + "/" + kExportListName, list.dump(1) + "\n");
  check_target(target_);
  replace_directory(partial_, target_);
  is_committed_ = true;
  std::error_code error;
  if (fs::exists(partial_, error)) remove_flat(partial_);  // the export that was there
}

}  // namespace tessera::dist
