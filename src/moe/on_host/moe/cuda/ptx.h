// src/moe/cuda/ptx.h as functions of the host: found instead of that file where kernels are
// compiled for the fake driver. Layouts are the PTX manual's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "device/fake/cuda_on_host.h"
#include "moe/bfloat16.h"

namespace hotplane::moe_cuda {
// The dynamic shared memory of a block; the most that a GPU has.
inline constexpr uint32_t kSharedOnHost = 227 * 1024;
alignas(16) extern thread_local uint8_t memory[kSharedOnHost + on_host::kGuardBytes];
}  // namespace hotplane::moe_cuda

namespace hotplane::ptx {

// Shared memory does not begin at 0, nor at a multiple of much.
inline constexpr uint32_t kSharedBegin = 2160;
inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - moe_cuda::memory) +
         kSharedBegin;
}
inline uint8_t* AtShared(uint32_t address, uint32_t align) {
  if (address < kSharedBegin ||
      address + align > kSharedBegin + on_host::CurrentGrid().shared_bytes)
    on_host::Die("shared memory that it does not have");
  if (address % align != 0) on_host::Die("a misaligned address in shared memory");
  return moe_cuda::memory + (address - kSharedBegin);
}

// Copies arrive when they are issued or when they are waited for, as it happens.
struct CopyOnHost {
  uint8_t* to;
  const void* from;  // null: zeros
  void Arrive() const {
    if (from == nullptr)
      std::memset(to, 0, 16);
    else
      std::memcpy(to, from, 16);
  }
};
struct ThreadOnHost {
  std::vector<CopyOnHost> open;
  std::deque<std::vector<CopyOnHost>> committed;
  std::shared_ptr<void> wgmmas;  // of wgmma_sm90.h
};
inline ThreadOnHost& OfThread() {
  std::shared_ptr<void>& own = on_host::OwnOfThread();
  if (own == nullptr) own = std::make_shared<ThreadOnHost>();
  return *static_cast<ThreadOnHost*>(own.get());
}
inline thread_local std::mt19937 chance;

inline void CopyAsync16OrZeros(uint32_t shared, const void* global, bool there) {
  if (there && reinterpret_cast<uintptr_t>(global) % 16 != 0) on_host::Die("a misaligned address");
  const CopyOnHost copy = {AtShared(shared, 16), there ? global : nullptr};
  if (chance() % 2 == 0)
    copy.Arrive();
  else
    OfThread().open.push_back(copy);
}
inline void CopyAsync16(uint32_t shared, const void* global) {
  CopyAsync16OrZeros(shared, global, true);
}
inline void CopyAsync16If(bool wanted, uint32_t shared, const void* global) {
  if (wanted) CopyAsync16(shared, global);
}
inline void CommitCopies() {
  ThreadOnHost& own = OfThread();
  own.committed.push_back(std::exchange(own.open, {}));
}
template <int kPending>
void WaitForCopies() {
  ThreadOnHost& own = OfThread();
  while (own.committed.size() > kPending) {
    for (const CopyOnHost& copy : own.committed.front()) copy.Arrive();
    own.committed.pop_front();
  }
}

inline void Prefetch(const void*) {}

inline uint32_t Max(uint32_t a, uint32_t b) { return a > b ? a : b; }

inline uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = bytes >> (8 * (nibble & 7)) & 255;
    if ((nibble & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

inline uint32_t HighHalf(uint32_t bits) {
  if ((bits & 0x7C000000u) == 0x7C000000u) on_host::Die("a float16 that is no number");
  return (bits >> 16) * 0x10001u;
}

template <uint32_t kMaskA, uint32_t kMaskB>
uint32_t Merge(uint32_t a, uint32_t b) {
  return (a & kMaskA) | (b & kMaskB);
}

inline uint32_t LoadShared(uint32_t shared) {
  uint32_t value;
  std::memcpy(&value, AtShared(shared, 4), sizeof value);
  return value;
}

inline uint32_t SameAsMasked(uint32_t a, uint32_t b, uint32_t mask) { return ~(a ^ (b & mask)); }

inline uint32_t LoadAcquire(const uint32_t* at) {
  on_host::WaitForOtherBlocks();
  return *at;
}
inline void AddRelease(uint32_t* at, uint32_t by) {
  *at += by;
  on_host::TellOtherBlocks();
}

// Of float16, finite ones.
inline double FromHalf(uint32_t half) {
  const int exponent = static_cast<int>(half >> 10 & 31);
  const double magnitude = (half & 1023) + (exponent != 0 ? 1024 : 0);
  return std::ldexp((half & 0x8000) != 0 ? -magnitude : magnitude, std::max(exponent, 1) - 25);
}
inline uint32_t ToHalf(double value) {
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  // Of the unit in the last place; that of subnormals is the least.
  const int unit = magnitude < 0x1p-14 ? -24 : std::ilogb(magnitude) - 10;
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
  if (unit > 5 || (unit == 5 && units > 2047)) on_host::Die("a float16 that is none");
  return sign | (units + (static_cast<uint32_t>(unit + 24) << 10));
}
// The sum in float64 is exact where products have few bits, as those of whole numbers.
inline uint32_t MultiplyAddHalves(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [&](uint32_t shift) {
    const auto of = [&](uint32_t pair) { return FromHalf(pair >> shift & 0xFFFF); };
    return ToHalf(of(a) * of(b) + of(c)) << shift;
  };
  return half(0) | half(16);
}
inline uint32_t AddHalves(uint32_t a, uint32_t b) { return MultiplyAddHalves(a, 0x3C003C00u, b); }

inline uint32_t MultiplyPair(uint32_t a, uint32_t b) {
  const auto half = [&](uint32_t shift) {
    const auto of = [&](uint32_t pair) { return FromBf16(static_cast<uint16_t>(pair >> shift)); };
    return uint32_t{ToBf16(of(a) * of(b))} << shift;
  };
  return half(0) | half(16);
}

inline void LoadMatrices(uint32_t (&matrices)[4], uint32_t shared) {
  struct Operands {
    uint32_t (&matrices)[4];
    const uint8_t* row;
  } operands = {matrices, AtShared(shared, 16)};
  on_host::Together(&operands, [](void* const(&lanes)[32]) {
    for (uint32_t lane = 0; lane < 32; ++lane) {
      for (uint32_t i = 0; i < 4; ++i) {
        const uint8_t* const row = static_cast<Operands*>(lanes[8 * i + lane / 4])->row;
        std::memcpy(&static_cast<Operands*>(lanes[lane])->matrices[i], row + lane % 4 * 4, 4);
      }
    }
  });
}

struct MultiplyOnHost {
  float (&d)[4];
  const uint32_t (&a)[4];
  uint32_t b[2];
  static float Half(uint32_t pair, uint32_t k) {
    return FromBf16(static_cast<uint16_t>(pair >> (k % 2 * 16)));
  }
};
// Lane 4g+t: a[0] has row g, k 2t and 2t+1, a[1] row g+8; a[2] and a[3] the same of k+8; b[0] k 2t
// and 2t+1 of column g, b[1] k+8; d[0] and d[1] row g, columns 2t and 2t+1, d[2] and d[3] row g+8.
inline void MultiplyBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MultiplyOnHost operands = {d, a, {b0, b1}};
  on_host::Together(&operands, [](void* const(&lanes)[32]) {
    using Of = MultiplyOnHost;
    const auto at = [&](uint32_t lane) { return static_cast<Of*>(lanes[lane]); };
    float left[16][16], right[16][8];
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t t = k % 8 / 2;
      for (uint32_t row = 0; row < 16; ++row)
        left[row][k] = Of::Half(at(row % 8 * 4 + t)->a[k / 8 * 2 + row / 8], k);
      for (uint32_t column = 0; column < 8; ++column)
        right[k][column] = Of::Half(at(column * 4 + t)->b[k / 8], k);
    }
    for (uint32_t row = 0; row < 16; ++row) {
      for (uint32_t column = 0; column < 8; ++column) {
        double sum = 0;
        for (uint32_t k = 0; k < 16; ++k) sum += double{left[row][k]} * double{right[k][column]};
        float& to = at(row % 8 * 4 + column / 2)->d[row / 8 * 2 + column % 2];
        to = static_cast<float>(double{to} + sum);
      }
    }
  });
}

struct MultiplyBytesOnHost {
  int32_t (&d)[4];
  const uint32_t (&a)[4];
  uint32_t b[2];
  static int32_t Byte(uint32_t word, uint32_t k) {
    return static_cast<int8_t>(static_cast<uint8_t>(word >> (k % 4 * 8)));
  }
};
// Lane 4g+t: a[0] has row g, k 4t to 4t+3, a[1] row g+8; a[2] and a[3] the same of k+16; b[0] those
// k of column g, b[1] k+16; d as in MultiplyBf16.
inline void MultiplyBytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MultiplyBytesOnHost operands = {d, a, {b0, b1}};
  on_host::Together(&operands, [](void* const(&lanes)[32]) {
    using Of = MultiplyBytesOnHost;
    const auto at = [&](uint32_t lane) { return static_cast<Of*>(lanes[lane]); };
    int32_t left[16][32], right[8][32];
    for (uint32_t k = 0; k < 32; ++k) {
      const uint32_t t = k % 16 / 4;
      for (uint32_t row = 0; row < 16; ++row)
        left[row][k] = Of::Byte(at(row % 8 * 4 + t)->a[k / 16 * 2 + row / 8], k);
      for (uint32_t column = 0; column < 8; ++column)
        right[column][k] = Of::Byte(at(column * 4 + t)->b[k / 16], k);
    }
    for (uint32_t row = 0; row < 16; ++row) {
      for (uint32_t column = 0; column < 8; ++column) {
        int32_t sum = 0;
        for (uint32_t k = 0; k < 32; ++k) sum += left[row][k] * right[column][k];
        at(row % 8 * 4 + column / 2)->d[row / 8 * 2 + column % 2] += sum;
      }
    }
  });
}

}  // namespace hotplane::ptx
