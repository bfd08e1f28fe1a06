// fsdp_fault CASE: a training whose last rank fails in one way; run and judged by faults.sh.

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "dist/comm/watchdog.h"
#include "dist/fsdp/fully_shard.h"
#include "kernels/reduce/reduce.h"
#include "nn/linear.h"

using namespace tessera;
using namespace tessera::dist;

namespace {

constexpr int kWidth = 16;

struct Net : nn::Module {
  nn::ChildList<nn::Linear> blocks{this, "blocks"};

  explicit Net(int64_t inner_width) {
    blocks.emplace_back(kWidth, inner_width);
    blocks.emplace_back(inner_width, kWidth);
    for (int i = 0; i < 3; ++i) blocks.emplace_back(kWidth, kWidth);
  }
  /// Blocks 2 and 3 change places if `swapped`; `between` runs after block 1.
  template <class F>
  Tensor forward(const Tensor& x, bool swapped, const F& between) {
    Tensor h = blocks[1](blocks[0](x));
    between();
    h = swapped ? blocks[2](blocks[3](h)) : blocks[3](blocks[2](h));
    return blocks[4](h);
  }
};

int run(World& world, const std::string& name) {
  world.watchdog().set_timeout(std::chrono::seconds(3));
  Context::set_process_context(std::make_shared<Context>(ContextOptions{.num_threads = 1}));
  const bool is_last = world.rank() == world.world_size() - 1;
  Net net(name == "bytes" && is_last ? 3000 : 16);
  FsdpOptions options;
  options.wrap = wrap::by_class<nn::Linear>();
  const auto fsdp = fully_shard(net, world, options);
  fsdp->initialize(1);
  if (name == "kill") {
    signal(SIGTERM, [](int) {
      const char text[] = "SIGTERM now\n";
      if (write(STDERR_FILENO, text, sizeof text - 1) < 0) return;
      Watchdog::notify_terminate();
    });
  }
  for (int step = 0; step < 4; ++step) {
    const bool is_now = is_last && step == (name == "swap0" ? 0 : 2);
    const bool swapped = is_now && (name == "swap0" || name == "swap2");
    const Tensor y = net.forward(full({4, kWidth}, 0.1), swapped, [&] {
      if (!is_now) return;
      if (name == "stop") raise(SIGSTOP);
      if (name == "kill") {
        // The others are in the gathers that follow, or soon will be.
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        fmt::print(stderr, "killed now\n");
        std::fflush(stderr);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // mpirun passes the line on
        raise(SIGKILL);
      }
      if (name == "throw") throw InputError("tokens.bin: truncated");
    });
    backward(sum(y));
    fsdp->clip_grad_norm(1.0);
    fsdp->end_step();
    current_stream().synchronize();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  return run_main(argc, argv, [&name](World& world) { return run(world, name); });
}
