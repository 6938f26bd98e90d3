// Functions with one source for kernel and host.
#pragma once

#if defined(__CUDACC__)
#define HP_HOST_DEVICE __host__ __device__ __forceinline__
#define HP_UNROLL _Pragma("unroll")
#else
#define HP_HOST_DEVICE inline
#define HP_UNROLL
#endif
