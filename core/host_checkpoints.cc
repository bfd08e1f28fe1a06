#include "core/host_checkpoints.h"

#include <algorithm>

#include "core/log.h"
#include "core/runtime/context.h"

namespace tessera {

std::shared_ptr<HostCheckpoints> HostCheckpoints::make() {
  return std::shared_ptr<HostCheckpoints>(new HostCheckpoints);
}

std::shared_ptr<HostCheckpoint> HostCheckpoints::keep(const Tensor& x) {
  if (!d2h_) {
    d2h_ = Context::current()->make_stream("d2h");
    h2d_ = Context::current()->make_stream("h2d");
  }
  if (leaving_ != nullptr) leaving_->let_go();
  auto checkpoint = std::make_shared<HostCheckpoint>(shared_from_this(), x.detach().contiguous());
  live_.push_back(leaving_ = checkpoint.get());
  return checkpoint;
}

HostCheckpoint::HostCheckpoint(std::shared_ptr<HostCheckpoints> owner, const Tensor& x)
    : owner_(std::move(owner)),
      stream_(current_stream()),
      shape_(x.shape()),
      dtype_(x.dtype()),
      on_device_(x),
      version_(x.impl()->version),
      kept_version_(*version_),
      home_(static_cast<size_t>(x.nbytes()), x.device()) {
  const Stream& d2h = owner_->d2h_;
  home_.materialize(Context::current()->host_allocator(), d2h, MemoryScope::current());
  d2h.wait(stream_.record());
  d2h.copy_bytes("offload_checkpoint", home_.data(), x.raw_data(), home_.nbytes());
  owner_->traffic_.d2h_nbytes += x.nbytes();
  is_home_ = d2h.record();
}

HostCheckpoint::~HostCheckpoint() {
  std::erase(owner_->live_, this);
  if (owner_->leaving_ == this) owner_->leaving_ = nullptr;
  try {
    // Whoever has the memory next comes after the copies.
    if (on_device_.is_defined()) {
      stream_.wait(is_home_);
      stream_.wait(is_here_);
    }
    owner_->d2h_.wait(is_here_);
  } catch (const Error& error) {
    log_error("recompute: a checkpoint in host memory: {}", error.what());
  }
}

/// The device's bytes are no longer needed here.
void HostCheckpoint::let_go() {
  owner_->leaving_ = nullptr;
  stream_.wait(is_home_);
  is_changed_ = *version_ != kept_version_;
  on_device_ = {};
}

void HostCheckpoint::fetch() {
  const Stream& h2d = owner_->h2d_;
  const StreamGuard guard(stream_);
  on_device_ = empty(shape_, dtype_);
  h2d.wait(stream_.record());  // what had the memory before, and the copy out: see `let_go`
  h2d.copy_bytes("fetch_checkpoint", on_device_.raw_data(), home_.data(), home_.nbytes());
  owner_->traffic_.h2d_nbytes += on_device_.nbytes();
  is_here_ = h2d.record();
}

const Tensor& HostCheckpoint::bring() {
  if (owner_->leaving_ == this) is_changed_ = *version_ != kept_version_;
  TESSERA_CHECK(!is_changed_,
                "recompute: an input of shape {} was changed in place after the forward", shape_);
  if (!on_device_.is_defined()) fetch();
  stream_.wait(is_here_);
  const std::vector<HostCheckpoint*>& live = owner_->live_;
  const auto it = std::find(live.begin(), live.end(), this);
  if (it != live.begin() && !it[-1]->on_device_.is_defined()) it[-1]->fetch();
  return on_device_;
}

}  // namespace tessera
