#include "store/store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/format_text.h"
#include "base/log.h"
#include "io/mem_env.h"
#include "io/path_kind.h"
#include "store/coverage.h"
#include "store/paths.h"
#include "store/replaceable.h"
#include "store/store_samples.h"

namespace hotplane {
namespace {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "hotplane-store-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Log lines while it lives.
class LogCapture {
 public:
  LogCapture() {
    SetLogSink([this](LogLevel, std::string_view line) { lines_ += std::string(line) + "\n"; });
  }
  ~LogCapture() { SetLogSink({}); }
  bool Has(std::string_view text) const { return lines_.find(text) != std::string::npos; }

 private:
  std::string lines_;
};

// Every case runs on the kernel's file system and on the one in memory.
class StoreTest : public testing::TestWithParam<bool> {
 protected:
  bool on_disk() const { return GetParam(); }
  Env& env() { return on_disk() ? PosixEnv() : memory_; }
  std::string root() const { return on_disk() ? directory_.path() + "/store" : "/store"; }
  std::vector<std::string> TemporariesIn(const std::string& directory) {
    std::vector<std::string> names = env().List(directory).value();
    std::erase_if(names, [](const std::string& name) { return !name.starts_with(".tmp-"); });
    return names;
  }
  void WriteText(const std::string& path, std::string_view text) {
    const auto file = env().Open(path, OpenMode::kCreate).value();
    ASSERT_TRUE(WriteFully(*file, 0, std::as_bytes(std::span(text))).has_value());
  }

  MemEnv memory_;
  TemporaryDirectory directory_;
};

INSTANTIATE_TEST_SUITE_P(Envs, StoreTest, testing::Bool(), [](const auto& parameter) {
  return parameter.param ? "Posix" : "Memory";
});

TEST_P(StoreTest, BuiltLayersAreFoundOpenedAndVerified) {
  const auto built = BuildSampleStore(env(), root());
  ASSERT_TRUE(built.has_value()) << built.error().ToString();
  const Generation generation = OpenOnly(env(), root()).value();
  EXPECT_EQ(generation.id(), built->id());
  EXPECT_EQ(generation.manifest(), SampleManifest());
  EXPECT_TRUE(generation.locked());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (const Encoding encoding : kEncodings) {
      const TierProbe probe = generation.Probe(layer, encoding);
      ASSERT_EQ(probe.presence, Presence::kPresent) << probe.reason->ToString();
      EXPECT_EQ(probe.bytes_metadata, kHeaderBytes);
      const LayerFile file = generation.OpenLayer(layer, encoding).value();
      for (size_t i = 0; i < file.chunks().size(); ++i) {
        std::vector<std::byte> bytes(file.chunks()[i].bytes);
        ASSERT_TRUE(file.RereadChunk(env(), i, bytes).has_value());
      }
      for (const Section& section : file.layout().sections) {
        std::vector<std::byte> bytes(section.expert_bytes);
        const uint64_t offset = file.layout().PieceOffset(section, 1);
        ASSERT_TRUE(ReadFully(file.file(), offset, bytes).has_value());
        EXPECT_EQ(bytes, SamplePiece(section.role, layer, 1, section.expert_bytes));
      }
    }
  }
  EXPECT_TRUE(TemporariesIn(generation.directory()).empty());
}

TEST_P(StoreTest, VerifyReadsEveryByteAndTellsProgress) {
  ASSERT_TRUE(BuildSampleStore(env(), root()).has_value());
  const Generation generation = OpenOnly(env(), root()).value();
  uint64_t expected_bytes = 0;
  const std::vector<std::string> names = env().List(generation.directory()).value();
  for (const std::string& name : names) {
    if (name == "locks") continue;
    expected_bytes += env().Stat(JoinPath(generation.directory(), name))->bytes;
  }
  WorkerPool pool(3);
  std::atomic<uint64_t> last_done = 0;
  const auto report = generation.Verify(pool, nullptr, [&](uint64_t done, uint64_t total) {
    EXPECT_GE(done, last_done);
    EXPECT_EQ(total, expected_bytes);
    last_done = done;
  });
  ASSERT_TRUE(report.has_value()) << report.error().ToString();
  EXPECT_TRUE(report->findings.empty());
  EXPECT_EQ(report->files_checked, 8u);
  EXPECT_EQ(report->bytes_checked, expected_bytes);
  EXPECT_EQ(last_done, expected_bytes);
  EXPECT_GT(report->chunks_checked, 2u * (4 * 2 + 4));
}

TEST_P(StoreTest, VerifyCanBeCancelled) {
  ASSERT_TRUE(BuildSampleStore(env(), root()).has_value());
  CancelToken cancel;
  cancel.Cancel(SIGINT);
  WorkerPool pool(2);
  const auto report = OpenOnly(env(), root())->Verify(pool, &cancel, {});
  ASSERT_FALSE(report.has_value());
  EXPECT_EQ(report.error().exit_code(), 130);
}

TEST_P(StoreTest, PiecesMayComeInAnyOrderFromSeveralThreads) {
  Manifest manifest = SampleManifest("wide", {8, 64, 128});
  const Generation generation = Store::OpenOrCreateGeneration(env(), root(), manifest).value();
  ASSERT_TRUE(BuildSampleLayer(generation, 0, Encoding::kDeltaQuintal).has_value());
  const auto writer = generation.CreateLayer(1, Encoding::kDeltaQuintal).value();
  std::vector<std::pair<std::string, uint32_t>> pieces;
  for (uint32_t expert = 8; expert-- > 0;) {
    pieces.emplace_back("fp2", expert);
    pieces.emplace_back("fp13", expert);
  }
  WorkerPool pool(4);
  const auto written = pool.ParallelFor(pieces.size(), [&](size_t i, size_t) {
    const auto& [role, expert] = pieces[i];
    const size_t bytes = writer->layout().Find(role)->expert_bytes;
    return writer->WritePiece(role, expert, SamplePiece(role, 0, expert, bytes));
  });
  ASSERT_TRUE(written.has_value());
  ASSERT_TRUE(writer->Publish().has_value());
  const LayerFile ordered = generation.OpenLayer(0, Encoding::kDeltaQuintal).value();
  const LayerFile shuffled = generation.OpenLayer(1, Encoding::kDeltaQuintal).value();
  EXPECT_EQ(ordered.checksums(), shuffled.checksums());
}

TEST_P(StoreTest, AWriterThatIsDroppedLeavesNothing) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  {
    const auto writer = generation.CreateLayer(0, Encoding::kBase).value();
    EXPECT_EQ(TemporariesIn(generation.directory()).size(), 1u);
    ASSERT_TRUE(WriteSamplePieces(*writer).has_value());
    EXPECT_EQ(generation.Probe(0, Encoding::kBase).presence, Presence::kAbsent);
  }
  EXPECT_TRUE(TemporariesIn(generation.directory()).empty());
  EXPECT_EQ(generation.Probe(0, Encoding::kBase).presence, Presence::kAbsent);
}

// A build that was killed while it published them; another one has published the manifest since.
TEST_P(StoreTest, TemporariesOfAGenerationAreRemovedUnlessSomebodyIsWriting) {
  const std::string directory =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest())->directory();
  for (const bool writing : {true, false}) {
    for (const char* name : {".tmp-manifest-4194303-0", ".tmp-source-stamp-4194303-1"}) {
      const std::string path = JoinPath(directory, name);
      if (env().Stat(path)->type != FileType::kInvalid) continue;
      ASSERT_TRUE(env().Open(path, OpenMode::kCreate).has_value());
    }
    std::unique_ptr<FileLock> lock;
    if (writing) {
      lock = env()
                 .Lock(JoinPath(JoinPath(directory, kLocksName), kGenerationLockName),
                       LockKind::kExclusive, LockWait::kTry)
                 .value();
      ASSERT_NE(lock, nullptr);
    }
    ASSERT_TRUE(Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).has_value());
    EXPECT_EQ(TemporariesIn(directory).size(), writing ? 2u : 0u);
  }
}

TEST_P(StoreTest, LosingTheRaceToPublishIsSuccess) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  const auto first = generation.CreateLayer(0, Encoding::kBase).value();
  auto second = generation.CreateLayer(0, Encoding::kBase).value();
  ASSERT_TRUE(WriteSamplePieces(*first).has_value());
  ASSERT_TRUE(WriteSamplePieces(*second).has_value());
  ASSERT_TRUE(first->Publish().has_value());
  const uint64_t inode = env().Stat(generation.LayerPath(0, Encoding::kBase))->inode;
  EXPECT_TRUE(second->Publish().has_value());
  second.reset();
  EXPECT_EQ(env().Stat(generation.LayerPath(0, Encoding::kBase))->inode, inode);
  EXPECT_TRUE(TemporariesIn(generation.directory()).empty());
}

TEST_P(StoreTest, AnotherContentIsNotPublishedOverAValidFile) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  ASSERT_TRUE(BuildSampleLayer(generation, 0, Encoding::kDeltaNibble).has_value());
  const auto writer = generation.CreateLayer(0, Encoding::kDeltaNibble).value();
  for (const Section& section : writer->layout().sections) {
    for (uint32_t expert = 0; expert < 2; ++expert) {
      const std::vector<std::byte> zeros(section.expert_bytes);
      ASSERT_TRUE(writer->WritePiece(section.role, expert, zeros).has_value());
    }
  }
  const auto published = writer->Publish();
  ASSERT_FALSE(published.has_value());
  EXPECT_EQ(published.error().exit_code(), 3);
  EXPECT_EQ(published.error().file(), generation.LayerPath(0, Encoding::kDeltaNibble));
}

TEST_P(StoreTest, OpenOrCreateKeepsTheStoresManifest) {
  Manifest manifest = SampleManifest();
  const Digest128 digest =
      Store::OpenOrCreateGeneration(env(), root(), manifest)->manifest_digest();
  EXPECT_EQ(Store::OpenOrCreateGeneration(env(), root(), manifest)->manifest_digest(), digest);
  // A setting of the config that no plane depends on: the identity is the same, the store's stands.
  manifest.top_k = 7;
  const auto edited = Store::OpenOrCreateGeneration(env(), root(), manifest);
  ASSERT_TRUE(edited.has_value()) << edited.error().ToString();
  EXPECT_EQ(edited->manifest_digest(), digest);
  EXPECT_EQ(edited->manifest().top_k, SampleManifest().top_k);
  // Other layers under one identity: no checkpoint has that.
  manifest.layers.front().prefix = "elsewhere.";
  const auto other = Store::OpenOrCreateGeneration(env(), root(), manifest);
  ASSERT_FALSE(other.has_value());
  EXPECT_EQ(other.error().exit_code(), 3);
}

TEST_P(StoreTest, AFileOfALaterFormatIsRefusedAndNotReplaced) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  const std::string path = generation.LayerPath(0, Encoding::kBase);
  std::vector<std::byte> page(kHeaderBytes);
  DiskLayerHeader header = {};
  std::memcpy(header.magic, kLayerMagic, sizeof(kLayerMagic));
  header.version = kLayerFormatVersion + 1;
  std::memcpy(page.data(), &header, sizeof(header));
  header.header_checksum =
      Checksum64(std::span(page).first(offsetof(DiskLayerHeader, header_checksum)));
  std::memcpy(page.data(), &header, sizeof(header));
  ASSERT_TRUE(PublishFile(env(), path, page).has_value());
  EXPECT_EQ(generation.Probe(0, Encoding::kBase).presence, Presence::kDamaged);
  const auto writer = generation.CreateLayer(0, Encoding::kBase);
  ASSERT_FALSE(writer.has_value());
  EXPECT_EQ(writer.error().exit_code(), 3);
  EXPECT_EQ(writer.error().file(), path);
  // And whoever plans a build knows before.
  EXPECT_EQ(CheckReplaceable(env(), path, 0).error().ToString(), writer.error().ToString());
  // As does whoever reads it.
  EXPECT_EQ(generation.Probe(0, Encoding::kBase).reason->ToString(), writer.error().ToString());
  EXPECT_EQ(writer.error().expected(), Text("format version {}", kLayerFormatVersion));
  EXPECT_EQ(writer.error().found(), Text("format version {}", kLayerFormatVersion + 1));
  EXPECT_EQ(ReadWholeFile(env(), path, 1 << 20).value(), page);
  // The same page with a wrong checksum is damage, which a build may replace.
  page.back() ^= std::byte{1};
  ASSERT_TRUE(PublishFile(env(), path, page).has_value());
  EXPECT_TRUE(CheckReplaceable(env(), path, 0).has_value());
  EXPECT_TRUE(generation.CreateLayer(0, Encoding::kBase).has_value());
}

TEST_P(StoreTest, ADirectoryInALayerFilesPlaceIsCalledThat) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  const std::string path = generation.LayerPath(0, Encoding::kBase);
  EXPECT_TRUE(CheckReplaceable(env(), path, 0).has_value());
  ASSERT_TRUE(CreateDirectories(env(), path).has_value());
  const TierProbe probe = generation.Probe(0, Encoding::kBase);
  EXPECT_EQ(probe.presence, Presence::kDamaged);
  EXPECT_EQ(probe.reason->what(), "a directory is in the place of layer 0's file");
  EXPECT_NE(probe.reason->advice().find("move it away"), std::string::npos);
  EXPECT_EQ(generation.OpenLayer(0, Encoding::kBase).error().what(), probe.reason->what());
  EXPECT_EQ(CheckReplaceable(env(), path, 0).error().what(), probe.reason->what());
  EXPECT_FALSE(generation.CreateLayer(0, Encoding::kBase).has_value());
}

TEST_P(StoreTest, SeveralGenerationsAreListedAndChosenByPrefix) {
  std::vector<std::string> names;
  for (const char* name : {"a", "b", "c"}) {
    const auto made = Store::OpenOrCreateGeneration(env(), root(), SampleManifest(name));
    names.push_back(ToHex(made->id()));
  }
  const Store store = Store::Open(env(), root()).value();
  EXPECT_EQ(store.ListGenerations()->size(), 3u);
  const auto ambiguous = store.OpenGeneration();
  ASSERT_FALSE(ambiguous.has_value());
  EXPECT_EQ(ambiguous.error().exit_code(), 2);
  for (const std::string& name : names) {
    EXPECT_NE(ambiguous.error().found().find(name), std::string::npos);
    EXPECT_EQ(ToHex(store.OpenGeneration(name.substr(0, 8))->id()), name);
    EXPECT_EQ(ToHex(store.OpenGeneration(name)->id()), name);
  }
  const auto none = store.OpenGeneration("zz");
  ASSERT_FALSE(none.has_value());
  EXPECT_EQ(none.error().exit_code(), 2);
  EXPECT_NE(none.error().expected().find(names[0]), std::string::npos);
}

TEST_P(StoreTest, WhatIsNoStoreIsRefused) {
  EXPECT_EQ(Store::Open(env(), root()).error().exit_code(), 2);
  ASSERT_TRUE(CreateDirectories(env(), root()).has_value());
  EXPECT_EQ(Store::Open(env(), root()).error().exit_code(), 3);
  EXPECT_FALSE(Store::Open(env(), root()).error().advice().empty());
  const std::string file = JoinPath(root(), "file");
  WriteText(file, "text");
  EXPECT_EQ(Store::Open(env(), file).error().exit_code(), 2);
  EXPECT_EQ(Store::OpenOrCreateGeneration(env(), file, SampleManifest()).error().exit_code(), 2);
  EXPECT_EQ(Store::CollectGarbage(env(), file, "", false).error().exit_code(), 2);
  // A directory named like a generation but without a manifest does not count.
  ASSERT_TRUE(env().CreateDirectory(JoinPath(root(), std::string(32, 'a'))).has_value());
  EXPECT_EQ(Store::Open(env(), root()).error().exit_code(), 3);
}

TEST_P(StoreTest, AMissingTierAndAMissingLayerAreTold) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  EXPECT_EQ(generation.OpenLayer(1, Encoding::kBase).error().what(), "layer 1 has no base tier");
  EXPECT_EQ(generation.OpenLayer(1, Encoding::kBase).error().exit_code(), 3);
  EXPECT_EQ(generation.OpenLayer(2, Encoding::kBase).error().exit_code(), 2);
  EXPECT_EQ(generation.Probe(2, Encoding::kBase).presence, Presence::kDamaged);
  EXPECT_FALSE(generation.CreateLayer(2, Encoding::kBase).has_value());
  ASSERT_TRUE(env().CreateDirectory(generation.LayerPath(0, Encoding::kBase)).has_value());
  EXPECT_EQ(generation.Probe(0, Encoding::kBase).presence, Presence::kDamaged);
}

TEST_P(StoreTest, TheSourceRecordGuardsAgainstAnEditedCheckpoint) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  EXPECT_FALSE(generation.ReadSourceRecord(0)->has_value());
  const SourceRecord record = SampleSourceRecord(generation, 0);
  ASSERT_TRUE(generation.PublishSourceRecord(record).has_value());
  EXPECT_TRUE(generation.PublishSourceRecord(record).has_value());
  EXPECT_EQ(generation.ReadSourceRecord(0).value(), record);
  SourceRecord edited = record;
  // Alone it proves nothing: a build that was cut short left it, and a corrected checkpoint may go
  // on.
  edited.tensors[1].digest = Digest("corrected");
  ASSERT_TRUE(generation.PublishSourceRecord(edited).has_value());
  EXPECT_EQ(generation.ReadSourceRecord(0).value(), edited);
  ASSERT_TRUE(generation.PublishSourceRecord(record).has_value());
  const std::byte any{1};
  ASSERT_TRUE(
      PublishFile(env(), generation.LayerPath(0, Encoding::kDeltaNibble), {&any, 1}).has_value());
  edited.tensors[1].digest = Digest("edited");
  const Status status = generation.PublishSourceRecord(edited).error();
  EXPECT_EQ(status.exit_code(), 3);
  EXPECT_NE(status.expected().find("gate_proj"), std::string::npos);
  EXPECT_NE(status.expected().find(ToHex(Digest("gate"))), std::string::npos);
  EXPECT_NE(status.found().find(ToHex(Digest("edited"))), std::string::npos);
  edited.tensors.pop_back();
  edited.tensors[0] = record.tensors[0];
  EXPECT_EQ(generation.PublishSourceRecord(edited).error().found(), "1 tensor");
  // A record of another layer under this name is found.
  ASSERT_TRUE(env()
                  .Rename(JoinPath(generation.directory(), SourceRecordName(0)),
                          JoinPath(generation.directory(), SourceRecordName(1)))
                  .has_value());
  EXPECT_EQ(generation.ReadSourceRecord(1).error().exit_code(), 3);
}

TEST_P(StoreTest, TheLayerLockExcludesASecondBuilderAndCleansUpAfterADeadOne) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  const std::string dead = JoinPath(generation.directory(), ".tmp-layer-0000.base-1-2");
  const std::string other = JoinPath(generation.directory(), ".tmp-layer-0001.base-1-2");
  WriteText(dead, "x");
  WriteText(other, "x");
  auto lock = generation.LockLayer(0, LockWait::kBlock).value();
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(env().Stat(dead)->type, FileType::kInvalid);
  EXPECT_EQ(env().Stat(other)->type, FileType::kRegular);
  EXPECT_EQ(generation.LockLayer(0, LockWait::kTry).value(), nullptr);
  EXPECT_NE(generation.LockLayer(1, LockWait::kTry).value(), nullptr);

  LogCapture log;
  CancelToken cancel;
  std::thread canceller([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    cancel.Cancel(SIGTERM);
  });
  EXPECT_EQ(generation.LockLayer(0, LockWait::kBlock, {.cancel = &cancel}).error().exit_code(),
            143);
  canceller.join();
  EXPECT_TRUE(log.Has("waiting for the build of layer 0"));

  Progress progress;
  const Result<std::unique_ptr<FileLock>> stalled =
      generation.LockLayer(0, LockWait::kBlock, {.stall_seconds = 0.05, .progress = &progress});
  ASSERT_FALSE(stalled.has_value());
  EXPECT_EQ(stalled.error().code(), StatusCode::kSystem);
  EXPECT_EQ(stalled.error().file(), generation.LayerLockPath(0));
  EXPECT_EQ(progress.waiting.load(), 0);

  std::thread releaser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    lock.reset();
  });
  EXPECT_NE(generation.LockLayer(0, LockWait::kBlock).value(), nullptr);
  releaser.join();
}

// The manifest is written under a lock of its own, and so is every wait for it bounded.
TEST_P(StoreTest, WaitingToPublishTheManifestEndsByASignalOrAsAStall) {
  const Manifest manifest = SampleManifest();
  const std::string directory = JoinPath(root(), ToHex(GenerationOf(manifest.identity)));
  const std::string path = JoinPath(JoinPath(directory, kLocksName), kGenerationLockName);
  ASSERT_TRUE(CreateDirectories(env(), ParentPath(path)).has_value());
  const auto held = env().Lock(path, LockKind::kExclusive, LockWait::kTry).value();
  ASSERT_NE(held, nullptr);
  const Result<Generation> stalled =
      Store::OpenOrCreateGeneration(env(), root(), manifest, {.stall_seconds = 0.05});
  ASSERT_FALSE(stalled.has_value());
  EXPECT_EQ(stalled.error().code(), StatusCode::kSystem);
  EXPECT_EQ(stalled.error().file(), path);
  CancelToken cancel;
  cancel.Cancel(SIGINT);
  EXPECT_EQ(Store::OpenOrCreateGeneration(env(), root(), manifest, {.cancel = &cancel})
                .error()
                .exit_code(),
            130);
  EXPECT_EQ(env().Stat(JoinPath(directory, kManifestName))->type, FileType::kInvalid);
}

// A collector that never ends, likewise.
TEST_P(StoreTest, WaitingForACollectorEndsAsAStall) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  const std::string other = JoinPath(root(), std::string(32, 'a'));
  const std::string path = JoinPath(JoinPath(other, kLocksName), kUsersLockName);
  ASSERT_TRUE(CreateDirectories(env(), ParentPath(path)).has_value());
  WriteText(JoinPath(other, kManifestName), "x");
  const auto held = env().Lock(path, LockKind::kExclusive, LockWait::kTry).value();
  const Store store = Store::Open(env(), root()).value();
  const Result<Generation> opened = store.OpenGeneration("aaaa", {.stall_seconds = 0.05});
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().code(), StatusCode::kSystem);
  EXPECT_EQ(opened.error().file(), path);
}

// What a builder writes shows, whoever looks.
TEST_P(StoreTest, TheMarkOfABuilderChangesWhileItWrites) {
  const Generation generation =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
  const uint64_t nothing = generation.BuilderMark(0);
  EXPECT_EQ(generation.BuilderMark(0), nothing);
  WriteText(JoinPath(generation.directory(), ".tmp-layer-0000.base-1-2"), "x");
  const uint64_t begun = generation.BuilderMark(0);
  EXPECT_NE(begun, nothing);
  EXPECT_EQ(generation.BuilderMark(0), begun);
  EXPECT_EQ(generation.BuilderMark(1), nothing);
}

TEST_P(StoreTest, TwoBuildersBuildALayerOnce) {
  std::atomic<int> built_count = 0;
  const auto build = [&] {
    const Generation generation =
        Store::OpenOrCreateGeneration(env(), root(), SampleManifest()).value();
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto lock = generation.LockLayer(layer, LockWait::kBlock).value();
      if (generation.Probe(layer, Encoding::kBase).presence == Presence::kPresent) continue;
      const auto writer = generation.CreateLayer(layer, Encoding::kBase).value();
      ASSERT_TRUE(WriteSamplePieces(*writer).has_value());
      ASSERT_TRUE(writer->Publish().has_value());
      ++built_count;
    }
  };
  std::vector<std::thread> builders;
  for (int i = 0; i < 4; ++i) builders.emplace_back(build);
  for (std::thread& builder : builders) builder.join();
  EXPECT_EQ(built_count, 2);
  EXPECT_TRUE(TemporariesIn(OpenOnly(env(), root())->directory()).empty());
}

TEST_P(StoreTest, GcTouchesNothingInUse) {
  std::optional<Generation> user = BuildSampleStore(env(), root()).value();
  const std::string path = user->directory();
  const std::string layer_temporary = JoinPath(path, ".tmp-layer-0000.base-1-2");
  const std::string manifest_temporary = JoinPath(path, ".tmp-manifest-1-2");
  WriteText(layer_temporary, "12345");
  WriteText(manifest_temporary, "123");
  const std::string prefix = ToHex(user->id()).substr(0, 6);

  auto builder =
      env().Lock(JoinPath(path, "locks/layer-0000"), LockKind::kExclusive, LockWait::kTry).value();
  auto publisher =
      env().Lock(JoinPath(path, "locks/generation"), LockKind::kExclusive, LockWait::kTry).value();
  GcReport report = Store::CollectGarbage(env(), root(), prefix, false).value();
  EXPECT_EQ(report.kept_in_use, std::vector<std::string>{path});
  EXPECT_TRUE(report.removed.empty());
  report = Store::CollectGarbage(env(), root(), "", false).value();
  EXPECT_EQ(report.kept_in_use, (std::vector<std::string>{layer_temporary, manifest_temporary}));
  EXPECT_EQ(report.bytes_freed, 0u);

  builder.reset();
  report = Store::CollectGarbage(env(), root(), "", true).value();
  EXPECT_EQ(report.removed, std::vector<std::string>{layer_temporary});
  EXPECT_EQ(env().Stat(layer_temporary)->bytes, 5u);
  report = Store::CollectGarbage(env(), root(), "", false).value();
  EXPECT_EQ(report.removed, std::vector<std::string>{layer_temporary});
  EXPECT_EQ(report.kept_in_use, std::vector<std::string>{manifest_temporary});
  EXPECT_EQ(report.bytes_freed, 5u);
  publisher.reset();
  report = Store::CollectGarbage(env(), root(), "", false).value();
  EXPECT_EQ(report.removed, std::vector<std::string>{manifest_temporary});
  EXPECT_EQ(report.bytes_freed, 3u);
  WorkerPool pool(1);
  EXPECT_TRUE(user->Verify(pool, nullptr, {})->findings.empty());

  user.reset();
  // A layer lock without a users lock, as a builder of another release might hold it.
  builder =
      env().Lock(JoinPath(path, "locks/layer-0001"), LockKind::kExclusive, LockWait::kTry).value();
  EXPECT_EQ(Store::CollectGarbage(env(), root(), prefix, false)->kept_in_use,
            std::vector<std::string>{path});
  builder.reset();
  report = Store::CollectGarbage(env(), root(), prefix, true).value();
  EXPECT_EQ(report.removed, std::vector<std::string>{path});
  const uint64_t dry_bytes = report.bytes_freed;
  report = Store::CollectGarbage(env(), root(), prefix, false).value();
  EXPECT_EQ(report.removed, std::vector<std::string>{path});
  EXPECT_EQ(report.bytes_freed, dry_bytes);
  EXPECT_TRUE(env().List(root())->empty());
}

TEST_P(StoreTest, GcRemovesGenerationsWithoutManifestAndKeepsForeignFiles) {
  const std::string doomed = BuildSampleStore(env(), root())->directory();
  const std::string kept =
      Store::OpenOrCreateGeneration(env(), root(), SampleManifest("other"))->directory();
  ASSERT_TRUE(
      env().Rename(JoinPath(doomed, "manifest"), JoinPath(doomed, "manifest.doomed")).has_value());
  WriteText(JoinPath(root(), "notes.txt"), "not ours");
  EXPECT_EQ(Store::CollectGarbage(env(), root(), "", false)->removed,
            std::vector<std::string>{doomed});
  EXPECT_EQ(env().Stat(doomed)->type, FileType::kInvalid);
  EXPECT_EQ(env().Stat(JoinPath(kept, "manifest"))->type, FileType::kRegular);
  EXPECT_EQ(env().Stat(JoinPath(root(), "notes.txt"))->type, FileType::kRegular);

  WriteText(JoinPath(kept, "notes.txt"), "not ours");
  const GcReport report =
      Store::CollectGarbage(env(), root(), std::filesystem::path(kept).filename().string(), false)
          .value();
  EXPECT_TRUE(report.removed.empty());
  EXPECT_EQ(env().Stat(JoinPath(kept, "notes.txt"))->type, FileType::kRegular);
  EXPECT_EQ(env().Stat(JoinPath(kept, "manifest"))->type, FileType::kInvalid);
  EXPECT_EQ(Store::CollectGarbage(env(), root(), "no such", false).error().exit_code(), 2);
}

// By accident, not by gc: the layer files are hours of work, and a build makes the manifest again.
TEST_P(StoreTest, GcKeepsLayerFilesWhoseManifestIsLost) {
  const std::string lost = BuildSampleStore(env(), root())->directory();
  ASSERT_TRUE(env().Remove(JoinPath(lost, "manifest")).has_value());
  for (const bool dry_run : {true, false}) {
    const GcReport report = Store::CollectGarbage(env(), root(), "", dry_run).value();
    EXPECT_TRUE(report.removed.empty());
    EXPECT_EQ(report.kept_without_manifest, std::vector<std::string>{lost});
    EXPECT_EQ(report.bytes_freed, 0u);
  }
  const std::string name = std::filesystem::path(lost).filename().string();
  EXPECT_EQ(Store::CollectGarbage(env(), root(), name, false)->removed,
            std::vector<std::string>{lost});
}

TEST(StoreReadOnly, OpensVerifiesAndSaysThatItCannotBeLocked) {
  MemEnv env;
  const std::string path = BuildSampleStore(env, "/store")->directory();
  env.set_read_only(true);
  {
    const Generation generation = OpenOnly(env, "/store").value();
    EXPECT_TRUE(generation.locked());  // the lock file is there: reading it is enough
    WorkerPool pool(2);
    EXPECT_TRUE(generation.Verify(pool, nullptr, {})->findings.empty());
    EXPECT_EQ(BuildSampleLayer(generation, 0, Encoding::kBase).error().exit_code(), 1);
    EXPECT_TRUE(Store::OpenOrCreateGeneration(env, "/store", SampleManifest()).has_value());
  }
  env.set_read_only(false);
  ASSERT_TRUE(env.Remove(path + "/locks/users").has_value());
  env.set_read_only(true);
  LogCapture log;
  const Generation generation = OpenOnly(env, "/store").value();
  EXPECT_FALSE(generation.locked());
  EXPECT_TRUE(log.Has("do not run gc"));
  EXPECT_EQ(generation.Probe(0, Encoding::kBase).presence, Presence::kPresent);
  // Where nothing can be locked nothing is removed.
  EXPECT_EQ(Store::CollectGarbage(env, "/store", ToHex(generation.id()), false)->kept_in_use,
            std::vector<std::string>{path});
  EXPECT_EQ(Store::OpenOrCreateGeneration(env, "/store", SampleManifest("new")).error().exit_code(),
            1);
}

TEST(StoreReadOnly, ADirectoryWithoutWritePermissionCanBeUsedAndNotBuilt) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  TemporaryDirectory directory;
  const std::string root = directory.path() + "/store";
  const std::string path = BuildSampleStore(PosixEnv(), root)->directory();
  chmod(path.c_str(), 0555);
  chmod((path + "/locks").c_str(), 0555);
  const auto generation = OpenOnly(PosixEnv(), root);
  EXPECT_TRUE(generation->locked());
  const auto built = BuildSampleLayer(*generation, 0, Encoding::kBase);
  chmod(path.c_str(), 0755);
  chmod((path + "/locks").c_str(), 0755);
  ASSERT_FALSE(built.has_value());
  EXPECT_EQ(built.error().exit_code(), 1);
}

TEST(StoreCoverage, TellsWhatIsMissingAndWhatIsDamaged) {
  MemEnv env;
  const Generation generation = BuildSampleStore(env, "/store").value();
  const auto remove = [&](const std::string& path) { ASSERT_TRUE(env.Remove(path)); };
  Coverage coverage = ProbeCoverage(generation);
  EXPECT_TRUE(coverage.base.complete());
  EXPECT_TRUE(coverage.delta.complete());
  EXPECT_EQ(coverage.delta.file_count, 2u);
  EXPECT_EQ(coverage.layers_without_record, std::vector<uint32_t>{1});

  // One encoding of two is enough.
  remove(generation.LayerPath(1, Encoding::kDeltaQuintal));
  EXPECT_TRUE(ProbeCoverage(generation).delta.complete());
  remove(generation.LayerPath(0, Encoding::kDeltaQuintal));
  remove(generation.LayerPath(1, Encoding::kDeltaNibble));
  coverage = ProbeCoverage(generation);
  ASSERT_EQ(coverage.delta.gaps.size(), 1u);
  EXPECT_EQ(coverage.delta.file_count_present, 1u);
  EXPECT_EQ(coverage.delta.Layers(Presence::kAbsent), std::vector<uint32_t>{1});
  // The one that the other layer has.
  EXPECT_EQ(coverage.delta.gaps[0].file, generation.LayerPath(1, Encoding::kDeltaNibble));

  const std::string bad = generation.LayerPath(0, Encoding::kBase);
  remove(bad);
  ASSERT_TRUE(PublishFile(env, bad, std::vector<std::byte>(100)));
  coverage = ProbeCoverage(generation);
  EXPECT_TRUE(coverage.base.Layers(Presence::kAbsent).empty());
  EXPECT_EQ(coverage.base.Layers(Presence::kDamaged), std::vector<uint32_t>{0});
  EXPECT_EQ(coverage.base.gaps[0].file, bad);

  // Of the layers that are asked for; without files no record is missed.
  const Coverage second = coverage.OfLayers({1});
  EXPECT_TRUE(second.base.complete());
  EXPECT_EQ(second.base.file_count, 1u);
  EXPECT_EQ(second.base.file_count_present, 1u);
  EXPECT_EQ(second.delta.tier, Tier::kDelta);
  EXPECT_EQ(second.delta.file_count_present, 0u);
  EXPECT_EQ(second.delta.Layers(Presence::kAbsent), std::vector<uint32_t>{1});
  EXPECT_EQ(second.layers_without_record, std::vector<uint32_t>{1});
  const Coverage first = coverage.OfLayers({0});
  EXPECT_EQ(first.base.Layers(Presence::kDamaged), std::vector<uint32_t>{0});
  EXPECT_EQ(first.base.file_count_present, 0u);
  EXPECT_TRUE(first.delta.complete());
  EXPECT_TRUE(first.layers_without_record.empty());
  remove(generation.LayerPath(1, Encoding::kBase));
  EXPECT_TRUE(ProbeCoverage(generation).layers_without_record.empty());
  EXPECT_EQ(coverage.OfLayers({}).base.file_count, 0u);
}

TEST(StoreCoverage, ImportedAndRandomLayersHaveNoRecords) {
  for (const char* const scheme : {kPlanesCacheScheme, kSyntheticScheme}) {
    MemEnv env;
    Manifest manifest = SampleManifest();
    manifest.scheme = scheme;
    const Generation generation = Store::OpenOrCreateGeneration(env, "/store", manifest).value();
    ASSERT_TRUE(BuildSampleLayer(generation, 0, Encoding::kBase));
    EXPECT_TRUE(ProbeCoverage(generation).layers_without_record.empty());
  }
}

TEST(StoreNames, AStoreIsRecognisedByTheNamesThatAreWritten) {
  MemEnv env;
  const std::string generation = "/store/" + ToHex(Digest("of a store"));
  ASSERT_TRUE(CreateDirectories(env, generation));
  ASSERT_TRUE(PublishFile(env, JoinPath(generation, kManifestName), {}));
  EXPECT_EQ(PathKindOf(env, "/store"), PathKind::kStore);
  for (const std::optional<uint32_t> rank : {std::optional<uint32_t>(), std::optional<uint32_t>(1)})
    for (const Encoding encoding : kEncodings) {
      const std::string path = JoinPath(generation, LayerFileName(12, rank, encoding));
      ASSERT_TRUE(PublishFile(env, path, {}));
      EXPECT_EQ(PathKindOf(env, path), PathKind::kLayerFile) << path;
    }
  EXPECT_EQ(PathKindOf(env, generation), PathKind::kGeneration);
}

TEST(StoreNames, ParsingIsTheInverseOfMaking) {
  for (const uint32_t layer : {0u, 7u, 9999u, 10000u, UINT32_MAX}) {
    for (const std::optional<uint32_t> rank :
         {std::optional<uint32_t>(), std::optional(0u), std::optional(12u)}) {
      for (const Encoding encoding : kEncodings) {
        const std::string name = LayerFileName(layer, rank, encoding);
        const auto parsed = ParseLayerName(name);
        ASSERT_TRUE(parsed.has_value());
        EXPECT_EQ(parsed->layer, layer);
        EXPECT_EQ(parsed->rank, rank);
        EXPECT_EQ(parsed->encoding, encoding);
        const std::string temporary = TemporaryName(name);
        EXPECT_EQ(LockOfTemporary(temporary), ShardStem(layer, rank));
        ASSERT_TRUE(ParseTemporaryName(temporary).has_value());
        EXPECT_EQ(ParseTemporaryName(temporary)->final_name, name);
        EXPECT_EQ(ParseTemporaryName(temporary)->process, static_cast<uint32_t>(getpid()));
      }
      const auto lock = ParseLayerLock(ShardStem(layer, rank));
      ASSERT_TRUE(lock.has_value());
      EXPECT_EQ(lock->layer, layer);
      EXPECT_EQ(lock->rank, rank);
    }
    EXPECT_EQ(LockOfTemporary(TemporaryName(SourceRecordName(layer))), LayerStem(layer));
  }
  EXPECT_EQ(LayerFileName(3, 1, Encoding::kBase), "layer-0003.rank1.base");
  EXPECT_EQ(LayerFileName(3, std::nullopt, Encoding::kBase), "layer-0003.base");
  EXPECT_EQ(ParseLayerName("layer-0003.source")->encoding, Encoding::kInvalid);
  for (const char* name : {"layer-3.base", "layer-00003.base", "layer-0003", "layer-0003.Base",
                           "layer-0003.base ", "layer--003.base", "layer-99999999999.base", "",
                           "layer-0003.rank1", "layer-0003.rank01.base", "layer-0003.rank.base",
                           "layer-0003.rank-1.base", "layer-0003.rank1.source",
                           "layer-0003.rank1.rank2.base", "layer-0003.rank99999999999.base"}) {
    EXPECT_FALSE(ParseLayerName(name).has_value()) << name;
  }
  for (const char* name :
       {"users", "generation", "layer-3", "layer-0003.base", "layer-0003.rank", "layer-0003 ", ""})
    EXPECT_FALSE(ParseLayerLock(name).has_value()) << name;
  for (const char* name :
       {"manifest", ".tmp-", ".tmp-a", ".tmp-a-1", ".tmp-a-x-1", ".tmp--1", ".tmp-a-01-1"})
    EXPECT_FALSE(ParseTemporaryName(name).has_value()) << name;
  EXPECT_FALSE(LockOfTemporary(".tmp-manifest-1-2").has_value());
  EXPECT_FALSE(ParseGenerationName(std::string(32, 'A')).has_value());
  EXPECT_TRUE(ParseGenerationName(std::string(32, 'a')).has_value());
}

}  // namespace
}  // namespace hotplane
