// A device with its own memory, such as a GPU, as boots see it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "device/landing_device.h"
#include "device/matrix_quantizer.h"

namespace hotplane {

// What --device names. The CPU is no Device: its memory is the host's.
struct DeviceName {
  bool cuda = false;
  int ordinal = 0;
};
// "cpu", "cuda" or "cuda:N". kUsage otherwise.
Result<DeviceName> ParseDeviceName(std::string_view text);

struct DeviceOptions {
  // Pinned host memory; at most 1 GiB. 2.4 ms of a PCIe 5 link; what was staged is still in the
  // CPU's caches when the device reads it. Of 64 to 1024 MiB the fastest.
  uint64_t ring_bytes = 128 * 1024 * 1024;
  uint64_t piece_bytes = 4 * 1024 * 1024;  // of a copy; at most kStagedBytesMax
  // So many workers land page cache by registering its pages with the driver instead of copying
  // them, a window at a time. None by default: registering holds up the copies of the others, and
  // releasing the pages takes as long again (40 against 48 GB/s on an H200 with 16 cores).
  size_t mapped_worker_count = 0;
  uint64_t mapped_window_bytes = 64 * 1024 * 1024;
  bool verify_on_device = true;  // false: landed bytes are verified before, by the CPU
  size_t thread_count = 0;       // that touch the ring; 0: the CPUs of this process
};

struct DeviceMemory {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};

struct ByteRange {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Device memory at consecutive addresses, given back on destruction. The host cannot read it.
class DeviceArena {
 public:
  virtual ~DeviceArena() = default;
  virtual std::byte* data() const = 0;
  virtual uint64_t bytes() const = 0;           // of addresses
  virtual uint64_t resident_bytes() const = 0;  // of them with memory
};

// What opening took, in seconds.
struct DeviceTimes {
  double context = 0;
  double ring = 0;  // beside it, for the most part
  double all = 0;
};

// Copies between pinned host memory and the device, timed by the device. Bytes per second.
struct DeviceRates {
  double pinned_copy = 0;  // in pieces of piece_bytes
  double pinned_copy_4mib = 0;
  double pinned_copy_16mib = 0;
  double verify = 0;  // chunks of 256 KiB hashed on the device
};

// Of pages registered with the driver read-only, a window at a time, and released. Bytes per
// second; 0: refused.
struct RegistrationRates {
  double registering = 0;
  double releasing = 0;
};

// For the largest matrix that comes. Memory of the device is taken for one source and its planes,
// each of their parts rounded up to kQuantizerAlignBytes.
struct QuantizerOptions {
  uint64_t source_bytes = 0;
  uint64_t plane_bytes = 0;
  // By scale byte the smallest float64 that has it: ScaleThresholds of quant/exponent_rule.h.
  std::span<const double> thresholds = {};
  // Registered with the driver while the quantizer lives, so that copies go at the link's rate:
  // where sources and planes will be. May be empty.
  std::span<std::byte> host_sources = {};
  std::span<std::byte> host_planes = {};

  uint64_t device_bytes() const { return source_bytes + plane_bytes + thresholds.size_bytes(); }
};
inline constexpr uint64_t kQuantizerAlignBytes = 256;

// Ordinary host memory that the driver has pinned, until it is destroyed.
class HostRegistration {
 public:
  virtual ~HostRegistration() = default;
};

// Gates at which streams of the device wait; each is closed at first, and opened once. Thread-safe.
// Destroyed, it opens all, and waits until every stream has passed those it was to wait at.
class StreamGates {
 public:
  virtual ~StreamGates() = default;
  // What is enqueued on `stream` (a CUstream of the device's primary context; null: its default
  // stream) after this call runs once the gate is open; no thread of the host waits for that. By
  // the device's own wait for a word of memory; where the device has none, by a host function of
  // the stream that waits. kUsage for a stream that is being captured, and where four others wait;
  // kSystem.
  virtual Result<void> Enqueue(size_t gate, void* stream) = 0;
  virtual void Open(size_t gate) = 0;
};

struct CudaHandles;  // device/cuda/cuda_handles.h

// Thread-safe. Outlives what it hands out.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // "cuda:0, NVIDIA H200"
  virtual int ordinal() const = 0;
  virtual Result<DeviceMemory> Memory() const = 0;
  // Of when its context had just been made: what is not free then is the context's own, or of
  // others.
  virtual DeviceMemory memory_at_open() const = 0;
  // Memory stands behind `wanted` (ascending), rounded to the device's granules, and behind nothing
  // else where the device can leave it out. kCapacity with the numbers when it does not fit.
  virtual Result<std::unique_ptr<DeviceArena>> Allocate(uint64_t bytes,
                                                        std::span<const ByteRange> wanted) = 0;
  // Through the pinned ring; one at a time. Its destruction waits for what is in flight.
  virtual Result<std::unique_ptr<LandingDevice>> BeginLanding() = 0;
  // Loads what NewQuantizer needs: later that might wait for streams that wait for a layer which is
  // to be built.
  virtual Result<void> LoadQuantizer() = 0;
  // On a stream of its own. kCapacity where the memory for it cannot be had. Null: this build has
  // no kernels for this device.
  virtual Result<std::unique_ptr<MatrixQuantizer>> NewQuantizer(
      const QuantizerOptions& options) = 0;
  virtual Result<std::unique_ptr<StreamGates>> NewGates(size_t count) = 0;
  // So that copies from and to this memory go at the link's rate. kCapacity where so much cannot be
  // pinned.
  virtual Result<std::unique_ptr<HostRegistration>> Register(std::span<std::byte> memory) = 0;
  // Whether landings verify: it has the kernel, and is asked to.
  virtual bool verifies() const = 0;
  // Blocking copy from ordinary memory.
  virtual Result<void> Upload(std::span<const std::byte> from, std::byte* to) = 0;
  // Blocking copy to ordinary memory.
  virtual Result<void> Download(const std::byte* from, std::span<std::byte> to) const = 0;
  // Takes some device memory for the time being. REQUIRES no landing.
  virtual Result<DeviceRates> MeasureRates() = 0;
  // Of memory of the host that is there, such as populated mapped pages, in windows of
  // mapped_window_bytes.
  virtual Result<RegistrationRates> MeasureRegistration(std::span<const std::byte> pages) = 0;
  virtual uint64_t pinned_bytes() const = 0;
  virtual DeviceTimes times() const = 0;
  virtual const CudaHandles& cuda() const = 0;
};

// kSystem, with what to do, where this build has no CUDA, no driver is found, the driver is too old
// or there is no such device.
Result<std::unique_ptr<Device>> OpenCudaDevice(int ordinal, const DeviceOptions& options);
// How many there are; 0 where OpenCudaDevice cannot work.
int CudaDeviceCount();

}  // namespace hotplane
