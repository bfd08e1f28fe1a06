#include "kernels/tuning/tuning.h"

#include <fmt/format.h>

#include <charconv>

#include "core/check.h"
#include "core/runtime/context.h"
#include "core/runtime/cuda/device_name.h"
#include "kernels/attention/cuda/cudnn.h"
#include "kernels/attention/tune.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "kernels/matmul/cuda/tune.h"

namespace tessera {
namespace {

thread_local Tuning* current_tuning = nullptr;

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

Tuning::Tuning(bool has_gemms) : has_gemms_(has_gemms), id_(next_id()) {}

Tuning::Scope::Scope(Tuning& tuning) : previous_(current_tuning) {
  current_tuning = &tuning;
}
Tuning::Scope::~Scope() {
  current_tuning = previous_;
}

Tuning* Tuning::current() {
  return current_tuning;
}

std::string Tuning::find_or_want(const std::string& key) {
  const std::lock_guard lock(mutex_);
  if (const auto found = choices_.find(key); found != choices_.end()) return found->second;
  if (choices_.size() + wanted_.size() < kMaxKeys) wanted_.insert(key);
  return "";
}

std::string Tuning::find(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = choices_.find(key);
  return found != choices_.end() ? found->second : "";
}

std::vector<std::string> Tuning::wanted() const {
  const std::lock_guard lock(mutex_);
  return {wanted_.begin(), wanted_.end()};
}

void Tuning::add(const Choices& choices) {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, choice] : choices) {
    choices_[key] = choice;
    wanted_.erase(key);
  }
  version_.fetch_add(1, std::memory_order_release);
}

Tuning::Choices Tuning::choices() const {
  const std::lock_guard lock(mutex_);
  return choices_;
}

namespace kernels {

Tuning::Choices measure_choices(const std::vector<std::string>& keys) {
  Tuning::Choices choices;
  for (const std::string& key : keys) {
    if (choices.contains(key)) continue;
    const bool is_known = cuda::measure_gemm(key, choices) || measure_attention(key, choices);
    TESSERA_CHECK_AS(InternalError, is_known, "tuning: nobody knows the key \"{}\"", key);
  }
  return choices;
}

bool is_choice(const std::string& key, const std::string& choice) {
  return cuda::is_gemm_choice(key, choice) || is_attention_choice(key, choice);
}

std::string tuning_machine() {
  const auto version = [](const char* library, const std::string& problem, int64_t number) {
    return problem.empty() ? fmt::format("{} {}", library, number) : fmt::format("no {}", library);
  };
  return fmt::format("{}; {}; {}", cuda_device_name(Context::current()->device()),
                     version("cuBLASLt", cuda::cublaslt_problem(), cuda::cublaslt_version()),
                     version("cuDNN", cudnn_problem(), cudnn_version()));
}

std::string key_text(const char* word, const std::map<std::string, int64_t>& fields) {
  std::string text = word;
  for (const auto& [name, value] : fields) text += fmt::format(" {}={}", name, value);
  return text;
}

std::map<std::string, int64_t> key_fields(const char* word, const std::string& key) {
  std::map<std::string, int64_t> fields;
  const std::string begin = std::string(word) + " ";
  if (key.rfind(begin, 0) != 0) return {};
  size_t place = begin.size();
  while (place < key.size()) {
    const size_t end = std::min(key.find(' ', place), key.size());
    const size_t equals = key.find('=', place);
    if (equals == std::string::npos || equals >= end) return {};
    int64_t value = 0;
    const char* const last = key.data() + end;
    const auto [stop, error] = std::from_chars(key.data() + equals + 1, last, value);
    if (error != std::errc{} || stop != last) return {};
    fields[key.substr(place, equals - place)] = value;
    place = end + 1;
  }
  return fields;
}

}  // namespace kernels
}  // namespace tessera
