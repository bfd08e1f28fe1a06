#include "dist/fsdp/pieces.h"

#include <utility>

#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/unit.h"

namespace tessera::dist {

Pieces::Table& Pieces::table(size_t group, size_t placement) {
  const std::vector<Group>& groups = unit_.groups();
  tables_.resize(groups.size());
  tables_[group].resize(groups[group].layout.placements.size());
  return tables_[group][placement];
}

bool Pieces::takes_rows(size_t group, size_t placement) const {
  if (unit_.groups()[group].kept_begin[placement] >= 0) return false;
  return tables_.empty() || tables_[group].empty() || !tables_[group][placement].whole.is_defined();
}

void Pieces::add_rows(size_t group, size_t placement, GradRows rows) {
  table(group, placement).rows.push_back(std::move(rows));
}

GradDst Pieces::destination(size_t group, size_t placement, const std::shared_ptr<Storage>& kept) {
  Group& g = unit_.groups()[group];
  const Placement& p = g.layout.placements[placement];
  const bool is_written = g.is_written[placement];
  if (g.kept_begin[placement] >= 0) {
    const int64_t slot_begin = g.grad_slot_offset / static_cast<int64_t>(size_of(g.grad_dtype));
    return {view_of_storage(kept, slot_begin + g.kept_begin[placement], p.shape, g.grad_dtype),
            is_written};
  }
  Table& t = table(group, placement);
  if (!t.whole.is_defined()) {
    const MemoryScope scope(MemoryClass::kGradients);
    t.whole = empty(p.shape, g.grad_dtype);
    write_rows(std::exchange(t.rows, {}), t.whole, 0);  // what came before, so that it is added to
  }
  return {t.whole, is_written};
}

void Pieces::write_rows(const std::vector<GradRows>& rows, const Tensor& view, int64_t begin) {
  const NoGrad no_grad;
  bool accumulate = false;
  for (const GradRows& write : rows) write({view, std::exchange(accumulate, true)}, begin);
}

void Pieces::write(size_t group, const Piece& piece, const std::shared_ptr<Storage>& memory,
                   const std::shared_ptr<Storage>& kept) {
  Group& g = unit_.groups()[group];
  const int64_t part_numel = g.layout.numel / piece.num_parts;
  int64_t at = g.piece_offset / static_cast<int64_t>(size_of(g.grad_dtype));
  // From the first on: a row that begins in the part before is computed over its end.
  for (int64_t part = 0; part < piece.num_parts; ++part, at += piece.numel) {
    const int64_t begin = part * part_numel + piece.begin;
    write_part(g, group, begin, begin + piece.numel, memory, at, kept);
  }
}

/// Elements [begin, end) of the group, which become those of `memory` from element `at` on.
void Pieces::write_part(Group& g, size_t group, int64_t begin, int64_t end,
                        const std::shared_ptr<Storage>& memory, int64_t at,
                        const std::shared_ptr<Storage>& kept) {
  const Stream& compute = unit_.lanes().compute;
  const auto address = [&](int64_t element) {
    return bytes(memory, nbytes_of(element, g.grad_dtype));
  };
  for (size_t i = 0; i < g.layout.placements.size(); ++i) {
    const Placement& p = g.layout.placements[i];
    const Overlap part(begin, end, p.begin, p.numel);
    if (part.is_empty()) continue;
    const int64_t to = at + part.begin - begin, from = part.begin - p.begin;  // from: of p
    if (!g.is_written[i]) {
      fill_flat(compute, address(to), part.numel(), g.grad_dtype, 0);
      continue;
    }
    if (g.kept_begin[i] >= 0) {
      const int64_t offset = nbytes_of(g.kept_begin[i] + from, g.grad_dtype);
      copy_flat(compute, address(to), bytes(kept, g.grad_slot_offset + offset), part.numel(),
                g.grad_dtype);
      continue;
    }
    const Table& t = table(group, i);
    if (t.whole.is_defined()) {
      const auto* whole = static_cast<const char*>(t.whole.raw_data());
      copy_flat(compute, address(to), whole + nbytes_of(from, g.grad_dtype), part.numel(),
                g.grad_dtype);
      continue;
    }
    const int64_t cols = p.shape[1], first_row = from / cols;
    const int64_t num_rows = (from + part.numel() + cols - 1) / cols - first_row;
    const int64_t lead = from - first_row * cols;
    Tensor before;
    if (lead > 0) {
      before = empty({lead}, g.grad_dtype);
      copy_flat(compute, before.raw_data(), address(to - lead), lead, g.grad_dtype);
    }
    write_rows(t.rows, view_of_storage(memory, to - lead, {num_rows, cols}, g.grad_dtype),
               first_row);
    if (lead > 0) copy_flat(compute, address(to - lead), before.raw_data(), lead, g.grad_dtype);
  }
}

}  // namespace tessera::dist
