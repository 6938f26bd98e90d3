// Stands in for uring_reader.cc where liburing was not there to build with.
#include <cerrno>

#include "io/reader.h"

namespace hotplane {

Result<std::unique_ptr<AsyncReader>> NewUringReader(const ReaderOptions&) {
  return Fail(Status::FromErrno(ENOSYS, "built without liburing"));
}

}  // namespace hotplane
