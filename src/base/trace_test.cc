#include "base/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/worker_pool.h"

namespace hotplane {
namespace {

using Json = nlohmann::json;

std::vector<Json> SpansOf(const Json& trace) {
  std::vector<Json> spans;
  for (const Json& event : trace.at("traceEvents"))
    if (event.at("ph") == "X") spans.push_back(event);
  return spans;
}

std::map<int, std::string> ThreadNamesOf(const Json& trace) {
  std::map<int, std::string> names;
  for (const Json& event : trace.at("traceEvents"))
    if (event.at("name") == "thread_name")
      names[event.at("tid").get<int>()] = event.at("args").at("name").get<std::string>();
  return names;
}

TEST(Trace, OffRecordsNothing) {
  StartTrace();
  StopTrace();
  EXPECT_FALSE(TraceEnabled());
  { const TraceSpan span("read", 1); }
  EXPECT_TRUE(SpansOf(Json::parse(TraceJson({}))).empty());
}

TEST(Trace, SpanKeepsWhatItWasGiven) {
  StartTrace();
  {
    TraceSpan span("read", 3, 4096, "disk");
    const TraceSpan inner("plan");
    span.set_bytes(8192);
    span.set_source("page cache");
  }
  StopTrace();
  const Json trace = Json::parse(TraceJson({{"command", "boot \"x\"\xff"}}));
  const std::vector<Json> spans = SpansOf(trace);
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].at("name"), "plan");
  EXPECT_FALSE(spans[0].contains("args"));
  EXPECT_EQ(spans[1].at("name"), "read");
  EXPECT_EQ(spans[1].at("args"), Json({{"layer", 3}, {"bytes", 8192}, {"source", "page cache"}}));
  EXPECT_LE(spans[1].at("ts").get<double>(), spans[0].at("ts").get<double>());
  EXPECT_GE(spans[1].at("dur").get<double>(), spans[0].at("dur").get<double>());
  EXPECT_EQ(ThreadNamesOf(trace).at(spans[0].at("tid").get<int>()), "main");
  EXPECT_EQ(trace.at("otherData").at("command"), "boot \"x\"\xef\xbf\xbd");
}

TEST(Trace, SpansThatStartedBeforeTheTraceAreLeftOut) {
  StartTrace();
  {
    const TraceSpan early("read");
    StartTrace();
  }
  {
    const TraceSpan late("verify");
    StopTrace();
  }
  EXPECT_TRUE(SpansOf(Json::parse(TraceJson({}))).empty());
}

TEST(Trace, WorkersHaveNamesAndOutliveTheirThreads) {
  StartTrace();
  {
    WorkerPool pool(3);
    std::atomic<int> inside{0};
    // Every worker is held until all three are there, so that each has a span.
    ASSERT_TRUE(pool.ParallelFor(3, [&](size_t index, size_t) -> Result<void> {
      const TraceSpan span("verify", static_cast<uint32_t>(index));
      ++inside;
      while (inside < 3) std::this_thread::yield();
      return {};
    }));
  }
  StopTrace();
  const Json trace = Json::parse(TraceJson({}));
  EXPECT_EQ(SpansOf(trace).size(), 3u);
  std::vector<std::string> names;
  for (const auto& [tid, name] : ThreadNamesOf(trace)) names.push_back(name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"main", "worker 1", "worker 2"}));
}

TEST(Trace, ALaterTraceHasNothingOfAnEarlierOne) {
  for (int round = 0; round < 2; ++round) {
    StartTrace();
    for (int i = 0; i < 3; ++i) {
      std::thread([round] {
        if (round == 0) NameTraceThread("early", 1);
        const TraceSpan span("read");
      }).join();
    }
    StopTrace();
    const Json trace = Json::parse(TraceJson({}));
    EXPECT_EQ(SpansOf(trace).size(), 3u);
    ASSERT_EQ(ThreadNamesOf(trace).size(), 3u);
    for (const auto& [tid, name] : ThreadNamesOf(trace))
      EXPECT_EQ(name.starts_with("early"), round == 0) << name;
  }
}

TEST(Trace, ThreadsThatRecordWhileTracesStart) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 3; ++i) {
    threads.emplace_back([&over, i] {
      NameTraceThread("recorder", i);
      while (!over) const TraceSpan span("read");
    });
  }
  for (int i = 0; i < 200; ++i) {
    StartTrace();
    std::this_thread::yield();
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  StartTrace();
  { const TraceSpan span("read"); }
  StopTrace();
  const Json trace = Json::parse(TraceJson({}));
  EXPECT_EQ(SpansOf(trace).size(), 1u);
  EXPECT_EQ(ThreadNamesOf(trace).size(), 1u);
}

TEST(Trace, BoundedAndSaysWhatDidNotFit) {
  StartTrace();
  for (size_t i = 0; i < kTraceSpansPerThreadMax + 7; ++i) const TraceSpan span("read");
  StopTrace();
  // As text: parsing so many takes a minute under a sanitizer.
  const std::string trace = TraceJson({});
  size_t count = 0;
  for (size_t at = trace.find("\"ph\":\"X\""); at != std::string::npos;
       at = trace.find("\"ph\":\"X\"", at + 1))
    ++count;
  EXPECT_EQ(count, kTraceSpansPerThreadMax);
  EXPECT_NE(trace.find("\"spans_dropped\":7"), std::string::npos) << trace.substr(0, 400);
}

}  // namespace
}  // namespace hotplane
