// What the variants of sha256.h share. Units that are compiled for an instruction set include
// nothing with inline functions that the linker could pick for the rest of the program.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotplane {

// The fractional parts of the cube roots of the first 64 primes.
extern const uint32_t kSha256RoundConstants[64];

// Of x86's SHA extensions; blocks of 64 bytes. REQUIRES a CPU that has them, and SSE 4.1.
void Sha256CompressSha(uint32_t* state, const std::byte* blocks, size_t count);

}  // namespace hotplane
