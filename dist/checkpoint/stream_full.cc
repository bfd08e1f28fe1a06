#include "dist/checkpoint/stream_full.h"

#include <chrono>
#include <future>
#include <optional>

#include "dist/fsdp/offload.h"

namespace tessera::dist {
namespace {

constexpr std::chrono::milliseconds kTurn{20};

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
  const auto is_writing = [&] { return world.rank() == 0 && !failed; };
  const auto attempt = [&](const std::function<void()>& f) {
    std::future<void> job;
    if (is_writing()) job = std::async(std::launch::async, f);
    const auto is_over = [&] {
      return !job.valid() || job.wait_for(kTurn) == std::future_status::ready;
    };
    while (!world.control().all_agree(is_over())) {
      if (sink.waiting) sink.waiting();
    }
    try {
      if (job.valid()) job.get();
    } catch (const IoError& error) {
      failed = error;
    }
  };
  attempt(sink.begin);
  fsdp.for_each_full(Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
    Tensor copy;
    const float* values = is_writing() ? values_on_host(full, copy) : nullptr;
    attempt([&] { sink.write(name, values, full.numel()); });
  });
  attempt(sink.finish);
  world.control().verdict(failed ? &*failed : nullptr);
}

}  // namespace tessera::dist
