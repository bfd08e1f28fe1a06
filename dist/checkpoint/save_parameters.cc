#include "dist/checkpoint/save_parameters.h"

#include <chrono>
#include <exception>
#include <future>

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

void save_parameters(Fsdp& fsdp, World& world,
                     const std::function<std::unique_ptr<ParameterSink>()>& open,
                     const std::function<void()>& waiting) {
  std::unique_ptr<ParameterSink> sink;  // of rank 0
  std::exception_ptr failed;            // the other ranks go on with the gathers until all know
  const auto is_writing = [&] { return world.rank() == 0 && !failed; };
  const auto attempt = [&](const std::function<void()>& f) {
    std::future<void> job;
    if (is_writing()) job = std::async(std::launch::async, f);
    const auto is_over = [&] {
      return !job.valid() || job.wait_for(kTurn) == std::future_status::ready;
    };
    while (!world.control().all_agree(is_over())) {
      if (waiting) waiting();
    }
    try {
      if (job.valid()) job.get();
    } catch (const Error&) {
      failed = std::current_exception();
    }
  };
  const auto agree = [&] {
    world.control().verdict([&] {
      if (failed) std::rethrow_exception(failed);
    });
  };
  attempt([&] { sink = open(); });
  agree();
  fsdp.for_each_full(Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
    Tensor copy;
    const float* values = is_writing() ? values_on_host(full, copy) : nullptr;
    attempt([&] { sink->write(name, full.shape(), values); });
  });
  attempt([&] { sink->finish(); });
  agree();
}

}  // namespace tessera::dist
