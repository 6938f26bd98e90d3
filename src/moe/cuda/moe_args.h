// What the kernels of the operator are launched with; one source for kernel and host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotplane::moe_cuda {

// Where one expert's parts are, as the device reads them at every launch: pools of experts change
// this table and nothing else. Device memory, or host memory that is mapped into the device. Parts
// are planes of whole matrices (docs/format/planes.md), 16-byte aligned; null: not there.
struct ExpertSlot {
  const uint8_t* planes13;
  const uint8_t* sc13;
  const uint8_t* planes2;
  const uint8_t* sc2;
  const uint8_t* fp13;  // with fp_quintals: quintals, which need the codes as well
  const uint8_t* fp2;
  const float* bias13;  // [2I] and [H]; of layers with biases
  const float* bias2;
  uint32_t fp_quintals;
  uint32_t reserved;
};
static_assert(sizeof(ExpertSlot) == 72);

// What a call asks for, by expert or for all.
enum Wanted : uint8_t { kWantBase = 1, kWantFp4 = 2, kWantFp4OrBase = 3 };

// What an expert is computed from, as bits.
enum From : uint8_t { kFromBase = 1, kFromNibbles = 2, kFromQuintals = 4, kFromAnything = 7 };

// Written once by the device when it could not compute what was asked; the rows concerned are NaN.
struct Refusal {
  uint32_t kind;    // 0: none
  uint32_t expert;  // of kRefusedId: the assignment
};
enum RefusalKind : uint32_t { kRefusedId = 1, kRefusedExpert = 2 };

// All zeros before the first call, then left to the calls.
struct GridBarriers {
  uint32_t arrived[2];
};

// Assignments (token, slot) are numbered token * top_k + slot.
struct MoeArgs {
  const ExpertSlot* slots;  // [experts]
  const uint8_t* wanted;    // [experts]; null: wanted_of_all
  const uint16_t* x;        // [tokens, hidden] bfloat16
  const int32_t* ids;       // [tokens, top_k]
  const float* weights;     // [tokens, top_k]
  uint16_t* y;              // [tokens, hidden] bfloat16
  uint16_t* inner;          // [tokens * top_k, intermediate] bfloat16: act, by assignment
  float* results;           // [tokens * top_k, hidden]: by assignment; of few: [block, hidden]
  Refusal* refusal;
  GridBarriers* barriers;
  uint32_t experts, hidden, intermediate;
  uint32_t tokens, top_k;
  uint32_t wanted_of_all;
  uint32_t tiers;       // what experts may be computed from, Froms
  uint32_t activation;  // an ActivationKind
  float limit, alpha;
  uint32_t biases;
};

// Of prefill alone. Assignments are sorted by expert, those of an expert ascending.
struct PrefillArgs {
  uint16_t* x;      // [tokens, hidden]: x in the order of PrefillColumn
  uint32_t* order;  // [assignments]: the sorted assignments
  uint32_t* begin;  // [experts + 1]: where an expert's begin in `order`
};
// The order of a block of 32 in activations for prefill, in which the fragments of fragments.h take
// them: word w has column PrefillColumn(w) and the one 16 further on.
constexpr uint32_t PrefillColumn(uint32_t word) {
  const uint32_t multiply = word / 8, pair = word % 8 / 4, t = word % 4;
  return 4 * t + 2 * multiply + pair;
}
inline constexpr unsigned kPrefillSortThreads = 256;
inline constexpr unsigned kPrefillThreads = 512;
// A stage: 64 of k of all columns' activations, then of all warps' weights; at a multiple of 1 KiB.
inline constexpr unsigned kPrefillColumns = 112;
inline constexpr unsigned kPrefillStages = 6;
inline constexpr unsigned kPrefillWeights = kPrefillColumns * 128;
inline constexpr unsigned kPrefillStageBytes = 24 * 1024;
inline constexpr unsigned kPrefillRingBytes = kPrefillStages * kPrefillStageBytes;
inline constexpr unsigned kPrefillBehindRingBytes = 64;
inline constexpr unsigned kPrefillSharedBytes = kPrefillRingBytes + kPrefillBehindRingBytes + 1024;

// The same of the kernels that take mma.sync, for many assignments of an expert and for few. Their
// blocks fit a multiprocessor of any GPU: the least shared memory that there is are 100 KiB, of
// which a block's own variables and the runtime take about 4 KiB. Stages are as many as fit.
struct PrefillMmaShape {
  unsigned columns, blocks_per_multiprocessor, ring_bytes;
};
inline constexpr PrefillMmaShape kPrefillMmaMany = {128, 2, 44 * 1024};
inline constexpr PrefillMmaShape kPrefillMmaFew = {32, 4, 20 * 1024};
inline constexpr unsigned kPrefillMmaThreads = 128;
constexpr unsigned SharedBytesOf(const PrefillMmaShape& shape) {
  return shape.ring_bytes + kPrefillBehindRingBytes + 128;
}
// Few: this many on average. Beyond, experts would often have two runs of columns, and their
// weights be unpacked twice.
inline constexpr unsigned kPrefillFewAverage = 16;
inline constexpr unsigned kCombineThreads = 256;

// Of decode alone.
struct DecodeArgs {
  uint32_t slice_tokens;  // assignments of an expert that are computed at once
};

inline constexpr unsigned kDecodeAssignmentsMax = 256;
inline constexpr unsigned kDecodeExpertsMax = 1024;
// A block, of which each multiprocessor has one: of more warps where there is shared memory for
// them.
inline constexpr unsigned kDecodeWarpsMin = kDecodeAssignmentsMax / 32;
inline constexpr unsigned kDecodeWarpsMax = 16;
// Of each warp, in shared memory: what is on its way from device memory, and sums of pieces of
// items (Pieces of decode_kernel.cu).
inline constexpr unsigned kDecodeStages = 3;
inline constexpr unsigned kDecodeStageBytes = 2432;
inline constexpr unsigned kDecodeRingBytes = kDecodeStages * kDecodeStageBytes;
inline constexpr unsigned kDecodePieceBytes = 1280;
inline constexpr unsigned kDecodeSliceTokensMax = 4;
// Slices that one block has to do with: those of its share of the items of a product.
inline constexpr unsigned kDecodeOwnSlicesMax = 24;
// With fewer a block might have more slices: costs differ by up to 3.4 (CostOf in routed.h).
inline constexpr unsigned kDecodeBlocksMin = 40;
// Beside what is staged: the routing (Routed of routed.h), tables (ProductTables of
// decode_product.h), and what each warp has.
inline constexpr unsigned kDecodeRoutedBytes = 5120;
inline constexpr unsigned kDecodeTableBytes = 4736;
inline constexpr unsigned kDecodeTableAlign = 4096;
constexpr unsigned DecodeFixedBytes(unsigned warps) {
  return kDecodeTableAlign + kDecodeTableBytes + kDecodeRoutedBytes +
         warps * (kDecodePieceBytes + kDecodeRingBytes);
}
// Activations of a slice of up to `tokens` tokens (1, 2 or 4): two bytes each, whole chunks of 8
// blocks of 32; and a float32 for each block and token.
constexpr unsigned StagedBytes(unsigned k, unsigned tokens) {
  const unsigned blocks = (k + 255) / 256 * 8;
  return blocks * tokens * (32 * 2 + 4);
}

// Of a decode of so few assignments that each has blocks of its own: of the intermediate rows,
// which are the columns of down, a block has some groups of 32, and all of hidden.
struct FewArgs {
  uint32_t parts;   // blocks of an assignment
  uint32_t groups;  // of a block; the last of an assignment may have fewer
};
// As many multiprocessors as the largest GPU has, and some; what is summed takes a row for each.
inline constexpr unsigned kFewBlocksMax = 192;
// Of each warp: sums of two pieces of items, of 64 rows at most.
inline constexpr unsigned kFewPieceRows = 64;
inline constexpr unsigned kFewPieceBytes = 2 * kFewPieceRows * 4;
// Blocks of 32 columns of down that are multiplied at once; a block's groups may begin in the
// middle of a tile.
inline constexpr unsigned kFewRun = 4;
constexpr unsigned FewRuns(unsigned groups) { return (groups + 1 + kFewRun - 1) / kFewRun; }
constexpr unsigned FewSharedBytes(unsigned warps, unsigned hidden, unsigned groups) {
  return kDecodeTableAlign + kDecodeTableBytes + warps * (kFewPieceBytes + kDecodeRingBytes) +
         StagedBytes(hidden, 1) + StagedBytes(FewRuns(groups) * kFewRun * 32, 1);
}
// An item that begins in a warp ends in the next ones, so that no warp has more than two.
constexpr unsigned FewGroupsMax(unsigned warps) { return warps / 2; }

}  // namespace hotplane::moe_cuda
