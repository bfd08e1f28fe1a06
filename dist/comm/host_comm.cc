#include "dist/comm/host_comm.h"

#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/check.h"

namespace tessera::dist {

namespace {

/// "all_gather blocks.3": what a timeline shows. Lives for ever.
const char* trace_name(const char* op, const char* unit) {
  if (*unit == '\0') return op;
  static std::mutex mutex;
  static auto* names = new std::map<std::pair<std::string, std::string>, std::string>;
  const std::lock_guard lock(mutex);
  std::string& name = (*names)[{op, unit}];
  if (name.empty()) name = fmt::format("{} {}", op, unit);
  return name.c_str();
}

class HostComm final : public Comm {
 public:
  HostComm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog)
      : Comm(std::move(transport), std::move(watchdog), DeviceType::kCpu) {}

 private:
  void do_run(const Call& call) override {
    call.stream.submit(
        trace_name(call.tag.op, call.info.unit),
        [transport = transport(), log = log(), tag = call.tag, info = call.info,
         nbytes = call.nbytes, collective = call.collective, delay = watchdog()->delay()] {
          const CollectiveScope scope(*log, tag.op, info, nbytes);
          if (delay.count() > 0) std::this_thread::sleep_for(delay);
          transport->run(tag, collective);
        });
  }
  int64_t do_staging_nbytes(const Collective& collective, bool is_allocated) const override {
    return collective.staging_nbytes(*transport(), is_allocated);
  }
  std::shared_ptr<MemoryBackend> do_memory(int64_t) override {
    return transport()->shared_memory();
  }
  std::unique_ptr<Comm> do_split(std::shared_ptr<HostTransport> child, int, int) override {
    return make_host_comm(std::move(child), watchdog());
  }
};

}  // namespace

std::unique_ptr<Comm> make_host_comm(std::shared_ptr<HostTransport> transport,
                                     std::shared_ptr<Watchdog> watchdog) {
  return std::make_unique<HostComm>(std::move(transport), std::move(watchdog));
}

}  // namespace tessera::dist
