#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <numeric>
#include <vector>

#include "base/cancel.h"
#include "base/fault_guard.h"
#include "base/json_text.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/number_text.h"
#include "base/sanitizers.h"
#include "base/status.h"
#include "base/topology.h"
#include "base/units.h"
#include "base/worker_pool.h"

namespace hotplane {
namespace {

TEST(Status, RendersEveryFieldThatIsSet) {
  const Status status = Status::Data("chunk 3 of layer 1 does not match its checksum")
                            .File("/s/layer-0001.base")
                            .At(8192)
                            .Expected("00ff")
                            .Found("00fe")
                            .Advice("rebuild it");
  EXPECT_EQ(status.exit_code(), 3);
  EXPECT_EQ(status.ToString(),
            "chunk 3 of layer 1 does not match its checksum\n"
            "  file      /s/layer-0001.base\n"
            "  offset    8192\n"
            "  expected  00ff\n"
            "  found     00fe\n"
            "  to fix    rebuild it");
}

TEST(Status, ErrnoDecidesTheCode) {
  EXPECT_EQ(Status::FromErrno(EIO, "x").code(), StatusCode::kSystem);
  EXPECT_EQ(Status::FromErrno(ENOSPC, "x").code(), StatusCode::kCapacity);
  EXPECT_EQ(Status::FromErrno(EACCES, "x").error_number(), EACCES);
}

TEST(Status, MacrosReturnTheError) {
  const auto fails = []() -> Result<int> { return Fail(Status::Usage("no")); };
  const auto outer = [&]() -> Result<int> {
    HP_ASSIGN(const int value, fails());
    return value + 1;
  };
  const Result<int> result = outer();
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().what(), "no");
}

TEST(Units, ParseSizeTakesBinarySuffixes) {
  EXPECT_EQ(ParseSize("4096").value(), 4096u);
  EXPECT_EQ(ParseSize("512M").value(), 512 * kMiB);
  EXPECT_EQ(ParseSize("1.5GiB").value(), 3 * kGiB / 2);
  EXPECT_EQ(ParseSize("2g").value(), 2 * kGiB);
  EXPECT_EQ(ParseSize("0").value(), 0u);
  EXPECT_EQ(ParseSize("0.5G").value(), kGiB / 2);
  EXPECT_EQ(ParseSize("4096B").value(), 4096u);
  EXPECT_EQ(ParseSize("1.5kb").value(), 1536u);
  EXPECT_EQ(ParseSize("9007199254740993").value(), 9007199254740993u);  // no double has it
  EXPECT_EQ(ParseSize("8388607T").value(), uint64_t{8388607} << 40);
  for (const char* bad : {"",
                          "G",
                          "-1",
                          "+1",
                          "1X",
                          "1GG",
                          "1e30",
                          "1e9",
                          "1E9",
                          "1e9G",
                          "1e-3G",
                          "nan",
                          "inf",
                          "1 G",
                          "01",
                          "00",
                          "007M",
                          "00.5G",
                          "1.5",
                          "1.0",
                          "1.5B",
                          "1.G",
                          ".5G",
                          "1..5G",
                          "1.5.5G",
                          "0x10",
                          "8388608T",
                          "18446744073709551615",
                          "18446744073709551616",
                          "99999999999999999999G"})
    EXPECT_FALSE(ParseSize(bad).has_value()) << bad;
}

TEST(NumberText, DecimalsHaveOneSpelling) {
  EXPECT_EQ(ParseDecimal("0"), 0u);
  EXPECT_EQ(ParseDecimal("4294967295"), UINT32_MAX);
  for (const char* bad : {"", "00", "05", "+1", "-1", " 1", "1 ", "0x1", "4294967296", "1,"})
    EXPECT_FALSE(ParseDecimal(bad).has_value()) << bad;
}

TEST(NumberText, OneIsNotPlural) {
  EXPECT_EQ(Counted(0, "layers"), "0 layers");
  EXPECT_EQ(Counted(1, "findings"), "1 finding");
  EXPECT_EQ(Counted(2, "MoE layers"), "2 MoE layers");
}

TEST(Units, FormatsBytes) {
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(3 * kGiB / 2), "1.50 GiB");
  EXPECT_EQ(FormatBytes(74 * kGiB + kGiB / 4), "74.2 GiB");
}

TEST(WorkerPool, RunsEveryIndexOnce) {
  for (size_t workers : {1, 2, 8}) {
    WorkerPool pool(workers);
    EXPECT_EQ(pool.worker_count(), workers);
    for (size_t count : {0, 1, 7, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      const Result<void> result =
          pool.ParallelFor(count, [&](size_t i, size_t worker) -> Result<void> {
            EXPECT_LT(worker, workers);
            ++runs[i];
            return {};
          });
      ASSERT_TRUE(result.has_value());
      for (const auto& run : runs) EXPECT_EQ(run.load(), 1);
    }
  }
}

TEST(WorkerPool, ReportsTheLowestFailureAndStops) {
  WorkerPool pool(4);
  std::atomic<size_t> ran{0};
  const Result<void> result = pool.ParallelFor(100000, [&](size_t i, size_t) -> Result<void> {
    ++ran;
    if (i >= 10) return Fail(Status::Data(Text("index {}", i)));
    return {};
  });
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().what(), "index 10");
  EXPECT_LT(ran.load(), 100000u);
  EXPECT_TRUE(pool.ParallelFor(3, [](size_t, size_t) -> Result<void> { return {}; }).has_value());
}

TEST(CancelToken, FirstSignalWins) {
  CancelToken token;
  EXPECT_TRUE(token.Check().has_value());
  token.Cancel(SIGTERM);
  token.Cancel(SIGINT);
  EXPECT_EQ(token.Check().error().exit_code(), 143);
}

TEST(Log, GoesToTheSinkAndNowhereElse) {
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  Log(LogLevel::kInfo, "layer {}", 3);
  SetLogSink({});
  Log(LogLevel::kInfo, "dropped");
  EXPECT_EQ(lines, std::vector<std::string>{"layer 3"});
}

TEST(Log, NamesForgeNoLinesAndSteerNoTerminal) {
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  Log(LogLevel::kInfo, "{} is there", "a\x1b[2J\nerror: b");
  LogStatus(LogLevel::kError, "building layer 3", Status::Data("bad\n").File("x\ny"));
  LogStatus(LogLevel::kError, "", Status::Data("bad"));
  SetLogSink({});
  EXPECT_EQ(lines,
            (std::vector<std::string>{"a\\x1b[2J\\x0aerror: b is there",
                                      "building layer 3: bad\\x0a\n  file      x\\x0ay", "bad"}));
}

TEST(Status, IsOneLineWhereThatIsWanted) {
  const Status status = Status::Data("bad").File("a\nb").At(7).Expected("x").Found("y").Advice("z");
  EXPECT_EQ(status.ToLine(), "bad; file a\\x0ab; offset 7; expected x; found y; to fix: z");
  EXPECT_EQ(Status::Data("bad").ToLine(), "bad");
}

TEST(Printable, KeepsLinesWhereThereAreSome) {
  EXPECT_EQ(PrintableLines("a\x1b\n\nb\r\n"), "a\\x1b\n\nb\\x0d\n");
  EXPECT_EQ(PrintableLines(""), "");
  EXPECT_EQ(Printable("\xc2\x9b\xc3\xa9\x7f\n"), "\\xc2\\x9b\xc3\xa9\\x7f\\x0a");
}

TEST(HugeBuffer, IsAlignedZeroedAndMovable) {
  HugeBuffer buffer = HugeBuffer::Allocate(3 * kMiB + 5).value();
  EXPECT_EQ(buffer.size(), 3 * kMiB + 5);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % (2 * kMiB), 0u);
  for (std::byte b : buffer.span()) ASSERT_EQ(b, std::byte{0});
  std::byte* const data = buffer.data();
  const HugeBuffer moved = std::move(buffer);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(HugeBuffer::Allocate(0).value().size(), 0u);
}

TEST(Topology, TellsSaneNumbers) {
  EXPECT_GE(UsableCpuCount(), 1u);
  const MemoryLimit limit = ReadMemoryLimit();
  EXPECT_GT(limit.total_bytes, 64 * kMiB);
  EXPECT_LE(limit.available_bytes, limit.total_bytes);
  EXPECT_GT(ReadResidentAnonymousBytes(), 0u);
}

TEST(FaultGuard, TurnsABusErrorIntoAReturnValue) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer wraps signal handlers: they cannot be left by a jump there";
#endif
  InstallFaultGuard();
  ASSERT_TRUE(FaultGuardInstalled());
  char path[] = "/tmp/hotplane-guard-XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  unlink(path);
  ASSERT_EQ(ftruncate(fd, 8192), 0);
  void* const map = mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(map, MAP_FAILED);
  struct Read {
    const volatile char* address;
    char value = 1;
  } read{static_cast<const char*>(map) + 4096};
  const auto body = [](void* context) {
    auto* const r = static_cast<Read*>(context);
    r->value = *r->address;
  };
  const std::span range(static_cast<const std::byte*>(map), 8192);
  EXPECT_TRUE(CallGuarded(range, body, &read));
  EXPECT_EQ(read.value, 0);
  ASSERT_EQ(ftruncate(fd, 4096), 0);
  for (int again = 0; again < 3; ++again) EXPECT_FALSE(CallGuarded(range, body, &read));
  read.address = static_cast<const char*>(map);
  EXPECT_TRUE(CallGuarded(range, body, &read));
  munmap(map, 8192);
  close(fd);
}

TEST(FaultGuardDeathTest, LeavesForeignSignalsAlone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  InstallFaultGuard();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // The handler that was there before is the sanitizer's: it reports the signal and exits.
  EXPECT_DEATH(raise(SIGBUS), "BUS");
#else
  EXPECT_EXIT(raise(SIGBUS), testing::KilledBySignal(SIGBUS), "");
#endif
}

TEST(JsonText, HoldsNoControlCharacterRaw) {
  const std::string printable = "\xc2\xa0\xe2\x80\x93\xc3\xa9";
  const std::string name = "\x1b\x7f\xc2\x80\xc2\x9f\xc2";
  const std::string text = JsonText({{"name", printable + name}});
  EXPECT_EQ(text,
            "{\n  \"name\": \"" + printable + "\\u001b\\u007f\\u0080\\u009f\xef\xbf\xbd\"\n}");
  // It means what it did.
  EXPECT_EQ(nlohmann::json::parse(text)["name"],
            printable + name.substr(0, name.size() - 1) + "\xef\xbf\xbd");
}

}  // namespace
}  // namespace hotplane
