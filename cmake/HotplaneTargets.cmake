# hp_library: one OBJECT library per folder of src/, with one-way links.
# hp_test, hp_bench, hp_fuzz: programs that link the objects of a folder and of what it depends on.
# Each registers itself with ctest; labels: threads (run by the tsan preset), fuzz, and
# plain_build_only for what means nothing under a sanitizer.

add_library(hp_options INTERFACE)
target_include_directories(hp_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
target_compile_options(hp_options INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor
  $<$<CONFIG:Debug>:-Og>)
# g++ 12 warns of overlap inside its own std::string::operator+ (GCC bug 105651).
target_compile_options(hp_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
# What a run computes must not depend on how the compiler fuses operations.
target_compile_options(hp_options INTERFACE -ffp-contract=off)
target_compile_definitions(hp_options INTERFACE HOTPLANE_VERSION_TEXT="${PROJECT_VERSION}")
if(HOTPLANE_SANITIZE)
  target_compile_options(hp_options INTERFACE -fsanitize=${HOTPLANE_SANITIZE}
    -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(hp_options INTERFACE -fsanitize=${HOTPLANE_SANITIZE})
endif()
# The headers of fmt only: src/base/format_text.cc compiles what is behind them, once.
target_include_directories(hp_options SYSTEM INTERFACE
  $<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>)
target_link_libraries(hp_options INTERFACE Threads::Threads
  nlohmann_json::nlohmann_json tl::expected)

# Compiling with instrumentation is slow: what does not compute much is not optimized in a build
# with a sanitizer, and what nearly every file includes is parsed once. Builds without one see that
# every file includes what it needs.
set(HP_NOT_OPTIMIZED engine capi cli)
function(hp_headers name)
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/headers.cc" CONTENT "")
  add_library(${name} OBJECT "${PROJECT_BINARY_DIR}/headers.cc")
  target_link_libraries(${name} PRIVATE hp_options)
  target_precompile_headers(${name} PRIVATE <algorithm> <array> <atomic> <charconv> <chrono>
    <cmath> <condition_variable> <cstring> <filesystem> <fstream> <functional> <map> <memory>
    <mutex> <numeric> <optional> <random> <set> <span> <string> <thread> <vector>
    <nlohmann/json.hpp> <tl/expected.hpp> ${ARGN})
endfunction()
if(HOTPLANE_SANITIZE AND HOTPLANE_BUILD_TESTS)
  hp_headers(hp_headers_optimized)
  hp_headers(hp_headers_plain <gtest/gtest.h> <rapidcheck/gtest.h>)
  target_compile_options(hp_headers_plain PRIVATE -O0)
  target_link_libraries(hp_headers_plain PRIVATE GTest::gtest)
endif()
function(hp_use_headers target optimized)
  if(NOT TARGET hp_headers_plain)
    return()
  endif()
  if(optimized)
    target_precompile_headers(${target} REUSE_FROM hp_headers_optimized)
  else()
    # The same code model as the folders', whatever the target is.
    target_compile_options(${target} PRIVATE -O0 -fPIC)
    target_precompile_headers(${target} REUSE_FROM hp_headers_plain)
  endif()
endfunction()

# hp_library(<folder> SOURCES <files> DEPS <folders>)
function(hp_library folder)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_library(hp_${folder} OBJECT ${arg_SOURCES})
  target_link_libraries(hp_${folder} PUBLIC hp_options)
  if(folder IN_LIST HP_NOT_OPTIMIZED)
    hp_use_headers(hp_${folder} FALSE)
  else()
    hp_use_headers(hp_${folder} TRUE)
  endif()
  set(closure ${arg_DEPS})
  foreach(dep ${arg_DEPS})
    get_property(below GLOBAL PROPERTY hp_closure_${dep})
    list(APPEND closure ${below})
  endforeach()
  list(REMOVE_DUPLICATES closure)
  set_property(GLOBAL PROPERTY hp_closure_${folder} "${closure}")
  set_property(GLOBAL APPEND PROPERTY hp_folders ${folder})
endfunction()

# Links the objects of the folders, and of all they depend on, into a program.
function(hp_link target)
  set(all ${ARGN})
  foreach(folder ${ARGN})
    get_property(below GLOBAL PROPERTY hp_closure_${folder})
    list(APPEND all ${below})
  endforeach()
  list(REMOVE_DUPLICATES all)
  foreach(folder ${all})
    target_link_libraries(${target} PRIVATE hp_${folder})
  endforeach()
endfunction()

# Links libstdc++ and libgcc into the target, without what nobody calls: libstdc++'s own
# random_device would need glibc 2.36, everything else 2.35. Sanitizers need the shared ones.
function(hp_own_runtime target)
  if(NOT HOTPLANE_SANITIZE)
    target_link_options(${target} PRIVATE
      -static-libstdc++ -static-libgcc LINKER:--gc-sections)
  endif()
endfunction()

add_custom_target(thread_tests)
add_custom_target(fuzzers)
set(HP_THREADED base io moe store boot engine capi)

# hp_test(<folder> SOURCES <files> [NAME <name>] [DEPS <folders>] [LABELS <labels>]
# [ENVIRONMENT <variables>]): <name>_test, registered test by test.
function(hp_test folder)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;DEPS;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT HOTPLANE_BUILD_TESTS)
    return()
  endif()
  if(NOT arg_NAME)
    set(arg_NAME ${folder})
  endif()
  add_executable(${arg_NAME}_test ${arg_SOURCES})
  hp_link(${arg_NAME}_test ${folder} ${arg_DEPS})
  target_include_directories(${arg_NAME}_test PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${arg_NAME}_test PRIVATE
    HOTPLANE_SOURCE_DIR="${PROJECT_SOURCE_DIR}" HOTPLANE_BINARY_DIR="${PROJECT_BINARY_DIR}")
  target_link_libraries(${arg_NAME}_test PRIVATE GTest::gtest GTest::gtest_main)
  # A test's own code need not be fast; this saves a third of its compile time.
  target_compile_options(${arg_NAME}_test PRIVATE $<$<CONFIG:Release>:-O1>)
  hp_use_headers(${arg_NAME}_test FALSE)
  if(folder IN_LIST HP_THREADED)
    list(APPEND arg_LABELS threads)
    add_dependencies(thread_tests ${arg_NAME}_test)
  endif()
  set(properties TIMEOUT 600)
  if(arg_ENVIRONMENT)
    list(APPEND properties ENVIRONMENT "${arg_ENVIRONMENT}")
  endif()
  if(arg_LABELS)
    list(APPEND properties LABELS "${arg_LABELS}")
  endif()
  include(GoogleTest)
  gtest_discover_tests(${arg_NAME}_test TEST_PREFIX "${arg_NAME}." DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 60 PROPERTIES ${properties})
endfunction()

# hp_bench(<folder> SOURCES <files> [NAME <name>] [DEPS <folders>]): <name>_bench, and a test that
# `<name>_bench --smoke` works; its figures are not tested.
function(hp_bench folder)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;DEPS" ${ARGN})
  if(NOT HOTPLANE_BUILD_BENCH)
    return()
  endif()
  if(NOT arg_NAME)
    set(arg_NAME ${folder})
  endif()
  add_executable(${arg_NAME}_bench ${arg_SOURCES})
  hp_link(${arg_NAME}_bench ${folder} ${arg_DEPS})
  target_include_directories(${arg_NAME}_bench PRIVATE ${PROJECT_SOURCE_DIR})
  if(HOTPLANE_BUILD_TESTS)
    add_test(NAME bench.${arg_NAME} COMMAND ${arg_NAME}_bench --smoke)
    set_tests_properties(bench.${arg_NAME} PROPERTIES LABELS plain_build_only TIMEOUT 300)
  endif()
endfunction()

# hp_fuzz(<folder> NAME <name> SOURCES <files> [DEPS <folders>]): <name>_fuzz with libFuzzer. The
# test runs it over fuzz/corpus/<name> and a few seconds on; what it finds stays in the build
# folder.
function(hp_fuzz folder)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;DEPS" ${ARGN})
  if(NOT HOTPLANE_BUILD_FUZZ)
    return()
  endif()
  add_executable(${arg_NAME}_fuzz ${arg_SOURCES})
  hp_link(${arg_NAME}_fuzz ${folder} ${arg_DEPS})
  target_link_options(${arg_NAME}_fuzz PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzzers ${arg_NAME}_fuzz)
  set(found "${PROJECT_BINARY_DIR}/fuzz/${arg_NAME}")
  file(MAKE_DIRECTORY "${found}")
  set(corpus "${PROJECT_SOURCE_DIR}/fuzz/corpus/${arg_NAME}")
  if(NOT IS_DIRECTORY "${corpus}")
    message(FATAL_ERROR "${arg_NAME}_fuzz has no seed corpus: expected ${corpus}")
  endif()
  add_test(NAME fuzz.${arg_NAME} COMMAND ${arg_NAME}_fuzz -max_total_time=10 -timeout=10
    -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=${found}/ "${found}" "${corpus}")
  set_tests_properties(fuzz.${arg_NAME} PROPERTIES LABELS fuzz TIMEOUT 120)
endfunction()
