#include "base/result_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace hotplane {
namespace {

TEST(ResultFile, AFileThatCannotBeWrittenIsToldByName) {
  for (const std::string& path : {testing::TempDir() + "none/result.json", testing::TempDir()}) {
    for (const Result<void>& done : {CheckResultFile(path), WriteResultFile(path, "{}")}) {
      ASSERT_FALSE(done) << path;
      EXPECT_EQ(done.error().code(), StatusCode::kSystem);
      EXPECT_EQ(done.error().file(), path);
      EXPECT_NE(done.error().found(), "");
      EXPECT_NE(done.error().advice(), "");
    }
  }
  const Result<void> full = WriteResultFile("/dev/full", "{}");
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code(), StatusCode::kCapacity);
}

TEST(ResultFile, AnOldResultStaysUntilTheNewOneIsThere) {
  const std::string path = testing::TempDir() + "hotplane-result.json";
  ASSERT_TRUE(WriteResultFile(path, "old, and longer"));
  ASSERT_TRUE(CheckResultFile(path));
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(text.str(), "old, and longer");
  ASSERT_TRUE(WriteResultFile(path, "new"));
  text.str("");
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(text.str(), "new");
  EXPECT_TRUE(CheckResultFile(""));
  EXPECT_TRUE(WriteResultFile("", "nowhere"));
}

}  // namespace
}  // namespace hotplane
