#pragma once

#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/data.h"
#include "core/runtime/device.h"
#include "dist/comm/control.h"

// Ranks that were started with other settings, programs or data train on in silence, since each of
// them does its own part well. So what decides the numbers is compared before anything is written.

namespace tessera::apps {

/// What has to be the same on all ranks.
struct Fact {
  std::string key, value;
  std::string origin = {};  ///< where it was set, for messages
};

/// The program and every key of the configuration that may not differ between ranks
/// (`Field::may_differ`).
std::vector<Fact> facts_of(const Config& config);
/// Those of the resolved configuration, the training and validation data by their content, and the
/// device that computes.
std::vector<Fact> facts_of(const Config& config, const Data& data, Device device);

/// Compares hashes of the facts over all ranks; collective.
/// Errors   ConfigError, on all ranks, that names what differs with the ranks and their values
void check_agreement(dist::Control& control, const std::vector<Fact>& facts);

}  // namespace tessera::apps
