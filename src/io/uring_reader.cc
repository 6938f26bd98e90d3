// Reads through io_uring: one ring, one thread, as many requests at the disk as the ring is deep.
#include <liburing.h>

#include <algorithm>
#include <cerrno>

#include "base/check.h"
#include "io/reader.h"

namespace hotplane {
namespace {

class UringReader final : public AsyncReader {
 public:
  static Result<std::unique_ptr<AsyncReader>> Create(const ReaderOptions& options) {
    std::unique_ptr<UringReader> reader(new UringReader(std::max<size_t>(options.depth, 1)));
    const int error = io_uring_queue_init(static_cast<unsigned>(reader->depth_), &reader->ring_, 0);
    if (error < 0) return Fail(Status::FromErrno(-error, "the kernel refuses io_uring"));
    reader->valid_ = true;
    io_uring_probe* const probe = io_uring_get_probe_ring(&reader->ring_);
    const bool can_read = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
    io_uring_free_probe(probe);
    if (!can_read) return Fail(Status::FromErrno(ENOSYS, "this kernel's io_uring cannot read"));
    return reader;
  }

  ~UringReader() override {
    if (!valid_) return;
    std::vector<ReadEnd> ended;
    while (in_flight_ > 0)
      if (!Collect(std::chrono::milliseconds(100), &ended)) break;
    // Closing the ring cancels and waits for what a broken ring may have left.
    io_uring_queue_exit(&ring_);
  }

  const char* name() const override { return "io_uring"; }
  std::string reason() const override { return ""; }
  size_t depth() const override { return depth_; }

  void Start(const ReadRequest& request) override {
    HP_CHECK(in_flight_ < depth_ && request.file->descriptor() >= 0);
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    HP_CHECK(entry != nullptr);
    io_uring_prep_read(entry, request.file->descriptor(), request.destination.data(),
                       static_cast<unsigned>(request.destination.size()), request.offset);
    entry->user_data = request.tag;
    ++in_flight_;
  }

  Result<void> Collect(std::chrono::milliseconds wait, std::vector<ReadEnd>* ended) override {
    __kernel_timespec timeout{};
    timeout.tv_sec = wait.count() / 1000;
    timeout.tv_nsec = wait.count() % 1000 * 1'000'000;
    io_uring_cqe* first = nullptr;
    const int error = io_uring_submit_and_wait_timeout(&ring_, &first, 1, &timeout, nullptr);
    // EBUSY and EAGAIN: the kernel takes the rest once some of what it has is collected.
    const bool passing =
        error >= 0 || error == -ETIME || error == -EINTR || error == -EAGAIN || error == -EBUSY;
    if (!passing) return Fail(Status::FromErrno(-error, "cannot read through io_uring"));
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      ++seen;
      if (entry->user_data == LIBURING_UDATA_TIMEOUT) continue;
      --in_flight_;
      ended->push_back({entry->user_data, entry->res < 0
                                              ? IoCount{0, -entry->res}
                                              : IoCount{static_cast<size_t>(entry->res), 0}});
    }
    io_uring_cq_advance(&ring_, seen);
    return {};
  }

 private:
  explicit UringReader(size_t depth) : depth_(depth) {}

  const size_t depth_;
  io_uring ring_{};
  bool valid_ = false;
  size_t in_flight_ = 0;
};

}  // namespace

Result<std::unique_ptr<AsyncReader>> NewUringReader(const ReaderOptions& options) {
  return UringReader::Create(options);
}

}  // namespace hotplane
