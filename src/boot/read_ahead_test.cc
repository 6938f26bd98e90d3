// Pieces of a checkpoint read ahead of those who take them: the right bytes in every order, within
// the memory given, whatever the disk and the system do meanwhile.
#include "boot/read_ahead.h"

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/format_text.h"
#include "base/units.h"
#include "boot/boot_testing.h"
#include "checkpoint/checkpoint_testing.h"
#include "io/fault_env.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

constexpr char kModel[] = "/model";

// Forwards all but readers.
class ReaderEnv final : public Env {
 public:
  using MakeReader = std::function<Result<std::unique_ptr<AsyncReader>>(const ReaderOptions&)>;
  ReaderEnv(Env& base, MakeReader make) : base_(base), make_(std::move(make)) {}

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override {
    return base_.Open(path, mode);
  }
  Result<FileStat> Stat(const std::string& path) override { return base_.Stat(path); }
  Result<std::vector<std::string>> List(const std::string& path) override {
    return base_.List(path);
  }
  Result<void> CreateDirectory(const std::string& path) override {
    return base_.CreateDirectory(path);
  }
  Result<void> Rename(const std::string& from, const std::string& to) override {
    return base_.Rename(from, to);
  }
  Result<void> Remove(const std::string& path) override { return base_.Remove(path); }
  Result<void> RemoveDirectory(const std::string& path) override {
    return base_.RemoveDirectory(path);
  }
  Result<void> SyncDirectory(const std::string& path) override { return base_.SyncDirectory(path); }
  Result<uint64_t> FreeBytes(const std::string& path) override { return base_.FreeBytes(path); }
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, LockKind kind,
                                         LockWait wait) override {
    return base_.Lock(path, kind, wait);
  }
  Result<std::unique_ptr<AsyncReader>> NewReader(const ReaderOptions& options) override {
    return make_(options);
  }

 private:
  Env& base_;
  const MakeReader make_;
};

// Takes requests and never ends one.
class SilentReader final : public AsyncReader {
 public:
  const char* name() const override { return "silent"; }
  std::string reason() const override { return ""; }
  size_t depth() const override { return 32; }
  void Start(const ReadRequest&) override {}
  Result<void> Collect(std::chrono::milliseconds wait, std::vector<ReadEnd>*) override {
    std::this_thread::sleep_for(wait);
    return {};
  }
};

// Breaks after some ends.
class BreakingReader final : public AsyncReader {
 public:
  BreakingReader(std::unique_ptr<AsyncReader> base, int good_count)
      : base_(std::move(base)), good_count_(good_count) {}
  const char* name() const override { return base_->name(); }
  std::string reason() const override { return ""; }
  size_t depth() const override { return base_->depth(); }
  void Start(const ReadRequest& request) override { base_->Start(request); }
  Result<void> Collect(std::chrono::milliseconds wait, std::vector<ReadEnd>* ended) override {
    if (good_count_-- <= 0) return Fail(Status::System("the ring is broken"));
    return base_->Collect(wait, ended);
  }

 private:
  const std::unique_ptr<AsyncReader> base_;
  int good_count_;
};

// Tensors of uneven sizes, in pieces of neighbours, of strangers and of several files.
struct Source {
  static Model MakeModel() {
    std::mt19937_64 random(5);
    Model model;
    for (size_t i = 0; i < 40; ++i) {
      const uint64_t bytes = i % 5 == 4 ? 4 : 1 + random() % 30'000;
      const std::string name = "t" + std::to_string(100 + i);
      model.Add(name, Dtype::kU8, {bytes});
      for (std::byte& byte : model.tensors[name].data) byte = static_cast<std::byte>(random());
    }
    return model;
  }

  explicit Source(Env& env, const std::string& path = kModel)
      : checkpoint(Checkpoint::Open(env, path).value()) {
    std::mt19937_64 random(6);
    for (size_t i = 0; i < model.tensors.size(); i += 4) {
      SourcePiece piece;
      for (size_t k = 0; k < 3; ++k) piece.push_back(&checkpoint.tensors()[i + k]);
      piece.push_back(&checkpoint.tensors()[random() % model.tensors.size()]);
      std::shuffle(piece.begin(), piece.end(), random);
      slot_bytes = std::max(slot_bytes, ReadAhead::SlotBytes(piece));
      pieces.push_back(std::move(piece));
    }
  }

  std::unique_ptr<ReadAhead> Read(size_t worker_count, size_t ahead_count,
                                  const CancelToken* cancel = nullptr) const {
    return ReadAhead::Create(checkpoint, {.slot_bytes = slot_bytes,
                                          .worker_count = worker_count,
                                          .ahead_count = ahead_count,
                                          .cancel = cancel})
        .value();
  }

  void ExpectRight(size_t piece, const std::vector<std::span<std::byte>>& views) const {
    ASSERT_EQ(views.size(), pieces[piece].size());
    for (size_t i = 0; i < views.size(); ++i) {
      const std::vector<std::byte>& data = model.tensors.at(pieces[piece][i]->name).data;
      EXPECT_TRUE(std::equal(views[i].begin(), views[i].end(), data.begin(), data.end()))
          << "tensor " << pieces[piece][i]->name << " of piece " << piece;
    }
  }

  // All pieces in order, by one worker.
  void ExpectAllRight(ReadAhead& reads) const {
    TakenPieces taken(reads, reads.Add(pieces), pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto views = taken.Next();
      ASSERT_TRUE(views) << views.error().ToString();
      ExpectRight(i, *views);
    }
  }

  uint64_t bytes() const {
    uint64_t bytes = 0;
    for (const SourcePiece& piece : pieces)
      for (const Tensor* tensor : piece) bytes += tensor->bytes;
    return bytes;
  }

  const Model model = MakeModel();
  const Checkpoint checkpoint;
  std::vector<SourcePiece> pieces;
  uint64_t slot_bytes = 0;
};

void WriteSource(Env& env, const std::string& path = kModel) {
  WriteModel(env, path, Source::MakeModel(), 150'000);
}

// As a disk that nothing was read from so far.
void Cool(Env& env, const Checkpoint& checkpoint) {
  for (const std::string& path : checkpoint.files()) {
    const auto file = env.Open(path, OpenMode::kRead).value();
    file->DropCache(0, 0);
    ASSERT_EQ(file->CachedBytes(0, 0).value(), 0u) << path;
  }
}

uint64_t DirectReads(const FaultEnv& env) {
  uint64_t count = 0;
  for (const Operation& operation : env.Log())
    count += operation.kind == OperationKind::kRead && operation.bypassed_cache;
  return count;
}

class ReadAheadTest : public testing::Test {
 protected:
  ReadAheadTest() { WriteSource(memory_); }
  MemEnv memory_;
  FaultEnv env_{memory_};
};

TEST_F(ReadAheadTest, BringsEveryPieceInOrderPastThePageCache) {
  for (const size_t ahead : {1, 2, 3, 40}) {
    const Source source(env_);
    ASSERT_GT(source.checkpoint.files().size(), 2u);
    Cool(memory_, source.checkpoint);
    const auto reads = source.Read(1, ahead);
    source.ExpectAllRight(*reads);
    EXPECT_EQ(reads->bytes_ahead(), source.bytes());
    EXPECT_NE(reads->path().find("O_DIRECT"), std::string::npos) << reads->path();
    for (const std::string& path : source.checkpoint.files())
      EXPECT_EQ(memory_.Open(path, OpenMode::kRead).value()->CachedBytes(0, 0).value(), 0u);
  }
  EXPECT_GT(DirectReads(env_), 0u);
}

TEST_F(ReadAheadTest, LeavesToTheTakerWhatIsCached) {
  const Source source(env_);
  Cool(memory_, source.checkpoint);
  uint64_t cached = 0;
  for (const std::string& path : {source.checkpoint.files()[0], source.checkpoint.files()[1]}) {
    ASSERT_TRUE(ReadWholeFile(memory_, path, kGiB));
    cached += memory_.Files().at(path).size();
  }
  const auto reads = source.Read(1, 4);
  source.ExpectAllRight(*reads);
  EXPECT_LT(reads->bytes_ahead(), source.bytes());
  EXPECT_GT(reads->bytes_ahead(), 0u);
  for (const Operation& operation : env_.Log())
    EXPECT_FALSE(operation.bypassed_cache && (operation.path == source.checkpoint.files()[0] ||
                                              operation.path == source.checkpoint.files()[1]));
}

TEST_F(ReadAheadTest, OfACachedCheckpointReadsNothing) {
  const Source source(env_);
  for (const std::string& path : source.checkpoint.files())
    ASSERT_TRUE(ReadWholeFile(memory_, path, kGiB));
  const auto reads = source.Read(1, 4);
  source.ExpectAllRight(*reads);
  EXPECT_EQ(reads->bytes_ahead(), 0u);
  EXPECT_EQ(DirectReads(env_), 0u);
  EXPECT_EQ(reads->path(), "from the page cache");
}

TEST_F(ReadAheadTest, WithoutMemoryForItTheTakersRead) {
  const Source source(env_);
  Cool(memory_, source.checkpoint);
  const auto reads = source.Read(1, 0);
  EXPECT_EQ(reads->memory().size(), source.slot_bytes);
  source.ExpectAllRight(*reads);
  EXPECT_EQ(reads->bytes_ahead(), 0u);
  EXPECT_NE(reads->path().find("staging limit"), std::string::npos);
}

// Slots are as large as pieces, and each piece is read once: when all slots are full nothing more
// may be asked for.
TEST_F(ReadAheadTest, NeverReadsBeyondItsMemory) {
  const Source source(env_);
  Cool(memory_, source.checkpoint);
  env_.ClearLog();
  const auto reads = source.Read(1, 2);
  EXPECT_EQ(reads->memory().size(), 3 * source.slot_bytes);
  const auto bytes_until = [&](size_t count) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i)
      for (const Tensor* tensor : source.pieces[i]) bytes += tensor->bytes;
    return bytes;
  };
  TakenPieces taken(*reads, reads->Add(source.pieces), source.pieces.size());
  for (size_t i = 0; i + 3 < source.pieces.size(); ++i) {
    // One is held from the second round on.
    while (reads->bytes_ahead() < bytes_until(i == 0 ? 3 : i + 2)) std::this_thread::yield();
    EXPECT_EQ(reads->bytes_ahead(), bytes_until(i == 0 ? 3 : i + 2));
    ASSERT_TRUE(taken.Next());
  }
}

TEST_F(ReadAheadTest, GoesOnAfterShortReadsAndSignals) {
  const Source source(env_);
  for (const Fault& fault :
       {Fault{
            .action = FaultAction::kShort, .count = Fault::kForever, .kind = OperationKind::kRead},
        Fault{.action = FaultAction::kShort,
        .count = Fault::kForever,
        .kind = OperationKind::kRead,
        .bytes = 100},
        Fault{.action = FaultAction::kError,
        .count = 30,
        .kind = OperationKind::kRead,
        .error = EINTR},
        Fault{.action = FaultAction::kError,
        .count = 30,
        .kind = OperationKind::kRead,
        .error = EAGAIN},
        Fault{.action = FaultAction::kError,
        .count = 5,
        .kind = OperationKind::kRead,
        .error = EINVAL}}) {
    Cool(memory_, source.checkpoint);
    env_.ClearFaults();
    env_.Add(fault);
    const auto reads = source.Read(1, 3);
    source.ExpectAllRight(*reads);
    EXPECT_GT(reads->bytes_ahead(), 0u);
  }
}

TEST_F(ReadAheadTest, ReadsThroughThePageCacheWhereDirectReadsAreRefused) {
  memory_.set_direct_refused(true);
  const Source source(env_);
  Cool(memory_, source.checkpoint);
  const auto reads = source.Read(1, 3);
  source.ExpectAllRight(*reads);
  EXPECT_GT(reads->bytes_ahead(), 0u);
  EXPECT_NE(reads->path().find("refuses O_DIRECT"), std::string::npos) << reads->path();
}

TEST_F(ReadAheadTest, LeavesInThePageCacheWhatOthersReadAsWell) {
  const Source source(env_);
  Cool(memory_, source.checkpoint);
  const auto reads =
      ReadAhead::Create(
          source.checkpoint,
          {.slot_bytes = source.slot_bytes, .worker_count = 1, .ahead_count = 3, .shared = true})
          .value();
  source.ExpectAllRight(*reads);
  EXPECT_GT(reads->bytes_ahead(), 0u);
  EXPECT_EQ(DirectReads(env_), 0u);
  const auto others = source.Read(1, 3);
  source.ExpectAllRight(*others);
  EXPECT_EQ(others->bytes_ahead(), 0u);
}

// What Checkpoint::Read says of it, and nothing else; the pieces before it come.
TEST_F(ReadAheadTest, TellsErrorsInTheMiddleAsAPlainReadDoes) {
  const Source source(env_);
  const SourcePiece& bad = source.pieces[6];
  const std::string path = source.checkpoint.files()[bad[1]->file];
  const uint64_t cut = bad[1]->offset + bad[1]->bytes / 2;
  for (const bool truncated : {false, true}) {
    Cool(memory_, source.checkpoint);
    if (truncated) {
      env_.ClearFaults();
      memory_.Truncate(path, cut);
    } else {
      env_.Add(Fault{.action = FaultAction::kError,
                     .count = Fault::kForever,
                     .kind = OperationKind::kRead,
                     .path_contains = path});
    }
    const auto reads = source.Read(1, 4);
    TakenPieces taken(*reads, reads->Add(source.pieces), source.pieces.size());
    for (size_t i = 0; i < source.pieces.size(); ++i) {
      const auto views = taken.Next();
      Result<void> plain;
      for (const Tensor* tensor : source.pieces[i]) {
        std::vector<std::byte> bytes(tensor->bytes);
        if (plain) plain = source.checkpoint.Read(*tensor, 0, bytes);
      }
      ASSERT_EQ(views.has_value(), plain.has_value()) << i;
      if (!views) {
        EXPECT_EQ(views.error().ToString(), plain.error().ToString());
      } else {
        source.ExpectRight(i, *views);
      }
    }
  }
}

// A cable that is loose for a moment.
TEST_F(ReadAheadTest, AFailedReadAheadIsTriedAgainByTheTaker) {
  const Source source(env_);
  Cool(memory_, source.checkpoint);
  env_.Add(Fault{.action = FaultAction::kError, .first = 3, .kind = OperationKind::kRead});
  const auto reads = source.Read(1, 3);
  source.ExpectAllRight(*reads);
  EXPECT_LT(reads->bytes_ahead(), source.bytes());
}

TEST_F(ReadAheadTest, EndsAWaitWhenItIsCancelled) {
  ReaderEnv silent(memory_, [](const ReaderOptions&) { return std::make_unique<SilentReader>(); });
  const Source source(silent);
  Cool(memory_, source.checkpoint);
  CancelToken cancel;
  const auto reads = source.Read(1, 2, &cancel);
  TakenPieces taken(*reads, reads->Add(source.pieces), source.pieces.size());
  std::thread user([&cancel] { cancel.Cancel(SIGINT); });
  const auto views = taken.Next();
  user.join();
  ASSERT_FALSE(views);
  EXPECT_EQ(views.error().exit_code(), 130);
}

TEST_F(ReadAheadTest, WithoutAReaderTheTakersRead) {
  ReaderEnv refusing(memory_,
                     [](const ReaderOptions&) { return Fail(Status::System("no reader today")); });
  const Source source(refusing);
  Cool(memory_, source.checkpoint);
  const auto reads = source.Read(1, 2);
  source.ExpectAllRight(*reads);
  EXPECT_EQ(reads->bytes_ahead(), 0u);
}

TEST_F(ReadAheadTest, AReaderThatBreaksLeavesTheRestToTheTakers) {
  for (const int good_count : {0, 1, 3, 7}) {
    ReaderEnv breaking(memory_, [&](const ReaderOptions& options) {
      return std::make_unique<BreakingReader>(memory_.NewReader(options).value(), good_count);
    });
    const Source source(breaking);
    Cool(memory_, source.checkpoint);
    const auto reads = source.Read(1, 3);
    source.ExpectAllRight(*reads);
  }
}

TEST(ReadAheadOnDisk, ReadsWithIoUringAndWithThreads) {
  TestDirectory directory;
  WriteSource(PosixEnv(), directory / "model");
  for (const bool threads : {false, true}) {
    const Source source(PosixEnv(), directory / "model");
    for (const std::string& path : source.checkpoint.files())
      PosixEnv().Open(path, OpenMode::kRead).value()->DropCache(0, 0);
    if (threads) setenv("HOTPLANE_NO_IO_URING", "1", 1);
    const auto reads = source.Read(1, 3);
    unsetenv("HOTPLANE_NO_IO_URING");
    source.ExpectAllRight(*reads);
    if (reads->bytes_ahead() == 0) GTEST_SKIP() << "what is written stays in the page cache here";
    EXPECT_EQ(reads->path().find("HOTPLANE_NO_IO_URING") != std::string::npos, threads);
  }
}

// Steps of some pieces each, taken by several workers as a BuildQueue does it: in order, each by
// whoever is free, some given up in the middle.
TEST(ReadAheadProperty, NobodyWaitsForEverWhateverTheNumbers) {
  MemEnv memory;
  WriteSource(memory);
  std::mt19937_64 random(11);
  for (int round = 0; round < 40; ++round) {
    const Source source(memory);
    Cool(memory, source.checkpoint);
    const size_t worker_count = 1 + random() % 5;
    const size_t ahead_count = random() % 4;
    const size_t per_step = 1 + random() % 3;
    const uint64_t given_up = random();  // by step, a bit
    SCOPED_TRACE(
        Text("{} workers, {} ahead, {} pieces a step", worker_count, ahead_count, per_step));
    const auto reads = source.Read(worker_count, ahead_count);
    const size_t step_count = source.pieces.size() / per_step;
    std::vector<SourcePiece> pieces(
        source.pieces.begin(),
        source.pieces.begin() + static_cast<ptrdiff_t>(step_count * per_step));
    const uint64_t first = reads->Add(pieces);
    std::mutex claim;
    size_t next_step = 0;
    std::vector<std::thread> workers;
    for (size_t w = 0; w < worker_count; ++w)
      workers.emplace_back([&] {
        while (true) {
          size_t step = 0;
          {
            const std::lock_guard lock(claim);
            if (next_step == step_count) return;
            step = next_step++;
          }
          TakenPieces taken(*reads, first + step * per_step, per_step);
          for (size_t i = 0; i < per_step; ++i) {
            if (i > 0 && (given_up >> step & 1) != 0) break;
            const auto views = taken.Next();
            ASSERT_TRUE(views);
            source.ExpectRight(step * per_step + i, *views);
          }
        }
      });
    for (std::thread& worker : workers) worker.join();
    reads->Drop(first, step_count * per_step);
  }
}

StoreContent BuiltFiles(Env& env, const MemEnv& memory, const BuildOptions& options,
                        BuildReport* report) {
  const Result<BuildReport> built = BuildStore(env, options);
  EXPECT_TRUE(built.has_value()) << built.error().ToString();
  if (built) *report = *built;
  return StoreFiles(memory);
}

// Where nobody knows what is in the page cache, all of it is read ahead.
TEST(ReadAheadBuild, WritesTheSameStore) {
  for (const SourceFormat format : {SourceFormat::kMxfp4, SourceFormat::kNvfp4, SourceFormat::kFp8,
                                    SourceFormat::kBf16, SourceFormat::kF32}) {
    MemEnv cached;
    WriteCheckpoint(cached, SmallModel(format));
    BuildReport report;
    const StoreContent expected = BuiltFiles(cached, cached, BothTiers(), &report);
    EXPECT_EQ(report.bytes_read_ahead, 0u);
    for (const size_t workers : {1, 2, 8}) {
      MemEnv memory;
      WriteCheckpoint(memory, SmallModel(format));
      FaultEnv env(memory);
      env.Add(Fault{.action = FaultAction::kError,
                    .count = Fault::kForever,
                    .kind = OperationKind::kCachedBytes});
      EXPECT_EQ(BuiltFiles(env, memory, BothTiers(workers), &report), expected) << workers;
      EXPECT_EQ(report.bytes_read_ahead, report.bytes_read);
      EXPECT_EQ(report.bytes_read, report.bytes_needed);
      EXPECT_NE(report.read_path.find("ahead"), std::string::npos) << report.read_path;
    }
  }
}

// Every rank's builder reads all of it: the first one leaves it in the page cache for the others.
TEST(ReadAheadBuild, OfOneRankLeavesTheCheckpointInThePageCache) {
  for (const bool one_rank : {false, true}) {
    MemEnv memory;
    SynthCheckpointOptions model = SmallModel();
    model.geometry.intermediate = 128;
    WriteCheckpoint(memory, model);
    FaultEnv env(memory);
    env.Add(Fault{.action = FaultAction::kError,
                  .count = Fault::kForever,
                  .kind = OperationKind::kCachedBytes});
    BuildOptions options = BothTiers(2);
    options.shard_world = 2;
    if (one_rank) options.rank = 1;
    const Result<BuildReport> report = BuildStore(env, options);
    ASSERT_TRUE(report) << report.error().ToString();
    EXPECT_GT(report->bytes_read_ahead, 0u);
    EXPECT_EQ(DirectReads(env) == 0, one_rank);
    EXPECT_EQ(report->read_path.find("other ranks") != std::string::npos, one_rank);
  }
}

TEST(ReadAheadBuild, CountsAsStaging) {
  for (const uint64_t limit : {32 * kKiB, 64 * kKiB, 100 * kKiB, 1 * kMiB}) {
    MemEnv memory;
    WriteCheckpoint(memory, SmallModel());
    BuildOptions options = BothTiers(2);
    options.staging_limit_bytes = limit;
    const Result<BuildReport> report = BuildStore(memory, options);
    ASSERT_TRUE(report) << report.error().ToString();
    EXPECT_LE(report->peak_staging_bytes, limit);
    EXPECT_GT(report->peak_staging_bytes, limit / 4);
  }
}

// A shard that is another file by the time it is opened for direct reads, or that is replaced while
// it is read.
TEST(ReadAheadBuild, FindsAShardThatWasReplacedMeanwhile) {
  MemEnv memory;
  WriteCheckpoint(memory, SmallModel());
  FaultEnv env(memory);
  env.Add(Fault{.action = FaultAction::kError,
                .count = Fault::kForever,
                .kind = OperationKind::kCachedBytes});
  const Checkpoint checkpoint = Checkpoint::Open(env, kTestCheckpoint).value();
  const MoeModel model = DiscoverMoe(checkpoint).value();
  std::vector<std::byte> content = memory.Files().at(checkpoint.files()[0]);
  ASSERT_TRUE(checkpoint.OpenShard(0, OpenMode::kRead));
  content.back() ^= std::byte{1};
  memory.SetFile(checkpoint.files()[0], content);
  EXPECT_FALSE(checkpoint.OpenShard(0, OpenMode::kReadDirect));
  const Result<BuildReport> refused = Build(env, checkpoint, model, kTestStore, BothTiers());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().exit_code(), 3);
  EXPECT_NE(refused.error().ToString().find("changed while"), std::string::npos)
      << refused.error().ToString();
}

}  // namespace
}  // namespace hotplane
