#pragma once

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dist/comm/node_memory.h"
#include "dist/comm/transport.h"

namespace tessera::dist {

[[noreturn]] void fail_mpi(int code, const char* call);

#define TESSERA_MPI_CHECK(call)                               \
  do {                                                        \
    const int mpi_code_ = (call);                             \
    if (mpi_code_ != MPI_SUCCESS) fail_mpi(mpi_code_, #call); \
  } while (0)

/// What the communicators of the process share. Thread-safe but for the node, which is set once.
class MpiDomain {
 public:
  bool is_aborted() const { return is_aborted_.load(std::memory_order_relaxed); }
  std::string reason() const;
  void abort(const std::string& reason) noexcept;
  void throw_if_aborted() const;
  /// Freed together at the end, since freeing is collective and a Comm may die on any thread.
  void add(MPI_Comm comm);
  void free_comms();
  /// The memory that ranks of this node share, if they do, and which nodes all ranks are on.
  void set_node(std::shared_ptr<NodeMemory> memory, int node_rank, std::vector<int> node_of);
  const std::shared_ptr<NodeMemory>& memory() const { return memory_; }
  int node_rank() const { return node_rank_; }
  int node_of(int world_rank) const { return node_of_[static_cast<size_t>(world_rank)]; }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_aborted_{false};
  std::string reason_;
  std::vector<MPI_Comm> comms_;
  std::shared_ptr<NodeMemory> memory_;
  int node_rank_ = 0;
  std::vector<int> node_of_;  // by rank of the world
};

/// See [Note: Collectives over MPI].
class MpiTransport final : public HostTransport {
 public:
  /// Collective over `comm`.
  MpiTransport(MPI_Comm comm, int rank, CommGroup group, std::shared_ptr<MpiDomain> domain);

  void start(const Messages& messages) override;
  void finish() override { wait_all(); }

  std::shared_ptr<HostTransport> split(int color, int key) override;
  std::shared_ptr<MemoryBackend> shared_memory() const override { return domain_->memory(); }
  bool is_shared(const void* data) const override {
    return domain_->memory() != nullptr && domain_->memory()->offset_of(data) >= 0;
  }
  void abort(const std::string& reason) noexcept override { domain_->abort(reason); }
  std::string abort_reason() const override {
    return domain_->is_aborted() ? domain_->reason() : std::string();
  }

 private:
  static constexpr int64_t kNotReceived = -1;

  std::vector<int> ranks_of_child(MPI_Comm child) const;
  void meet_node();
  void receive(void* data, int64_t nbytes, int from);
  void send(const void* data, int64_t nbytes, int to);
  void wait_all();
  int message_tag();
  int hash_bits(const CallTag& call) const;
  void throw_if_mismatch();
  [[noreturn]] void fail_exchange(int code);

  const MPI_Comm comm_;
  const int num_hash_bits_;
  const std::shared_ptr<MpiDomain> domain_;
  int64_t tagged_sequence_ = -1;  // whose message tag follows
  int message_tag_ = 0;
  std::map<int, std::string> names_;  // of the calls so far, by the bits of their hashes
  std::vector<MPI_Request> requests_;
  std::vector<int64_t> expected_;  // bytes to receive, or kNotReceived
  std::vector<MPI_Status> statuses_;
};

}  // namespace tessera::dist
