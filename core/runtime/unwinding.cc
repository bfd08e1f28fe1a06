#include "core/runtime/unwinding.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "core/log.h"
#include "core/runtime/stream.h"

namespace tessera {
namespace {

using Action = std::function<void()>;

using Actions = std::vector<std::weak_ptr<const Action>>;

// Of this thread. A static object that has one may be destroyed later than these are: then the list
// is made anew.
thread_local Actions* thread_actions = nullptr;
struct ActionsEnd {
  ~ActionsEnd() { delete std::exchange(thread_actions, nullptr); }
};

Actions& actions() {
  static thread_local const ActionsEnd end;
  static_cast<void>(end);
  if (thread_actions == nullptr) thread_actions = new Actions;
  return *thread_actions;
}

}  // namespace

UnwindAction::UnwindAction(std::function<void()> action)
    : action_(std::make_shared<const Action>(std::move(action))) {
  std::erase_if(actions(), [](const auto& weak) { return weak.expired(); });
  actions().push_back(action_);
}

void wait_while_unwinding(StreamImpl& stream, int num_exceptions) noexcept {
  if (std::uncaught_exceptions() <= num_exceptions || actions().empty()) return;
  constexpr std::chrono::milliseconds kPeriod{5}, kPatience{200};
  try {
    const Event end = stream.record();
    auto next_call = std::chrono::steady_clock::now() + kPatience;
    while (!end.is_done()) {
      std::this_thread::sleep_for(kPeriod);
      if (std::chrono::steady_clock::now() < next_call) continue;
      next_call += kPatience;
      const auto all = actions();
      for (const auto& weak : all) {
        if (const auto action = weak.lock()) (*action)();
      }
    }
  } catch (const std::exception& error) {  // no event: the destructor waits as ever
    log_error("stream {}: {}", stream.name, error.what());
  }
}

}  // namespace tessera
