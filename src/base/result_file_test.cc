#include "base/result_file.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

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

// Of this process and test alone.
class ResultFileTest : public testing::Test {
 protected:
  ResultFileTest() {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    path_ = folder_ + "/result.json";
  }
  ~ResultFileTest() override { std::filesystem::remove_all(folder_); }
  std::string Content() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }
  std::string folder_ = testing::TempDir() + "hotplane-result-XXXXXX";
  std::string path_;
};

TEST_F(ResultFileTest, AnOldResultStaysUntilTheNewOneIsThere) {
  ASSERT_TRUE(WriteResultFile(path_, "old, and longer"));
  ASSERT_TRUE(CheckResultFile(path_));
  EXPECT_EQ(Content(), "old, and longer");
  ASSERT_TRUE(WriteResultFile(path_, "new"));
  EXPECT_EQ(Content(), "new");
  EXPECT_TRUE(CheckResultFile(""));
  EXPECT_TRUE(WriteResultFile("", "nowhere"));
}

TEST_F(ResultFileTest, ALookLeavesNothingBehind) {
  ASSERT_TRUE(CheckResultFile(path_));
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  std::filesystem::create_symlink(folder_ + "/elsewhere", path_);
  ASSERT_TRUE(CheckResultFile(path_));
  EXPECT_TRUE(std::filesystem::is_symlink(path_));
  EXPECT_FALSE(std::filesystem::exists(path_));
  ASSERT_TRUE(WriteResultFile(path_, ""));
  ASSERT_TRUE(CheckResultFile(path_));  // empty, and somebody's
  EXPECT_TRUE(std::filesystem::exists(path_));
}

}  // namespace
}  // namespace hotplane
