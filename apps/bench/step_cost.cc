#include "apps/bench/step_cost.h"

#include <algorithm>

namespace tessera::apps {
namespace {

/// Bytes in the union of the ranges that are read, or of those that are written.
int64_t union_nbytes(const Cost& cost, bool is_write) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const Access& a : cost.accesses()) {
    const auto* begin = static_cast<const char*>(a.data);
    if (a.is_write == is_write) ranges.emplace_back(begin, begin + a.nbytes);
  }
  std::sort(ranges.begin(), ranges.end());
  int64_t total = 0;
  const char* end = nullptr;
  for (const auto& range : ranges) {
    const char* begin = end == nullptr ? range.first : std::max(end, range.first);
    if (range.second > begin) total += range.second - begin;
    end = end == nullptr ? range.second : std::max(end, range.second);
  }
  return total;
}

const Access* largest(const Cost& cost, bool is_write) {
  const Access* found = nullptr;
  for (const Access& a : cost.accesses()) {
    if (a.is_write == is_write && (found == nullptr || a.nbytes > found->nbytes)) found = &a;
  }
  return found;
}

int64_t nbytes_at(const Cost& cost, const void* data, bool is_write) {
  for (const Access& a : cost.accesses()) {
    if (a.is_write == is_write && a.data == data) return a.nbytes;
  }
  return 0;
}

}  // namespace

void TrafficCounter::on_task(const Stream&, const char* name, const Cost& cost) {
  const std::lock_guard lock(mutex_);
  Traffic& traffic = by_task_[name];
  ++traffic.num_tasks;
  traffic.nbytes += nbytes_of(name, cost);
}

int64_t TrafficCounter::nbytes_of(const std::string& name, const Cost& cost) {
  const int64_t all = union_nbytes(cost, false) + union_nbytes(cost, true);
  if (name == "embedding_fwd") {  // as many bytes of the table as are written
    return all - largest(cost, false)->nbytes + largest(cost, true)->nbytes;
  }
  if (name == "embedding_bwd") {
    const Access* dw = largest(cost, true);
    const int64_t dw_read = nbytes_at(cost, dw->data, false);
    if (dw_read == 0) return all;  // all rows are written
    const int64_t dy = cost.accesses()[0].nbytes, rows = dy / element_nbytes_ * 4;
    return all - 2 * dw->nbytes + 2 * std::min(rows, dw->nbytes);
  }
  const bool is_narrow = element_nbytes_ < 4;
  if (name == "cross_entropy_fused") {
    const Access* logits = largest(cost, true);
    logits_ = logits->data;
    return is_narrow ? all - logits->nbytes / 2 : all;
  }
  if (name == "matmul" && is_narrow && logits_ != nullptr) {
    return all - nbytes_at(cost, logits_, false) / 2;
  }
  return all;
}

std::map<std::string, TrafficCounter::Traffic> TrafficCounter::by_task() const {
  const std::lock_guard lock(mutex_);
  return by_task_;
}

TrafficCounter::Traffic TrafficCounter::total() const {
  Traffic total;
  for (const auto& [_, traffic] : by_task()) {
    total.num_tasks += traffic.num_tasks;
    total.nbytes += traffic.nbytes;
  }
  return total;
}

int64_t TrafficCounter::num_host_waits() const {
  const std::lock_guard lock(mutex_);
  return num_host_waits_;
}

void TrafficCounter::count_host_wait() {
  const std::lock_guard lock(mutex_);
  ++num_host_waits_;
}

void TrafficCounter::reset() {
  const std::lock_guard lock(mutex_);
  by_task_.clear();
  num_host_waits_ = 0;
}

int64_t Gpt2Step::num_parameters() const {
  const int64_t C = width;
  return (vocab + time + 2) * C + layers * (12 * C * C + 13 * C);
}

std::vector<MinimumPart> minimum_traffic(const Gpt2Step& s) {
  const int64_t L = s.layers, C = s.width, T = s.time, V = s.vocab, e = s.element_nbytes;
  const int64_t R = s.batch * T, RC = R * C * e, CC = C * C * e, VC = V * C * e;
  const int64_t statistics = 4 * R, N = s.num_parameters(), num_norms = 2 * L + 1;
  return {
      {"embeddings, forward", 2 * RC + T * C * e},
      {"embeddings, backward", 2 * RC + 8 * R * C + 4 * T * C},
      {"norms, forward", num_norms * (2 * RC + 2 * statistics)},
      // dy and x to dx, and but for the last norm the residual's gradient.
      {"norms, backward", num_norms * (3 * RC + 2 * statistics) + 2 * L * RC},
      // qkv; out with the residual; up with its activation; down with the residual.
      {"products, forward",
       L * ((4 * RC + 3 * CC) + (3 * RC + CC) + (9 * RC + 4 * CC) + (6 * RC + 4 * CC))},
      // down with the activation's derivative; up; out; qkv.
      {"products, dx",
       L * ((9 * RC + 4 * CC) + (5 * RC + 4 * CC) + (2 * RC + CC) + (4 * RC + 3 * CC))},
      {"products, dw and db", L * ((5 + 5 + 2 + 4) * RC + 4 * (12 * C * C + 9 * C))},
      {"attention, forward", L * (4 * RC + 4 * R * s.heads)},
      {"attention, backward", L * (8 * RC + 4 * R * s.heads)},
      {"head, logits", RC + VC + 4 * R * V},
      {"head, loss", 4 * R * V + R * V * e},
      {"head, dx", R * V * e + VC + RC},
      {"head, dw", R * V * e + RC + 4 * V * C},
      {"gradient norm", 4 * N},
      {"AdamW", 28 * N + (e < 4 ? e * N : 0)},
  };
}

}  // namespace tessera::apps
