// A CUDA driver in host memory, for tests on machines without a GPU: a library that calls itself
// libcuda.so.1. Copies and kernels run as late as the interface allows, when somebody waits for or
// asks about what comes after them, so that memory which is given back too early is seen to change.
// The kernels are run on the host; folders above this one add theirs (fake_kernel.h). What a test
// may ask of it, by dlsym:
#pragma once

#include <cstdint>

extern "C" {

// The call of `function` ("cuMemCreate") after `skip` further ones returns `error` instead of doing
// anything; "" names every function. `lost`: all calls do from then on, but those that free.
void fake_cuda_fail(const char* function, uint64_t skip, int error, bool lost);
// Forgets what was asked for; the device is well again.
void fake_cuda_heal(void);
// 1 when the failure that was asked for has been given.
int fake_cuda_failed(void);
// Handles, mappings, registrations and contexts that were taken and not given back.
int64_t fake_cuda_live(void);
// Calls of a function so far, or launches of a kernel by cuLaunchKernelEx; "" counts all calls.
uint64_t fake_cuda_calls(const char* function);
// Bytes that were copied from the host to the device so far.
uint64_t fake_cuda_uploaded(void);
// Calls so far that gave memory back while a stream waited for a word of memory: a real driver
// would have waited for that stream.
uint64_t fake_cuda_frees_while_waiting(void);
// Multiprocessors that there are and the shared memory of each, of which a block gets all but 1
// KiB; those of an H200 otherwise.
void fake_cuda_gpu(int multiprocessors, int shared_bytes);
// Device memory that there is; 256 MiB of it are the context's.
void fake_cuda_memory(uint64_t bytes);
}
