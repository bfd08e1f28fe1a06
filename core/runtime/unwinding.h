#pragma once

#include <functional>
#include <memory>

namespace tessera {

class StreamImpl;

// [Note: Unwinding]
// An exception destroys streams whose tasks may wait for other processes: a collective that the
// others never come to. Its handler, which says what went wrong and ends the others, is reached
// only when all destructors are through. So a stream that is destroyed, or drained, by an exception
// waits for a moment, and then asks those who registered for it to end what waits for others. An
// exception that is caught on the spot does no harm as long as nothing is stuck.

/// While alive, `action` is called for streams as above that destructors on this thread wait for;
/// again and again until they are done. It does not throw.
class UnwindAction {
 public:
  explicit UnwindAction(std::function<void()> action);
  UnwindAction(const UnwindAction&) = delete;
  UnwindAction& operator=(const UnwindAction&) = delete;

 private:
  const std::shared_ptr<const std::function<void()>> action_;
};

/// For destructors, before they wait for a stream. `num_exceptions`: those in flight when the
/// stream was made. Unless there is one more, nothing; else returns when what was submitted is
/// done.
void wait_while_unwinding(StreamImpl& stream, int num_exceptions) noexcept;

}  // namespace tessera
