// Reports as JSON text, one object each; the keys are part of the contract (docs/cli.md).
#pragma once

#include <string>

#include "boot/boot.h"
#include "boot/build.h"
#include "boot/plan.h"
#include "engine/import_planes_cache.h"

namespace hotplane {

std::string BuildReportJson(const BuildReport& report);
std::string PlanesCacheImportJson(const PlanesCacheImportReport& report);
// `limit_bytes_per_second` 0: not measured, the keys are null. `build`: of the layers that the boot
// had to build; empty when there were none.
std::string BootReportJson(const BootReport& report, const BootPlan& plan, const BuildReport& build,
                           const Digest128& generation, double limit_bytes_per_second);
std::string BootPlanJson(const BootPlan& plan, const Digest128& generation);
// {"error": {"code": 3, "kind": "data", "what": ..., "file": ..., "offset": ..., ...}}
std::string StatusJson(const Status& status);

}  // namespace hotplane
