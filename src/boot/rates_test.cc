// What this machine gives to boots, and what a boot takes then.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/fault_guard.h"
#include "base/units.h"
#include "boot/boot_estimate.h"
#include "boot/source_rates.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

BootFacts Warm() {
  BootFacts facts;
  facts.bytes = 100 * uint64_t{1'000'000'000};
  facts.bytes_cached = facts.bytes;
  facts.on_device = true;
  facts.available_bytes = 2 * facts.bytes;
  facts.copy_rate = 60e9;
  facts.link_rate = 50e9;
  facts.verify_rate = 1000e9;
  facts.direct_rate = 5e9;
  facts.buffered_rate = 4e9;
  return facts;
}

TEST(BootEstimateTest, TheSlowestStageDecides) {
  const BootEstimate link = EstimateBoot(Warm());
  EXPECT_DOUBLE_EQ(link.seconds, 2);
  EXPECT_EQ(link.limit, "the link");
  EXPECT_EQ(link.source, "page cache");
  BootFacts slow = Warm();
  slow.copy_rate = 10e9;
  EXPECT_DOUBLE_EQ(EstimateBoot(slow).seconds, 10);
  EXPECT_EQ(EstimateBoot(slow).limit, "copying the page cache");
  slow.verify_rate = 1e9;
  EXPECT_EQ(EstimateBoot(slow).limit, "verifying");
  BootFacts host = Warm();
  host.on_device = false;
  host.link_rate = host.verify_rate = 0;
  EXPECT_DOUBLE_EQ(EstimateBoot(host).seconds, 100e9 / 60e9);
}

TEST(BootEstimateTest, TheDiskBringsWhatIsNotInMemory) {
  BootFacts facts = Warm();
  facts.bytes_cached = facts.bytes / 2;
  BootEstimate half = EstimateBoot(facts);
  EXPECT_EQ(half.source, "both");
  EXPECT_EQ(half.limit, "the disk");
  EXPECT_DOUBLE_EQ(half.seconds, 50e9 / 4e9) << "through the page cache: it fits there";
  EXPECT_NE(half.why.find("the next boot is warm"), std::string::npos) << half.why;
  facts.bytes_cached = 0;
  EXPECT_EQ(EstimateBoot(facts).source, "disk, buffered");
  facts.available_bytes = facts.bytes;
  const BootEstimate direct = EstimateBoot(facts);
  EXPECT_EQ(direct.source, "disk, direct");
  EXPECT_DOUBLE_EQ(direct.seconds, 100e9 / 5e9);
  facts.direct_rate = facts.buffered_rate = 0;
  EXPECT_EQ(EstimateBoot(facts).seconds, 0) << "not known";
}

TEST(BootEstimateTest, TellsWhyPagesAreNotRegistered) {
  BootFacts facts = Warm();
  facts.register_rate = facts.release_rate = 40e9;
  EXPECT_NE(EstimateBoot(facts).why.find("registering and releasing makes 20.0 GB/s"),
            std::string::npos)
      << EstimateBoot(facts).why;
}

TEST(BootEstimateTest, LandedOnTheHostBothCopiesMustFit) {
  EXPECT_FALSE(PassesByCache(900, true, 1000));
  EXPECT_TRUE(PassesByCache(960, true, 1000));
  EXPECT_TRUE(PassesByCache(900, false, 1000));
  EXPECT_FALSE(PassesByCache(460, false, 1000));
}

TEST(SourceRatesTest, CopiesByThreads) {
  InstallFaultGuard();
  const std::vector<std::byte> pages(16 * kMiB + 5, std::byte{1});
  const auto rates = MeasureCopyRates(pages, 3, "memory", nullptr);
  ASSERT_TRUE(rates) << rates.error().ToString();
  ASSERT_EQ(rates->size(), 3u);
  const size_t threads[] = {1, 2, 3};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*rates)[i].threads, threads[i]);
    EXPECT_GT((*rates)[i].bytes_per_second, 1e8);
  }
  EXPECT_TRUE(MeasureCopyRates({}, 3, "", nullptr)->empty());
}

TEST(SourceRatesTest, TheDiskBothWaysAndThePageCacheAsItWas) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/file";
  {
    std::ofstream file(path, std::ios::binary);
    const std::string mebibyte(kMiB, 'x');
    for (int i = 0; i < 9; ++i) file << mebibyte;
  }
  const FilePart missing = {directory.path() + "/missing", 0, kMiB};
  EXPECT_FALSE(MeasureDiskRates(PosixEnv(), {&missing, 1}, nullptr));
  const auto file = PosixEnv().Open(path, OpenMode::kRead).value();
  const FilePart part = {path, kPageBytes, 8 * kMiB};
  const auto cached_bytes = [&] { return file->CachedBytes(part.offset, part.bytes).value(); };
  // What is not yet on the disk cannot be dropped.
  const int written = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::fsync(written), 0);
  ASSERT_EQ(::close(written), 0);
  file->DropCache(0, 0);
  if (cached_bytes() != 0) GTEST_SKIP() << "the page cache cannot be dropped here";
  for (const bool cached : {false, true}) {
    std::vector<std::byte> bytes(part.bytes);
    if (cached) {
      ASSERT_TRUE(ReadFully(*file, part.offset, bytes).has_value());
    }
    const uint64_t before = cached_bytes();
    const auto rates = MeasureDiskRates(PosixEnv(), {&part, 1}, nullptr);
    ASSERT_TRUE(rates) << rates.error().ToString();
    EXPECT_GT(rates->buffered, 1e5) << cached;
    EXPECT_EQ(cached_bytes(), before) << cached;
  }
}

}  // namespace
}  // namespace hotplane
