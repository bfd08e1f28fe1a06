#pragma once

#include <array>
#include <deque>
#include <optional>
#include <string_view>

#include "apps/config.h"
#include "core/settings.h"

// The table of all keys: to add one, give a struct a field and `config_table.cc` a row. The row
// says all that is said of one key alone; what several keys must agree on is in config.cc.

namespace tessera::apps {

/// In what `dump_config` writes of a configuration whose model and data are a program's own.
inline constexpr std::string_view kOwnComment = "# Model and data are a program's own.";
/// What such a program has no keys of.
inline constexpr std::array<std::string_view, 5> kOwnSections = {"model", "lora", "data", "dpo",
                                                                 "sample"};

/// What it means to resume a checkpoint with another value of a key.
enum class ResumeKind : unsigned char {
  kIdentity,  ///< another model or other data: refused
  kSchedule,  ///< other numbers from here on: said; refused where the key was left out by mistake
  kFree,      ///< where and how it runs, not what it computes
};

/// A row, and what only a training run asks of it.
struct Field : Setting {
  std::optional<ResumeKind> resume = {};
  bool may_differ = false;            ///< between ranks: how one works, not what it computes
  bool is_stored = true;              ///< in `dump_config`
  bool is_of_model = true;            ///< false: of families that are not selected
  bool is_essential = true;           ///< then another value than the default is refused
  bool has_effect = true;             ///< with the values that the other keys have now
  std::string_view condition = {};    ///< of an effect, in words of keys; empty: it always has one
  std::string_view other_names = {};  ///< in other trainers, separated by spaces
  /// The field in a library's messages, "LossScaleOptions::init"; empty: has the key's last name.
  std::string_view option = {};

  Field& needs(bool holds, std::string_view words) {
    has_effect = holds, condition = words;
    return *this;
  }
  Field& on_resume(ResumeKind kind) { return resume = kind, *this; }
  Field& of_one_rank() { return may_differ = true, *this; }
  Field& not_stored() { return is_stored = false, *this; }
  /// Learned from Hugging Face's TrainingArguments, torchtitan, nanoGPT, llm.c, by the last
  /// component: who writes one of them is told the key.
  Field& also(std::string_view names) { return other_names = names, *this; }
  Field& field(std::string_view name) { return option = name, *this; }
  Field& one_line() { return is_one_line = true, *this; }
  Field& expects(std::string_view words) { return expected = words, *this; }
};
using ConfigTable = SettingTable<Field>;

/// Rows that read and write `config`, in the order in which they are printed. Their conditions are
/// those of its values now; `is_cuda`: the device that computes.
std::deque<Field> config_fields(Config& config, bool is_cuda = false);

/// The key that sets a field of a library's option struct, "FsdpOptions::shard_size"; empty if none
/// does.
std::string key_of_option(std::string_view option);

/// Keys that the user has set, with the values that they have: "optim.lr", 0.001.
std::vector<std::pair<std::string, SettingValue>> given_settings(const Config& config);

/// A library's message about a field of its option struct, "FsdpOptions::shard_size: 3 does not
/// divide the 4 ranks", with the place and the key: "command line: fsdp.shard_size: 3 does not ...".
/// Any other message as it is.
std::string in_keys(const Config& config, const std::string& message);

}  // namespace tessera::apps
