#pragma once

#include <string>
#include <vector>

#include "apps/report/run_log.h"

namespace tessera::apps {

/// What the runs are drawn over.
enum class ReportAxis : unsigned char {
  kAuto,  ///< steps, or tokens where the runs take different numbers of them a step
  kStep,
  kTokens,
};

/// The whole page: HTML that needs nothing from elsewhere. Of one run, or of several beside each
/// other with what differs between their configurations.
std::string report_html(const std::vector<RunLog>& runs, ReportAxis axis);

/// What every page begins with, by which it is known as one of ours.
extern const char* const kReportMark;

// The page's style and script, in assets.cc.
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace tessera::apps
