#include "moe/cuda/cuda_moe.h"

#include <algorithm>

#include "base/format_text.h"

namespace hotplane {

// Made from decode_kernel.cu by the build.
extern const unsigned char kMoeDecodeImage[];

namespace {

using namespace moe_cuda;

constexpr uint64_t kAlign = 256;
// Of each thread block, beside what it asks for.
constexpr uint32_t kSharedOfRuntime = 1024;

uint64_t Aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
uint64_t InnerBytes(const LayerGeometry& geometry, uint64_t assignments) {
  return Aligned(assignments * geometry.intermediate * sizeof(uint16_t));
}
uint64_t ResultBytes(const LayerGeometry& geometry, uint64_t assignments) {
  return Aligned(assignments * geometry.hidden * sizeof(float));
}

Result<void> CheckPointer(const void* pointer, const char* name) {
  if (pointer == nullptr)
    return Fail(Status::Usage("cannot compute the experts")
                    .Expected(Text("{} in device memory", name))
                    .Found("null"));
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
    return Fail(Status::Usage("cannot compute the experts")
                    .Expected(Text("{} at a multiple of 16 bytes", name))
                    .Found(Text("{}", pointer)));
  return {};
}

Result<void> CheckCall(const CudaMoeCall& call) {
  const LayerGeometry& geometry = call.geometry;
  if (geometry.experts == 0 || geometry.experts > kDecodeExpertsMax || geometry.hidden == 0 ||
      geometry.hidden % 64 != 0 || geometry.intermediate == 0 || geometry.intermediate % 64 != 0)
    return Fail(
        Status::Usage("cannot compute the experts")
            .Expected(Text("1 to {} experts, widths that are multiples of 64", kDecodeExpertsMax))
            .Found(
                Text("E={} H={} I={}", geometry.experts, geometry.hidden, geometry.intermediate)));
  HP_TRY(CheckPointer(call.slots, "slots"));
  HP_TRY(CheckPointer(call.x, "x"));
  HP_TRY(CheckPointer(call.y, "y"));
  HP_TRY(CheckPointer(call.refusal, "the refusal"));
  if (call.ids == nullptr || call.weights == nullptr)
    return Fail(
        Status::Usage("cannot compute the experts").Expected("ids and weights").Found("null"));
  const uint64_t needed = CudaMoe::WorkspaceBytes(geometry, call.token_count, call.top_k);
  if (call.workspace_bytes < needed)
    return Fail(Status::Usage("the workspace is too small")
                    .Expected(Text("{} bytes", needed))
                    .Found(Text("{}", call.workspace_bytes)));
  HP_TRY(CheckPointer(call.workspace, "the workspace"));
  if (call.top_k > kDecodeAssignmentsMax)
    return Fail(Status::Usage("too many experts for a token")
                    .Expected(Text("at most {}", kDecodeAssignmentsMax))
                    .Found(Text("{}", call.top_k)));
  return {};
}

}  // namespace

Result<std::unique_ptr<CudaMoe>> CudaMoe::Load(const CudaDriver& driver, CUcontext context,
                                               CUdevice device) {
  std::unique_ptr<CudaMoe> moe(new CudaMoe(driver, context));
  const auto ask = [&](CUdevice_attribute attribute, uint32_t* value) -> Result<void> {
    int answer = 0;
    HP_CUDA_TRY(driver, "cannot ask for an attribute of the GPU",
                driver.cuDeviceGetAttribute(&answer, attribute, device));
    *value = static_cast<uint32_t>(answer);
    return {};
  };
  HP_TRY(ask(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &moe->multiprocessors_));
  HP_TRY(ask(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &moe->shared_per_block_));
  HP_TRY(ask(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
             &moe->shared_per_multiprocessor_));
  const CUresult loaded = driver.cuModuleLoadData(&moe->decode_module_, kMoeDecodeImage);
  if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) return std::unique_ptr<CudaMoe>();
  HP_CUDA_TRY(driver, "cannot load the kernels of the experts", loaded);
  HP_TRY(moe->LoadDecode());
  return moe;
}

Result<void> CudaMoe::LoadDecode() {
  HP_CUDA_TRY(driver_, "cannot find the kernel of decode",
              driver_.cuModuleGetFunction(&decode_, decode_module_, "hotplane_moe_decode"));
  HP_CUDA_TRY(driver_, "cannot give the kernel of decode its shared memory",
              driver_.cuFuncSetAttribute(decode_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                         static_cast<int>(shared_per_block_)));
  return {};
}

CudaMoe::~CudaMoe() {
  const CurrentContext current(driver_, context_);
  if (decode_module_ != nullptr) (void)driver_.cuModuleUnload(decode_module_);
}

uint64_t CudaMoe::WorkspaceBytes(const LayerGeometry& geometry, uint32_t tokens, uint32_t top_k) {
  const uint64_t assignments = uint64_t{tokens} * top_k;
  return kWorkspaceZeros + InnerBytes(geometry, assignments) + ResultBytes(geometry, assignments);
}

Result<void> CudaMoe::Enqueue(const Launch& launch, CUstream stream, void** arguments) const {
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  attribute.value.cooperative = 1;
  CUlaunchConfig config = {};
  config.gridDimX = launch.blocks;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = launch.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = launch.shared_bytes;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = launch.all_resident ? 1 : 0;
  HP_CUDA_TRY(driver_, "cannot launch a kernel of the experts",
              driver_.cuLaunchKernelEx(&config, launch.kernel, arguments, nullptr));
  return {};
}

Result<CudaMoe::DecodeShape> CudaMoe::ShapeFor(uint32_t k) const {
  for (uint32_t per_multiprocessor = kDecodeBlocksPerSm; per_multiprocessor > 0;
       --per_multiprocessor) {
    const uint32_t room = std::min(
        shared_per_block_, shared_per_multiprocessor_ / per_multiprocessor - kSharedOfRuntime);
    for (uint32_t tokens = kDecodeSliceTokensMax; tokens > 1; tokens /= 2) {
      const uint32_t bytes = kDecodeFixedBytes + StagedBytes(k, tokens);
      if (bytes <= room) return DecodeShape{multiprocessors_ * per_multiprocessor, tokens, bytes};
    }
  }
  return Fail(
      Status::Capacity("this GPU has too little shared memory for layers so wide")
          .Expected(Text("{} bytes for a thread block", kDecodeFixedBytes + StagedBytes(k, 2)))
          .Found(Text("{}", shared_per_block_)));
}

Result<void> CudaMoe::Decode(MoeArgs args, CUstream stream) const {
  HP_ASSIGN(const DecodeShape shape, ShapeFor(std::max(args.hidden, args.intermediate)));
  if (shape.blocks < kDecodeBlocksMin)
    return Fail(Status::System("this GPU has too few multiprocessors for the experts")
                    .Expected(Text("room for {} thread blocks", kDecodeBlocksMin))
                    .Found(Text("{}", shape.blocks)));
  DecodeArgs decode = {.slice_tokens = shape.slice_tokens};
  void* arguments[] = {&args, &decode};
  return Enqueue({.kernel = decode_,
                  .blocks = shape.blocks,
                  .threads = kDecodeThreads,
                  .shared_bytes = shape.shared_bytes,
                  .all_resident = true},
                 stream, arguments);
}

Result<void> CudaMoe::Forward(const CudaMoeCall& call, CUstream stream) const {
  if (call.token_count == 0) return {};
  HP_TRY(CheckCall(call));
  const uint64_t assignments = uint64_t{call.token_count} * call.top_k;
  MoeArgs args = {};
  args.slots = call.slots;
  args.wanted = call.wanted;
  args.wanted_of_all = call.wanted_of_all;
  args.x = call.x;
  args.ids = call.ids;
  args.weights = call.weights;
  args.y = call.y;
  args.barrier = reinterpret_cast<GridBarrier*>(call.workspace);
  std::byte* const inner = call.workspace + kWorkspaceZeros;
  args.inner = reinterpret_cast<uint16_t*>(inner);
  args.results = reinterpret_cast<float*>(inner + InnerBytes(call.geometry, assignments));
  args.refusal = call.refusal;
  args.experts = call.geometry.experts;
  args.hidden = call.geometry.hidden;
  args.intermediate = call.geometry.intermediate;
  args.tokens = call.token_count;
  args.top_k = call.top_k;
  args.activation = static_cast<uint32_t>(call.activation.kind);
  args.limit = static_cast<float>(call.activation.limit);
  args.alpha = static_cast<float>(call.activation.alpha);
  args.biases = call.geometry.biases ? 1 : 0;
  // More tokens than a decode takes go in pieces.
  const uint32_t piece = std::max(1u, kDecodeAssignmentsMax / std::max(1u, call.top_k));
  for (uint32_t first = 0; first < call.token_count; first += piece) {
    MoeArgs some = args;
    some.tokens = std::min(piece, call.token_count - first);
    some.x += uint64_t{first} * args.hidden;
    some.y += uint64_t{first} * args.hidden;
    some.ids += uint64_t{first} * args.top_k;
    some.weights += uint64_t{first} * args.top_k;
    HP_TRY(Decode(some, stream));
  }
  return {};
}

}  // namespace hotplane
