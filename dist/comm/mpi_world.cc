#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/log.h"
#include "core/runtime/cpu/affinity.h"
#include "dist/comm/backend.h"
#include "dist/comm/control.h"
#include "dist/comm/launcher.h"
#include "dist/comm/mpi_transport.h"
#include "dist/comm/world.h"

// A World of processes that mpirun started: which of them share a node, its processors and its
// memory, and how they end.

namespace tessera::dist {

namespace {

// The messages of watchdogs, on a communicator of their own; made by their thread alone.
class MpiWatchChannel final : public WatchChannel {
 public:
  MpiWatchChannel(MPI_Comm comm, int rank, int world_size)
      : WatchChannel(rank, world_size), comm_(comm) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  ~MpiWatchChannel() override {
    for (auto& sent : sent_) {  // nobody may take it any more: MPI keeps what it has not sent
      int is_done = 0;
      if (MPI_Test(&sent->request, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS || is_done == 0)
        (void)sent.release();
    }
  }

  void send(int to, std::string text) override {
    std::erase_if(sent_, [](const std::unique_ptr<Sent>& sent) {
      int is_done = 0;
      return MPI_Test(&sent->request, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS || is_done != 0;
    });
    sent_.push_back(std::make_unique<Sent>());
    sent_.back()->text = std::move(text);
    const std::string& kept = sent_.back()->text;
    if (MPI_Isend(kept.data(), static_cast<int>(kept.size()), MPI_BYTE, to, 0, comm_,
                  &sent_.back()->request) != MPI_SUCCESS) {
      sent_.pop_back();
    }
  }

  bool receive(int* from, std::string* text) override {
    int has_message = 0, nbytes = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &has_message, &status) != MPI_SUCCESS ||
        has_message == 0) {
      return false;
    }
    MPI_Get_count(&status, MPI_BYTE, &nbytes);
    text->assign(static_cast<size_t>(nbytes), '\0');
    *from = status.MPI_SOURCE;
    return MPI_Recv(text->data(), nbytes, MPI_BYTE, status.MPI_SOURCE, 0, comm_,
                    MPI_STATUS_IGNORE) == MPI_SUCCESS;
  }

 private:
  struct Sent {
    std::string text;
    MPI_Request request;
  };
  const MPI_Comm comm_;
  std::vector<std::unique_ptr<Sent>> sent_;
};

class MpiBackend final : public WorldBackend {
 public:
  MpiBackend(int argc, char** argv) : domain_(std::make_shared<MpiDomain>()) {
    int provided = 0;
    TESSERA_MPI_CHECK(MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided));
    TESSERA_CHECK_AS(CommError, provided == MPI_THREAD_MULTIPLE,
                     "World: MPI must provide MPI_THREAD_MULTIPLE, got level {}", provided);
    TESSERA_MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &place_.rank));
    TESSERA_MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &place_.world_size));
    place_.is_launched = true;
    const int ranks_per_node = agree_on_ranks_per_node();
    MPI_Comm comm;
    TESSERA_MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    find_place_on_node(ranks_per_node);
    watchdog_ = std::make_shared<Watchdog>(kDefaultTimeout, [end = end_](const std::string&) {
      // Time for the watchdogs of the other processes, which are about as late, to say their part.
      std::this_thread::sleep_for(std::chrono::seconds(1));
      const std::lock_guard lock(end->mutex);
      if (end->is_finalized) return;  // it came through after all, and so did all that followed
      MPI_Abort(MPI_COMM_WORLD, CommError("").exit_status());
    });
    base_ = std::make_shared<MpiTransport>(
        comm, place_.rank, CommGroup::world(place_.rank, place_.world_size), domain_);
    if (place_.world_size > 1) {
      MPI_Comm watch;
      TESSERA_MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &watch));
      domain_->add(watch);
      watchdog_->set_channel(
          std::make_unique<MpiWatchChannel>(watch, place_.rank, place_.world_size));
    }
  }

  void abort(int status, const std::string& reason) noexcept override {
    domain_->abort(reason);
    MPI_Abort(MPI_COMM_WORLD, status);
  }

  void give_up(const std::string& reason) noexcept override { domain_->abort(reason); }

  void finalize(Control& control) override {
    if (domain_->is_aborted()) return;
    // Asleep, and under the watchdog, until all ranks are done: finalizing spins.
    control.barrier("end of the run");
    watchdog_->set_channel(nullptr);
    {
      const std::lock_guard lock(end_->mutex);  // MPI may not be aborted any more
      end_->is_finalized = true;
    }
    domain_->free_comms();
    MPI_Finalize();
  }

 private:
  // What TESSERA_RANKS_PER_NODE says, for tests: 0 if it is not set. On some ranks only, or with
  // other values, ranks would wait for others that never come: it is compared before it is used.
  int agree_on_ranks_per_node() const {
    constexpr const char* kName = "TESSERA_RANKS_PER_NODE";
    constexpr size_t kMaxNbytes = 24;
    const char* const text = std::getenv(kName);
    std::array<char, kMaxNbytes> mine{};  // '=' and the beginning of the value
    if (text != nullptr) fmt::format_to_n(mine.data(), kMaxNbytes - 1, "={}", text);
    std::vector<std::array<char, kMaxNbytes>> all(static_cast<size_t>(place_.world_size));
    TESSERA_MPI_CHECK(MPI_Allgather(mine.data(), kMaxNbytes, MPI_BYTE, all.data(), kMaxNbytes,
                                    MPI_BYTE, MPI_COMM_WORLD));
    const auto fail = [&](int reporter, const std::string& message) {
      MPI_Finalize();
      throw StartError(message, place_.rank == reporter);
    };
    const auto value_of = [](const std::array<char, kMaxNbytes>& value) {
      return value[0] == '\0' ? "not set" : fmt::format("\"{}\"", &value[1]);
    };
    for (int r = 0; r < place_.world_size; ++r) {
      const auto& theirs = all[static_cast<size_t>(r)];
      if (theirs[0] != '\0' && !parse_integer(&theirs[1], 1, 1'000'000)) {
        fail(r, fmt::format("{}: {} on rank {}, expected an integer in [1, 1000000]", kName,
                            value_of(theirs), r));
      }
      if (theirs != all[0]) {
        fail(0, fmt::format("{}: {} on rank 0, {} on rank {}, expected the same on all ranks",
                            kName, value_of(all[0]), value_of(theirs), r));
      }
    }
    return text == nullptr ? 0 : static_cast<int>(*parse_integer(text, 1, 1'000'000));
  }

  // Ranks of the same node, or `ranks_per_node` of them that pretend to be alone; with 1 nobody
  // shares memory.
  static MPI_Comm split_node(int ranks_per_node) {
    MPI_Comm node;
    TESSERA_MPI_CHECK(
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node));
    if (ranks_per_node < 1) return node;
    int rank = 0;
    TESSERA_MPI_CHECK(MPI_Comm_rank(node, &rank));
    MPI_Comm part;
    TESSERA_MPI_CHECK(MPI_Comm_split(node, rank / ranks_per_node, rank, &part));
    MPI_Comm_free(&node);
    return part;
  }

  // Maps the memory of all ranks of the node into each of them; if one cannot, none does.
  void share_memory(MPI_Comm node) {
    int first = place_.rank;  // the node's name
    TESSERA_MPI_CHECK(MPI_Bcast(&first, 1, MPI_INT, 0, node));
    std::vector<int> node_of(static_cast<size_t>(place_.world_size));
    TESSERA_MPI_CHECK(
        MPI_Allgather(&first, 1, MPI_INT, node_of.data(), 1, MPI_INT, MPI_COMM_WORLD));
    auto memory = std::make_shared<NodeMemory>(place_.local_size);
    std::vector<NodeMemory::Handle> handles(static_cast<size_t>(place_.local_size));
    TESSERA_MPI_CHECK(MPI_Allgather(&memory->handle(), sizeof(NodeMemory::Handle), MPI_BYTE,
                                    handles.data(), sizeof(NodeMemory::Handle), MPI_BYTE, node));
    int is_connected = 1;
    for (int r = 0; r < place_.local_size && is_connected != 0; ++r) {
      is_connected = memory->connect(r, handles[static_cast<size_t>(r)]) ? 1 : 0;
    }
    if (is_connected == 0) {
      log_warning("ranks of this node exchange messages, since they cannot share memory: {}",
                  memory->why_not());
    }
    // All ranks of the world decide alike: making communicators is collective.
    TESSERA_MPI_CHECK(
        MPI_Allreduce(MPI_IN_PLACE, &is_connected, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
    if (is_connected == 0) memory = nullptr;
    domain_->set_node(std::move(memory), place_.local_rank, std::move(node_of));
  }

  void find_place_on_node(int ranks_per_node) {
    MPI_Comm node = split_node(ranks_per_node);
    TESSERA_MPI_CHECK(MPI_Comm_rank(node, &place_.local_rank));
    TESSERA_MPI_CHECK(MPI_Comm_size(node, &place_.local_size));
    if (place_.world_size > 1) share_memory(node);
    cpu_set_t mine;
    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof(mine), &mine);
    std::vector<cpu_set_t> all(static_cast<size_t>(place_.local_size));
    TESSERA_MPI_CHECK(
        MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, node));
    const uint64_t my_group = cpu_quota().group_id;
    std::vector<uint64_t> groups(static_cast<size_t>(place_.local_size));
    TESSERA_MPI_CHECK(
        MPI_Allgather(&my_group, 1, MPI_UINT64_T, groups.data(), 1, MPI_UINT64_T, node));
    MPI_Comm_free(&node);
    place_.num_sharing_quota = static_cast<int>(std::count(groups.begin(), groups.end(), my_group));
    place_.num_sharing = place_.sharing_index = 0;
    bool is_same = true;
    for (int i = 0; i < place_.local_size; ++i) {
      const cpu_set_t& theirs = all[static_cast<size_t>(i)];
      cpu_set_t common;
      CPU_AND(&common, &mine, &theirs);
      if (CPU_COUNT(&common) == 0) continue;
      if (CPU_EQUAL(&mine, &theirs) == 0) is_same = false;
      if (i < place_.local_rank) ++place_.sharing_index;
      ++place_.num_sharing;
    }
    if (!is_same) place_.sharing_index = -1;
  }

  struct End {
    std::mutex mutex;
    bool is_finalized = false;
  };

  const std::shared_ptr<MpiDomain> domain_;
  const std::shared_ptr<End> end_ = std::make_shared<End>();  // the watchdog may outlive this
};

}  // namespace

std::unique_ptr<WorldBackend> make_mpi_backend(int argc, char** argv) {
  return std::make_unique<MpiBackend>(argc, argv);
}

}  // namespace tessera::dist
