#include "dist/fsdp/state_guard.h"

#include <algorithm>
#include <map>

#include "core/autograd.h"
#include "core/text.h"
#include "dist/comm/watchdog.h"
#include "dist/fsdp/parts.h"
#include "kernels/reduce/reduce.h"

namespace tessera::dist {
namespace {

constexpr size_t kMaxNamed = 3;  // tensors of a rank in a message

std::vector<optim::Segment> whole(const std::string& name, int64_t numel) {
  optim::Segment segment;
  segment.parameter = name;
  segment.end = numel;
  return {segment};
}

Tensor zero_sums(int64_t count) {
  return zeros({count}, kI64);
}

}  // namespace

std::string StateGuard::Item::to_string() const {
  return unit.empty() ? fmt::format("{} {}", kind, tensor)
                      : fmt::format("{} of {} (unit {})", kind, tensor, unit);
}

void StateGuard::Table::add(const Tensor& values, const std::vector<optim::Segment>& segments,
                            const std::string& unit, const std::string& kind,
                            const HeldGroup* gathered) {
  std::vector<int64_t> bounds;
  for (const optim::Segment& s : segments) {
    bounds.insert(bounds.end(), {s.begin, s.end, s.offset});
    items.push_back({unit, s.parameter, kind});
  }
  if (segments.empty()) return;
  const auto count = static_cast<int64_t>(segments.size());
  buffers.push_back({values, from_values(std::span<const int64_t>(bounds), {count, 3}, kI64),
                     gathered, size() - count});
}

StateGuard::StateGuard(nn::Module& model, Fsdp& fsdp, optim::Optimizer& optimizer, World& world,
                       const StateGuardOptions& options, const Extras& extras)
    : fsdp_(fsdp), view_(fsdp), world_(world), options_(options) {
  const MemoryScope scope(MemoryClass::kOther);
  make_tables(model, optimizer, extras);
  if (options.replica_every > 0 && world.world_size() > 1) {
    const bool has_replicas = view_.num_replicas() > 1;
    num_sums_ = shared_.size() + (has_replicas ? world.control().max(states_.size()) : 0);
    if (num_sums_ > 0) all_ = zero_sums(num_sums_ * world.world_size());
  }
  if (options.checks_state) after_ = zero_sums(states_.size());
}

void StateGuard::make_tables(nn::Module& model, optim::Optimizer& optimizer, const Extras& extras) {
  const std::vector<optim::NamedState> states = optimizer.state();
  size_t shard = 0;
  for (const HeldGroup& g : view_.groups()) {
    const std::vector<optim::Segment> own = segments_in(g.layout, g.begin, g.begin + g.numel);
    if (g.coded != nullptr) {
      add_codes(g, own);
      continue;
    }
    states_.add(g.values, own, g.name, g.low.is_defined() ? "master" : "parameters");
    if (g.low.is_defined()) states_.add(g.low, own, g.name, "low-precision copy");
    if (g.layout.is_trainable) {
      for (const optim::NamedState& state : states) {
        if (state.tensors.empty() || !state.tensors[shard].is_defined()) continue;
        std::vector<optim::Segment> blocks = own;
        for (optim::Segment& s : blocks) {
          s.begin /= state.block;
          s.end = optim::state_numel(s.end, state.block);
          s.offset /= state.block;
        }
        states_.add(state.tensors[shard], blocks, g.name, state.name);
      }
      ++shard;
    }
    if (g.stays_gathered) {
      shared_.add({}, segments_in(g.layout, 0, g.layout.numel), g.name, "gathered parameters", &g);
    }
  }
  const auto add_flat = [this](const std::string& name, const char* kind, const Tensor& values) {
    if (values.numel() == 0 || !values.is_contiguous()) return;
    shared_.add(values.detach().view({values.numel()}), whole(name, values.numel()), "", kind);
  };
  for (const nn::NamedBuffer& b : model.named_buffers())
    add_flat(b.name, "buffer", b.buffer->tensor);
  for (const nn::NamedParameter& p : parts_of(fsdp_).ignored)
    add_flat(p.name, "ignored parameter", p.parameter->tensor);
  add_flat("step count", "optimizer's", optimizer.step_count());
  for (const optim::WholeState& s : optimizer.whole_state()) {
    add_flat(s.name, "state", s.values);
  }
  for (const auto& [name, values] : extras) add_flat(name, "the", values);
}

/// Codes, which are a rank's own or a replica's; scales, which are the same on all ranks.
void StateGuard::add_codes(const HeldGroup& g, std::vector<optim::Segment> records) {
  for (optim::Segment& s : records) {
    s.begin = nf4_nbytes(s.begin), s.end = nf4_nbytes(s.end), s.offset = nf4_nbytes(s.offset);
  }
  states_.add(g.coded->codes(), records, g.name, "codes");
  for (size_t i = 0; i < g.layout.placements.size(); ++i) {
    const Tensor scales = g.coded->scales(i);
    shared_.add(scales, whole(g.layout.placements[i].name, scales.numel()), g.name, "scales");
  }
  if (g.stays_gathered) {
    shared_.add({}, segments_in(g.layout, 0, g.layout.numel), g.name, "gathered parameters", &g);
  }
}

void StateGuard::add_sums(const Tensor& sums, const Table& table) const {
  for (const Buffer& b : table.buffers) {
    const Tensor values = b.gathered != nullptr ? view_.gathered(*b.gathered) : b.values;
    if (!values.is_defined()) continue;  // on no rank
    add_checksums(sums.narrow(0, b.first_sum, b.segments.dim(0)), values, b.segments);
  }
}

void StateGuard::before_update(int64_t step) {
  const NoGrad no_grad;
  const bool compares = num_sums_ > 0 && step % options_.replica_every == 0;
  const bool checks = options_.checks_state && has_after_;
  if (!compares && !checks) return;
  Pending pending{step, {}, {}, {}};
  if (compares) {
    Tensor mine = all_.narrow(0, world_.rank() * num_sums_, num_sums_);
    mine.fill_(0);
    add_sums(mine.narrow(0, 0, shared_.size()), shared_);
    if (num_sums_ > shared_.size())
      add_sums(mine.narrow(0, shared_.size(), num_sums_ - shared_.size()), states_);
    view_.comm().all_gather(current_stream(), all_.raw_data(), mine.raw_data(), num_sums_, kI64,
                            {"compare_replicas", "", step});
    pending.all = HostCopy(all_);
  }
  if (checks) {
    const Tensor before = zero_sums(states_.size());
    add_sums(before, states_);
    pending.before = HostCopy(before);
    pending.after = std::move(after_copy_);
  }
  pending_.push_back(std::move(pending));
}

void StateGuard::after_update() {
  if (!options_.checks_state) return;
  const NoGrad no_grad;
  after_.fill_(0);
  add_sums(after_, states_);
  after_copy_ = HostCopy(after_);
  has_after_ = true;
}

/// What other ranks than this one hold of `states_` only they can name: `is_any` says that somebody
/// will.
std::string StateGuard::find_drift(const Pending& pending, bool* is_any) const {
  const auto* sums = static_cast<const uint64_t*>(pending.all.data());
  const int world_size = world_.world_size();
  const auto sum = [&](int rank, int64_t i) { return sums[rank * num_sums_ + i]; };
  std::map<std::vector<int>, std::vector<std::string>> drifted;  // names by the ranks that differ
  bool is_tie = false;
  const auto compare = [&](int64_t i, int first, int stride, const Table* names, int64_t offset) {
    std::map<uint64_t, std::vector<int>> ranks;  // by what they hold
    for (int r = first; r < world_size; r += stride) ranks[sum(r, i)].push_back(r);
    if (ranks.size() == 1) return;
    *is_any = true;
    if (names == nullptr) return;
    // Most are right; where there are two halves nobody knows, and all are named.
    const auto most = std::max_element(
        ranks.begin(), ranks.end(),
        [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
    const size_t size = most->second.size();
    const auto num_as_many = std::count_if(ranks.begin(), ranks.end(), [size](const auto& entry) {
      return entry.second.size() == size;
    });
    std::vector<int> odd;
    for (const auto& [value, who] : ranks) {
      if (num_as_many > 1 || value != most->first) odd.insert(odd.end(), who.begin(), who.end());
    }
    is_tie = is_tie || num_as_many > 1;
    std::sort(odd.begin(), odd.end());
    drifted[odd].push_back(names->items[static_cast<size_t>(i - offset)].to_string());
  };
  for (int64_t i = 0; i < shared_.size(); ++i) compare(i, 0, 1, &shared_, 0);
  const int own = world_.rank() % view_.shard_size();
  for (int64_t i = shared_.size(); i < num_sums_; ++i) {
    for (int s = 0; s < view_.shard_size(); ++s) {
      const bool can_name = s == own && i - shared_.size() < states_.size();
      compare(i, s, view_.shard_size(), can_name ? &states_ : nullptr, shared_.size());
    }
  }
  if (drifted.empty()) return "";
  std::string text;
  size_t count = 0;
  for (const auto& [ranks, names] : drifted) {
    if (++count > kMaxNamed) continue;
    text += fmt::format("{}{}: {}", count > 1 ? ", " : "", format_ranks(ranks),
                        join_few(names, ", ", kMaxNamed));
  }
  if (count > kMaxNamed) text += fmt::format(" and {} more", count - kMaxNamed);
  return fmt::format(
      "step {}: replicas have drifted apart, expected the same bits: {}{}; memory has changed by "
      "itself, or a rank computes other numbers; replica_every = 0 compares nothing",
      pending.step, text, is_tie ? " (which of them is right cannot be told)" : "");
}

std::string StateGuard::find_change(const Pending& pending) const {
  const auto* after = static_cast<const uint64_t*>(pending.after.data());
  const auto* before = static_cast<const uint64_t*>(pending.before.data());
  std::vector<std::string> names;
  for (size_t i = 0; i < states_.items.size(); ++i) {
    if (after[i] != before[i]) names.push_back(states_.items[i].to_string());
  }
  if (names.empty()) return "";
  return fmt::format(
      "step {}: rank {}: {} changed since the last update wrote it, expected the same bits: memory "
      "has changed by itself",
      pending.step, world_.rank(), join_few(names, ", ", kMaxNamed));
}

void StateGuard::check(int64_t last_step) {
  while (!pending_.empty() && pending_.front().step <= last_step) {
    const Pending pending = std::move(pending_.front());
    pending_.pop_front();
    bool is_any = false;  // the same on all ranks
    std::string what;
    if (pending.before.is_defined()) what = find_change(pending);
    if (pending.all.is_defined()) {
      const std::string drift = find_drift(pending, &is_any);
      if (what.empty()) what = drift;
    }
    if (!is_any && !options_.checks_state) continue;
    const NumericsError error(what);
    world_.control().verdict(what.empty() ? nullptr : &error);
  }
}

}  // namespace tessera::dist
