#include "device/cuda/cuda_arena.h"

#include <algorithm>
#include <vector>

#include "base/log.h"
#include "base/units.h"

namespace hotplane {
namespace {

// Few handles, should the arena be handed to another process, and small enough that fragmented
// device memory still serves.
constexpr uint64_t kPieceBytes = 2 * kGiB;

CUmemAllocationProp MemoryOf(const CudaDriver& driver, CUdevice device) {
  int exportable = 0;
  (void)driver.cuDeviceGetAttribute(
      &exportable, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  if (exportable != 0) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

class VirtualArena final : public DeviceArena {
 public:
  VirtualArena(const CudaDriver& driver, CUcontext context) : driver_(driver), context_(context) {}
  ~VirtualArena() override {
    const CurrentContext current(driver_, context_);
    for (const ByteRange& piece : mapped_)
      (void)driver_.cuMemUnmap(base_ + piece.offset, piece.bytes);
    if (base_ != 0) (void)driver_.cuMemAddressFree(base_, bytes_);
  }

  Result<void> Reserve(uint64_t bytes) {
    HP_CUDA_TRY(driver_, Text("cannot reserve {} of device addresses", FormatBytes(bytes)),
                driver_.cuMemAddressReserve(&base_, bytes, 0, 0, 0));
    bytes_ = bytes;
    return {};
  }

  Result<void> Back(const CUmemAllocationProp& properties, ByteRange piece) {
    const std::string what = Text("cannot allocate {} of device memory", FormatBytes(piece.bytes));
    CUmemGenericAllocationHandle handle = 0;
    HP_CUDA_TRY(driver_, what, driver_.cuMemCreate(&handle, piece.bytes, &properties, 0));
    const CUresult mapped = driver_.cuMemMap(base_ + piece.offset, piece.bytes, 0, handle, 0);
    // The mapping keeps the memory.
    (void)driver_.cuMemRelease(handle);
    HP_CUDA_TRY(driver_, what, mapped);
    mapped_.push_back(piece);
    CUmemAccessDesc access = {};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    HP_CUDA_TRY(driver_, what,
                driver_.cuMemSetAccess(base_ + piece.offset, piece.bytes, &access, 1));
    resident_bytes_ += piece.bytes;
    return {};
  }

  std::byte* data() const override { return reinterpret_cast<std::byte*>(base_); }
  uint64_t bytes() const override { return bytes_; }
  uint64_t resident_bytes() const override { return resident_bytes_; }

 private:
  const CudaDriver& driver_;
  const CUcontext context_;
  CUdeviceptr base_ = 0;
  uint64_t bytes_ = 0;
  uint64_t resident_bytes_ = 0;
  std::vector<ByteRange> mapped_;
};

// For devices without the virtual memory calls.
class PlainArena final : public DeviceArena {
 public:
  PlainArena(const CudaDriver& driver, CUcontext context) : driver_(driver), context_(context) {}
  ~PlainArena() override {
    const CurrentContext current(driver_, context_);
    if (base_ != 0) (void)driver_.cuMemFree(base_);
  }
  Result<void> Allocate(uint64_t bytes) {
    HP_CUDA_TRY(driver_, Text("cannot allocate {} of device memory", FormatBytes(bytes)),
                driver_.cuMemAlloc(&base_, bytes));
    bytes_ = bytes;
    return {};
  }
  std::byte* data() const override { return reinterpret_cast<std::byte*>(base_); }
  uint64_t bytes() const override { return bytes_; }
  uint64_t resident_bytes() const override { return bytes_; }

 private:
  const CudaDriver& driver_;
  const CUcontext context_;
  CUdeviceptr base_ = 0;
  uint64_t bytes_ = 0;
};

// Rounded to granules; ranges that touch then are one.
std::vector<ByteRange> Granules(std::span<const ByteRange> wanted, uint64_t granule) {
  std::vector<ByteRange> ranges;
  for (const ByteRange& range : wanted) {
    if (range.bytes == 0) continue;
    const uint64_t begin = range.offset / granule * granule;
    const uint64_t end = RoundUp(range.offset + range.bytes, granule);
    if (!ranges.empty() && begin <= ranges.back().offset + ranges.back().bytes) {
      ranges.back().bytes = std::max(ranges.back().bytes, end - ranges.back().offset);
    } else {
      ranges.push_back({begin, end - begin});
    }
  }
  return ranges;
}

}  // namespace

Result<std::unique_ptr<DeviceArena>> AllocateCudaArena(const CudaDriver& driver, CUcontext context,
                                                       CUdevice device, uint64_t bytes,
                                                       std::span<const ByteRange> wanted) {
  CUmemAllocationProp properties = MemoryOf(driver, device);
  size_t granule = 0;
  CUresult supported = driver.cuMemGetAllocationGranularity(&granule, &properties,
                                                            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (supported != CUDA_SUCCESS || granule == 0) {
    Log(LogLevel::kInfo, "device memory in one piece: {}",
        CudaStatus(driver, supported, "the virtual memory calls are refused").found());
    auto plain = std::make_unique<PlainArena>(driver, context);
    HP_TRY(plain->Allocate(bytes));
    return std::unique_ptr<DeviceArena>(std::move(plain));
  }
  auto arena = std::make_unique<VirtualArena>(driver, context);
  HP_TRY(arena->Reserve(RoundUp(bytes, granule)));
  const uint64_t piece_bytes = RoundUp(kPieceBytes, granule);
  for (const ByteRange& range : Granules(wanted, granule))
    for (uint64_t at = 0; at < range.bytes; at += piece_bytes)
      HP_TRY(arena->Back(properties, {range.offset + at, std::min(piece_bytes, range.bytes - at)}));
  return std::unique_ptr<DeviceArena>(std::move(arena));
}

}  // namespace hotplane
