// One function for each instruction that CUDA C++ has no name for, or no good one.
#pragma once

#include <cstdint>

namespace hotplane::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, past the first-level cache.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(shared), "l"(global)
               : "memory");
}
// The same if `wanted`, without a branch: around one, copies would take instructions more.
__device__ __forceinline__ void CopyAsync16If(bool wanted, uint32_t shared, const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(wanted ? 1u : 0u)
      : "memory");
}
// The same; 16 zeros unless `there`.
__device__ __forceinline__ void CopyAsync16OrZeros(uint32_t shared, const void* global,
                                                   bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
               "l"(global), "r"(there ? 16u : 0u)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void Prefetch(const void* global) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(global));
}

__device__ __forceinline__ uint32_t Max(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.u32 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Byte i of the result is the byte of {b, a} that nibble i of `selector` names.
__device__ __forceinline__ uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// The high half of `bits`, in both halves; as a float16 it is no NaN and not infinite. A product
// with one, which runs beside byte permutations, where a shift would compete with them.
__device__ __forceinline__ uint32_t HighHalf(uint32_t bits) {
  uint32_t result;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 both;\n"
      "mov.b32 {low, high}, %1;\n"
      "mov.b32 both, {high, high};\n"
      "mul.f16x2 %0, both, %2;\n"
      "}\n"
      : "=r"(result)
      : "r"(bits), "r"(0x3C003C00u));
  return result;
}

// (a & mask_a) | (b & mask_b) where the masks share no bit.
template <uint32_t kMaskA, uint32_t kMaskB>
__device__ __forceinline__ uint32_t Merge(uint32_t a, uint32_t b) {
  return (a & kMaskA) | (b & kMaskB);
}

// Of what does not change: its place among other accesses is the compiler's choice, as long as its
// address comes from what is read behind the barrier that it needs.
__device__ __forceinline__ uint32_t LoadShared(uint32_t shared) {
  uint32_t value;
  asm("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(shared));
  return value;
}

// Four matrices of 8 rows of 16 bytes: lane 8i+r names row r of matrix i in shared memory; of each
// matrix a lane gets bytes 4t to 4t+3 of row g.
__device__ __forceinline__ void LoadMatrices(uint32_t (&matrices)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared)
               : "memory");
}

// The bits in which a and b & mask are the same.
__device__ __forceinline__ uint32_t SameAsMasked(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x87;\n" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
}

// d += a b: a [16, 16], b [16, 8] bfloat16, d [16, 8] float32, in the layouts of the PTX manual.
__device__ __forceinline__ void MultiplyBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b: a [16, 32], b [32, 8] signed bytes, d [16, 8] int32.
__device__ __forceinline__ void MultiplyBytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two bfloat16 products.
__device__ __forceinline__ uint32_t MultiplyPair(uint32_t a, uint32_t b) {
  uint32_t result;
  // The form that sm_80 has: a b - 0.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
  return result;
}

// Of float16 pairs: a b + c, rounded once, and a + b. Subnormals are kept.
__device__ __forceinline__ uint32_t MultiplyAddHalves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ uint32_t AddHalves(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void AddRelease(uint32_t* at, uint32_t by) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(at), "r"(by) : "memory");
}

}  // namespace hotplane::ptx
