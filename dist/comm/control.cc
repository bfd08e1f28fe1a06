#include "dist/comm/control.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "core/text.h"
#include "dist/comm/transport.h"
#include "dist/comm/watchdog.h"

namespace tessera::dist {

Control::Control(std::shared_ptr<HostTransport> transport, std::shared_ptr<CollectiveLog> log)
    : transport_(std::move(transport)), log_(std::move(log)) {}

int Control::rank() const {
  return transport_->rank();
}
int Control::world_size() const {
  return transport_->world_size();
}

void Control::barrier(const char* name) {
  const uint8_t mine = 0;
  all_of(mine, name);
}

void Control::all_gather(void* all, const void* mine, int64_t nbytes, const char* name) {
  has_thrown_verdict_ = false;
  const CollectiveScope scope(*log_, name, {}, nbytes);
  transport_->all_gather(CallTag(next_sequence_++, name, {}), all, mine, nbytes);
}

template <class T>
std::vector<T> Control::all_of(T mine, const char* name) {
  std::vector<T> all(static_cast<size_t>(world_size()));
  all_gather(all.data(), &mine, sizeof(mine), name);
  return all;
}

std::vector<std::string> Control::all_gather(const std::string& mine) {
  const size_t num_ranks = static_cast<size_t>(world_size());
  const std::vector<int64_t> lengths =
      all_of(static_cast<int64_t>(mine.size()), "control all_gather of lengths");
  const size_t longest = static_cast<size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::string padded = mine, all(longest * num_ranks, '\0');
  padded.resize(longest);
  all_gather(all.data(), padded.data(), static_cast<int64_t>(longest));
  std::vector<std::string> texts;
  for (size_t r = 0; r < num_ranks; ++r) {
    texts.push_back(all.substr(r * longest, static_cast<size_t>(lengths[r])));
  }
  return texts;
}

void Control::broadcast(void* data, int64_t nbytes, int root) {
  TESSERA_CHECK(root >= 0 && root < world_size(), "broadcast: root {} is not in [0, {})", root,
                world_size());
  const CollectiveScope scope(*log_, "control broadcast", {}, nbytes);
  transport_->broadcast(CallTag(next_sequence_++, "control broadcast", {}), data, nbytes, root);
}

std::string Control::broadcast(const std::string& text, int root) {
  int64_t length = static_cast<int64_t>(text.size());
  broadcast(&length, sizeof(length), root);
  std::string result = rank() == root ? text : std::string(static_cast<size_t>(length), '\0');
  broadcast(result.data(), length, root);
  return result;
}

bool Control::all_agree(bool mine) {
  const std::vector<uint8_t> all = all_of<uint8_t>(mine ? 1 : 0, "control all_agree");
  return std::find(all.begin(), all.end(), 0) == all.end();
}

int64_t Control::max(int64_t mine) {
  const std::vector<int64_t> all = all_of(mine, "control max");
  return *std::max_element(all.begin(), all.end());
}

int64_t Control::min(int64_t mine) {
  const std::vector<int64_t> all = all_of(mine, "control min");
  return *std::min_element(all.begin(), all.end());
}

int64_t Control::sum(int64_t mine) {
  int64_t total = 0;
  for (const int64_t x : all_of(mine, "control sum")) total += x;
  return total;
}

double Control::sum(double mine) {
  double total = 0;
  for (const double x : all_of(mine, "control sum")) total += x;
  return total;
}

void Control::verdict(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    verdict(&error);  // throws here too
  }
  verdict(nullptr);
}

void Control::verdict(const Error* mine) {
  const int32_t status = mine != nullptr ? std::max(mine->exit_status(), 1) : 0;
  const std::vector<int32_t> statuses = all_of(status, "control verdict");
  const auto failed = std::find_if(statuses.begin(), statuses.end(), [](int s) { return s != 0; });
  if (failed == statuses.end()) return;
  const int root = static_cast<int>(failed - statuses.begin());
  const std::string text = root == rank() ? shorten(mine->what(), kMaxVerdictNbytes) : "";
  verdict_message_ = broadcast(text, root);
  verdict_rank_ = root;
  has_thrown_verdict_ = true;
  throw_with_status(*failed, verdict_message_);
}

int Control::verdict_rank(const Error& error) const {
  return verdict_rank_ >= 0 && verdict_message_ == error.what() ? verdict_rank_ : -1;
}

}  // namespace tessera::dist
