#include "core/build_id.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <cstring>

namespace tessera {
namespace {

/// The notes of an object in memory.
std::string find_build_id(const dl_phdr_info& object) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = object.dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* next = reinterpret_cast<const unsigned char*>(object.dlpi_addr + segment.p_vaddr);
    const auto* const end = next + segment.p_memsz;
    const auto padded = [&](size_t nbytes) {
      return (nbytes + segment.p_align - 1) / segment.p_align * segment.p_align;
    };
    if (segment.p_align == 0) continue;
    while (next + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, next, sizeof(note));
      const auto* const name = next + sizeof(note);
      const auto* const content = name + padded(note.n_namesz);
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
          std::memcmp(name, "GNU", 4) == 0) {
        std::string text;
        for (size_t k = 0; k < note.n_descsz; ++k) text += fmt::format("{:02x}", content[k]);
        return text;
      }
      next = content + padded(note.n_descsz);
    }
  }
  return "";
}

}  // namespace

std::string build_id() {
  std::string id;
  ::dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* result) {
        *static_cast<std::string*>(result) = find_build_id(*object);
        return 1;  // the first object is the program itself
      },
      &id);
  return id.empty() ? "unknown" : id;
}

}  // namespace tessera
