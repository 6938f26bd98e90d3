#include "device/fake/fake_cuda.h"

#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda/quantize_args.h"
#include "device/cuda/verify_args.h"
#include "device/fake/fake_kernel.h"
#include "device/xxh3.h"

struct CUstream_st {
  std::deque<std::function<bool()>> work;  // false: cannot be done yet, is to be called again
  uint64_t queued = 0;
  uint64_t done = 0;
};

struct CUevent_st {
  CUstream_st* stream = nullptr;  // none: not recorded
  uint64_t position = 0;
  int queries_left = 0;  // that say "not ready"
};

namespace {

using namespace hotplane;

constexpr uint64_t kGranule = 2 << 20;
constexpr int kQueriesNotReady = 2;
// What a real context takes of the device's memory, about.
constexpr uint64_t kContextBytes = 256 << 20;

struct Fake {
  std::recursive_mutex mutex;
  std::map<std::string, uint64_t> calls;
  uint64_t all_calls = 0;
  uint64_t uploaded_bytes = 0;
  int64_t live = 0;
  std::vector<CUstream_st*> streams;  // also those that were destroyed
  uint64_t memory_bytes = uint64_t{1} << 34;
  int multiprocessors = 132, shared_bytes = 233472;  // an H200's
  uint64_t allocated_bytes = 0;
  std::map<CUmemGenericAllocationHandle, uint64_t> handles;  // bytes
  std::map<CUdeviceptr, std::pair<uint64_t, CUmemGenericAllocationHandle>> mapped;
  std::map<CUdeviceptr, uint64_t> plain;
  std::map<const void*, uint64_t> pinned;          // bytes
  std::map<const uint32_t*, uint32_t> waited_for;  // words of streams that wait: values
  uint64_t frees_while_waiting = 0;
  CUmemGenericAllocationHandle next_handle = 1;

  std::string fail_function;
  uint64_t fail_skip = 0;
  CUresult fail_error = CUDA_SUCCESS;
  bool fail_armed = false;
  bool fail_stays = false;
  bool failed = false;
  bool lost = false;
};

Fake& State() {
  static Fake* const fake = new Fake;
  return *fake;
}

bool GivesBack(const std::string& function) {
  return function.find("Free") != std::string::npos ||
         function.find("Unmap") != std::string::npos ||
         function.find("Release") != std::string::npos ||
         function.find("Unregister") != std::string::npos ||
         function.find("Destroy") != std::string::npos ||
         function.find("Unload") != std::string::npos || function == "cuCtxPopCurrent" ||
         function.find("cuGetError") == 0;
}

// Null names the context's own stream.
CUstream_st* Named(CUstream_st* stream) {
  static CUstream_st* const own = new CUstream_st;
  return stream != nullptr ? stream : own;
}

// What the call has to return instead of doing its work.
CUresult Enter(const char* name) {
  Fake& fake = State();
  ++fake.calls[name];
  ++fake.all_calls;
  if (GivesBack(name)) return CUDA_SUCCESS;
  if (fake.lost) return fake.fail_error;
  if (!fake.fail_armed || (!fake.fail_function.empty() && fake.fail_function != name))
    return CUDA_SUCCESS;
  if (fake.fail_skip > 0) {
    --fake.fail_skip;
    return CUDA_SUCCESS;
  }
  fake.fail_armed = false;
  fake.failed = true;
  fake.lost = fake.fail_stays;
  if (fake.lost) Named(nullptr)->work.clear();
  return fake.fail_error;
}

// False where the stream waits for something that is not there yet.
bool RunUntil(CUstream_st* stream, uint64_t position) {
  // What a lost device had before it is never done.
  if (State().lost) stream->work.clear();
  while (stream->done < position && !stream->work.empty()) {
    const std::function<bool()> work = std::move(stream->work.front());
    stream->work.pop_front();
    if (!work()) {
      stream->work.push_front(work);
      return false;
    }
    ++stream->done;
  }
  return true;
}

void QueueWait(CUstream_st* stream, std::function<bool()> work) {
  stream = Named(stream);
  stream->work.push_back(std::move(work));
  ++stream->queued;
}

void Queue(CUstream_st* stream, std::function<void()> work) {
  QueueWait(stream, [work = std::move(work)] {
    work();
    return true;
  });
}

using Lock = std::unique_lock<std::recursive_mutex>;

#define FAKE_ENTER(name)    \
  Lock lock(State().mutex); \
  if (const CUresult entered = Enter(name); entered != CUDA_SUCCESS) return entered

// Contexts that this thread has made current. What creates, copies or loads needs one, as on a GPU.
thread_local int current_contexts = 0;
#define FAKE_ENTER_CONTEXT(name) \
  FAKE_ENTER(name);              \
  if (current_contexts == 0) return CUDA_ERROR_INVALID_CONTEXT

// Blocks the caller, as the interface does, while other threads go on.
void Finish(Lock& lock, CUstream_st* stream, uint64_t position) {
  while (!RunUntil(stream, position)) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    lock.lock();
  }
}

CUresult Init(unsigned) {
  FAKE_ENTER("cuInit");
  return CUDA_SUCCESS;
}
CUresult DriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult GetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
CUresult GetErrorString(CUresult, const char** text) {
  *text = "as the test asked for";
  return CUDA_SUCCESS;
}
CUresult DeviceGetCount(int* count) {
  FAKE_ENTER("cuDeviceGetCount");
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult DeviceGet(CUdevice* device, int ordinal) {
  FAKE_ENTER("cuDeviceGet");
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult DeviceGetName(char* name, int bytes, CUdevice) {
  FAKE_ENTER("cuDeviceGetName");
  std::strncpy(name, "fake GPU", static_cast<size_t>(bytes));
  return CUDA_SUCCESS;
}
// As far as anybody asks; yes to what is asked for by yes or no.
CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  FAKE_ENTER("cuDeviceGetAttribute");
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = State().multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = State().shared_bytes - 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = State().shared_bytes;
      break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}
CUresult ContextRetain(CUcontext* context, CUdevice) {
  FAKE_ENTER("cuDevicePrimaryCtxRetain");
  ++State().live;
  *context = reinterpret_cast<CUcontext>(&State());
  return CUDA_SUCCESS;
}
CUresult ContextRelease(CUdevice) {
  FAKE_ENTER("cuDevicePrimaryCtxRelease");
  --State().live;
  return CUDA_SUCCESS;
}
CUresult ContextPush(CUcontext) {
  ++current_contexts;
  return CUDA_SUCCESS;
}
CUresult ContextPop(CUcontext* context) {
  if (current_contexts == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --current_contexts;
  *context = nullptr;
  return CUDA_SUCCESS;
}
CUresult ContextSynchronize() {
  FAKE_ENTER_CONTEXT("cuCtxSynchronize");
  Finish(lock, Named(nullptr), Named(nullptr)->queued);
  for (size_t i = 0; i < State().streams.size(); ++i)
    Finish(lock, State().streams[i], State().streams[i]->queued);
  return CUDA_SUCCESS;
}
CUresult MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  FAKE_ENTER_CONTEXT("cuMemGetInfo");
  *total_bytes = State().memory_bytes;
  *free_bytes = State().memory_bytes -
                std::min(State().memory_bytes, State().allocated_bytes + kContextBytes);
  return CUDA_SUCCESS;
}
CUresult Take(uint64_t bytes) {
  if (State().allocated_bytes + kContextBytes + bytes > State().memory_bytes)
    return CUDA_ERROR_OUT_OF_MEMORY;
  State().allocated_bytes += bytes;
  ++State().live;
  return CUDA_SUCCESS;
}
CUresult MemAlloc(CUdeviceptr* address, size_t bytes) {
  FAKE_ENTER_CONTEXT("cuMemAlloc");
  if (const CUresult taken = Take(bytes); taken != CUDA_SUCCESS) return taken;
  *address = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  State().plain[*address] = bytes;
  return CUDA_SUCCESS;
}
// A real driver gives memory back when all that was enqueued before is done.
void CountFree() {
  for (const auto& [word, value] : State().waited_for) {
    if (static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) >= 0) continue;
    ++State().frees_while_waiting;
    return;
  }
}
CUresult MemFree(CUdeviceptr address) {
  FAKE_ENTER("cuMemFree");
  CountFree();
  State().allocated_bytes -= State().plain.at(address);
  State().plain.erase(address);
  --State().live;
  std::free(reinterpret_cast<void*>(address));
  return CUDA_SUCCESS;
}
CUresult MemHostAlloc(void** address, size_t bytes, unsigned) {
  FAKE_ENTER_CONTEXT("cuMemHostAlloc");
  ++State().live;
  *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*address, 0, bytes);
  State().pinned[*address] = bytes;
  return CUDA_SUCCESS;
}
CUresult MemFreeHost(void* address) {
  FAKE_ENTER("cuMemFreeHost");
  const auto* const begin = static_cast<const uint32_t*>(address);
  std::map<const uint32_t*, uint32_t>& words = State().waited_for;
  words.erase(words.lower_bound(begin), words.lower_bound(begin + State().pinned[address] / 4));
  State().pinned.erase(address);
  CountFree();
  --State().live;
  std::free(address);
  return CUDA_SUCCESS;
}
CUresult MemHostRegister(void*, size_t, unsigned) {
  FAKE_ENTER_CONTEXT("cuMemHostRegister");
  ++State().live;
  return CUDA_SUCCESS;
}
CUresult MemHostUnregister(void*) {
  FAKE_ENTER("cuMemHostUnregister");
  CountFree();
  --State().live;
  return CUDA_SUCCESS;
}
CUresult MemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                           unsigned long long) {
  FAKE_ENTER("cuMemAddressReserve");
  void* const at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  ++State().live;
  *address = reinterpret_cast<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}
CUresult MemAddressFree(CUdeviceptr address, size_t bytes) {
  FAKE_ENTER("cuMemAddressFree");
  --State().live;
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
CUresult MemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                   unsigned long long) {
  FAKE_ENTER("cuMemCreate");
  if (const CUresult taken = Take(bytes); taken != CUDA_SUCCESS) return taken;
  *handle = State().next_handle++;
  State().handles[*handle] = bytes;
  return CUDA_SUCCESS;
}
// A mapping keeps its memory.
CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_ENTER("cuMemRelease");
  bool kept = false;
  for (const auto& [address, mapping] : State().mapped) kept = kept || mapping.second == handle;
  if (!kept) State().allocated_bytes -= State().handles.at(handle);
  if (!kept) --State().live;
  State().handles.erase(handle);
  return CUDA_SUCCESS;
}
CUresult MemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                unsigned long long) {
  FAKE_ENTER("cuMemMap");
  if (mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  State().mapped[address] = {bytes, handle};
  return CUDA_SUCCESS;
}
CUresult MemUnmap(CUdeviceptr address, size_t bytes) {
  FAKE_ENTER("cuMemUnmap");
  const auto found = State().mapped.find(address);
  if (found == State().mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  State().allocated_bytes -= found->second.first;
  --State().live;
  State().mapped.erase(found);
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
       -1, 0);
  return CUDA_SUCCESS;
}
CUresult MemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  FAKE_ENTER("cuMemSetAccess");
  return CUDA_SUCCESS;
}
CUresult MemGranularity(size_t* granule, const CUmemAllocationProp*,
                        CUmemAllocationGranularity_flags) {
  FAKE_ENTER("cuMemGetAllocationGranularity");
  *granule = kGranule;
  return CUDA_SUCCESS;
}
CUresult MemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyHtoDAsync");
  State().uploaded_bytes += bytes;
  if (bytes != 0) Queue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
  return CUDA_SUCCESS;
}
CUresult MemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  FAKE_ENTER_CONTEXT("cuMemcpyDtoH");
  if (bytes != 0) std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return CUDA_SUCCESS;
}
CUresult MemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyDtoHAsync");
  if (bytes != 0) Queue(stream, [=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
  return CUDA_SUCCESS;
}
CUresult MemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) {
  FAKE_ENTER_CONTEXT("cuMemsetD8");
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return CUDA_SUCCESS;
}
CUresult StreamCreate(CUstream* stream, unsigned) {
  FAKE_ENTER_CONTEXT("cuStreamCreate");
  ++State().live;
  *stream = new CUstream_st;
  State().streams.push_back(*stream);
  return CUDA_SUCCESS;
}
CUresult StreamPriorityRange(int* least, int* greatest) {
  FAKE_ENTER("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
CUresult StreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  FAKE_ENTER_CONTEXT("cuStreamCreateWithPriority");
  return StreamCreate(stream, flags);
}
// Does not wait: what was enqueued is done later, and events may ask about it.
CUresult StreamDestroy(CUstream stream) {
  FAKE_ENTER("cuStreamDestroy");
  --State().live;
  (void)RunUntil(stream, stream->queued);
  return CUDA_SUCCESS;
}
CUresult StreamSynchronize(CUstream stream) {
  FAKE_ENTER("cuStreamSynchronize");
  stream = Named(stream);
  Finish(lock, stream, stream->queued);
  return CUDA_SUCCESS;
}
CUresult StreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  FAKE_ENTER("cuStreamWaitEvent");
  CUstream_st* const other = event->stream;
  const uint64_t position = event->position;
  if (other != nullptr) QueueWait(stream, [=] { return RunUntil(other, position); });
  return CUDA_SUCCESS;
}
CUresult StreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  FAKE_ENTER("cuStreamIsCapturing");
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
// Of what is asked for, the wait for a value that is not less.
CUresult StreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  FAKE_ENTER("cuStreamWaitValue32");
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
  const auto* const word = reinterpret_cast<const uint32_t*>(address);
  State().waited_for[word] = value;
  QueueWait(stream, [=] {
    return static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) >= 0;
  });
  return CUDA_SUCCESS;
}
// On a thread of its own, as it may wait for what other threads do.
CUresult LaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  FAKE_ENTER("cuLaunchHostFunc");
  struct Call {
    bool begun = false;
    std::atomic<bool> done{false};
  };
  const auto call = std::make_shared<Call>();
  QueueWait(stream, [=] {
    if (!std::exchange(call->begun, true))
      std::thread([=] {
        function(data);
        call->done = true;
      }).detach();
    return call->done.load();
  });
  return CUDA_SUCCESS;
}
CUresult EventCreate(CUevent* event, unsigned) {
  FAKE_ENTER_CONTEXT("cuEventCreate");
  ++State().live;
  *event = new CUevent_st;
  return CUDA_SUCCESS;
}
CUresult EventDestroy(CUevent event) {
  FAKE_ENTER("cuEventDestroy");
  --State().live;
  delete event;
  return CUDA_SUCCESS;
}
CUresult EventRecord(CUevent event, CUstream stream) {
  FAKE_ENTER("cuEventRecord");
  stream = Named(stream);
  event->stream = stream;
  event->position = stream->queued;
  event->queries_left = kQueriesNotReady;
  return CUDA_SUCCESS;
}
CUresult EventQuery(CUevent event) {
  FAKE_ENTER("cuEventQuery");
  if (event->queries_left > 0) {
    --event->queries_left;
    return CUDA_ERROR_NOT_READY;
  }
  const bool passed = event->stream == nullptr || RunUntil(event->stream, event->position);
  return passed ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult EventSynchronize(CUevent event) {
  FAKE_ENTER("cuEventSynchronize");
  if (event->stream != nullptr) Finish(lock, event->stream, event->position);
  return CUDA_SUCCESS;
}
CUresult ModuleLoadData(CUmodule* module, const void*) {
  FAKE_ENTER_CONTEXT("cuModuleLoadData");
  ++State().live;
  *module = reinterpret_cast<CUmodule>(&State());
  return CUDA_SUCCESS;
}
CUresult ModuleUnload(CUmodule) {
  FAKE_ENTER("cuModuleUnload");
  --State().live;
  return CUDA_SUCCESS;
}

template <typename T>
T Argument(const FakeLaunch& launch, size_t index) {
  return *static_cast<const T*>(launch.arguments[index]);
}

std::function<void()> VerifyWork(const FakeLaunch& launch) {
  const auto data = Argument<const uint8_t*>(launch, 0);
  const auto checks = Argument<const VerifyCheck*>(launch, 1);
  const auto outcome = Argument<VerifyOutcome>(launch, 2);
  const auto secret = Argument<xxh3::Secret>(launch, 3);
  return [=, blocks = launch.blocks] {
    for (unsigned i = 0; i < blocks; ++i) {
      const uint64_t found = xxh3::Hash(secret, data + checks[i].offset, checks[i].bytes);
      if (found == checks[i].checksum) continue;
      outcome.found[i] = found;
      outcome.bad_at[i] = 1;
      *outcome.bad = 1;
    }
  };
}

std::function<void()> CountWork(const FakeLaunch& launch) {
  const auto source = Argument<tile::Source>(launch, 0);
  const auto counts = Argument<tile::Counts*>(launch, 1);
  return [=, blocks = launch.blocks] {
    for (unsigned block = 0; block < blocks; ++block) {
      tile::Counts own = {0, 0, 0};
      for (uint64_t tile = block; tile < tile::TileCount(source); tile += blocks)
        for (unsigned thread = 0; thread < tile::kThreads; ++thread)
          tile::CountBlock(source, tile, thread, &own);
      counts[block] = own;
    }
  };
}

std::function<void()> QuantizeWork(const FakeLaunch& launch) {
  const auto source = Argument<tile::Source>(launch, 0);
  const auto planes = Argument<tile::Planes>(launch, 1);
  const auto thresholds = Argument<const double*>(launch, 2);
  const bool alternate_zeros = Argument<uint32_t>(launch, 3) != 0;
  return [=] {
    tile::Nibbles nibbles;
    for (uint64_t tile = 0; tile < tile::TileCount(source); ++tile) {
      for (unsigned thread = 0; thread < tile::kThreads; ++thread)
        tile::QuantizePart(source, planes, thresholds, alternate_zeros, tile, thread, &nibbles);
      for (unsigned lane = 0; lane < tile::kThreads; ++lane)
        tile::WriteLane(planes, nibbles, tile, lane);
    }
  };
}

std::vector<const FakeKernel*>& Kernels() {
  static auto* const kernels = new std::vector<const FakeKernel*>;
  return *kernels;
}

constexpr FakeKernel kVerify = {kVerifyKernelName, VerifyWork};
constexpr FakeKernel kCount = {kCountKernelName, CountWork};
constexpr FakeKernel kQuantize = {kQuantizeKernelName, QuantizeWork};
const FakeKernelAdded kVerifyAdded(kVerify), kCountAdded(kCount), kQuantizeAdded(kQuantize);

CUresult ModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  FAKE_ENTER("cuModuleGetFunction");
  for (const FakeKernel* kernel : Kernels()) {
    if (std::strcmp(name, kernel->name) != 0) continue;
    *function = reinterpret_cast<CUfunction>(const_cast<FakeKernel*>(kernel));
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult LaunchKernel(CUfunction function, unsigned blocks, unsigned, unsigned, unsigned threads,
                      unsigned, unsigned, unsigned shared_bytes, CUstream stream, void** arguments,
                      void**) {
  FAKE_ENTER("cuLaunchKernel");
  Queue(stream, reinterpret_cast<const FakeKernel*>(function)->work(
                    {blocks, threads, shared_bytes, arguments}));
  return CUDA_SUCCESS;
}

CUresult FuncLoad(CUfunction) {
  FAKE_ENTER("cuFuncLoad");
  return CUDA_SUCCESS;
}

CUresult FuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  FAKE_ENTER("cuFuncSetAttribute");
  return CUDA_SUCCESS;
}

CUresult LaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                        void**) {
  FAKE_ENTER("cuLaunchKernelEx");
  ++State().calls[reinterpret_cast<const FakeKernel*>(function)->name];
  Queue(config->hStream,
        reinterpret_cast<const FakeKernel*>(function)->work(
            {config->gridDimX, config->blockDimX, config->sharedMemBytes, arguments}));
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& Table() {
#define FAKE_ENTRY(name, function) \
  { name, reinterpret_cast<void*>(&function) }
  static const auto* const table = new std::map<std::string, void*>{
      FAKE_ENTRY("cuInit", Init),
      FAKE_ENTRY("cuDriverGetVersion", DriverGetVersion),
      FAKE_ENTRY("cuGetErrorName", GetErrorName),
      FAKE_ENTRY("cuGetErrorString", GetErrorString),
      FAKE_ENTRY("cuDeviceGetCount", DeviceGetCount),
      FAKE_ENTRY("cuDeviceGet", DeviceGet),
      FAKE_ENTRY("cuDeviceGetName", DeviceGetName),
      FAKE_ENTRY("cuDeviceGetAttribute", DeviceGetAttribute),
      FAKE_ENTRY("cuDevicePrimaryCtxRetain", ContextRetain),
      FAKE_ENTRY("cuDevicePrimaryCtxRelease", ContextRelease),
      FAKE_ENTRY("cuCtxPushCurrent", ContextPush),
      FAKE_ENTRY("cuCtxPopCurrent", ContextPop),
      FAKE_ENTRY("cuCtxSynchronize", ContextSynchronize),
      FAKE_ENTRY("cuMemGetInfo", MemGetInfo),
      FAKE_ENTRY("cuMemAlloc", MemAlloc),
      FAKE_ENTRY("cuMemFree", MemFree),
      FAKE_ENTRY("cuMemHostAlloc", MemHostAlloc),
      FAKE_ENTRY("cuMemFreeHost", MemFreeHost),
      FAKE_ENTRY("cuMemHostRegister", MemHostRegister),
      FAKE_ENTRY("cuMemHostUnregister", MemHostUnregister),
      FAKE_ENTRY("cuMemAddressReserve", MemAddressReserve),
      FAKE_ENTRY("cuMemAddressFree", MemAddressFree),
      FAKE_ENTRY("cuMemCreate", MemCreate),
      FAKE_ENTRY("cuMemRelease", MemRelease),
      FAKE_ENTRY("cuMemMap", MemMap),
      FAKE_ENTRY("cuMemUnmap", MemUnmap),
      FAKE_ENTRY("cuMemSetAccess", MemSetAccess),
      FAKE_ENTRY("cuMemGetAllocationGranularity", MemGranularity),
      FAKE_ENTRY("cuMemcpyHtoDAsync", MemcpyHtoDAsync),
      FAKE_ENTRY("cuMemcpyDtoH", MemcpyDtoH),
      FAKE_ENTRY("cuMemcpyDtoHAsync", MemcpyDtoHAsync),
      FAKE_ENTRY("cuMemsetD8", MemsetD8),
      FAKE_ENTRY("cuStreamCreate", StreamCreate),
      FAKE_ENTRY("cuStreamDestroy", StreamDestroy),
      FAKE_ENTRY("cuStreamSynchronize", StreamSynchronize),
      FAKE_ENTRY("cuStreamWaitEvent", StreamWaitEvent),
      FAKE_ENTRY("cuStreamCreateWithPriority", StreamCreateWithPriority),
      FAKE_ENTRY("cuCtxGetStreamPriorityRange", StreamPriorityRange),
      FAKE_ENTRY("cuStreamIsCapturing", StreamIsCapturing),
      FAKE_ENTRY("cuStreamWaitValue32", StreamWaitValue32),
      FAKE_ENTRY("cuLaunchHostFunc", LaunchHostFunc),
      FAKE_ENTRY("cuFuncLoad", FuncLoad),
      FAKE_ENTRY("cuEventCreate", EventCreate),
      FAKE_ENTRY("cuEventDestroy", EventDestroy),
      FAKE_ENTRY("cuEventRecord", EventRecord),
      FAKE_ENTRY("cuEventQuery", EventQuery),
      FAKE_ENTRY("cuEventSynchronize", EventSynchronize),
      FAKE_ENTRY("cuModuleLoadData", ModuleLoadData),
      FAKE_ENTRY("cuModuleUnload", ModuleUnload),
      FAKE_ENTRY("cuModuleGetFunction", ModuleGetFunction),
      FAKE_ENTRY("cuFuncSetAttribute", FuncSetAttribute),
      FAKE_ENTRY("cuLaunchKernel", LaunchKernel),
      FAKE_ENTRY("cuLaunchKernelEx", LaunchKernelEx),
  };
#undef FAKE_ENTRY
  return *table;
}

}  // namespace

namespace hotplane {
FakeKernelAdded::FakeKernelAdded(const FakeKernel& kernel) { Kernels().push_back(&kernel); }
}  // namespace hotplane

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

// cuda.h renames it to its current version.
FAKE_EXPORT CUresult cuGetProcAddress(const char* symbol, void** address, int, cuuint64_t,
                                      CUdriverProcAddressQueryResult*) {
  const auto found = Table().find(symbol);
  if (found == Table().end()) return CUDA_ERROR_NOT_FOUND;
  *address = found->second;
  return CUDA_SUCCESS;
}

// For programs that link the driver instead of asking for its functions.
FAKE_EXPORT CUresult cuInit(unsigned flags) { return Init(flags); }
FAKE_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return DeviceGet(device, ordinal);
}
FAKE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return ContextRetain(context, device);
}
FAKE_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return ContextRelease(device); }
FAKE_EXPORT CUresult cuCtxPushCurrent(CUcontext context) { return ContextPush(context); }
FAKE_EXPORT CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  return MemAlloc(address, bytes);
}
FAKE_EXPORT CUresult cuMemFree(CUdeviceptr address) { return MemFree(address); }
FAKE_EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes,
                                       CUstream stream) {
  return MemcpyHtoDAsync(to, from, bytes, stream);
}
FAKE_EXPORT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return MemcpyDtoHAsync(to, from, bytes, stream);
}
FAKE_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return StreamCreate(stream, flags);
}
FAKE_EXPORT CUresult cuStreamSynchronize(CUstream stream) { return StreamSynchronize(stream); }
FAKE_EXPORT CUresult cuStreamDestroy(CUstream stream) { return StreamDestroy(stream); }

FAKE_EXPORT void fake_cuda_fail(const char* function, uint64_t skip, int error, bool lost) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  State().fail_function = function;
  State().fail_skip = skip;
  State().fail_error = static_cast<CUresult>(error);
  State().fail_armed = true;
  State().fail_stays = lost;
  State().failed = false;
}
FAKE_EXPORT void fake_cuda_heal() {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  State().fail_armed = false;
  State().failed = false;
  State().lost = false;
}
FAKE_EXPORT int fake_cuda_failed() {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  return State().failed ? 1 : 0;
}
FAKE_EXPORT int64_t fake_cuda_live() {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  return State().live;
}
FAKE_EXPORT uint64_t fake_cuda_calls(const char* function) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  return *function == '\0' ? State().all_calls : State().calls[function];
}
FAKE_EXPORT uint64_t fake_cuda_uploaded() {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  return State().uploaded_bytes;
}
FAKE_EXPORT uint64_t fake_cuda_frees_while_waiting() {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  return State().frees_while_waiting;
}
FAKE_EXPORT void fake_cuda_gpu(int multiprocessors, int shared_bytes) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  State().multiprocessors = multiprocessors;
  State().shared_bytes = shared_bytes;
}
FAKE_EXPORT void fake_cuda_memory(uint64_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  State().memory_bytes = bytes;
}
