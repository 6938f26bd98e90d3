// For threads, and for what others wait for: an exception must become a failure that they are told.
#pragma once

#include <exception>
#include <new>

#include "base/status.h"

namespace hotplane {

// What `work` returns, a Result; kCapacity for memory that is not there, kSystem for anything else
// that it throws.
template <typename Work>
auto NothingThrown(Work&& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return Fail(Status::Capacity("out of memory"));
  } catch (const std::exception& error) {
    return Fail(Status::System("the system refused a resource").Found(error.what()));
  }
}

}  // namespace hotplane
