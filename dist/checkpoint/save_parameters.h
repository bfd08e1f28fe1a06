#pragma once

#include <functional>
#include <memory>

#include "core/formats/parameters.h"
#include "dist/fsdp/fully_shard.h"

namespace tessera::dist {

/// Gathers the f32 parameters unit by unit and writes each to the sink that `open` gives on rank 0,
/// which calls it and the sink on a thread of their own. Collective: rank 0 holds one unit and one
/// parameter of it at a time, the others a unit. No gather waits for the disk, however slow it is:
/// while rank 0 writes, all ranks meet in short exchanges, and each calls `waiting` (if there is
/// one) in each turn.
/// Errors   what `open`, `write` or `finish` threw, on every rank: at once if it was `open`, else
///          after the gathers, which go on so that no rank waits
void save_parameters(Fsdp& fsdp, World& world,
                     const std::function<std::unique_ptr<ParameterSink>()>& open,
                     const std::function<void()>& waiting = nullptr);

}  // namespace tessera::dist
