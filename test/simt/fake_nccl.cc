#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "test/simt/fake_cuda.h"
#include "test/simt/include/nccl.h"

// NCCL between thread ranks. A call is a task of its stream, which meets the tasks of the other
// ranks there. As in the real library the first collective of a communicator and the first transfer
// between two ranks connect them before the call returns: the host meets the others' hosts, for as
// long as they take to come, or until its own communicator is aborted. Ranks that come with
// different calls, counts or types are a mistake that is named, where the real library hangs or
// writes past the end of a buffer; the communicator then has an asynchronous error on all ranks.

namespace {

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

/// A collective as one rank calls it.
struct Call {
  const char* op = "";
  size_t count = 0;
  ncclDataType_t type = ncclUint8;
  const void* send = nullptr;

  bool agrees_with(const Call& other) const {
    return std::strcmp(op, other.op) == 0 && count == other.count && type == other.type;
  }
  std::string to_string() const {
    return std::string(op) + " of " + std::to_string(count) + " elements of type " +
           std::to_string(type);
  }
};

/// What one rank sends to another; on its stack until it is taken.
struct Message {
  const void* data;
  size_t count;
  ncclDataType_t type;
  bool is_taken = false;
};

/// What the ranks of one communicator share.
class Group {
 public:
  explicit Group(int num_ranks)
      : num_ranks_(num_ranks),
        calls_(static_cast<size_t>(num_ranks)),
        splits_(static_cast<size_t>(num_ranks)),
        children_(static_cast<size_t>(num_ranks)) {}

  int num_ranks() const { return num_ranks_; }

  // ----- by the tasks of streams; false once the communicator has ended or failed

  bool meet(int rank, const Call& call, std::vector<Call>* all) {
    std::unique_lock lock(mutex_);
    calls_[static_cast<size_t>(rank)] = call;
    if (!arrive(lock)) return false;
    for (size_t r = 1; r < calls_.size(); ++r) {
      if (calls_[r].agrees_with(calls_[0])) continue;
      fail("the ranks disagree: rank 0 calls " + calls_[0].to_string() + ", rank " +
           std::to_string(r) + " " + calls_[r].to_string());
      return false;
    }
    *all = calls_;
    return true;
  }
  bool meet_again() {
    std::unique_lock lock(mutex_);
    return arrive(lock);
  }

  void post(int from, int to, Message* message) {
    {
      const std::lock_guard lock(mutex_);
      messages_[{from, to}].push_back(message);
    }
    changed_.notify_all();
  }
  bool take(int from, int to, void* data, size_t count, ncclDataType_t type) {
    std::unique_lock lock(mutex_);
    std::deque<Message*>& queue = messages_[{from, to}];
    changed_.wait(lock, [&] { return !queue.empty() || has_ended_; });
    if (has_ended_) return false;
    Message* message = queue.front();
    queue.pop_front();
    if (message->count != count || message->type != type) {
      fail("rank " + std::to_string(from) + " sends " + std::to_string(message->count) +
           " elements of type " + std::to_string(message->type) + ", rank " + std::to_string(to) +
           " receives " + std::to_string(count) + " of type " + std::to_string(type));
      return false;
    }
    std::memcpy(data, message->data, count * size_of(type));
    message->is_taken = true;
    changed_.notify_all();
    return true;
  }
  void wait_taken(const Message& message) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return message.is_taken || has_ended_; });
  }

  // ----- by hosts

  struct Split {
    int color, key, rank;
  };
  /// All ranks meet on the host; the group of the ranks of the same color, and the rank in it; null
  /// once the communicator is aborted.
  std::pair<std::shared_ptr<Group>, int> split(const Split& mine, const bool& is_aborted) {
    std::unique_lock lock(mutex_);
    splits_[static_cast<size_t>(mine.rank)] = mine;
    if (!host_meet(lock, is_aborted)) return {};
    std::vector<Split> members;
    for (const Split& s : splits_) {
      if (s.color == mine.color) members.push_back(s);
    }
    std::stable_sort(members.begin(), members.end(),
                     [](const Split& a, const Split& b) { return a.key < b.key; });
    auto& child = children_[static_cast<size_t>(members.front().rank)];
    if (child == nullptr) child = std::make_shared<Group>(static_cast<int>(members.size()));
    const auto place = std::find_if(members.begin(), members.end(),
                                    [&](const Split& s) { return s.rank == mine.rank; });
    std::pair result(child, static_cast<int>(place - members.begin()));
    static const bool never = false;  // all have come: they come to these as well
    host_meet(lock, never);
    child.reset();
    host_meet(lock, never);
    return result;
  }
  /// False if `is_aborted` became true before all ranks had come.
  bool meet_on_host(const bool& is_aborted) {
    std::unique_lock lock(mutex_);
    return host_meet(lock, is_aborted);
  }
  /// Waits until each of `peers` has come here with `rank` among its own.
  bool connect(int rank, const std::set<int>& peers, const bool& is_aborted) {
    std::unique_lock lock(mutex_);
    for (const int peer : peers) comers_.emplace(rank, peer);
    changed_.notify_all();
    const auto is_connected = [&] {
      return std::all_of(peers.begin(), peers.end(), [&](int peer) {
        return comers_.count({peer, rank}) != 0;
      });
    };
    changed_.wait(lock, [&] { return is_connected() || is_aborted; });
    return is_connected();
  }

  /// Of one rank: its own host calls return, and what is queued on all ends.
  void abort(bool* is_aborted) {
    {
      const std::lock_guard lock(mutex_);
      has_ended_ = *is_aborted = true;
    }
    changed_.notify_all();
  }
  std::string error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  void fail(const std::string& text) {
    if (!error_.empty()) return;  // found by another rank
    simt::report_mistake("NCCL: " + text);
    error_ = text;
    has_ended_ = true;
    changed_.notify_all();
  }
  bool arrive(std::unique_lock<std::mutex>& lock) {
    if (has_ended_) return false;
    const int64_t generation = generation_;
    if (++num_arrived_ == num_ranks_) {
      num_arrived_ = 0;
      ++generation_;
      changed_.notify_all();
      return true;
    }
    changed_.wait(lock, [&] { return generation_ != generation || has_ended_; });
    return generation_ != generation;
  }
  bool host_meet(std::unique_lock<std::mutex>& lock, const bool& is_aborted) {
    const int64_t generation = host_generation_;
    if (++num_hosts_ == num_ranks_) {
      num_hosts_ = 0;
      ++host_generation_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return host_generation_ != generation || is_aborted; });
    return host_generation_ != generation;
  }

  const int num_ranks_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;
  int num_arrived_ = 0, num_hosts_ = 0;
  int64_t generation_ = 0, host_generation_ = 0;
  std::map<std::pair<int, int>, std::deque<Message*>> messages_;
  std::set<std::pair<int, int>> comers_;  // (rank, peer): the host of rank connects to peer, or has
  std::vector<Split> splits_;
  std::vector<std::shared_ptr<Group>> children_;
  bool has_ended_ = false;
  std::string error_;
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank = 0, device = 0;
  std::atomic<int> num_queued{0};
  std::atomic<int> num_in_call{0};  // host threads in calls of it
  bool is_connected = false;        // a collective has been called; by one host thread
  bool is_aborted = false;          // under the group's mutex
  std::set<int> peers;              // of transfers so far; by one host thread
  std::string last_error;
  std::mutex mutex;
  std::map<const char*, int64_t> registered;  // bytes by address, which is the handle
};

namespace {

std::mutex buffers_mutex;
simt::NcclBuffers buffers;

void count_buffer(ncclComm_t comm, const void* data, int64_t nbytes) {
  bool is_registered = false;
  {
    const std::lock_guard lock(comm->mutex);
    const char* begin = static_cast<const char*>(data);
    const auto next = comm->registered.upper_bound(begin);
    if (next != comm->registered.begin()) {
      const auto& [address, size] = *std::prev(next);
      is_registered = begin + nbytes <= address + size;
    }
  }
  const std::lock_guard lock(buffers_mutex);
  ++(is_registered ? buffers.num_registered : buffers.num_others);
  if (!is_registered) buffers.largest_other = std::max(buffers.largest_other, nbytes);
}

std::mutex groups_mutex;
std::map<std::string, std::pair<std::shared_ptr<Group>, int>> groups;  // by id, with ranks to come

/// A send or a receive of a group.
struct Transfer {
  ncclComm_t comm;
  cudaStream_t stream;
  bool is_send;
  void* data;
  size_t count;
  ncclDataType_t type;
  int peer;
};
thread_local int group_depth = 0;
thread_local std::vector<Transfer> transfers;

ncclResult_t make_comm(std::shared_ptr<Group> group, int rank, ncclComm_t* comm) {
  *comm = new ncclComm;
  (*comm)->group = std::move(group);
  (*comm)->rank = rank;
  cudaGetDevice(&(*comm)->device);
  simt::add_object(*comm, "an NCCL communicator of rank " + std::to_string(rank));
  return ncclSuccess;
}

ncclResult_t submit(ncclComm_t comm, cudaStream_t stream, const char* name,
                    std::vector<simt::Range> ranges, std::function<void()> work) {
  if (stream != nullptr && simt::device_of(stream) != comm->device) {
    simt::report_mistake(std::string(name) + ": the stream is of another device");
    return ncclInvalidArgument;
  }
  for (const simt::Range& range : ranges) count_buffer(comm, range.data, range.nbytes);
  ++comm->num_queued;
  const auto counted = [comm, work = std::move(work)] {
    work();
    --comm->num_queued;
  };
  if (simt::submit(stream, name, std::move(ranges), counted) == cudaSuccess) return ncclSuccess;
  --comm->num_queued;
  return ncclUnhandledCudaError;
}

/// A host thread is in a call of the communicator, which is not deleted meanwhile.
class InCall {
 public:
  explicit InCall(ncclComm_t comm) : comm_(comm) { ++comm_->num_in_call; }
  ~InCall() { --comm_->num_in_call; }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  ncclComm_t comm_;
};

int64_t nbytes_of(size_t count, ncclDataType_t type) {
  return static_cast<int64_t>(count * size_of(type));
}

/// The transfers of one communicator and stream run side by side.
void run_transfers(Group& group, int rank, const std::vector<Transfer>& all) {
  std::deque<Message> messages;
  for (const Transfer& t : all) {
    if (!t.is_send) continue;
    messages.push_back({t.data, t.count, t.type});
    group.post(rank, t.peer, &messages.back());
  }
  for (const Transfer& t : all) {
    if (!t.is_send && !group.take(t.peer, rank, t.data, t.count, t.type)) break;
  }
  for (const Message& message : messages) group.wait_taken(message);
}

ncclResult_t submit_transfers() {
  while (!transfers.empty()) {
    const ncclComm_t comm = transfers.front().comm;
    const cudaStream_t stream = transfers.front().stream;
    std::vector<Transfer> mine, others;
    std::vector<simt::Range> ranges;
    for (const Transfer& t : transfers) {
      (t.comm == comm && t.stream == stream ? mine : others).push_back(t);
    }
    std::set<int> new_peers;
    for (const Transfer& t : mine) {
      ranges.push_back({t.data, nbytes_of(t.count, t.type), !t.is_send});
      if (t.peer != comm->rank && comm->peers.insert(t.peer).second) new_peers.insert(t.peer);
    }
    transfers = others;
    const InCall in_call(comm);
    if (!comm->group->connect(comm->rank, new_peers, comm->is_aborted)) return ncclInternalError;
    const ncclResult_t result = submit(
        comm, stream, "ncclSend/ncclRecv", ranges,
        [group = comm->group, rank = comm->rank, mine] { run_transfers(*group, rank, mine); });
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

ncclResult_t add_transfer(const Transfer& transfer) {
  if (transfer.comm == nullptr || transfer.peer < 0 ||
      transfer.peer >= transfer.comm->group->num_ranks())
    return ncclInvalidArgument;
  transfers.push_back(transfer);
  return group_depth == 0 ? submit_transfers() : ncclSuccess;
}

/// `finish(all calls)` copies what this rank gets, between two meetings.
template <class Finish>
ncclResult_t submit_collective(ncclComm_t comm, cudaStream_t stream, const Call& call,
                               const std::vector<simt::Range>& ranges, Finish finish) {
  const InCall in_call(comm);
  if (!std::exchange(comm->is_connected, true) && !comm->group->meet_on_host(comm->is_aborted))
    return ncclInternalError;
  return submit(comm, stream, call.op, ranges,
                [group = comm->group, rank = comm->rank, call, finish] {
                  std::vector<Call> all;
                  if (!group->meet(rank, call, &all)) return;
                  finish(all);
                  group->meet_again();
                });
}

/// In rank order; what NCCL's order is, it does not say.
template <class T, class ToFloat, class FromFloat>
void add_ranks(const std::vector<Call>& all, size_t first, size_t count, void* out,
               ToFloat to_float, FromFloat from_float) {
  std::vector<T> sums(count);  // `out` may be a part of what others still read
  for (size_t i = 0; i < count; ++i) {
    decltype(to_float(T{})) sum = 0;
    for (const Call& call : all) sum += to_float(static_cast<const T*>(call.send)[first + i]);
    sums[i] = from_float(sum);
  }
  std::memcpy(out, sums.data(), count * sizeof(T));
}

float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t float_to_bf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

simt::NcclBuffers simt::take_nccl_buffers() {
  const std::lock_guard lock(buffers_mutex);
  return std::exchange(buffers, {});
}

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    default:
      return "internal error";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  if (comm == nullptr) return "";
  comm->last_error = comm->group->error();
  return comm->last_error.c_str();
}

// Ranks are threads here: for processes of a launcher it is a version too old to be used.
ncclResult_t ncclGetVersion(int* version) {
  *version = std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr ? NCCL_VERSION_CODE : 0;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> next{1};
  *id = {};
  const std::string text = "fake " + std::to_string(next++);
  text.copy(id->internal, NCCL_UNIQUE_ID_BYTES - 1);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(groups_mutex);
    auto& [shared, num_left] = groups[id.internal];
    if (shared == nullptr) {
      shared = std::make_shared<Group>(num_ranks);
      num_left = num_ranks;
    }
    group = shared;
    if (--num_left == 0) groups.erase(id.internal);
  }
  if (group->num_ranks() != num_ranks) return ncclInvalidUsage;
  static const bool never = false;
  group->meet_on_host(never);
  return make_comm(group, rank, comm);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t*) {
  if (comm == nullptr) return ncclInvalidArgument;
  const InCall in_call(comm);
  auto [group, rank] = comm->group->split({color, key, comm->rank}, comm->is_aborted);
  if (group == nullptr) return ncclInternalError;
  return make_comm(group, rank, child);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm->num_queued != 0) {
    simt::report_mistake("ncclCommDestroy: " + std::to_string(comm->num_queued) +
                         " calls are not finished");
    return ncclInvalidUsage;
  }
  if (!comm->registered.empty()) {
    simt::report_mistake("ncclCommDestroy: " + std::to_string(comm->registered.size()) +
                         " pieces of memory are still registered");
  }
  simt::remove_object(comm);
  delete comm;
  return ncclSuccess;
}

// Calls of the host return with an error, what is queued ends without a result; the tasks own what
// they need.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->group->abort(&comm->is_aborted);
  while (comm->num_queued != 0 || comm->num_in_call != 0) std::this_thread::yield();
  simt::remove_object(comm);
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->group->error().empty() ? ncclSuccess : ncclInvalidUsage;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** data, size_t nbytes) {
  return cudaMalloc(data, nbytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* data) {
  return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void* data, size_t nbytes, void** handle) {
  if (!simt::is_reachable({data, static_cast<int64_t>(nbytes), false})) return ncclInvalidArgument;
  const std::lock_guard lock(comm->mutex);
  comm->registered[static_cast<const char*>(data)] = static_cast<int64_t>(nbytes);
  *handle = data;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  const std::lock_guard lock(comm->mutex);
  if (comm->registered.erase(static_cast<const char*>(handle)) == 1) return ncclSuccess;
  simt::report_mistake("ncclCommDeregister: the memory is not registered with this communicator");
  return ncclInvalidArgument;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return ncclInvalidUsage;
  return --group_depth == 0 ? submit_transfers() : ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add_transfer({comm, stream, true, const_cast<void*>(data), count, type, peer});
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add_transfer({comm, stream, false, data, count, type, peer});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  if (comm == nullptr) return ncclInvalidArgument;
  const int64_t nbytes = nbytes_of(send_count, type);
  const int num_ranks = comm->group->num_ranks();
  return submit_collective(comm, stream, {"ncclAllGather", send_count, type, send},
                           {{send, nbytes, false}, {receive, nbytes * num_ranks, true}},
                           [receive, nbytes](const std::vector<Call>& all) {
                             for (size_t r = 0; r < all.size(); ++r) {
                               char* place =
                                   static_cast<char*>(receive) + static_cast<int64_t>(r) * nbytes;
                               if (place != all[r].send)
                                 std::memcpy(place, all[r].send, static_cast<size_t>(nbytes));
                             }
                           });
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count,
                               ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                               cudaStream_t stream) {
  if (comm == nullptr) return ncclInvalidArgument;
  const int64_t nbytes = nbytes_of(receive_count, type);
  const size_t first = receive_count * static_cast<size_t>(comm->rank);
  if (type != ncclFloat32 && type != ncclFloat64 && type != ncclBfloat16)
    return ncclInvalidArgument;
  return submit_collective(
      comm, stream, {"ncclReduceScatter", receive_count, type, send},
      {{send, nbytes * comm->group->num_ranks(), false}, {receive, nbytes, true}},
      [=](const std::vector<Call>& all) {
        if (type == ncclFloat32) {
          const auto same = [](float x) { return x; };
          add_ranks<float>(all, first, receive_count, receive, same, same);
        } else if (type == ncclFloat64) {
          const auto same = [](double x) { return x; };
          add_ranks<double>(all, first, receive_count, receive, same, same);
        } else {
          add_ranks<uint16_t>(all, first, receive_count, receive, bf16_to_float, float_to_bf16);
        }
      });
}

}  // extern "C"
