#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/row_gradients.h"
#include "core/storage.h"

namespace tessera::dist {

struct Group;
class Unit;

/// What one reduce sends of a group: elements [begin, begin + numel) of each of `num_parts` equal
/// parts of it, one a rank that sums, behind each other.
struct Piece {
  int64_t num_parts, begin, numel;
};

/// The gradients of a unit that has them in pieces ([Note: Pieces of a gradient] in plan.h), from
/// the backward that gives them to the reduces that send them. `kept`: the slot of those that are no
/// tables.
class Pieces {
 public:
  explicit Pieces(Unit& unit) : unit_(unit) {}

  /// A table whose gradient came by rows so far, if any came.
  bool takes_rows(size_t group, size_t placement) const;
  void add_rows(size_t group, size_t placement, GradRows rows);
  /// For a gradient that comes whole. A table then takes memory for all of it until `clear`.
  GradDst destination(size_t group, size_t placement, const std::shared_ptr<Storage>& kept);
  /// Computes a piece, on the compute stream, into the slot `memory`; what nobody gave is zero.
  void write(size_t group, const Piece& piece, const std::shared_ptr<Storage>& memory,
             const std::shared_ptr<Storage>& kept);
  /// Forgets all.
  void clear() { tables_.clear(); }

 private:
  struct Table {
    std::vector<GradRows> rows;
    Tensor whole;
  };
  Table& table(size_t group, size_t placement);
  void write_part(Group& g, size_t group, int64_t begin, int64_t end,
                  const std::shared_ptr<Storage>& memory, int64_t at,
                  const std::shared_ptr<Storage>& kept);
  void write_rows(const std::vector<GradRows>& rows, const Tensor& view, int64_t begin);

  Unit& unit_;
  std::vector<std::vector<Table>> tables_;  // by group and placement, where there are some
};

}  // namespace tessera::dist
