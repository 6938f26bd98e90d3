#include "io/output_place.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "io/mem_env.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

TEST(OutputPlace, EachReasonOfTheSystemHasItsRemedy) {
  MemEnv env;
  ASSERT_TRUE(CreateDirectories(env, "/there"));
  const auto told = [&](int error, const std::string& path) {
    return CannotWrite(Status::FromErrno(error, "cannot create").File("/there/.tmp-x"), env, path);
  };
  for (const int error : {ENOTDIR, EACCES, EPERM, EROFS, ENOSPC, EDQUOT, ENAMETOOLONG, ENOENT}) {
    const Status status = told(error, "/there/x");
    EXPECT_EQ(status.file(), "/there/x");
    EXPECT_EQ(status.error_number(), error);
    EXPECT_NE(status.expected(), "") << status.ToString();
    EXPECT_NE(status.found(), "");
    EXPECT_NE(status.advice().find("name another place"), std::string::npos) << status.ToString();
  }
  EXPECT_EQ(told(ENOENT, "/none/x").expected(), "the folder /none");
  EXPECT_NE(told(ENOENT, "/none/x").advice().find("make it first"), std::string::npos);
  EXPECT_EQ(told(ENOSPC, "/there/x").code(), StatusCode::kCapacity);
  // Advice that knows less of the place gives way.
  const Status known = CannotWrite(
      Status::FromErrno(EACCES, "cannot create").Advice(PermissionAdvice(EACCES)), env, "/there/x");
  EXPECT_EQ(known.advice(), told(EACCES, "/there/x").advice());
  EXPECT_NE(known.advice(), PermissionAdvice(EACCES));
  EXPECT_EQ(PermissionAdvice(EIO), "");
  EXPECT_EQ(PermissionAdvice(0), "");
  // What was said already stays.
  const Status own = CannotWrite(
      Status::FromErrno(ENOSPC, "no room").Expected("4 KiB").Advice("fewer layers"), env, "/x");
  EXPECT_EQ(own.expected(), "4 KiB");
  EXPECT_EQ(own.advice(), "fewer layers");
}

TEST(OutputPlace, AFileThatCanBeMadeLeavesNothingBehind) {
  const TestDirectory directory;
  Env& env = PosixEnv();
  const std::string path = directory.path() + "/out";
  EXPECT_TRUE(CheckOutputFile(env, path));
  ASSERT_TRUE(PublishFile(env, path, {}));
  EXPECT_TRUE(CheckOutputFile(env, path));  // to be replaced
  EXPECT_EQ(env.List(directory.path()).value(), std::vector<std::string>{"out"});
}

TEST(OutputPlace, WhatCannotBeMadeIsFoundOut) {
  const TestDirectory directory;
  Env& env = PosixEnv();
  ASSERT_TRUE(PublishFile(env, directory.path() + "/file", {}));
  ASSERT_TRUE(env.CreateDirectory(directory.path() + "/folder"));
  const auto code = [&](const std::string& path) {
    const Result<void> checked = CheckOutputFile(env, path);
    EXPECT_FALSE(checked) << path;
    if (checked) return StatusCode::kInvalid;
    EXPECT_EQ(checked.error().file(), path);
    EXPECT_NE(checked.error().expected(), "");
    EXPECT_NE(checked.error().advice(), "");
    return checked.error().code();
  };
  EXPECT_EQ(code(directory.path() + "/none/out"), StatusCode::kSystem);
  EXPECT_EQ(code(directory.path() + "/file/out"), StatusCode::kSystem);
  EXPECT_EQ(code(directory.path() + "/folder"), StatusCode::kUsage);
  EXPECT_EQ(code(directory.path() + "/new/"), StatusCode::kUsage);
  EXPECT_EQ(code("/dev/null"), StatusCode::kUsage);
  EXPECT_EQ(code("/proc/out"), StatusCode::kSystem);
  EXPECT_EQ(code(directory.path() + "/" + std::string(300, 'x')), StatusCode::kSystem);
}

TEST(OutputPlace, AFileThatCannotBePublishedIsNamedByItsOwnName) {
  MemEnv env;
  const Result<void> published = PublishFile(env, "/none/out", {});
  ASSERT_FALSE(published);
  EXPECT_EQ(published.error().file(), "/none/out");
  EXPECT_EQ(published.error().expected(), "the folder /none");
}

}  // namespace
}  // namespace hotplane
