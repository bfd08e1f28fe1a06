#include "apps/agreement.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "apps/checkpointing.h"
#include "apps/config_table.h"
#include "core/build_id.h"
#include "core/text.h"
#include "dist/checkpoint/manifest.h"

namespace tessera::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxNamed = 5;        // differences in a message
constexpr size_t kMaxValueBytes = 80;  // of a value in it
constexpr size_t kMaxNbytes = 1000;    // of all differences

/// What nobody has to be told in full.
std::string cut(const std::string& text) {
  return shorten(text, kMaxValueBytes);
}

uint64_t hash_of(const std::vector<Fact>& facts) {
  dist::Hasher hasher;
  for (const Fact& fact : facts) {
    for (const std::string* text : {&fact.key, &fact.value}) {
      hasher.update(text->c_str(), static_cast<int64_t>(text->size()) + 1);  // with its end
    }
  }
  return hasher.digest();
}

/// "rank 0", "ranks 0 to 2 and 5".
std::string ranks_text(const std::vector<int>& ranks) {
  std::vector<std::string> runs;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    runs.push_back(end - i == 1 ? std::to_string(ranks[i])
                                : fmt::format("{} to {}", ranks[i], ranks[end - 1]));
    i = end;
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", join_few(runs));
}

std::string to_text(const std::vector<Fact>& facts) {
  Json all = Json::array();
  for (const Fact& fact : facts) all.push_back({fact.key, fact.value, fact.origin});
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// "optim.lr = 0.001 on rank 0, 0.1 (command line) on ranks 1 to 3"; empty if all have the same.
std::string difference(const std::string& key,
                       const std::vector<std::map<std::string, Fact>>& facts_by_rank) {
  std::vector<std::string> values;  // in the order of the first rank of each
  std::map<std::string, std::vector<int>> ranks;
  std::map<std::string, std::string> shown;
  for (size_t r = 0; r < facts_by_rank.size(); ++r) {
    const auto found = facts_by_rank[r].find(key);
    const bool is_there = found != facts_by_rank[r].end();
    const std::string value = is_there ? "=" + found->second.value : "";
    if (ranks[value].empty()) {
      values.push_back(value);
      std::string text = is_there ? cut(found->second.value) : "absent";
      if (is_there && !found->second.origin.empty()) {
        text += fmt::format(" ({})", cut(found->second.origin));
      }
      shown[value] = text;
    }
    ranks[value].push_back(static_cast<int>(r));
  }
  if (values.size() == 1) return "";
  std::vector<std::string> texts;
  for (const std::string& value : values) {
    texts.push_back(fmt::format("{} on {}", shown[value], ranks_text(ranks[value])));
  }
  return fmt::format("{} = {}", key, join_few(texts, ", ", kMaxNamed));
}

}  // namespace

std::vector<Fact> facts_of(const Config& config) {
  std::vector<Fact> facts = {
      {"program", fmt::format("{} (build {})", TESSERA_VERSION, build_id())}};
  Config copy = config;
  for (const Field& field : config_fields(copy)) {
    if (field.may_differ) continue;
    const std::string& origin = config.origin(field.key);
    facts.push_back(
        {std::string(field.key), field.value_text(), origin == "default" ? "" : origin});
  }
  return facts;
}

std::vector<Fact> facts_of(const Config& config, const Data& data, Device device) {
  std::vector<Fact> facts = facts_of(config);
  facts.push_back({"the training data", fingerprint(data.train)});
  facts.push_back({"the validation data", fingerprint(data.val)});
  if (data.tokenizer != nullptr) {
    const std::string json = data.tokenizer->to_json();
    dist::Hasher hasher;
    hasher.update(json.data(), std::ssize(json));
    facts.push_back({"the tokenizer", fmt::format("{} of {} ids, {:016x}", data.tokenizer->name(),
                                                  data.tokenizer->vocab_size(), hasher.digest())});
  }
  facts.push_back({"the device", device.type == DeviceType::kCuda ? "cuda" : "cpu"});
  return facts;
}

void check_agreement(dist::Control& control, const std::vector<Fact>& facts) {
  const auto num_ranks = static_cast<size_t>(control.world_size());
  const uint64_t mine = hash_of(facts);
  std::vector<uint64_t> hashes(num_ranks);
  control.all_gather(hashes.data(), &mine, sizeof(mine));
  if (std::all_of(hashes.begin(), hashes.end(), [&](uint64_t h) { return h == mine; })) return;
  std::vector<std::map<std::string, Fact>> facts_by_rank(num_ranks);
  std::vector<std::string> keys;
  const std::vector<std::string> texts = control.all_gather(to_text(facts));
  for (size_t r = 0; r < num_ranks; ++r) {
    for (const Json& entry : Json::parse(texts[r])) {
      const std::string key = entry[0];
      const bool is_new = std::none_of(facts_by_rank.begin(), facts_by_rank.end(),
                                       [&](const auto& known) { return known.count(key) != 0; });
      if (is_new) keys.push_back(key);
      facts_by_rank[r][key] = {key, entry[1], entry[2]};
    }
  }
  std::vector<std::string> differences;
  for (const std::string& key : keys) {
    if (std::string text = difference(key, facts_by_rank); !text.empty()) {
      differences.push_back(std::move(text));
    }
  }
  if (differences.empty()) differences.push_back("bytes that are not UTF-8");
  const ConfigError error(
      fmt::format("the ranks disagree: {}; expected the same on all ranks",
                  join_few(differences, "; ", kMaxNamed, kMaxNbytes, kMaxNbytes / 2)));
  control.verdict(&error);  // the same on all: one of them says it
}

}  // namespace tessera::apps
