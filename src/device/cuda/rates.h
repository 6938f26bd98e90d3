// What the link and the verify kernel of a GPU give.
#pragma once

#include "device/cuda/verifier.h"
#include "device/device.h"

namespace hotplane {

// The context is current. Rates whose memory cannot be had are 0.
Result<DeviceRates> MeasureCudaRates(const CudaDriver& driver, const PinnedRing& ring,
                                     CudaVerifier& verifier, uint64_t piece_bytes);

// The context is current. kSystem, but not where such pages cannot be registered.
Result<RegistrationRates> MeasureCudaRegistration(const CudaDriver& driver,
                                                  std::span<const std::byte> pages,
                                                  uint64_t window_bytes);

}  // namespace hotplane
