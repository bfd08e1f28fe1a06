#include "dist/fsdp/offload.h"

#include <algorithm>
#include <utility>

#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {
namespace {

constexpr unsigned char kPoison = 0xff;

std::unique_ptr<SlotPool> make_ring(int64_t nbytes, int num_slots, MemoryClass memory_class) {
  const auto allocate = [memory_class](int64_t n) {
    auto memory = std::make_shared<Storage>(static_cast<size_t>(n), Context::current()->device());
    memory->materialize(memory_class);
    return memory;
  };
  return std::make_unique<SlotPool>(nbytes, num_slots, allocate, /*is_eager=*/true);
}

}  // namespace

Tensor empty_on_host(int64_t numel, DType dtype) {
  const auto& context = Context::current();
  auto storage =
      std::make_shared<Storage>(static_cast<size_t>(numel) * size_of(dtype), context->device());
  storage->materialize(context->host_allocator(), current_stream(), MemoryScope::current());
  return view_of_storage(std::move(storage), 0, {numel}, dtype);
}

Offloader::Offloader(Offload offload, int64_t window_numel, bool with_gradients, bool poison)
    : offload_(offload),
      window_numel_(window_numel),
      with_gradients_(with_gradients),
      poison_(poison) {
  h2d_ = Context::current()->make_stream("h2d");
  d2h_ = Context::current()->make_stream("d2h");
}

Offloader::~Offloader() {
  drain();
}

void Offloader::drain() const noexcept {
  h2d_.drain();
  d2h_.drain();
}

Event Offloader::load(void* dst, const Tensor& shard, const Event& is_free, const Event& is_ready) {
  wait(h2d_, is_free, OffloadWait::kSlotFree);
  wait(h2d_, is_ready, OffloadWait::kShardsReady);
  copy_flat(h2d_, dst, shard.raw_data(), shard.numel(), shard.dtype());
  return h2d_.record();
}

// ---- gradients

void Offloader::make_gradient_ring(int64_t numel) {
  gradients_ = make_ring(numel * static_cast<int64_t>(sizeof(float)), kHostGradientSlots,
                         MemoryClass::kGradients);
}

void Offloader::bring(HostGradient& host, const Tensor& grad, bool with_values) {
  host.slot = gradients_->acquire();
  void* data = host.slot->memory->data();
  wait(h2d_, host.slot->is_free, OffloadWait::kGradientFree);
  if (with_values) {
    wait(h2d_, host.is_home, OffloadWait::kGradientHome);
    copy_flat(h2d_, data, host.home.raw_data(), host.home.numel(), kF32);
  }
  host.is_here = h2d_.record();
  grad.storage()->attach(data, host.slot->memory);
}

void Offloader::send_home(HostGradient& host, const Tensor& grad, const Event& is_written) {
  wait(d2h_, is_written, OffloadWait::kGradientWritten);
  copy_flat(d2h_, host.home.raw_data(), grad.raw_data(), grad.numel(), kF32);
  host.is_home = d2h_.record();
  if (poison_) {
    d2h_.fill_bytes("poison", grad.raw_data(), kPoison, grad.storage()->nbytes());
  }
  grad.storage()->release();
  gradients_->release(std::exchange(host.slot, nullptr), d2h_.record());
}

void Offloader::drop(HostGradient& host, const Tensor& grad) {
  if (poison_) {
    current_stream().fill_bytes("poison", grad.raw_data(), kPoison, grad.storage()->nbytes());
  }
  grad.storage()->release();
  gradients_->release(std::exchange(host.slot, nullptr), current_stream().record());
}

// ---- the optimizer's windows

Tensor Offloader::make_state(int64_t numel, DType dtype) {
  Tensor state = empty_on_host(numel, dtype);
  state.fill_(0);
  return state;
}

/// One tensor of a shard that is in host memory, and where its window goes.
struct Offloader::Part {
  Tensor tensor;
  bool is_written;  // by the update
  int64_t offset;   // of its place in a slot, in bytes of a window of one element
  Tensor* (*place)(optim::ShardWindow& window, size_t state);
  size_t state;
  int64_t block;  // elements of the shard for one of it
};

std::vector<Offloader::Part> Offloader::parts_on_host(const optim::ShardParts& shard) const {
  std::vector<Part> parts;
  int64_t offset = 0;
  const auto add = [&](const Tensor& tensor, bool is_written, auto place, size_t state = 0,
                       int64_t block = 1) {
    parts.push_back({tensor, is_written, offset, place, state, block});
    offset += static_cast<int64_t>(sizeof(float));  // the widest: every part stays aligned
  };
  using Window = optim::ShardWindow;
  for (size_t i = 0; i < shard.states.size(); ++i) {
    add(
        shard.states[i].values, true, [](Window& w, size_t state) { return &w.states[state]; }, i,
        shard.states[i].block);
  }
  if (shard.with_master && (has_parameters() || shard.shard->low.is_defined())) {
    add(shard.shard->master, true, [](Window& w, size_t) { return &w.master; });
  }
  if (shard.with_grad && has_gradients())
    add(shard.shard->grad, false, [](Window& w, size_t) { return &w.grad; });
  if (shard.with_master && has_parameters() && shard.shard->low.is_defined()) {
    add(shard.shard->low, true, [](Window& w, size_t) { return &w.low; });
  }
  return parts;
}

void Offloader::reserve_windows(int64_t nbytes) {
  if (nbytes == 0 || (windows_ != nullptr && windows_->nbytes() >= nbytes)) return;
  windows_ = make_ring(nbytes, kOffloadWindows, MemoryClass::kOptimizer);
}

int64_t Offloader::part_numel(const Part& part, int64_t count) {
  return optim::state_numel(count, part.block);
}

/// Windows begin at multiples of 256 elements, and so of blocks.
Tensor Offloader::part_values(const Part& part, int64_t first, int64_t count) {
  return part.tensor.narrow(0, first / part.block, part_numel(part, count));
}

std::vector<Tensor> Offloader::values_of(const optim::ShardParts& shard) {
  std::vector<Tensor> values;
  for (const optim::BlockState& s : shard.states) values.push_back(s.values);
  return values;
}

void Offloader::for_each_window(std::span<const optim::ShardParts> shards, const Update& update) {
  const Stream compute = current_stream();
  std::vector<std::vector<Part>> parts;
  int64_t num_parts = 0, window_numel = 0;
  for (const optim::ShardParts& shard : shards) {
    parts.push_back(parts_on_host(shard));
    num_parts = std::max(num_parts, static_cast<int64_t>(parts.back().size()));
    window_numel = std::max(window_numel, shard.shard->master.numel());
  }
  window_numel = std::min(window_numel, window_numel_);
  reserve_windows(num_parts * window_numel * static_cast<int64_t>(sizeof(float)));
  wait(h2d_, compute.record(), OffloadWait::kStatesReady);
  for (size_t i = 0; i < shards.size(); ++i) {
    const optim::FlatShard& shard = *shards[i].shard;
    if (parts[i].empty()) {  // nothing of it in host memory
      update(i, {shard.master, shard.grad, shard.low, values_of(shards[i]), 0});
      continue;
    }
    const int64_t numel = shard.master.numel();
    for (int64_t first = 0; first < numel; first += window_numel) {
      const int64_t count = std::min(window_numel, numel - first);
      Slot* slot = windows_->acquire();
      wait(h2d_, slot->is_free, OffloadWait::kWindowFree);
      const auto part_of = [&](const Tensor& t) {
        return t.is_defined() ? t.narrow(0, first, count) : t;
      };
      optim::ShardWindow window{part_of(shard.master), part_of(shard.grad), part_of(shard.low),
                                values_of(shards[i]), first};
      for (const Part& part : parts[i]) {
        const DType dtype = part.tensor.dtype();
        Tensor* place = part.place(window, part.state);
        *place = view_of_storage(slot->memory,
                                 part.offset * window_numel / static_cast<int64_t>(size_of(dtype)),
                                 {part_numel(part, count)}, dtype);
        copy_flat(h2d_, place->raw_data(), part_values(part, first, count).raw_data(),
                  part_numel(part, count), dtype);
      }
      wait(compute, h2d_.record(), OffloadWait::kWindowHere);
      update(i, window);
      wait(d2h_, compute.record(), OffloadWait::kWindowUpdated);
      for (const Part& part : parts[i]) {
        if (!part.is_written) continue;
        copy_flat(d2h_, part_values(part, first, count).raw_data(),
                  part.place(window, part.state)->raw_data(), part_numel(part, count),
                  part.tensor.dtype());
      }
      if (poison_) {
        d2h_.fill_bytes("poison", slot->memory->data(), kPoison, slot->memory->nbytes());
      }
      windows_->release(slot, d2h_.record());
    }
  }
  wait(compute, d2h_.record(), OffloadWait::kStored);
}

}  // namespace tessera::dist
