// What the link and the verify kernel of a GPU give.
#pragma once

#include "device/cuda/verifier.h"
#include "device/device.h"

namespace hotplane {

// The context is current. Rates whose memory cannot be had are 0.
Result<DeviceRates> MeasureCudaRates(const CudaDriver& driver, const PinnedRing& ring,
                                     CudaVerifier& verifier, uint64_t piece_bytes);

}  // namespace hotplane
