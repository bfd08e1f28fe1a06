#include "core/profiler.h"
#include "core/runtime/cuda/cuda.h"
#if defined(TESSERA_CUDA)
#include <map>
#include <utility>

#include "core/log.h"
#include "core/runtime/cuda/check.h"
#include "core/runtime/cuda/timing.h"
#endif

namespace tessera {

#if defined(TESSERA_CUDA)

namespace {

double elapsed_ns(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0;
  TESSERA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<double>(ms) * 1e6;
}

/// The timelines of all streams that live.
class Registry {
 public:
  static Registry& get() {
    static auto* registry = new Registry;  // leaked: streams may outlive statics
    return *registry;
  }

  void add(const std::shared_ptr<CudaTimeline>& timeline) {
    static std::once_flag once;
    std::call_once(once, [] { profiler::add_source([] { Registry::get().collect(); }); });
    const std::lock_guard lock(mutex_);
    std::erase_if(timelines_, [](const auto& weak) { return weak.expired(); });
    timelines_.push_back(timeline);
  }

 private:
  void collect() {
    std::vector<std::weak_ptr<CudaTimeline>> timelines;
    {
      const std::lock_guard lock(mutex_);
      timelines = timelines_;
    }
    std::map<int, CudaTimeline::Base> bases;  // by device
    for (const auto& weak : timelines) {
      if (const auto timeline = weak.lock()) timeline->collect(bases[timeline->device().index]);
    }
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<CudaTimeline>> timelines_;
};

}  // namespace

TimingPool::~TimingPool() {
  if (!idle_.empty()) ensure_cuda_device(device_);
  for (const cudaEvent_t event : idle_)
    cuda::log_failure("cudaEventDestroy", cudaEventDestroy(event));
}

cudaEvent_t TimingPool::take() {
  {
    ensure_cuda_device(device_);
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      const cudaEvent_t event = idle_.back();
      idle_.pop_back();
      return event;
    }
  }
  use_cuda_device(device_);  // an event belongs to the thread's device
  cudaEvent_t event = nullptr;
  TESSERA_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault));
  return event;
}

void TimingPool::give_back(cudaEvent_t event) noexcept {
  if (event == nullptr) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

CudaSpan::CudaSpan(const Stream& stream) : CudaSpan(*timeline_of(stream)) {}

CudaSpan::CudaSpan(const CudaTimeline& timeline)
    : pool_(timeline.pool()), stream_(timeline.stream()), begin_(pool_->take()) {
  if (const cudaError_t error = cudaEventRecord(begin_, stream_); error != cudaSuccess) {
    pool_->give_back(begin_);
    cuda::fail("cudaEventRecord(begin, stream)", error, __FILE__, __LINE__);
  }
}

CudaSpan::CudaSpan(CudaSpan&& other) noexcept
    : pool_(std::move(other.pool_)),
      stream_(other.stream_),
      begin_(std::exchange(other.begin_, nullptr)),
      end_(std::exchange(other.end_, nullptr)) {}

CudaSpan& CudaSpan::operator=(CudaSpan&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(stream_, other.stream_);
  std::swap(begin_, other.begin_);
  std::swap(end_, other.end_);
  return *this;
}

CudaSpan::~CudaSpan() {
  if (pool_ == nullptr) return;
  pool_->give_back(begin_);
  pool_->give_back(end_);
}

void CudaSpan::end() {
  end_ = pool_->take();
  TESSERA_CUDA_CHECK(cudaEventRecord(end_, stream_));
}

double CudaSpan::ms() const {
  if (end_ == nullptr) return 0;
  ensure_cuda_device(pool_->device());
  TESSERA_CUDA_CHECK(cudaEventSynchronize(end_));
  return elapsed_ns(begin_, end_) * 1e-6;
}

CudaTimeline::CudaTimeline(Device device, int stream_id, cudaStream_t stream)
    : device_(device),
      stream_id_(stream_id),
      stream_(stream),
      pool_(std::make_shared<TimingPool>(device)) {}

void CudaTimeline::add(const char* name, const char* unit, int32_t label, CudaSpan span) {
  const std::lock_guard lock(mutex_);
  if (stream_ != nullptr) entries_.push_back({name, unit, label, std::move(span)});
}

CudaTimeline::Base::~Base() {
  if (pool != nullptr) pool->give_back(event);
}

void CudaTimeline::collect(Base& base) {
  const std::lock_guard lock(mutex_);
  collect_locked(base);
}

void CudaTimeline::collect_locked(Base& base) {
  const std::vector<Entry> entries = std::exchange(entries_, {});
  if (entries.empty()) return;
  ensure_cuda_device(pool_->device());
  TESSERA_CUDA_CHECK(cudaEventSynchronize(entries.back().span.end_));
  if (base.event == nullptr) {
    base.pool = pool_;
    base.event = pool_->take();
    TESSERA_CUDA_CHECK(cudaEventRecord(base.event, stream_));
    TESSERA_CUDA_CHECK(cudaEventSynchronize(base.event));
    base.host_ns = profiler::now_ns();
  }
  double at_ns =
      static_cast<double>(base.host_ns) - elapsed_ns(entries.front().span.begin_, base.event);
  const Entry* previous = nullptr;
  for (const Entry& e : entries) {
    if (previous != nullptr) at_ns += elapsed_ns(previous->span.end_, e.span.begin_);
    const auto begin_ns = static_cast<int64_t>(at_ns);
    at_ns += elapsed_ns(e.span.begin_, e.span.end_);
    profiler::add({e.name, stream_id_, begin_ns, static_cast<int64_t>(at_ns), e.unit, e.label});
    previous = &e;
  }
}

void CudaTimeline::close() noexcept {
  const std::lock_guard lock(mutex_);
  try {
    Base base;
    collect_locked(base);
  } catch (const std::exception& error) {
    log_error("{}", error.what());
  }
  stream_ = nullptr;
}

std::shared_ptr<CudaTimeline> make_cuda_timeline(Device device, int stream_id,
                                                 cudaStream_t stream) {
  auto timeline = std::make_shared<CudaTimeline>(device, stream_id, stream);
  Registry::get().add(timeline);
  return timeline;
}

namespace {
thread_local bool is_in_task = false;
}  // namespace

void CudaTask::begin(const std::shared_ptr<CudaTimeline>& timeline, const char* name,
                     const char* unit) {
  if (is_in_task) return;
  span_ = CudaSpan(*timeline);
  timeline_ = timeline;
  name_ = name;
  unit_ = unit;
  label_ = profiler::current_label();
  is_in_task = true;
}

void CudaTask::end() noexcept {
  is_in_task = false;
  try {
    span_.end();
    timeline_->add(name_, unit_, label_, std::move(span_));
  } catch (const std::exception& error) {
    log_error("{}: {}", name_, error.what());
  }
}

#else  // a build without CUDA: there is no stream to time

CudaSpan::CudaSpan(const Stream& stream) {
  TESSERA_UNIMPLEMENTED("CudaSpan: this build has no CUDA, the stream is on {}", stream.device());
}
CudaSpan::CudaSpan(CudaSpan&&) noexcept = default;
CudaSpan& CudaSpan::operator=(CudaSpan&&) noexcept = default;
CudaSpan::~CudaSpan() = default;
void CudaSpan::end() {}
double CudaSpan::ms() const {
  return 0;
}
const std::shared_ptr<CudaTimeline>& timeline_of(const Stream& stream) {
  TESSERA_UNIMPLEMENTED("timeline_of: this build has no CUDA, the stream is on {}",
                        stream.device());
}
void CudaTask::begin(const std::shared_ptr<CudaTimeline>&, const char*, const char*) {}
void CudaTask::end() noexcept {}

#endif

}  // namespace tessera
