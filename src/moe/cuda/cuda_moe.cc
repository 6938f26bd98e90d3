#include "moe/cuda/cuda_moe.h"

#include <algorithm>
#include <iterator>

#include "base/format_text.h"
#include "moe/fp8.h"

namespace hotplane {

// Made from the kernels by the build.
extern const unsigned char kMoeDecodeImage[];
extern const unsigned char kMoeDecodeFewImage[];
extern const unsigned char kMoePrefillSortImage[];
extern const unsigned char kMoePrefillMmaImage[];
#ifdef HOTPLANE_MOE_PREFILL_SM90
extern const unsigned char kMoePrefillSm90Image[];
#endif

namespace {

using namespace moe_cuda;

// The kernels of a product, and how they are launched.
struct PrefillShape {
  const char* kernels[3];  // from base, nibbles, quintals
  uint32_t threads;
  uint32_t blocks_per_multiprocessor;
  uint32_t shared_bytes;
};
constexpr PrefillShape kShapeOfWgmma = {
    {"hotplane_moe_prefill_base", "hotplane_moe_prefill_nibbles", "hotplane_moe_prefill_quintals"},
    kPrefillThreads,
    1,
    kPrefillSharedBytes};
constexpr PrefillShape kShapesOfMma[2] = {
    {{"hotplane_moe_prefill_mma_base", "hotplane_moe_prefill_mma_nibbles",
      "hotplane_moe_prefill_mma_quintals"},
     kPrefillMmaThreads,
     kPrefillMmaMany.blocks_per_multiprocessor,
     SharedBytesOf(kPrefillMmaMany)},
    {{"hotplane_moe_prefill_mma_few_base", "hotplane_moe_prefill_mma_few_nibbles",
      "hotplane_moe_prefill_mma_few_quintals"},
     kPrefillMmaThreads,
     kPrefillMmaFew.blocks_per_multiprocessor,
     SharedBytesOf(kPrefillMmaFew)},
};
struct PrefillSet {
  const char* name;
  const unsigned char* image;  // null: this build has none
  PrefillShape shapes[2];      // for many assignments of an expert, for few
};
#ifdef HOTPLANE_MOE_PREFILL_SM90
constexpr const unsigned char* kSm90Image = kMoePrefillSm90Image;
#else
constexpr const unsigned char* kSm90Image = nullptr;
#endif
// By PrefillKernels.
constexpr PrefillSet kPrefillSets[] = {
    {"wgmma", kSm90Image, {kShapeOfWgmma, kShapeOfWgmma}},
    {"mma", kMoePrefillMmaImage, {kShapesOfMma[0], kShapesOfMma[1]}},
};
static_assert(std::size(kPrefillSets) == std::size(kAllPrefillKernels));
const PrefillSet& SetOf(PrefillKernels kernels) {
  return kPrefillSets[static_cast<size_t>(kernels)];
}

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

uint64_t ArrangedBytes(const LayerGeometry& geometry, uint64_t tokens) {
  return Aligned(tokens * geometry.hidden * sizeof(uint16_t));
}
uint64_t OrderBytes(uint64_t count) { return Aligned(count * sizeof(uint32_t)); }

Result<void> CheckPointer(const void* pointer, const char* name, uint32_t align = 16) {
  if (pointer == nullptr)
    return Fail(Status::Usage("cannot compute the experts")
                    .Expected(Text("{} in device memory", name))
                    .Found("null"));
  if (reinterpret_cast<uintptr_t>(pointer) % align != 0)
    return Fail(Status::Usage("cannot compute the experts")
                    .Expected(Text("{} at a multiple of {} bytes", name, align))
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
  // Prefill counts activations in 32 bits, and runs of columns in 16.
  const uint64_t widest = std::max(geometry.hidden, geometry.intermediate);
  const uint64_t assignments_max = std::min(((uint64_t{1} << 32) - 1) / widest,
                                            uint64_t{(1u << 16) - 1 - kDecodeExpertsMax} *
                                                std::min(kPrefillColumns, kPrefillMmaMany.columns));
  if (uint64_t{call.token_count} * std::max(1u, call.top_k) > assignments_max)
    return Fail(Status::Usage("too many tokens at once for the experts")
                    .Expected(Text("tokens times top k up to {}", assignments_max))
                    .Found(Text("{} times {}", call.token_count, call.top_k)));
  if (call.tiers == 0 || call.tiers > kFromAnything)
    return Fail(Status::Usage("cannot compute the experts")
                    .Expected("something to compute them from")
                    .Found(Text("tiers {}", call.tiers)));
  HP_TRY(CheckPointer(call.slots, "slots"));
  HP_TRY(CheckPointer(call.x, "x"));
  HP_TRY(CheckPointer(call.y, "y"));
  HP_TRY(CheckPointer(call.refusal, "the refusal"));
  HP_TRY(CheckPointer(call.ids, "ids", alignof(int32_t)));
  HP_TRY(CheckPointer(call.weights, "weights", alignof(float)));
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

const char* NameOf(PrefillKernels kernels) { return SetOf(kernels).name; }

Result<std::unique_ptr<CudaMoe>> CudaMoe::Load(const CudaDriver& driver, CUcontext context,
                                               CUdevice device, const CudaMoeKernels& wanted) {
  std::unique_ptr<CudaMoe> moe(new CudaMoe(driver, context, wanted));
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
  HP_ASSIGN(const bool many, moe->LoadPrefill(0));
  HP_ASSIGN(const bool few, moe->LoadPrefill(1));
  if (!many || !few) return std::unique_ptr<CudaMoe>();
  HP_CUDA_TRY(driver, "cannot load the kernel of few assignments",
              driver.cuModuleLoadData(&moe->few_module_, kMoeDecodeFewImage));
  HP_TRY(moe->Get(moe->few_module_, "hotplane_moe_decode_few", &moe->few_));
  HP_TRY(moe->GiveShared(moe->few_, moe->shared_per_block_));
  HP_CUDA_TRY(driver, "cannot load the kernels that sort for prefill",
              driver.cuModuleLoadData(&moe->sort_module_, kMoePrefillSortImage));
  HP_TRY(moe->Get(moe->sort_module_, "hotplane_moe_sort", &moe->sort_));
  HP_TRY(moe->Get(moe->sort_module_, "hotplane_moe_arrange", &moe->arrange_));
  HP_TRY(moe->Get(moe->sort_module_, "hotplane_moe_round_fp8", &moe->round_fp8_));
  return moe;
}

Result<void> CudaMoe::Get(CUmodule module, const char* name, CUfunction* function) const {
  HP_CUDA_TRY(driver_, Text("cannot find the kernel {}", name),
              driver_.cuModuleGetFunction(function, module, name));
  return LoadCudaKernel(driver_, *function);
}

Result<void> CudaMoe::GiveShared(CUfunction kernel, uint32_t bytes) const {
  HP_CUDA_TRY(driver_, "cannot give a kernel its shared memory",
              driver_.cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                         static_cast<int>(bytes)));
  return {};
}

Result<void> CudaMoe::GiveAllShared(CUfunction kernel) const {
  HP_CUDA_TRY(driver_, "cannot give a kernel its share of shared memory",
              driver_.cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                         CU_SHAREDMEM_CARVEOUT_MAX_SHARED));
  return {};
}

Result<void> CudaMoe::LoadDecode() {
  HP_TRY(Get(decode_module_, "hotplane_moe_decode", &decode_[0]));
  HP_TRY(Get(decode_module_, "hotplane_moe_decode_fp8", &decode_[1]));
  HP_TRY(Get(decode_module_, "hotplane_moe_combine", &combine_));
  HP_TRY(Get(decode_module_, "hotplane_moe_decode_base", &decode_plain_[0]));
  HP_TRY(Get(decode_module_, "hotplane_moe_decode_nibbles", &decode_plain_[1]));
  HP_TRY(Get(decode_module_, "hotplane_moe_decode_quintals", &decode_plain_[2]));
  for (CUfunction kernel : decode_) HP_TRY(GiveShared(kernel, shared_per_block_));
  for (CUfunction kernel : decode_plain_) HP_TRY(GiveShared(kernel, shared_per_block_));
  return {};
}

Result<bool> CudaMoe::LoadPrefill(size_t few) {
  // wgmma has 64 rows of weights for as few columns as there are; narrow products are mma's.
  static constexpr PrefillKernels kByPreference[2][2] = {
      {PrefillKernels::kWgmma, PrefillKernels::kMma},
      {PrefillKernels::kMma, PrefillKernels::kWgmma}};
  for (const PrefillKernels kernels : kByPreference[few]) {
    if (kernels != wanted_.prefill.value_or(kernels)) continue;
    const PrefillSet& set = SetOf(kernels);
    CUmodule* const module = &prefill_modules_[static_cast<size_t>(kernels)];
    if (*module == nullptr && set.image != nullptr) {
      const CUresult loaded = driver_.cuModuleLoadData(module, set.image);
      if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU)
        *module = nullptr;
      else
        HP_CUDA_TRY(driver_, "cannot load the kernels of prefill", loaded);
    }
    if (*module == nullptr) continue;
    const PrefillShape& shape = set.shapes[few];
    for (size_t i = 0; i < std::size(prefill_[few]); ++i) {
      CUfunction* const kernel = &prefill_[few][i];
      HP_TRY(Get(*module, shape.kernels[i], kernel));
      HP_TRY(GiveShared(*kernel, shape.shared_bytes));
      // So many blocks are to be resident at once.
      if (shape.blocks_per_multiprocessor > 1) HP_TRY(GiveAllShared(*kernel));
    }
    prefill_kernels_[few] = kernels;
    return true;
  }
  return false;
}

CudaMoe::~CudaMoe() {
  const CurrentContext current(driver_, context_);
  for (const CUmodule module :
       {decode_module_, few_module_, sort_module_, prefill_modules_[0], prefill_modules_[1]})
    if (module != nullptr) (void)driver_.cuModuleUnload(module);
}

uint64_t CudaMoe::WorkspaceBytes(const LayerGeometry& geometry, uint32_t tokens, uint32_t top_k) {
  const uint64_t assignments = uint64_t{tokens} * top_k;
  const uint64_t decode =
      kWorkspaceZeros + InnerBytes(geometry, assignments) + ResultBytes(geometry, assignments);
  if (assignments <= kFewBlocksMax)
    return std::max(decode, kWorkspaceZeros + ResultBytes(geometry, kFewBlocksMax));
  if (assignments <= kDecodeAssignmentsMax) return decode;
  return decode + ArrangedBytes(geometry, tokens) + OrderBytes(assignments) +
         OrderBytes(geometry.experts + uint64_t{1});
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

uint32_t CudaMoe::SharedOfBlock() const {
  return std::min(shared_per_block_, shared_per_multiprocessor_ - kSharedOfRuntime);
}

std::optional<CudaMoe::FewShape> CudaMoe::FewShapeFor(const CudaMoeCall& call) const {
  const uint64_t assignments = uint64_t{call.token_count} * call.top_k;
  const uint32_t blocks = std::min(multiprocessors_, kFewBlocksMax);
  // FP8 has scales of 128 columns of down, which blocks would share.
  if (!wanted_.few || call.fp8 || assignments == 0 || assignments > blocks) return {};
  const uint32_t all = static_cast<uint32_t>(call.geometry.intermediate / 32);
  const uint32_t most = blocks / static_cast<uint32_t>(assignments);
  const uint32_t groups = (all + most - 1) / most;
  const uint32_t parts = (all + groups - 1) / groups;
  const uint32_t hidden = static_cast<uint32_t>(call.geometry.hidden);
  for (uint32_t warps = kDecodeWarpsMax; warps >= kDecodeWarpsMin; warps /= 2) {
    const uint32_t bytes = FewSharedBytes(warps, hidden, groups);
    if (groups <= FewGroupsMax(warps) && bytes <= SharedOfBlock())
      return FewShape{parts, groups, 32 * warps, bytes};
  }
  return {};
}

Result<void> CudaMoe::DecodeFew(MoeArgs args, const CudaMoeCall& call, CUstream stream) const {
  const FewShape shape = *FewShapeFor(call);
  args.results = reinterpret_cast<float*>(call.workspace + kWorkspaceZeros);
  FewArgs few = {.parts = shape.parts, .groups = shape.groups};
  void* arguments[] = {&args, &few};
  return Enqueue({.kernel = few_,
                  .blocks = std::min(multiprocessors_, kFewBlocksMax),
                  .threads = shape.threads,
                  .shared_bytes = shape.shared_bytes,
                  .all_resident = true},
                 stream, arguments);
}

Result<CudaMoe::DecodeShape> CudaMoe::ShapeFor(uint32_t k) const {
  const uint32_t room = SharedOfBlock();
  for (uint32_t tokens = kDecodeSliceTokensMax; tokens > 1; tokens /= 2) {
    for (uint32_t warps = kDecodeWarpsMax; warps >= kDecodeWarpsMin; warps /= 2) {
      const uint32_t bytes = DecodeFixedBytes(warps) + StagedBytes(k, tokens);
      if (bytes <= room) return DecodeShape{32 * warps, tokens, bytes};
    }
  }
  return Fail(Status::Capacity("this GPU has too little shared memory for layers so wide")
                  .Expected(Text("{} bytes for a thread block",
                                 DecodeFixedBytes(kDecodeWarpsMin) + StagedBytes(k, 2)))
                  .Found(Text("{}", room)));
}

CUfunction CudaMoe::DecodeKernelFor(const CudaMoeCall& call) const {
  if (call.fp8) return decode_[1];
  // As bits of From.
  uint8_t from = 0;
  if (call.wanted == nullptr && call.wanted_of_all == kWantBase) from = kFromBase;
  if (call.wanted == nullptr && call.wanted_of_all == kWantFp4)
    from = call.tiers & (kFromNibbles | kFromQuintals);
  switch (from) {
    case kFromBase: return decode_plain_[0];
    case kFromNibbles: return decode_plain_[1];
    case kFromQuintals: return decode_plain_[2];
    default: return decode_[0];
  }
}

Result<void> CudaMoe::Decode(MoeArgs args, const CudaMoeCall& call, CUstream stream) const {
  HP_ASSIGN(const DecodeShape shape, ShapeFor(std::max(args.hidden, args.intermediate)));
  if (multiprocessors_ < kDecodeBlocksMin)
    return Fail(Status::System("this GPU has too few multiprocessors for the experts")
                    .Expected(Text("room for {} thread blocks", kDecodeBlocksMin))
                    .Found(Text("{}", multiprocessors_)));
  DecodeArgs decode = {.slice_tokens = shape.slice_tokens};
  void* arguments[] = {&args, &decode};
  return Enqueue({.kernel = DecodeKernelFor(call),
                  .blocks = multiprocessors_,
                  .threads = shape.threads,
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
  args.tiers = call.tiers;
  args.x = call.x;
  args.ids = call.ids;
  args.weights = call.weights;
  args.y = call.y;
  args.barriers = reinterpret_cast<GridBarriers*>(call.workspace);
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
  if (FewShapeFor(call)) return DecodeFew(args, call, stream);
  if (assignments <= kDecodeAssignmentsMax) return Decode(args, call, stream);
  std::byte* at =
      inner + InnerBytes(call.geometry, assignments) + ResultBytes(call.geometry, assignments);
  PrefillArgs prefill = {};
  prefill.x = reinterpret_cast<uint16_t*>(at);
  at += ArrangedBytes(call.geometry, call.token_count);
  prefill.order = reinterpret_cast<uint32_t*>(at);
  prefill.begin = reinterpret_cast<uint32_t*>(at + OrderBytes(assignments));
  return Prefill(args, prefill, call, stream);
}

Result<void> CudaMoe::RoundToFp8(uint16_t* values, uint64_t rows, uint32_t columns,
                                 CUstream stream) const {
  constexpr uint32_t kThreads = kPrefillSortThreads;
  const uint64_t warps = rows * ((columns + fp8::kGroup - 1) / fp8::kGroup);
  void* arguments[] = {&values, &rows, &columns};
  return Enqueue({.kernel = round_fp8_,
                  .blocks = static_cast<uint32_t>((warps * 32 + kThreads - 1) / kThreads),
                  .threads = kThreads},
                 stream, arguments);
}

Result<void> CudaMoe::Prefill(MoeArgs args, PrefillArgs prefill, const CudaMoeCall& call,
                              CUstream stream) const {
  constexpr uint32_t kThreads = kPrefillSortThreads;
  void* arguments[] = {&args, &prefill};
  HP_TRY(
      Enqueue({.kernel = sort_, .blocks = args.experts, .threads = kThreads}, stream, arguments));
  const uint64_t blocks_of_32 = uint64_t{args.tokens} * args.hidden / 32;
  HP_TRY(Enqueue({.kernel = arrange_,
                  .blocks = static_cast<uint32_t>((blocks_of_32 + kThreads - 1) / kThreads),
                  .threads = kThreads},
                 stream, arguments));
  if (call.fp8) HP_TRY(RoundToFp8(prefill.x, args.tokens, args.hidden, stream));
  const uint64_t assignments = uint64_t{args.tokens} * args.top_k;
  const size_t few = assignments <= uint64_t{kPrefillFewAverage} * args.experts ? 1 : 0;
  const PrefillShape& shape = SetOf(prefill_kernels_[few]).shapes[few];
  for (uint32_t gate_up : {1u, 0u}) {
    if (call.fp8 && gate_up == 0)
      HP_TRY(RoundToFp8(args.inner, assignments, args.intermediate, stream));
    void* with_product[] = {&args, &prefill, &gate_up};
    for (size_t i = 0; i < std::size(prefill_[few]); ++i) {
      if ((call.tiers >> i & 1) == 0) continue;
      HP_TRY(Enqueue({.kernel = prefill_[few][i],
                      .blocks = shape.blocks_per_multiprocessor * multiprocessors_,
                      .threads = shape.threads,
                      .shared_bytes = shape.shared_bytes},
                     stream, with_product));
    }
  }
  return Enqueue({.kernel = combine_, .blocks = 4 * multiprocessors_, .threads = kCombineThreads},
                 stream, arguments);
}

}  // namespace hotplane
