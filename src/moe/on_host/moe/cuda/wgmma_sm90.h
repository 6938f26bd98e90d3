// src/moe/cuda/wgmma_sm90.h as functions of the host. A warp's part of a multiply is done when it
// is issued or when it is waited for, as it happens: registers that are written too early, or
// stages that are filled too early, give wrong results.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "moe/cuda/ptx.h"

namespace hotplane::ptx {

// One lane's part.
struct WgmmaOnHost {
  float* d;
  const uint32_t* a;
  uint64_t b;
  uint32_t columns;
};
struct WgmmasOnHost {
  bool fenced = false;
  std::vector<WgmmaOnHost> open;
  std::deque<std::vector<WgmmaOnHost>> committed;
};
inline WgmmasOnHost& WgmmasOfThread() {
  std::shared_ptr<void>& own = OfThread().wgmmas;
  if (own == nullptr) own = std::make_shared<WgmmasOnHost>();
  return *static_cast<WgmmasOnHost*>(own.get());
}

// Rows of 128 bytes, 16-byte chunk c of row n at c ^ (n % 8), eight rows after each other.
inline uint64_t SwizzledRows(uint32_t shared) {
  if (shared % 1024 % 32 != 0 || shared % 1024 >= 128)
    on_host::Die("rows of a multiply that are not at 1 KiB and 32 for each 16 of k");
  return shared;
}
inline uint64_t RowsFurther(uint64_t rows, uint32_t bytes) {
  return SwizzledRows(static_cast<uint32_t>(rows) + bytes);
}
inline float SwizzledAt(uint64_t rows, uint32_t n, uint32_t k) {
  const uint32_t plain = static_cast<uint32_t>(rows) + n * 128 + k * 2;
  uint16_t bits;
  std::memcpy(&bits, AtShared(plain ^ (plain >> 7 & 7) << 4, 2), sizeof bits);
  return FromBf16(bits);
}

// d [16, columns] += a [16, 16] b [16, columns], of a warp; d in eights of columns, each and a as
// in MultiplyBf16.
inline void DoWgmma(const WgmmaOnHost (&lanes)[32]) {
  float left[16][16];
  for (uint32_t row = 0; row < 16; ++row)
    for (uint32_t k = 0; k < 16; ++k)
      left[row][k] = MultiplyOnHost::Half(lanes[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8], k);
  for (uint32_t column = 0; column < lanes[0].columns; ++column) {
    float right[16];
    for (uint32_t k = 0; k < 16; ++k) right[k] = SwizzledAt(lanes[0].b, column, k);
    for (uint32_t row = 0; row < 16; ++row) {
      double sum = 0;
      for (uint32_t k = 0; k < 16; ++k) sum += double{left[row][k]} * double{right[k]};
      float& to = lanes[row % 8 * 4 + column % 8 / 2].d[column / 8 * 4 + row / 8 * 2 + column % 2];
      to = static_cast<float>(double{to} + sum);
    }
  }
}

template <int kColumns>
struct Wgmma {
  static void Multiply(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b) {
    WgmmasOnHost& own = WgmmasOfThread();
    if (!own.fenced) on_host::Die("a batch of multiplies without a fence");
    WgmmaOnHost operands = {d, a, b, kColumns};
    on_host::Together(&operands, [](void* const(&lanes)[32]) {
      WgmmaOnHost of_lanes[32];
      for (uint32_t i = 0; i < 32; ++i) of_lanes[i] = *static_cast<WgmmaOnHost*>(lanes[i]);
      const bool now = chance() % 2 == 0;
      if (now) DoWgmma(of_lanes);
      // Done already: nothing is left to do at the wait.
      for (uint32_t i = 0; i < 32 && now; ++i) static_cast<WgmmaOnHost*>(lanes[i])->columns = 0;
    });
    if (operands.columns != 0) own.open.push_back(operands);
  }
};

inline void WgmmaFence() { WgmmasOfThread().fenced = true; }
inline void WgmmaCommit() {
  WgmmasOnHost& own = WgmmasOfThread();
  own.committed.push_back(std::exchange(own.open, {}));
  own.fenced = false;
}
template <int kPending>
void WgmmaWait() {
  on_host::Together(&WgmmasOfThread(), [](void* const(&lanes)[32]) {
    const auto of = [&](uint32_t lane) { return static_cast<WgmmasOnHost*>(lanes[lane]); };
    while (of(0)->committed.size() > kPending) {
      for (size_t i = 0; i < of(0)->committed.front().size(); ++i) {
        WgmmaOnHost of_lanes[32];
        for (uint32_t lane = 0; lane < 32; ++lane) of_lanes[lane] = of(lane)->committed.front()[i];
        DoWgmma(of_lanes);
      }
      for (uint32_t lane = 0; lane < 32; ++lane) of(lane)->committed.pop_front();
    }
  });
}
inline void FenceForAsync() {}

}  // namespace hotplane::ptx
