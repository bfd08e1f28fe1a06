#include "dist/comm/board.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace tessera::dist {

Board::Board(std::vector<int> ranks, std::vector<int> world_ranks, int world_size, int me)
    : ranks_(std::move(ranks)),
      world_ranks_(std::move(world_ranks)),
      places_(static_cast<size_t>(world_size), -1),
      me_(me) {
  for (size_t i = 0; i < ranks_.size(); ++i)
    places_[static_cast<size_t>(ranks_[i])] = static_cast<int>(i);
}

void Board::enter(const Call& call) {
  begin(call);
  Published& mine = own_slot();
  mine.sequence = call.tag.sequence;
  mine.hash = call.tag.hash;
  mine.nbytes = call.nbytes;
  mine.detail = call.detail;
  mine.where = publish_data(call);
  const std::string_view op = call.tag.sequence < 0 ? call.op : call.tag.op;
  const std::string name = call.tag.sequence < 0 ? call.op : call.tag.to_string();
  mine.op_length = std::min(op.size(), sizeof mine.name - 1);
  mine.name[name.copy(mine.name, sizeof mine.name - 1)] = '\0';
  meet_first();
  check_agreement();
}

void Board::check_agreement() {
  const Published& a = published(0);
  for (int i = 1; i < size(); ++i) {
    const Published& b = published(i);
    // Calls without a tag have a name only.
    const bool is_same_call = a.sequence == b.sequence && a.hash == b.hash &&
                              (a.sequence >= 0 || std::strcmp(a.name, b.name) == 0);
    if (is_same_call && a.nbytes == b.nbytes && a.detail == b.detail) continue;
    const std::string message = fmt::format(
        "{}: the ranks disagree: rank {} calls {} ({} bytes), rank {} calls {} ({} bytes){}",
        std::string_view(a.name, a.op_length), world_ranks_[0], a.name, a.nbytes,
        world_ranks_[static_cast<size_t>(i)], b.name, b.nbytes,
        is_same_call && a.detail != b.detail ? "; dtypes or root differ" : "");
    on_disagreement(message);
    throw CommError(message);
  }
}

bool Board::all_have_data() const {
  for (int i = 0; i < size(); ++i) {
    if (!has_data(i)) return false;
  }
  return true;
}

bool Board::none_has_data() const {
  for (int i = 0; i < size(); ++i) {
    if (has_data(i)) return false;
  }
  return true;
}

}  // namespace tessera::dist
