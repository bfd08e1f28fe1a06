// comm_fault CASE: ranks that fail in one way each; run and judged by faults.sh.

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "core/log.h"
#include "core/runtime/context.h"
#include "dist/comm/watchdog.h"
#include "dist/comm/world.h"

using namespace tessera;
using namespace tessera::dist;

namespace {

int run(World& world, const std::string& name) {
  world.watchdog().set_timeout(std::chrono::seconds(3));
  const auto comm = world.make_comm();
  const Stream stream = Context::current()->make_stream("comm");
  std::vector<float> full(static_cast<size_t>(8 * world.world_size())), shard(8);
  const auto gather = [&](int64_t step, const char* unit = "block3") {
    comm->all_gather(stream, full.data(), shard.data(), 8, kF32, {"forward", unit, step});
  };
  gather(0);
  stream.synchronize();
  const bool is_last = world.rank() == world.world_size() - 1;
  if (name == "pair") {  // ranks of a communicator are not those of the world
    const auto pair = comm->split(world.rank() / 2, world.rank());
    if (is_last) std::this_thread::sleep_for(std::chrono::seconds(60));
    pair->all_gather(stream, full.data(), shard.data(), 8, kF32, {"forward", "block5", 2});
    stream.synchronize();
    world.control().barrier();
  }
  if (name == "fine") return 0;
  if (name == "threads") return world.num_threads(4096) == 4096 && world.num_threads() >= 1 ? 0 : 1;
  if (name == "throw" && is_last) throw InputError("tokens.bin: bad magic");
  if (name == "unwind") {  // amid a collective that nobody else comes to
    world.watchdog().set_timeout(std::chrono::seconds(600));
    if (!is_last) std::this_thread::sleep_for(std::chrono::seconds(60));
    gather(1);
    throw InputError("tokens.bin: bad magic");
  }
  if (name == "early" && !is_last) return 0;
  if (name == "early") world.control().verdict([] {});
  if (name == "verdict") {
    world.control().verdict([&] {
      if (is_last) throw CheckpointError("shard 1: checksum differs");
    });
  }
  if (name == "stop" && is_last) raise(SIGSTOP);
  if (name == "kill" && is_last) raise(SIGKILL);
  if (name == "kill") signal(SIGTERM, [](int) { Watchdog::notify_terminate(); });
  if (name == "exit" && is_last) _exit(9);
  if (name == "skip" && is_last) std::this_thread::sleep_for(std::chrono::seconds(60));
  if (name == "other") {  // the same bytes for another unit, and all know its name
    gather(0, "block4");
    stream.synchronize();
  }
  gather(1, name == "other" && is_last ? "block4" : "block3");
  stream.synchronize();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  return run_main(argc, argv, [&name](World& world) { return run(world, name); });
}
