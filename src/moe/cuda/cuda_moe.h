// The operator of a MoE layer on a GPU (moe/moe.h says what it computes), straight from the planes
// in device memory. Activations are bfloat16 in and out and between the two products, sums float32;
// reference.cc derives the bound.
//   decode (up to 256 assignments)  weights are exact. Activations enter the products as 16-bit
//     integers with a scale for each 32 of them, at most 1/65024 of the largest is lost. So few
//     that each assignment can have thread blocks of its own get them.
//   prefill (more)                  weights are rounded to bfloat16, which has them all but base
//     weights of 2^-127 (taken for zero) and those of scale bytes above 252 (infinite).
//
// All of a call happens on the device and on one stream, without a wait of the host: it can be
// captured in a graph. The same call gives the same bits every time.
#pragma once

#include <memory>
#include <optional>

#include "base/status.h"
#include "device/cuda/driver.h"
#include "format/kinds.h"
#include "moe/cuda/moe_args.h"

namespace hotplane {

// Arrays in device memory, row-major and contiguous, 16-byte aligned, ids and weights as their
// elements are. None may overlap y.
struct CudaMoeCall {
  LayerGeometry geometry;  // E, H, I, biases
  Activation activation;
  uint32_t token_count = 0;                     // T
  uint32_t top_k = 0;                           // k
  const moe_cuda::ExpertSlot* slots = nullptr;  // [E]
  const uint8_t* wanted = nullptr;              // [E], a moe_cuda::Wanted each; null: wanted_of_all
  uint8_t wanted_of_all = moe_cuda::kWantBase;
  // Activations of both products are rounded to FP8 (moe/fp8.h), and otherwise go the same way.
  bool fp8 = false;
  // What experts may be computed from. Leaving out what does not occur saves launches, and lets
  // kernels decode that know the tier; what could be computed from nothing else is refused.
  uint8_t tiers = moe_cuda::kFromAnything;
  const uint16_t* x = nullptr;     // [T, H] bfloat16
  const int32_t* ids = nullptr;    // [T, k]
  const float* weights = nullptr;  // [T, k]
  uint16_t* y = nullptr;           // [T, H] bfloat16
  // Of WorkspaceBytes; one call at a time uses it. Its first kWorkspaceZeros bytes are zeros before
  // the first call and belong to the operator from then on.
  std::byte* workspace = nullptr;
  uint64_t workspace_bytes = 0;
  // Left alone, or told what could not be computed: an id that is no expert, an expert without the
  // parts that were asked for. The rows of y concerned are then NaN.
  moe_cuda::Refusal* refusal = nullptr;
};

// Which instructions multiply in a prefill: wgmma on Hopper, mma.sync from sm_80 on.
enum class PrefillKernels : uint8_t { kWgmma, kMma };
inline constexpr PrefillKernels kAllPrefillKernels[] = {PrefillKernels::kWgmma,
                                                        PrefillKernels::kMma};
const char* NameOf(PrefillKernels kernels);  // "wgmma", "mma"

// Which kernels are taken where there is a choice.
struct CudaMoeKernels {
  // nullopt: wgmma for many assignments of an expert and mma.sync for few, whichever there is.
  std::optional<PrefillKernels> prefill;
  // Whether the few assignments of a decode may have blocks of their own.
  bool few = true;
};

// The kernels of one GPU, loaded. Thread-safe; the context outlives it.
class CudaMoe {
 public:
  // The context is current. Null where this build has no kernels for this GPU, or not those that
  // are wanted.
  static Result<std::unique_ptr<CudaMoe>> Load(const CudaDriver& driver, CUcontext context,
                                               CUdevice device, const CudaMoeKernels& wanted = {});
  ~CudaMoe();
  CudaMoe(const CudaMoe&) = delete;
  CudaMoe& operator=(const CudaMoe&) = delete;

  // Where experts have many assignments, where they have few.
  PrefillKernels prefill() const { return prefill_kernels_[0]; }
  PrefillKernels prefill_of_few() const { return prefill_kernels_[1]; }
  bool few() const { return wanted_.few; }

  static constexpr uint64_t kWorkspaceZeros = 256;
  static uint64_t WorkspaceBytes(const LayerGeometry& geometry, uint32_t tokens, uint32_t top_k);

  // Enqueues the call; the context is current. kUsage for a null or misaligned array, a workspace
  // that is too small, or a shape that cannot be.
  Result<void> Forward(const CudaMoeCall& call, CUstream stream) const;

 private:
  CudaMoe(const CudaDriver& driver, CUcontext context, const CudaMoeKernels& wanted)
      : driver_(driver), context_(context), wanted_(wanted) {}

  struct Launch {
    CUfunction kernel = nullptr;
    uint32_t blocks = 1;
    uint32_t threads = 0;
    uint32_t shared_bytes = 0;
    bool all_resident = false;  // its blocks wait for each other
  };
  Result<void> Enqueue(const Launch& launch, CUstream stream, void** arguments) const;
  Result<void> Decode(moe_cuda::MoeArgs args, const CudaMoeCall& call, CUstream stream) const;
  CUfunction DecodeKernelFor(const CudaMoeCall& call) const;
  Result<void> DecodeFew(moe_cuda::MoeArgs args, const CudaMoeCall& call, CUstream stream) const;
  Result<void> Prefill(moe_cuda::MoeArgs args, moe_cuda::PrefillArgs prefill,
                       const CudaMoeCall& call, CUstream stream) const;
  Result<void> RoundToFp8(uint16_t* values, uint64_t rows, uint32_t columns, CUstream stream) const;
  Result<void> Get(CUmodule module, const char* name, CUfunction* function) const;
  Result<void> GiveShared(CUfunction kernel, uint32_t bytes) const;
  // All that a multiprocessor has, for its blocks.
  Result<void> GiveAllShared(CUfunction kernel) const;
  Result<void> LoadDecode();
  // The kernels for many assignments of an expert (0), for few (1). False where this GPU has none
  // of those that are wanted.
  Result<bool> LoadPrefill(size_t few);
  // What the blocks get that decode a layer whose wider side is k, one on each multiprocessor.
  struct DecodeShape {
    uint32_t threads = 0;
    uint32_t slice_tokens = 0;
    uint32_t shared_bytes = 0;
  };
  Result<DecodeShape> ShapeFor(uint32_t k) const;
  // The most shared memory that a block can have beside the runtime's.
  uint32_t SharedOfBlock() const;
  // How assignments get blocks of their own, if there are so few.
  struct FewShape {
    uint32_t parts = 0, groups = 0;  // as in FewArgs
    uint32_t threads = 0;
    uint32_t shared_bytes = 0;
  };
  std::optional<FewShape> FewShapeFor(const CudaMoeCall& call) const;

  const CudaDriver& driver_;
  const CUcontext context_;
  const CudaMoeKernels wanted_;
  uint32_t multiprocessors_ = 0;
  uint32_t shared_per_block_ = 0;
  uint32_t shared_per_multiprocessor_ = 0;
  CUmodule decode_module_ = nullptr;
  CUfunction decode_[2] = {};  // from bfloat16 activations, from FP8
  // Of experts that are all computed from base, from nibbles, from quintals.
  CUfunction decode_plain_[3] = {};
  CUfunction combine_ = nullptr;
  CUmodule few_module_ = nullptr;
  CUfunction few_ = nullptr;
  CUmodule sort_module_ = nullptr;
  CUfunction sort_ = nullptr;
  CUfunction arrange_ = nullptr;
  CUfunction round_fp8_ = nullptr;
  CUmodule prefill_modules_[2] = {};  // by PrefillKernels; null: not loaded
  // For many assignments of an expert, for few; from base, nibbles, quintals.
  PrefillKernels prefill_kernels_[2] = {};
  CUfunction prefill_[2][3] = {};
};

}  // namespace hotplane
