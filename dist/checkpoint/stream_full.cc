#include "dist/checkpoint/stream_full.h"

#include <optional>

#include "dist/fsdp/offload.h"

namespace tessera::dist {
namespace {

/// f32 values of a tensor where the host can read them; `copy` holds them if they had to move.
const float* values_on_host(const Tensor& full, Tensor& copy) {
  copy = full.device().type == DeviceType::kCpu ? full : empty_on_host(full.numel(), kF32);
  if (full.device().type != DeviceType::kCpu) copy.copy_(full.view({full.numel()}));
  current_stream().synchronize();
  return copy.data<float>();
}

}  // namespace

void stream_full(Fsdp& fsdp, World& world, const FullSink& sink) {
  std::optional<IoError> failed;  // the other ranks go on with the gathers until all know
  const auto attempt = [&](auto&& f) {
    if (failed || world.rank() != 0) return;
    try {
      f();
    } catch (const IoError& error) {
      failed = error;
    }
  };
  attempt(sink.begin);
  fsdp.for_each_full(Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
    attempt([&] {
      Tensor copy;
      sink.write(name, values_on_host(full, copy), full.numel());
    });
  });
  attempt(sink.finish);
  world.control().verdict(failed ? &*failed : nullptr);
}

}  // namespace tessera::dist
