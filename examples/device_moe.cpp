// device_moe STORE: boots the store onto a GPU and computes a layer's experts there, on a stream of
// our own, for one token: enqueued while the layer is still on its way, the stream waits for it.
// Then the same from arrays of the host.
//
//   c++ -std=c++17 device_moe.cpp -I$CUDA/include $(pkg-config --cflags --libs hotplane) -lcuda
//
// A program of the CUDA runtime does the same with cudaMallocAsync and its cudaStream_t.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <hotplane/engine.hpp>
#include <vector>

namespace api = hotplane::api;

namespace {

constexpr uint32_t kTopK = 2;

int Fail(const api::Error& error) {
  std::fprintf(stderr, "%s\n", error.text.c_str());
  return error.code;
}

void Must(CUresult result) {
  if (result == CUDA_SUCCESS) return;
  std::fprintf(stderr, "CUDA error %d\n", static_cast<int>(result));
  std::exit(HOTPLANE_SYSTEM);
}

// Device memory with a copy of `values`.
template <typename T>
CUdeviceptr Copied(const std::vector<T>& values, CUstream stream) {
  CUdeviceptr at = 0;
  Must(cuMemAlloc(&at, values.size() * sizeof(T)));
  Must(cuMemcpyHtoDAsync(at, values.data(), values.size() * sizeof(T), stream));
  Must(cuStreamSynchronize(stream));
  return at;
}

void* Pointer(CUdeviceptr at) { return reinterpret_cast<void*>(at); }

float FromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

api::Result<std::vector<float>> OnDevice(const api::Engine& engine,
                                         const hotplane_layer_info& layer,
                                         const std::vector<uint16_t>& x,
                                         const std::vector<int32_t>& ids,
                                         const std::vector<float>& weights, CUstream stream) {
  // Once for the largest call, before any graph is captured.
  const auto bytes = engine.MoeWorkspaceBytes(layer.ordinal, 1, kTopK);
  if (!bytes) return tl::unexpected<api::Error>(bytes.error());
  const CUdeviceptr workspace = Copied(std::vector<char>(*bytes), stream);
  const CUdeviceptr y = Copied(x, stream);
  const CUdeviceptr inputs[] = {Copied(x, stream), Copied(ids, stream), Copied(weights, stream)};

  hotplane_device_moe call;
  hotplane_device_moe_init(&call);
  call.layer = layer.ordinal;
  call.token_count = 1;
  call.top_k = kTopK;
  call.x = Pointer(inputs[0]);
  call.ids = Pointer(inputs[1]);
  call.weights = Pointer(inputs[2]);
  call.y = Pointer(y);
  call.workspace = Pointer(workspace);
  call.workspace_bytes = *bytes;
  call.stream = stream;
  // The host goes on; the device computes once the layer is there and verified.
  const auto waiting = engine.StreamWaitLayer(layer.ordinal, stream);
  if (!waiting) return tl::unexpected<api::Error>(waiting.error());
  const auto enqueued = engine.MoeForwardOnDevice(call);
  if (!enqueued) return tl::unexpected<api::Error>(enqueued.error());

  // Not a copy to pageable memory behind a stream that waits: the driver would hold its lock until
  // the copy is done, and the boot could not go on.
  Must(cuStreamSynchronize(stream));
  std::vector<uint16_t> result(x.size());
  Must(cuMemcpyDtoHAsync(result.data(), y, result.size() * sizeof(uint16_t), stream));
  Must(cuStreamSynchronize(stream));
  for (const CUdeviceptr at : {workspace, y, inputs[0], inputs[1], inputs[2]}) Must(cuMemFree(at));
  // An id that is no expert, an expert that is not there, or a boot that failed is told here.
  const auto refused = engine.MoeRefusal(layer.ordinal);
  if (!refused) return tl::unexpected<api::Error>(refused.error());
  std::vector<float> values;
  for (const uint16_t bits : result) values.push_back(FromBf16(bits));
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: device_moe STORE\n");
    return HOTPLANE_USAGE;
  }
  api::BootOptions options;
  options.device = "cuda:0";
  auto engine = api::Engine::Open(argv[1], options);
  if (!engine) return Fail(engine.error());
  const auto layers = engine->DescribeLayers();
  if (!layers) return Fail(layers.error());
  const hotplane_layer_info layer = layers->front();
  if (const auto started = engine->Start(); !started) return Fail(started.error());

  // The device's primary context: what the CUDA runtime uses too.
  CUcontext context = nullptr;
  CUdevice device = 0;
  CUstream stream = nullptr;
  Must(cuInit(0));
  Must(cuDeviceGet(&device, 0));
  Must(cuDevicePrimaryCtxRetain(&context, device));
  Must(cuCtxPushCurrent(context));
  Must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));

  const std::vector<uint16_t> x(layer.hidden, 0x3F80);  // ones
  const std::vector<int32_t> ids = {0, static_cast<int32_t>(layer.experts) - 1};
  const std::vector<float> weights = {0.75f, 0.25f};
  const auto on_device = OnDevice(*engine, layer, x, ids, weights, stream);
  if (!on_device) return Fail(on_device.error());
  if (const auto booted = engine->Wait(); !booted) return Fail(booted.error());

  const std::vector<float> ones(layer.hidden, 1.0f);
  std::vector<float> y(layer.hidden);
  hotplane_moe call;
  hotplane_moe_init(&call);
  call.layer = layer.ordinal;
  call.token_count = 1;
  call.top_k = kTopK;
  call.x = ones.data();
  call.ids = ids.data();
  call.weights = weights.data();
  call.y = y.data();
  const auto computed = engine->MoeForward(call);
  if (!computed) return Fail(computed.error());
  std::printf("layer %u on cuda:0: y[0] = %g, %s from arrays of the host\n", layer.ordinal,
              static_cast<double>(on_device->front()),
              *on_device == y ? "the same" : "another result");

  Must(cuStreamDestroy(stream));
  Must(cuDevicePrimaryCtxRelease(device));
  return *on_device == y ? 0 : HOTPLANE_SYSTEM;
}
