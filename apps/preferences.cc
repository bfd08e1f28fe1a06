#include "apps/preferences.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "apps/chats.h"
#include "apps/config_table.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/files.h"
#include "core/log.h"
#include "core/random.h"
#include "core/text.h"
#include "dist/checkpoint/manifest.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"

namespace tessera::apps {
namespace {

/// A pair whose sequences are as they are, cut, or missing.
struct Pair {
  text::TokenizedChat chosen, rejected;
};

/// As a conversation (`fit_chats`): of what fits, an answer's token has to be left.
bool fit(text::TokenizedChat& chat, int64_t context, text::LongChats rule) {
  const auto limit = static_cast<size_t>(context) + 1;
  if (chat.ids.size() > limit) {
    if (rule == text::LongChats::kDrop) return false;
    chat.ids.resize(limit);
    chat.is_trained.resize(limit);
  }
  return std::count(chat.is_trained.begin(), chat.is_trained.end(), uint8_t{1}) > 0;
}

class PairReader {
 public:
  PairReader(std::vector<std::string> paths, const text::ChatTemplate& chat_template,
             std::shared_ptr<const text::Tokenizer> tokenizer)
      : reader_(std::move(paths), rows()),
        template_(chat_template),
        tokenizer_(std::move(tokenizer)) {}

  /// The next one; false at the end. InputError with file and row.
  bool next(Pair& pair) {
    Document row;
    if (!reader_.next(row)) return false;
    try {
      const text::Preference preference =
          text::parse_preference(text::jinja::parse_json("the row", row.text));
      pair = {tokens_of(preference.chosen), tokens_of(preference.rejected)};
      if (pair.chosen.ids == pair.rejected.ids) {
        throw InputError("\"chosen\" and \"rejected\" have the same tokens, expected two answers");
      }
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", reader_.where(row.position), error.what()));
    }
    return true;
  }

 private:
  static DocumentOptions rows() {
    DocumentOptions options;
    options.whole_rows = true;
    options.columns = {"prompt",       "chosen", "rejected", "conversations",
                       "conversation", "system", "tools"};
    return options;
  }
  text::TokenizedChat tokens_of(const text::Conversation& conversation) const {
    return tokenizer_.tokenize(template_.render(conversation, text::TrainOn::kCompletion));
  }

  DocumentReader reader_;
  const text::ChatTemplate& template_;
  const text::ChatTokenizer tokenizer_;
};

constexpr std::string_view kReferencesName = "log-probabilities of a reference";

std::string header_of(uint64_t key, int64_t count) {
  return fmt::format("{} {:016x} {}\n", kReferencesName, key, count);
}

/// What `path` has for `key`, if that is all of it.
std::shared_ptr<std::vector<float>> read_references(const std::string& path, uint64_t key,
                                                    int64_t count) {
  const std::string header = header_of(key, count);
  const size_t nbytes = static_cast<size_t>(count) * sizeof(float);
  std::string text;
  try {
    text = read_regular_file(path, static_cast<int64_t>(header.size() + nbytes + 8));
  } catch (const InputError&) {
    return nullptr;  // none, or another
  }
  if (text.size() != header.size() + nbytes + 8 || !text.starts_with(header)) return nullptr;
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(count));
  std::memcpy(values->data(), text.data() + header.size(), nbytes);
  uint64_t hash = 0;
  std::memcpy(&hash, text.data() + header.size() + nbytes, 8);
  if (hash != dist::hash_of(values->data(), static_cast<int64_t>(nbytes))) return nullptr;
  return values;
}

void write_references(const std::string& path, uint64_t key, const std::vector<float>& values) {
  const size_t nbytes = values.size() * sizeof(float);
  std::string text = header_of(key, std::ssize(values));
  text.append(reinterpret_cast<const char*>(values.data()), nbytes);
  const uint64_t hash = dist::hash_of(values.data(), static_cast<int64_t>(nbytes));
  text.append(reinterpret_cast<const char*>(&hash), 8);
  write_file_atomically(path, text);
}

}  // namespace

LoadedPreferences load_preferences(const Config& config,
                                   std::shared_ptr<const text::Tokenizer> tokenizer,
                                   const std::string& dir) {
  const DataConfig& d = config.data;
  LoadedPreferences loaded;
  loaded.chat_template =
      std::make_shared<const text::ChatTemplate>(text::load_chat_template(dir, d.chat_template));
  const std::vector<std::string> paths =
      files_of_globs("data.preference", {d.preference}, "JSON lines or Parquet files of pairs");
  PairReader reader(paths, *loaded.chat_template, std::move(tokenizer));
  auto pairs = std::make_shared<PreferencePairs>();
  std::vector<int32_t> ids, is_target;
  int64_t count = 0, num_long = 0, num_empty = 0;
  pairs->begins.push_back(0);
  const auto limit = config.model.context + 1;
  for (Pair pair; reader.next(pair); ++count) {
    const bool is_long =
        std::ssize(pair.chosen.ids) > limit || std::ssize(pair.rejected.ids) > limit;
    num_long += is_long ? 1 : 0;
    const bool is_whole = fit(pair.chosen, config.model.context, d.long_chats) &&
                          fit(pair.rejected, config.model.context, d.long_chats);
    if (!is_whole) {
      num_empty += is_long && d.long_chats == text::LongChats::kDrop ? 0 : 1;
      continue;
    }
    for (const text::TokenizedChat* chat : {&pair.chosen, &pair.rejected}) {
      ids.insert(ids.end(), chat->ids.begin(), chat->ids.end());
      is_target.insert(is_target.end(), chat->is_trained.begin(), chat->is_trained.end());
      pairs->begins.push_back(std::ssize(ids));
    }
  }
  loaded.summary = fmt::format(
      "pairs: {} of {} files, {} of them trained on: {} tokens, {} of answers", count, paths.size(),
      pairs->count(), ids.size(), std::count(is_target.begin(), is_target.end(), 1));
  loaded.summary +=
      left_out_text(num_long, limit, d.long_chats, num_empty, "nothing is left of an answer");
  if (ids.empty()) {
    throw InputError(fmt::format("data.preference = {}: {}; expected at least one",
                                 shorten(d.preference), loaded.summary));
  }
  pairs->tokens = TokenArray(ids, d.preference);
  pairs->is_target = TokenArray(is_target, d.preference);
  loaded.pairs = std::move(pairs);
  return loaded;
}

Batch pair_batch(const PreferencePairs& pairs, const std::vector<int64_t>& indices,
                 const SampleOptions& options) {
  constexpr int64_t kStep = 16;  // of lengths, so that a GEMM has few shapes
  std::vector<int64_t> sequences;
  int64_t longest = 1;
  for (const int64_t index : indices) {
    for (const int64_t answer : {0, 1}) {
      sequences.push_back(index < 0 ? -1 : 2 * index + answer);
      if (index < 0) continue;
      const auto i = static_cast<size_t>(sequences.back());
      longest = std::max(longest, pairs.begins[i + 1] - pairs.begins[i] - 1);
    }
  }
  Batch batch;
  batch.B = std::ssize(sequences);
  batch.num_pairs = std::ssize(indices) - std::count(indices.begin(), indices.end(), -1);
  batch.T = std::min(options.context, (longest + kStep - 1) / kStep * kStep);
  batch.inputs.assign(static_cast<size_t>(batch.B * batch.T), 0);
  batch.targets.assign(batch.inputs.size(), kIgnoredTarget);
  for (size_t row = 0; row < sequences.size(); ++row) {
    if (sequences[row] < 0) continue;
    const auto i = static_cast<size_t>(sequences[row]);
    const int64_t begin = pairs.begins[i], length = pairs.begins[i + 1] - begin - 1;
    for (int64_t t = 0; t < length; ++t) {
      const size_t at = row * static_cast<size_t>(batch.T) + static_cast<size_t>(t);
      batch.inputs[at] = checked_id(pairs.tokens, begin + t, options.vocab_size);
      const int32_t next = checked_id(pairs.tokens, begin + t + 1, options.vocab_size);
      if (pairs.is_target[begin + t + 1] == 0) continue;
      batch.targets[at] = next;
      ++batch.num_valid;
    }
  }
  return batch;
}

PreferenceSamples::PreferenceSamples(std::shared_ptr<const PreferencePairs> pairs,
                                     const SampleOptions& options, double val_fraction,
                                     SplitPart part)
    : pairs_(std::move(pairs)),
      options_(options),
      split_(pairs_->count(), val_fraction, 0),
      part_(part) {}

int64_t PreferenceSamples::num_samples() const {
  return part_ == SplitPart::kTrain ? split_.num_train() : split_.num_val();
}

int64_t PreferenceSamples::pair_of(int64_t sample) const {
  if (part_ == SplitPart::kVal) return sample < num_samples() ? split_.val(sample) : -1;
  const int64_t epoch = sample / num_samples();
  const PhiloxKey key =
      make_key(options_.seed, hash_name("data order") + static_cast<uint64_t>(epoch));
  return split_.train(Permutation(num_samples(), key)(sample % num_samples()));
}

Batch PreferenceSamples::batch(int64_t first_sample, int64_t B) const {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < B; ++i) indices.push_back(pair_of(first_sample + i));
  Batch batch = pair_batch(*pairs_, indices, options_);
  for (const int64_t index : indices) {
    for (const int64_t answer : {0, 1}) {
      const bool is_known = references_ != nullptr && index >= 0;
      batch.references.push_back(is_known ? (*references_)[static_cast<size_t>(2 * index + answer)]
                                          : 0.0f);
    }
  }
  return batch;
}

int64_t PreferenceSamples::num_targets(int64_t first_sample, int64_t count) const {
  if (part_ == SplitPart::kTrain) return count;
  return std::clamp<int64_t>(num_samples() - first_sample, 0, count);
}

int64_t PreferenceSamples::num_tokens() const {
  int64_t total = 0;
  for (int64_t i = 0; i < num_samples(); ++i) {
    const auto pair =
        static_cast<size_t>(part_ == SplitPart::kTrain ? split_.train(i) : split_.val(i));
    total += pairs_->begins[2 * pair + 2] - pairs_->begins[2 * pair];
  }
  return total;
}

Tensor sequence_log_probs(nn::LanguageModel& model, const Batch& batch) {
  const LossInput input = loss_input(batch);
  const Tensor losses = model.token_losses(input.ids, input.targets, input.options);
  // Of each position 1 where it is of the sequence: their product adds up each sequence's losses.
  const auto num_rows = losses.numel();
  std::vector<float> members(static_cast<size_t>(batch.B * num_rows), 0);
  int64_t row = 0;
  for (int64_t i = 0; i < batch.B * batch.T; ++i) {
    const bool is_target = batch.targets[static_cast<size_t>(i)] != kIgnoredTarget;
    if (!is_target && input.options.loss_rows.is_defined()) continue;
    if (is_target) members[static_cast<size_t>(i / batch.T * num_rows + row)] = -1;
    ++row;
  }
  const Tensor membership =
      from_values(std::span<const float>(members), {batch.B, num_rows}, losses.dtype());
  return linear(losses.view({1, num_rows}), membership).view({batch.B});
}

PreferenceSum preference_loss(nn::LanguageModel& model, const Batch& batch,
                              const PreferenceConfig& config) {
  TESSERA_CHECK(std::ssize(batch.references) == batch.B && batch.B % 2 == 0,
                "preference_loss: {} references for {} sequences, expected one of each of two",
                batch.references.size(), batch.B);
  const int64_t pairs = batch.B / 2;  // of padding as well
  const Shape shape{pairs, 2};
  const Tensor reference = from_values(std::span<const float>(batch.references), shape);
  const Tensor ratios = sub(sequence_log_probs(model, batch).view(shape), reference);
  std::vector<int32_t> lengths(static_cast<size_t>(batch.B), 0), targets;
  for (size_t i = 0; i < batch.targets.size(); ++i) {
    if (batch.targets[i] != kIgnoredTarget) ++lengths[i / static_cast<size_t>(batch.T)];
  }
  for (size_t i = 0; i < lengths.size(); i += 2)
    targets.push_back(lengths[i] > 0 ? 0 : kIgnoredTarget);
  PreferenceSum result;
  {
    const NoGrad no_grad;
    result.rewards = scale(ratios.detach(), config.beta);
  }
  if (config.loss == PreferenceLoss::kSigmoid) {
    // -log sigmoid(a - b) is the cross entropy of logits (a, b) against the first of two classes, of
    // which smoothing gives the other one half of its share.
    const CrossEntropyOptions options{
        .ignore_index = kIgnoredTarget,
        .label_smoothing = static_cast<float>(2 * config.label_smoothing)};
    result.loss = cross_entropy(scale(ratios, config.beta),
                                from_values(std::span<const int32_t>(targets), {pairs}), options);
    return result;
  }
  std::vector<float> per_token, counts;
  for (const int32_t length : lengths) {
    per_token.push_back(1.0f / static_cast<float>(std::max(length, 1)));
  }
  for (const int32_t target : targets) counts.push_back(target == 0 ? 1.0f : 0.0f);
  const Tensor means = mul(ratios, from_values(std::span<const float>(per_token), shape));
  const Tensor margins = sub(means.narrow(1, 0, 1), means.narrow(1, 1, 1));
  const Tensor distances = squared_difference(margins, 1 / (2 * config.beta));
  result.loss.sum =
      sum(mul(distances, from_values(std::span<const float>(counts), Shape{pairs, 1})));
  result.loss.count = full({}, static_cast<double>(batch.num_pairs));
  return result;
}

StepMetrics::Rewards mean_rewards(const std::vector<HostCopy>& mine, int64_t micro_batch,
                                  dist::World& world) {
  struct Sums {
    double chosen = 0, rejected = 0, correct = 0;
  };
  std::vector<Sums> sums;
  for (const HostCopy& copy : mine) {
    const auto* const rewards = static_cast<const float*>(copy.data());
    Sums& of_batch = sums.emplace_back();
    for (int64_t i = 0; i < micro_batch; ++i) {
      const float chosen = rewards[2 * i], rejected = rewards[2 * i + 1];
      of_batch.chosen += chosen, of_batch.rejected += rejected;
      of_batch.correct += chosen > rejected ? 1 : 0;
    }
  }
  std::vector<Sums> all(sums.size() * static_cast<size_t>(world.world_size()));
  world.control().all_gather(all.data(), sums.data(),
                             static_cast<int64_t>(sums.size() * sizeof(Sums)));
  StepMetrics::Rewards m;
  for (size_t pass = 0; pass < sums.size(); ++pass) {
    for (size_t i = pass; i < all.size(); i += sums.size()) {
      m.chosen += all[i].chosen, m.rejected += all[i].rejected, m.accuracy += all[i].correct;
    }
  }
  const auto count = static_cast<double>(all.size()) * static_cast<double>(micro_batch);
  m.chosen /= count, m.rejected /= count, m.accuracy /= count;
  return m;
}

std::string reference_identity(const Config& config) {
  namespace fs = std::filesystem;
  std::string text = fmt::format("seed {}", config.train.seed);
  for (const std::string& dir : {config.dpo.reference, config.model.from}) {
    if (dir.empty()) continue;
    std::vector<std::string> files;
    std::error_code ignored;
    for (fs::directory_iterator at(dir, ignored), end; at != end; at.increment(ignored)) {
      if (!at->is_regular_file(ignored)) continue;
      const auto time = at->last_write_time(ignored).time_since_epoch().count();
      files.push_back(
          fmt::format("{} {} {}", at->path().filename().string(), at->file_size(ignored), time));
    }
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) text += "; " + file;
  }
  Config copy = config;
  for (const Field& field : config_fields(copy)) {
    const bool counts = field.key.starts_with("model.") || field.key == "precision.param_dtype";
    if (counts && field.is_stored) text += fmt::format("; {} = {}", field.key, field.value_text());
  }
  return text;
}

std::shared_ptr<const std::vector<float>> find_references(
    nn::LanguageModel& model, dist::Fsdp& fsdp, dist::World& world, const PreferencePairs& pairs,
    const SampleOptions& options, int64_t micro_batch, const std::string& path, uint64_t key,
    const std::function<void()>& load) {
  const int64_t count = 2 * pairs.count();
  std::shared_ptr<std::vector<float>> kept = read_references(path, key, count);
  if (world.control().min(kept != nullptr ? 1 : 0) == 1) return kept;
  load();
  const NoGrad no_grad;
  model.train(false);
  const int64_t B = micro_batch, ranks = world.world_size();
  const int64_t passes = ((pairs.count() + B - 1) / B + ranks - 1) / ranks;
  std::vector<float> mine;
  std::optional<InputError> error;
  for (int64_t pass = 0; pass < passes; ++pass) {
    std::vector<int64_t> indices;
    const int64_t first = (pass * ranks + world.rank()) * B;
    for (int64_t i = first; i < first + B; ++i) indices.push_back(i < pairs.count() ? i : -1);
    Batch batch;
    try {
      batch = pair_batch(pairs, indices, options);
    } catch (const InputError& e) {  // the other ranks compute on
      if (!error) error = e;
      batch = pair_batch(pairs, std::vector<int64_t>(static_cast<size_t>(B), -1), options);
    }
    const std::vector<double> values = sequence_log_probs(model, batch).to_vector();
    mine.insert(mine.end(), values.begin(), values.end());
  }
  fsdp.end_forward();
  model.train(true);
  world.control().verdict(error ? &*error : nullptr);
  std::vector<float> all(mine.size() * static_cast<size_t>(ranks));
  world.control().all_gather(all.data(), mine.data(),
                             static_cast<int64_t>(mine.size() * sizeof(float)));
  auto values = std::make_shared<std::vector<float>>();
  for (int64_t pass = 0; pass < passes; ++pass) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto begin = all.begin() + (rank * passes + pass) * 2 * B;
      values->insert(values->end(), begin, begin + 2 * B);
    }
  }
  values->resize(static_cast<size_t>(count));
  world.control().verdict([&] {
    if (world.rank() == 0) write_references(path, key, *values);
  });
  return values;
}

}  // namespace tessera::apps
