// The C API under hostile use, and from several threads. What its bytes must be is checked by the C
// program of tests/capi.
#include <gtest/gtest.h>
#include <hotplane/hotplane.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <hotplane/engine.hpp>
#include <thread>

#include "capi/api_words.h"
#include "checkpoint/synth_checkpoint.h"
#include "engine/synth.h"
#include "io/test_directory.h"
#include "store/store.h"

namespace {

using hotplane::Encoding;

class CapiTest : public testing::Test {
 protected:
  void SetUp() override {
    hotplane::SynthStoreOptions options;
    options.geometry = {.experts = 4, .hidden = 128, .intermediate = 64};
    options.layers = 3;
    options.encodings = {Encoding::kBase, Encoding::kDeltaQuintal};
    options.worker_count = 1;
    const auto made = hotplane::SynthStore(hotplane::PosixEnv(), store_, options);
    ASSERT_TRUE(made.has_value()) << made.error().ToString();
    generation_ = made->generation;
  }

  std::string PathOf(const std::string& file) const {
    return store_ + "/" + generation_ + "/" + file;
  }
  // Changes two bytes of the first chunk of the data region.
  static void Damage(const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (const int offset : {8192 + 5, 8192 + 77}) {
      file.seekg(offset);
      const int byte = file.get();
      file.seekp(offset);
      file.put(static_cast<char>(byte ^ 1));
    }
    ASSERT_TRUE(file.good());
  }
  hotplane_engine* Open(const hotplane_boot_options* options = nullptr) const {
    hotplane_engine* engine = nullptr;
    EXPECT_EQ(hotplane_open(store_.c_str(), options, &engine), HOTPLANE_OK)
        << hotplane_last_error();
    return engine;
  }

  const hotplane::TestDirectory directory_;
  const std::string store_ = directory_.path() + "/store";
  std::string generation_;
};

hotplane_boot_options Options() {
  hotplane_boot_options options;
  hotplane_boot_options_init(&options);
  return options;
}

TEST(ApiWords, OptionsAreArgumentsAndCommandsAreCalls) {
  using hotplane::capi::InApiWords;
  const std::pair<const char*, const char*> kCases[] = {
      {"", ""},
      {"free space, or another folder", "free space, or another folder"},
      {"--map serves them from the page cache; or boot fewer --layers",
       "`map` serves them from the page cache; or boot fewer `layers`"},
      {"--base auto keeps it on the host; or lower --reserve",
       "the residency auto keeps it on the host; or lower `reserve_bytes`"},
      {"--layers-geometry takes --layers", "`layers_geometry` takes `layers`"},
      {"--staging-limit 12M or more", "`staging_limit_bytes` 12M or more"},
      {"choose one with --generation PREFIX, and its rank with --rank",
       "choose one with `generation`, and its rank with `rank`"},
      {"--layers-of", "--layers-of"},
      {"/data/--layers", "/data/--layers"},
      {"build one: hotplane build CHECKPOINT --store DIR", "build one: build(CHECKPOINT, DIR)"},
      {"build them: `hotplane build /m x --store DIR`; or not",
       "build them: `build(/m x, DIR)`; or not"},
      {"`hotplane build /m` into a store", "`build(/m, ...)` into a store"},
      {"run `hotplane build` with it", "run `build` with it"},
      {"`hotplane build --tp W` makes a store", "`build(..., world=W)` makes a store"},
      {"`hotplane boot --checkpoint CHECKPOINT` builds", "`boot(..., checkpoint)` builds"},
      {"run `hotplane verify` on the store", "run `hotplane verify` on the store"},
      {"a store: hotplane import --planes-cache /c --layers-geometry GEOMETRY STORE",
       "a store: import_planes_cache(/c, STORE, GEOMETRY)"},
  };
  for (const auto& [text, words] : kCases) EXPECT_EQ(InApiWords(text), words);
}

TEST_F(CapiTest, ErrorsAdviseArgumentsAndFunctions) {
  const auto told = [](hotplane_code code) {
    hotplane_error error;
    hotplane_error_init(&error);
    EXPECT_EQ(hotplane_get_last_error(&error), HOTPLANE_OK);
    EXPECT_EQ(error.code, code);
    const std::string text = hotplane_last_error();
    EXPECT_EQ(text.find(" --"), std::string::npos) << text;
    EXPECT_NE(text.find(error.advice), std::string::npos);
    return std::string(error.expected) + "|" + error.advice;
  };
  hotplane_engine* engine = nullptr;
  hotplane_boot_options options = Options();
  const std::string nowhere = directory_.path() + "/nowhere";
  EXPECT_EQ(hotplane_boot(nowhere.c_str(), &options, &engine), HOTPLANE_USAGE);
  EXPECT_NE(told(HOTPLANE_USAGE).find("build(CHECKPOINT, DIR)"), std::string::npos);
  options.map = 1;
  options.base_residency = HOTPLANE_RESIDENCY_DEVICE;
  EXPECT_EQ(hotplane_boot(store_.c_str(), &options, &engine), HOTPLANE_USAGE);
  EXPECT_NE(told(HOTPLANE_USAGE).find("leave out `map`"), std::string::npos);
  options = Options();
  options.rank = 1;
  EXPECT_EQ(hotplane_boot(store_.c_str(), &options, &engine), HOTPLANE_USAGE);
  EXPECT_NE(told(HOTPLANE_USAGE).find("no `rank`|"), std::string::npos);
  options = Options();
  options.memory_bytes = 1;
  options.base_residency = HOTPLANE_RESIDENCY_DEVICE;
  EXPECT_EQ(hotplane_boot(store_.c_str(), &options, &engine), HOTPLANE_CAPACITY);
  EXPECT_NE(told(HOTPLANE_CAPACITY).find("boot fewer `layers`"), std::string::npos);
  ASSERT_EQ(std::remove(PathOf("layer-0001.base").c_str()), 0);
  options = Options();
  EXPECT_EQ(hotplane_boot(store_.c_str(), &options, &engine), HOTPLANE_DATA);
  EXPECT_NE(told(HOTPLANE_DATA).find("`checkpoint` builds what is missing"), std::string::npos);
}

TEST_F(CapiTest, NullsAreWrongUsageNotCrashes) {
  hotplane_engine* engine = Open();
  hotplane_engine* other = engine;
  hotplane_layer layer;
  hotplane_layer_init(&layer);
  size_t size = 0;
  hotplane_record* record = nullptr;
  const uint32_t expert = 0;
  void* destination = nullptr;
  char buffer[8];
  const hotplane_code codes[] = {
      hotplane_open(nullptr, nullptr, &other),
      hotplane_open(store_.c_str(), nullptr, nullptr),
      hotplane_boot(nullptr, nullptr, nullptr),
      hotplane_start(nullptr),
      hotplane_wait(nullptr),
      hotplane_wait_layer(nullptr, 0, &layer),
      hotplane_wait_layer(engine, 0, nullptr),
      hotplane_get_layer(nullptr, 0, &layer),
      hotplane_get_layer(engine, 0, nullptr),
      hotplane_get_last_error(nullptr),
      hotplane_describe(nullptr, nullptr),
      hotplane_describe(engine, nullptr),
      hotplane_describe_layer(nullptr, 0, nullptr),
      hotplane_describe_layer(engine, 0, nullptr),
      hotplane_record_bytes(nullptr, HOTPLANE_BASE, 0, &size),
      hotplane_record_bytes(engine, HOTPLANE_BASE, 0, nullptr),
      hotplane_read_record(nullptr, HOTPLANE_BASE, 0, 0, buffer, 8),
      hotplane_read_record(engine, HOTPLANE_BASE, 0, 0, nullptr, 8),
      hotplane_read_records(engine, HOTPLANE_BASE, 0, nullptr, nullptr, 1, 8),
      hotplane_read_records(engine, HOTPLANE_BASE, 0, &expert, &destination, 1, 8),
      hotplane_record_get(nullptr, HOTPLANE_BASE, 0, 0, 0, &record),
      hotplane_record_get(engine, HOTPLANE_BASE, 0, 0, 0, nullptr),
      hotplane_record_look(nullptr, nullptr),
      hotplane_prefetch(nullptr, HOTPLANE_BASE, 0, &expert, 1, nullptr),
      hotplane_prefetch(engine, HOTPLANE_BASE, 0, nullptr, 1, nullptr),
      hotplane_get_cache_stats(engine, HOTPLANE_BASE, nullptr),
      hotplane_get_cache_stats(nullptr, HOTPLANE_BASE, nullptr),
  };
  for (size_t i = 0; i < std::size(codes); ++i) EXPECT_EQ(codes[i], HOTPLANE_USAGE) << i;
  EXPECT_EQ(other, nullptr);
  EXPECT_EQ(hotplane_layer_count(nullptr), 0u);
  EXPECT_STREQ(hotplane_stats_json(nullptr), "{}");
  hotplane_layer_init(nullptr);
  hotplane_boot_options_init(nullptr);
  hotplane_record_release(nullptr);
  hotplane_close(nullptr);
  hotplane_close_at(nullptr);
  hotplane_close_at(&engine);
  EXPECT_EQ(engine, nullptr);
  hotplane_close_at(&engine);
}

TEST_F(CapiTest, StructsOfOtherSizesAreRefusedOrFilledAsFarAsTheyGo) {
  hotplane_boot_options options = Options();
  const size_t first_version = offsetof(hotplane_boot_options, delta_cache_bytes);
  for (const size_t bytes : {size_t{0}, size_t{7}, sizeof(size_t), sizeof(size_t) + 4,
                             first_version - 1, first_version + 1, sizeof(options) + 8, SIZE_MAX}) {
    options.struct_bytes = bytes;
    hotplane_engine* engine = nullptr;
    EXPECT_EQ(hotplane_open(store_.c_str(), &options, &engine), HOTPLANE_USAGE) << bytes;
    EXPECT_EQ(engine, nullptr);
  }
  options.struct_bytes = first_version;
  options.delta_cache_bytes = 1;  // beyond the caller's struct: not looked at
  hotplane_engine* engine = Open(&options);
  ASSERT_EQ(hotplane_start(engine), HOTPLANE_OK);
  ASSERT_EQ(hotplane_wait(engine), HOTPLANE_OK);

  hotplane_layer layer;
  std::memset(&layer, 0x5a, sizeof(layer));
  for (const size_t bytes : {size_t{0}, size_t{8}, offsetof(hotplane_layer, sc2_bytes), SIZE_MAX}) {
    layer.struct_bytes = bytes;
    EXPECT_EQ(hotplane_get_layer(engine, 0, &layer), HOTPLANE_USAGE) << bytes;
    EXPECT_EQ(layer.experts, 0x5a5a5a5au);
  }
  layer.struct_bytes = offsetof(hotplane_layer, planes13_stride);
  EXPECT_EQ(hotplane_get_layer(engine, 0, &layer), HOTPLANE_OK);
  EXPECT_EQ(layer.experts, 4u);
  EXPECT_EQ(layer.sc2_offset, 0x5a5a5a5a5a5a5a5au);

  hotplane_store store;
  store.struct_bytes = 3;
  EXPECT_EQ(hotplane_describe(engine, &store), HOTPLANE_USAGE);
  hotplane_close(engine);
}

TEST_F(CapiTest, WhatTheStoreDoesNotHaveIsWrongUsage) {
  hotplane_engine* engine = Open();
  hotplane_layer_info info;
  hotplane_layer_info_init(&info);
  EXPECT_EQ(hotplane_describe_layer(engine, 3, &info), HOTPLANE_USAGE);
  size_t bytes = 77;
  EXPECT_EQ(hotplane_record_bytes(engine, HOTPLANE_DELTA, UINT32_MAX, &bytes), HOTPLANE_USAGE);
  // 0 is no kind, and what a forgotten initialization gives.
  EXPECT_EQ(hotplane_record_bytes(engine, hotplane_kind{}, 0, &bytes), HOTPLANE_USAGE);
  EXPECT_EQ(bytes, 77u);
  ASSERT_EQ(hotplane_record_bytes(engine, HOTPLANE_DELTA, 0, &bytes), HOTPLANE_OK);
  std::vector<char> buffer(bytes + 1);
  EXPECT_EQ(hotplane_read_record(engine, HOTPLANE_DELTA, 0, 4, buffer.data(), bytes),
            HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_read_record(engine, HOTPLANE_DELTA, 0, 0, buffer.data(), bytes + 1),
            HOTPLANE_USAGE);
  hotplane_record* record = nullptr;
  EXPECT_EQ(hotplane_record_get(engine, HOTPLANE_DELTA, 3, 0, 0, &record), HOTPLANE_USAGE);
  EXPECT_EQ(record, nullptr);
  const uint32_t experts[] = {1, 4};
  EXPECT_EQ(hotplane_prefetch(engine, HOTPLANE_DELTA, 0, experts, 2, &bytes), HOTPLANE_USAGE);
  hotplane_layer layer;
  hotplane_layer_init(&layer);
  EXPECT_EQ(hotplane_wait(engine), HOTPLANE_USAGE);  // none was started: no endless wait
  EXPECT_EQ(hotplane_wait_layer(engine, 0, &layer), HOTPLANE_USAGE);
  ASSERT_EQ(hotplane_start(engine), HOTPLANE_OK);
  EXPECT_EQ(hotplane_start(engine), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_wait_layer(engine, 3, &layer), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_get_layer(engine, 3, &layer), HOTPLANE_USAGE);
  hotplane_close(engine);
}

TEST_F(CapiTest, AnErrorIsToldByField) {
  hotplane_engine* engine = nullptr;
  EXPECT_EQ(hotplane_open((store_ + "/none").c_str(), nullptr, &engine), HOTPLANE_USAGE);
  EXPECT_EQ(engine, nullptr);

  engine = Open();
  size_t bytes = 0;
  ASSERT_EQ(hotplane_record_bytes(engine, HOTPLANE_DELTA, 1, &bytes), HOTPLANE_OK);
  std::vector<char> buffer(bytes);
  EXPECT_EQ(hotplane_read_record(engine, HOTPLANE_DELTA, 1, 0, buffer.data(), bytes), HOTPLANE_OK);
  Damage(PathOf("layer-0001.delta-quintal"));
  ASSERT_EQ(hotplane_read_record(engine, HOTPLANE_DELTA, 1, 0, buffer.data(), bytes),
            HOTPLANE_DATA);
  hotplane_error error;
  hotplane_error_init(&error);
  ASSERT_EQ(hotplane_get_last_error(&error), HOTPLANE_OK);
  EXPECT_EQ(error.code, HOTPLANE_DATA);
  EXPECT_EQ(error.file, PathOf("layer-0001.delta-quintal"));
  EXPECT_EQ(error.has_offset, 1);
  EXPECT_EQ(error.offset, 8192u);
  EXPECT_NE(std::strstr(error.what, "layer 1, section fp13, expert 0"), nullptr);
  EXPECT_NE(std::strstr(error.expected, "xxh3-64"), nullptr);
  EXPECT_NE(std::strstr(error.found, "xxh3-64"), nullptr);
  EXPECT_STRNE(error.advice, "");
  EXPECT_NE(std::strstr(hotplane_last_error(), error.what), nullptr);
  // Another thread has not failed.
  std::thread([] {
    hotplane_error other;
    hotplane_error_init(&other);
    EXPECT_EQ(hotplane_get_last_error(&other), HOTPLANE_OK);
    EXPECT_EQ(other.code, HOTPLANE_OK);
    EXPECT_STREQ(other.what, "");
  }).join();
  // The others of the layer, and other layers, go on.
  EXPECT_EQ(hotplane_read_record(engine, HOTPLANE_DELTA, 1, 1, buffer.data(), bytes), HOTPLANE_OK);
  EXPECT_EQ(hotplane_read_record(engine, HOTPLANE_DELTA, 0, 0, buffer.data(), bytes), HOTPLANE_OK);
  hotplane_close(engine);
}

TEST_F(CapiTest, CallsAfterAFailedBoot) {
  Damage(PathOf("layer-0002.base"));
  hotplane_boot_options options = Options();
  options.workers = 1;
  hotplane_engine* engine = Open(&options);
  ASSERT_EQ(hotplane_start(engine), HOTPLANE_OK);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(hotplane_wait(engine), HOTPLANE_DATA);
    EXPECT_NE(std::strstr(hotplane_last_error(), "layer-0002.base"), nullptr);
  }
  hotplane_layer layer;
  hotplane_layer_init(&layer);
  EXPECT_EQ(hotplane_wait_layer(engine, 2, &layer), HOTPLANE_DATA);
  EXPECT_EQ(hotplane_start(engine), HOTPLANE_USAGE);
  EXPECT_STREQ(hotplane_stats_json(engine), "{}");
  // What was published stays, and so do the records of sound layers.
  const uint32_t published = hotplane_layer_count(engine);
  EXPECT_LT(published, 3u);
  for (uint32_t i = 0; i < published; ++i)
    EXPECT_EQ(hotplane_wait_layer(engine, i, &layer), HOTPLANE_OK);
  hotplane_record* record = nullptr;
  EXPECT_EQ(hotplane_record_get(engine, HOTPLANE_FULL, 0, 1, 0, &record), HOTPLANE_OK);
  hotplane_record_release(record);
  hotplane_close(engine);

  EXPECT_EQ(hotplane_boot(store_.c_str(), nullptr, &engine), HOTPLANE_DATA);
  EXPECT_EQ(engine, nullptr);
}

TEST_F(CapiTest, EnginesBootSideBySideFromSeveralThreads) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::atomic<uint32_t> called{0};
      hotplane_boot_options options = Options();
      options.map = t % 2;
      options.workers = 2;
      options.user = &called;
      options.on_layer = [](void* user, const hotplane_layer* layer) {
        auto& count = *static_cast<std::atomic<uint32_t>*>(user);
        if (layer->ordinal == count.load()) ++count;
      };
      hotplane_engine* engine = nullptr;
      if (hotplane_boot(store_.c_str(), &options, &engine) != HOTPLANE_OK) ++wrong;
      if (called.load() != 3 || hotplane_layer_count(engine) != 3) ++wrong;
      size_t bytes = 0;
      (void)hotplane_record_bytes(engine, HOTPLANE_FULL, 1, &bytes);
      std::vector<char> record(bytes);
      if (hotplane_read_record(engine, HOTPLANE_FULL, 1, 2, record.data(), bytes) != HOTPLANE_OK)
        ++wrong;
      hotplane_close(engine);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(CapiTest, ManyThreadsUseOneEngineWhileItBoots) {
  hotplane_boot_options options = Options();
  options.full_cache_bytes = 3 * 128 * 64 * 3 / 2;
  hotplane_engine* engine = Open(&options);
  std::atomic<int> wrong{0};
  std::atomic<int> started{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      if (hotplane_start(engine) == HOTPLANE_OK) ++started;
      hotplane_layer layer;
      hotplane_layer_init(&layer);
      for (uint32_t i = 0; i < 3; ++i) {
        if (hotplane_wait_layer(engine, i, &layer) != HOTPLANE_OK || layer.ordinal != i) ++wrong;
        hotplane_record* record = nullptr;
        if (hotplane_record_get(engine, HOTPLANE_FULL, i, t, 0, &record) != HOTPLANE_OK) ++wrong;
        hotplane_record_release(record);
      }
      if (hotplane_wait(engine) != HOTPLANE_OK) ++wrong;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(started.load(), 1);
  hotplane_close(engine);
}

struct Reentrant {
  std::atomic<hotplane_engine*> engine{nullptr};
  std::atomic<hotplane_code> waited{HOTPLANE_OK};
  std::atomic<hotplane_code> read{HOTPLANE_SYSTEM};
  std::atomic<bool> close{false};
  std::atomic<bool> closed{false};
};

void OnLayer(void* user, const hotplane_layer* layer) {
  auto& self = *static_cast<Reentrant*>(user);
  while (self.engine.load() == nullptr) std::this_thread::yield();
  if (layer->ordinal != 0) return;
  hotplane_engine* const engine = self.engine.load();
  self.waited = hotplane_wait(engine);
  std::vector<char> first(3 * 128 * 64 / 2), second(first.size());
  void* destinations[] = {first.data(), second.data()};
  const uint32_t experts[] = {0, 1};
  self.read =
      hotplane_read_records(engine, HOTPLANE_FULL, 1, experts, destinations, 2, first.size());
  if (!self.close.load()) return;
  hotplane_close(engine);
  self.closed = true;
}

TEST_F(CapiTest, ACallbackReadsRecordsAndCannotWaitForItself) {
  // Static: a boot that its own callback closed ends when it likes.
  static Reentrant selves[2];
  for (const bool close : {false, true}) {
    Reentrant& self = selves[close ? 1 : 0];
    self.close = close;
    hotplane_boot_options options = Options();
    options.on_layer = &OnLayer;
    options.user = &self;
    hotplane_engine* engine = Open(&options);
    ASSERT_EQ(hotplane_start(engine), HOTPLANE_OK);
    self.engine = engine;
    if (close) {
      while (!self.closed.load()) std::this_thread::yield();
    } else {
      EXPECT_EQ(hotplane_wait(engine), HOTPLANE_OK);
      hotplane_close(engine);
    }
    EXPECT_EQ(self.waited.load(), HOTPLANE_USAGE);
    EXPECT_EQ(self.read.load(), HOTPLANE_OK);
  }
}

TEST_F(CapiTest, CloseEndsABootThatStillRuns) {
  for (int i = 0; i < 20; ++i) {
    hotplane_engine* engine = Open();
    ASSERT_EQ(hotplane_start(engine), HOTPLANE_OK);
    hotplane_close(engine);
  }
}

TEST_F(CapiTest, ACancelledBootIsInterruptedAndItsStoreStaysReadable) {
  hotplane_engine* engine = Open();
  hotplane_cancel(nullptr);
  hotplane_cancel(engine);
  ASSERT_EQ(hotplane_start(engine), HOTPLANE_OK);
  EXPECT_EQ(hotplane_wait(engine), HOTPLANE_INTERRUPTED) << hotplane_last_error();
  size_t bytes = 0;
  ASSERT_EQ(hotplane_record_bytes(engine, HOTPLANE_BASE, 0, &bytes), HOTPLANE_OK);
  std::vector<std::byte> record(bytes);
  EXPECT_EQ(hotplane_read_record(engine, HOTPLANE_BASE, 0, 0, record.data(), bytes), HOTPLANE_OK);
  hotplane_close(engine);
}

// DLPack 1.0, as its consumers declare it.
struct DlTensor {
  void* data;
  int32_t device_type, device_id, dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};
struct DlVersioned {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DlVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

TEST_F(CapiTest, ALayerIsATensorThatOutlivesTheEngine) {
  hotplane_engine* engine = nullptr;
  ASSERT_EQ(hotplane_boot(store_.c_str(), nullptr, &engine), HOTPLANE_OK);
  hotplane_layer layer;
  hotplane_layer_init(&layer);
  ASSERT_EQ(hotplane_get_layer(engine, 2, &layer), HOTPLANE_OK);
  void* made = nullptr;
  ASSERT_EQ(hotplane_layer_dlpack(engine, 2, HOTPLANE_SC13, 0, &made), HOTPLANE_OK);
  auto* const plain = static_cast<DlManaged*>(made);
  ASSERT_EQ(hotplane_layer_dlpack(engine, 2, HOTPLANE_PLANES2, 1, &made), HOTPLANE_OK);
  auto* const versioned = static_cast<DlVersioned*>(made);
  EXPECT_EQ(versioned->major, 1u);
  EXPECT_EQ(versioned->flags, 1u);
  EXPECT_EQ(plain->tensor.data, layer.sc13);
  EXPECT_EQ(versioned->tensor.data, layer.planes2);
  for (const DlTensor& tensor : {plain->tensor, versioned->tensor}) {
    EXPECT_EQ(tensor.device_type, 1);
    EXPECT_EQ(tensor.dimensions, 2);
    EXPECT_EQ(tensor.type_code, 1);
    EXPECT_EQ(tensor.type_bits, 8);
    EXPECT_EQ(tensor.type_lanes, 1);
    EXPECT_EQ(tensor.shape[0], 4);
    EXPECT_EQ(tensor.strides[0], tensor.shape[1]);
    EXPECT_EQ(tensor.strides[1], 1);
    EXPECT_EQ(tensor.byte_offset, 0u);
  }
  EXPECT_EQ(plain->tensor.shape[1], static_cast<int64_t>(layer.sc13_stride));
  EXPECT_EQ(versioned->tensor.shape[1], static_cast<int64_t>(layer.planes2_stride));
  for (const auto& [index, part] : {std::pair{3u, HOTPLANE_SC2},
                                    {0u, HOTPLANE_BIAS13},
                                    {0u, HOTPLANE_BIAS2},
                                    {0u, static_cast<hotplane_part>(7)}}) {
    EXPECT_EQ(hotplane_layer_dlpack(engine, index, part, 1, &made), HOTPLANE_USAGE) << part;
    EXPECT_EQ(made, nullptr);
  }
  EXPECT_EQ(hotplane_layer_dlpack(nullptr, 0, HOTPLANE_SC2, 1, &made), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_layer_dlpack(engine, 0, HOTPLANE_SC2, 1, nullptr), HOTPLANE_USAGE);
  const std::string before(static_cast<const char*>(layer.planes2), layer.planes2_bytes);
  hotplane_drop_capsule(engine);  // there is no Python here
  EXPECT_EQ(hotplane_owner_new(HOTPLANE_OWNED_TENSOR), nullptr);
  EXPECT_EQ(hotplane_owner_to_dlpack(engine), -1);
  hotplane_close(engine);
  std::thread([plain] { plain->deleter(plain); }).join();
  EXPECT_EQ(before, std::string(static_cast<const char*>(versioned->tensor.data), before.size()));
  versioned->deleter(versioned);
}

TEST_F(CapiTest, WhatIsForDevicesRefusesLayersOnTheHost) {
  hotplane_engine* engine = nullptr;
  ASSERT_EQ(hotplane_boot(store_.c_str(), nullptr, &engine), HOTPLANE_OK) << hotplane_last_error();
  hotplane_device_moe on_device;
  hotplane_device_moe_init(&on_device);
  hotplane_device_moe_init(nullptr);
  EXPECT_EQ(on_device.precision, HOTPLANE_PRECISION_BASE);
  EXPECT_EQ(on_device.arithmetic, HOTPLANE_FAST);
  EXPECT_EQ(hotplane_moe_forward_on_device(engine, &on_device), HOTPLANE_USAGE);
  EXPECT_NE(std::string(hotplane_last_error()).find("memory of the host"), std::string::npos);
  on_device.precision = 4;
  EXPECT_EQ(hotplane_moe_forward_on_device(engine, &on_device), HOTPLANE_USAGE);
  EXPECT_NE(std::string(hotplane_last_error()).find("precision"), std::string::npos);
  on_device.precision = HOTPLANE_PRECISION_BASE;
  on_device.arithmetic = 4;
  EXPECT_EQ(hotplane_moe_forward_on_device(engine, &on_device), HOTPLANE_USAGE);
  EXPECT_NE(std::string(hotplane_last_error()).find("arithmetic"), std::string::npos);
  on_device.struct_bytes = 8;
  EXPECT_EQ(hotplane_moe_forward_on_device(engine, &on_device), HOTPLANE_USAGE);
  EXPECT_NE(std::string(hotplane_last_error()).find("unknown size"), std::string::npos);
  size_t bytes = 0;
  EXPECT_EQ(hotplane_moe_workspace_bytes(engine, 0, 1, 1, &bytes), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_workspace_bytes(engine, 0, 1, 1, nullptr), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_workspace_bytes(nullptr, 0, 1, 1, &bytes), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_stream_wait_layer(engine, 0, nullptr), HOTPLANE_USAGE);
  EXPECT_NE(std::string(hotplane_last_error()).find("with a device"), std::string::npos);
  EXPECT_EQ(hotplane_stream_wait_layer(nullptr, 0, nullptr), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_refusal(engine, 0), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_refusal(nullptr, 0), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_load_fp4(engine, 0, nullptr, 0), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_load_fp4(engine, 0, nullptr, 1), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_load_fp4(nullptr, 0, nullptr, 0), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_forward_on_device(nullptr, &on_device), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_forward_on_device(engine, nullptr), HOTPLANE_USAGE);
  hotplane_close(engine);
}

TEST_F(CapiTest, TheOperatorTakesWhatIsRightAndRefusesTheRest) {
  hotplane_engine* engine = nullptr;
  ASSERT_EQ(hotplane_boot(store_.c_str(), nullptr, &engine), HOTPLANE_OK) << hotplane_last_error();
  std::vector<float> x(2 * 128, 0.5f), weights = {0.25f, 0.75f, 1, 0}, y(x.size(), -1.0f);
  std::vector<int32_t> ids = {0, 3, 1, 1};
  std::vector<uint8_t> precisions = {HOTPLANE_PRECISION_BASE, HOTPLANE_PRECISION_FP4,
                                     HOTPLANE_PRECISION_BASE, HOTPLANE_PRECISION_FP4};
  hotplane_moe call;
  hotplane_moe_init(&call);
  EXPECT_EQ(call.arithmetic, HOTPLANE_FAST);
  EXPECT_EQ(call.precision, HOTPLANE_PRECISION_BASE);
  call.token_count = 2;
  call.top_k = 2;
  call.x = x.data();
  call.ids = ids.data();
  call.weights = weights.data();
  call.precisions = precisions.data();
  call.y = y.data();
  ASSERT_EQ(hotplane_moe_forward(engine, &call), HOTPLANE_OK) << hotplane_last_error();
  const std::vector<float> mixed = y;
  // Token 1 is expert 1 at FP4 alone.
  call.precisions = nullptr;
  call.precision = HOTPLANE_PRECISION_FP4;
  ASSERT_EQ(hotplane_moe_forward(engine, &call), HOTPLANE_OK) << hotplane_last_error();
  EXPECT_TRUE(std::equal(y.begin() + 128, y.end(), mixed.begin() + 128));
  EXPECT_FALSE(std::equal(y.begin(), y.begin() + 128, mixed.begin()));

  const auto refused = [&](auto change, hotplane_code code, const char* text) {
    hotplane_moe other = call;
    change(other);
    EXPECT_EQ(hotplane_moe_forward(engine, &other), code) << text;
    EXPECT_NE(std::string(hotplane_last_error()).find(text), std::string::npos)
        << hotplane_last_error();
  };
  refused([](hotplane_moe& c) { c.struct_bytes = 8; }, HOTPLANE_USAGE, "unknown size");
  refused([](hotplane_moe& c) { c.arithmetic = 7; }, HOTPLANE_USAGE, "arithmetic");
  refused([](hotplane_moe& c) { c.precision = 0; }, HOTPLANE_USAGE, "precision");
  refused([](hotplane_moe& c) { c.precision = HOTPLANE_PRECISION_FP4_OR_BASE; }, HOTPLANE_USAGE,
          "base or FP4, where arrays are the host's");
  refused([](hotplane_moe& c) { c.layer = 3; }, HOTPLANE_USAGE, "layer 3 is not published");
  refused([](hotplane_moe& c) { c.x = nullptr; }, HOTPLANE_USAGE, "x is null");
  refused([](hotplane_moe& c) { c.ids = nullptr; }, HOTPLANE_USAGE, "ids is null");
  ids[3] = 4;
  refused([](hotplane_moe&) {}, HOTPLANE_USAGE, "ids [1, 1] is no expert of it");
  EXPECT_EQ(hotplane_moe_forward(nullptr, &call), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_moe_forward(engine, nullptr), HOTPLANE_USAGE);
  hotplane_moe_init(nullptr);

  hotplane_store store;
  hotplane_store_init(&store);
  ASSERT_EQ(hotplane_describe(engine, &store), HOTPLANE_OK);
  EXPECT_EQ(store.activation, HOTPLANE_SILU);
  hotplane_close(engine);

  ids[3] = 1;
  const std::vector<float> best = y;
  for (const char* isa : {"scalar", "mmx"}) {
    ASSERT_EQ(setenv("HOTPLANE_ISA", isa, 1), 0);
    ASSERT_EQ(hotplane_boot(store_.c_str(), nullptr, &engine), HOTPLANE_OK);
    ASSERT_EQ(unsetenv("HOTPLANE_ISA"), 0);
    const bool known = isa == std::string("scalar");
    EXPECT_EQ(hotplane_moe_forward(engine, &call), known ? HOTPLANE_OK : HOTPLANE_USAGE);
    if (!known) {
      const std::string text = hotplane_last_error();
      EXPECT_NE(text.find("HOTPLANE_ISA=mmx"), std::string::npos) << text;
      EXPECT_NE(text.find("unset it"), std::string::npos) << text;
    }
    EXPECT_EQ(y, best);
    hotplane_close(engine);
  }
}

// A checkpoint beside the store of the fixture.
class CapiBuildTest : public CapiTest {
 protected:
  void SetUp() override {
    hotplane::SynthCheckpointOptions options;
    options.geometry = {.experts = 4, .hidden = 128, .intermediate = 64};
    options.main_layers = 3;
    hotplane::WorkerPool pool(1);
    const auto made = hotplane::WriteSynthCheckpoint(hotplane::PosixEnv(), model_, options, pool);
    ASSERT_TRUE(made.has_value()) << made.error().ToString();
  }
  hotplane_boot_options FromModel() const {
    hotplane_boot_options options = Options();
    options.checkpoint = model_.c_str();
    return options;
  }
  const std::string model_ = directory_.path() + "/model";
};

TEST_F(CapiBuildTest, AFirstBootIsPlannedBuildsAndTheNextOneReads) {
  hotplane_boot_options options = FromModel();
  options.want_delta = 1;
  options.no_delta_layers = "1";
  options.delta_encoding = HOTPLANE_NIBBLES;
  hotplane_engine* engine = Open(&options);
  const char* json = nullptr;
  ASSERT_EQ(hotplane_plan_json(engine, &json), HOTPLANE_OK) << hotplane_last_error();
  const std::string plan = json;
  EXPECT_NE(plan.find("\"action\": \"build\""), std::string::npos) << plan;
  ASSERT_EQ(hotplane_plan_json(engine, &json), HOTPLANE_OK) << "the same, as often as asked";
  EXPECT_EQ(plan, json);
  ASSERT_EQ(hotplane_start(engine), HOTPLANE_OK);
  ASSERT_EQ(hotplane_wait(engine), HOTPLANE_OK) << hotplane_last_error();
  EXPECT_EQ(hotplane_layer_count(engine), 3u);
  for (uint32_t layer = 0; layer < 3; ++layer) {
    hotplane_layer_info info;
    hotplane_layer_info_init(&info);
    ASSERT_EQ(hotplane_describe_layer(engine, layer, &info), HOTPLANE_OK);
    EXPECT_EQ(info.base, HOTPLANE_PRESENT);
    EXPECT_EQ(info.delta, layer == 1 ? HOTPLANE_ABSENT : HOTPLANE_PRESENT);
    EXPECT_EQ(info.delta_encoding, layer == 1 ? 0 : HOTPLANE_NIBBLES);
  }
  hotplane_close(engine);

  options.no_build = 1;
  EXPECT_EQ(hotplane_open(store_.c_str(), &options, &engine), HOTPLANE_USAGE) << "both are given";
  options.checkpoint = nullptr;
  options.want_delta = 0;
  EXPECT_EQ(hotplane_open(store_.c_str(), &options, &engine), HOTPLANE_USAGE)
      << "layers of a tier that is not wanted";
  options.no_delta_layers = nullptr;
  options.first_expert = 1;
  EXPECT_EQ(hotplane_open(store_.c_str(), &options, &engine), HOTPLANE_USAGE) << "none of them";
  options.expert_count = 2;
  options.base_residency = HOTPLANE_RESIDENCY_DEVICE;
  options.cache = HOTPLANE_CACHE_KEEP;
  ASSERT_EQ(hotplane_boot(store_.c_str(), &options, &engine), HOTPLANE_OK) << hotplane_last_error();
  hotplane_layer layer;
  hotplane_layer_init(&layer);
  ASSERT_EQ(hotplane_get_layer(engine, 2, &layer), HOTPLANE_OK);
  EXPECT_EQ(layer.experts, 2u);
  EXPECT_EQ(hotplane_plan_json(engine, &json), HOTPLANE_USAGE) << "too late";
  hotplane_close(engine);
}

TEST_F(CapiBuildTest, AStoreIsBuiltReportedAndInterrupted) {
  const std::string store = directory_.path() + "/built";
  hotplane_build_options options;
  hotplane_build_options_init(&options);
  const char* report = nullptr;
  EXPECT_EQ(hotplane_build(nullptr, store.c_str(), nullptr, &report), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_build(model_.c_str(), nullptr, nullptr, &report), HOTPLANE_USAGE);
  EXPECT_STREQ(report, "{}");
  options.struct_bytes -= 1;
  EXPECT_EQ(hotplane_build(model_.c_str(), store.c_str(), &options, nullptr), HOTPLANE_USAGE);
  hotplane_build_options_init(&options);
  for (int* const field : {&options.delta_encoding, &options.zero_mode}) {
    *field = 9;
    EXPECT_EQ(hotplane_build(model_.c_str(), store.c_str(), &options, nullptr), HOTPLANE_USAGE);
    *field = 0;
  }
  options.base_only = 1;
  options.delta_encoding = HOTPLANE_NIBBLES;
  EXPECT_EQ(hotplane_build(model_.c_str(), store.c_str(), &options, nullptr), HOTPLANE_USAGE);
  options.delta_encoding = 0;
  options.device = "tpu";
  EXPECT_EQ(hotplane_build(model_.c_str(), store.c_str(), &options, nullptr), HOTPLANE_USAGE);
  // Of a caller of the first version, what is behind its struct is not read: the rest of this test.
  options.struct_bytes = offsetof(hotplane_build_options, device);

  std::atomic<int> answer = 1;
  options.user = &answer;
  options.on_progress = [](void* user, const hotplane_progress* progress) {
    EXPECT_EQ(progress->struct_bytes, sizeof(*progress));
    EXPECT_NE(progress->phase, nullptr);
    return static_cast<std::atomic<int>*>(user)->load();
  };
  EXPECT_EQ(hotplane_build(model_.c_str(), store.c_str(), &options, &report), HOTPLANE_INTERRUPTED);
  EXPECT_STREQ(report, "{}");
  answer = 0;
  ASSERT_EQ(hotplane_build(model_.c_str(), store.c_str(), &options, &report), HOTPLANE_OK)
      << hotplane_last_error();
  EXPECT_NE(std::string(report).find("\"layers_built\""), std::string::npos) << report;
  hotplane_engine* engine = nullptr;
  ASSERT_EQ(hotplane_open(store.c_str(), nullptr, &engine), HOTPLANE_OK);
  hotplane_layer_info info;
  hotplane_layer_info_init(&info);
  ASSERT_EQ(hotplane_describe_layer(engine, 0, &info), HOTPLANE_OK);
  EXPECT_EQ(info.base, HOTPLANE_PRESENT);
  EXPECT_EQ(info.delta, HOTPLANE_ABSENT);
  hotplane_close(engine);
}

TEST_F(CapiBuildTest, APlanesCacheIsImportedWithItsOptionsChecked) {
  const std::string cache = directory_.path() + "/cache";
  const std::string store = directory_.path() + "/imported";
  hotplane_import_options options;
  const char* report = nullptr;
  hotplane_import_options_init(nullptr);
  hotplane_import_options_init(&options);
  EXPECT_EQ(options.rank, -1);
  const auto import = [&] {
    return hotplane_import_planes_cache(cache.c_str(), store.c_str(), &options, &report);
  };
  EXPECT_EQ(import(), HOTPLANE_USAGE) << "no geometry";
  EXPECT_STREQ(report, "{}");
  options.layers_geometry = "2,64,64";
  EXPECT_EQ(import(), HOTPLANE_USAGE) << "no cache";
  EXPECT_NE(std::string(hotplane_last_error()).find("no planes cache here"), std::string::npos);
  options.base_only = options.move = 1;
  EXPECT_EQ(import(), HOTPLANE_USAGE);
  options.base_only = options.move = 0;
  options.rank = -2;
  EXPECT_EQ(import(), HOTPLANE_USAGE);
  options.rank = -1;
  for (const char** const field : {&options.layers_geometry, &options.mtp_layers}) {
    const char* const before = *field;
    *field = "nonsense";
    EXPECT_EQ(import(), HOTPLANE_USAGE);
    *field = before;
  }
  options.config = cache.c_str();
  EXPECT_NE(import(), HOTPLANE_OK);
  options.config = nullptr;
  options.on_progress = [](void*, const hotplane_progress*) { return 1; };
  EXPECT_EQ(import(), HOTPLANE_INTERRUPTED);
  options.struct_bytes -= 1;
  EXPECT_EQ(import(), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_import_planes_cache(nullptr, store.c_str(), nullptr, nullptr), HOTPLANE_USAGE);
  EXPECT_EQ(hotplane_import_planes_cache(cache.c_str(), nullptr, nullptr, nullptr), HOTPLANE_USAGE);
}

TEST_F(CapiBuildTest, WhatDoesNotFitOrIsMissingEndsInThePlan) {
  hotplane_engine* engine = nullptr;
  hotplane_boot_options options = FromModel();
  ASSERT_EQ(hotplane_boot(store_.c_str(), &options, &engine), HOTPLANE_OK) << hotplane_last_error();
  hotplane_close(engine);
  const char* json = nullptr;
  options = Options();
  options.base_residency = HOTPLANE_RESIDENCY_DEVICE;
  options.memory_bytes = 4096;
  engine = Open(&options);
  EXPECT_EQ(hotplane_plan_json(engine, &json), HOTPLANE_CAPACITY);
  hotplane_close(engine);
  options = Options();
  options.want_delta = 1;
  options.no_build = 1;
  engine = Open(&options);
  EXPECT_EQ(hotplane_plan_json(engine, &json), HOTPLANE_DATA) << "the delta tier is absent";
  EXPECT_STREQ(json, "{}");
  hotplane_close(engine);
}

TEST_F(CapiBuildTest, UnknownEnumeratorsAreRefusedByName) {
  const auto refused = [this](const char* field, hotplane_boot_options options) {
    hotplane_engine* engine = nullptr;
    EXPECT_EQ(hotplane_open(store_.c_str(), &options, &engine), HOTPLANE_USAGE);
    EXPECT_NE(std::string(hotplane_last_error()).find(field), std::string::npos)
        << hotplane_last_error();
  };
  hotplane_boot_options options = FromModel();
  options.delta_encoding = HOTPLANE_BASE_PLANES;
  refused("delta_encoding", options);
  options = FromModel();
  options.base_residency = 7;
  refused("base_residency", options);
  options = FromModel();
  options.cache = 7;
  refused("cache", options);
  options = FromModel();
  options.first_expert = 2;
  options.expert_count = UINT32_MAX;
  refused("experts", options);
}

TEST_F(CapiBuildTest, ARankIsAskedForOrComesFromTheLauncher) {
  hotplane::SynthCheckpointOptions wide;
  wide.geometry = {.experts = 2, .hidden = 64, .intermediate = 128};
  hotplane::WorkerPool pool(1);
  const std::string model = directory_.path() + "/wide";
  const std::string store = directory_.path() + "/ranks";
  ASSERT_TRUE(hotplane::WriteSynthCheckpoint(hotplane::PosixEnv(), model, wide, pool).has_value());
  hotplane_boot_options options = Options();
  options.checkpoint = model.c_str();
  options.world = 2;
  hotplane_engine* engine = nullptr;
  for (options.rank = 0; options.rank < 2; ++options.rank) {
    ASSERT_EQ(hotplane_boot(store.c_str(), &options, &engine), HOTPLANE_OK)
        << hotplane_last_error();
    hotplane_store described;
    hotplane_store_init(&described);
    ASSERT_EQ(hotplane_describe(engine, &described), HOTPLANE_OK);
    EXPECT_EQ(described.rank, static_cast<uint32_t>(options.rank));
    EXPECT_EQ(described.world, 2u);
    hotplane_layer layer;
    hotplane_layer_init(&layer);
    ASSERT_EQ(hotplane_get_layer(engine, 0, &layer), HOTPLANE_OK);
    EXPECT_EQ(layer.intermediate, 64u);
    EXPECT_EQ(layer.planes13_bytes, 2u * (2 * 64 * 64 / 4));
    hotplane_layer_info info;
    hotplane_layer_info_init(&info);
    ASSERT_EQ(hotplane_describe_layer(engine, 0, &info), HOTPLANE_OK);
    EXPECT_EQ(info.intermediate, 64u);
    EXPECT_EQ(info.base, HOTPLANE_PRESENT);
    hotplane_close(engine);
  }
  options = Options();
  for (const int32_t rank : {-2, 2, INT32_MAX}) {
    options.rank = rank;
    EXPECT_EQ(hotplane_open(store.c_str(), &options, &engine), HOTPLANE_USAGE) << rank;
  }
  options.rank = 1;
  options.world = 3;
  EXPECT_EQ(hotplane_open(store.c_str(), &options, &engine), HOTPLANE_USAGE);
  setenv("RANK", "1", 1);
  setenv("WORLD_SIZE", "2", 1);
  const auto opened = hotplane::api::Engine::Open(store);
  hotplane::api::BootOptions first;
  first.rank = 0;
  const auto other = hotplane::api::Engine::Open(store, first);
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  ASSERT_TRUE(opened.has_value() && other.has_value());
  EXPECT_EQ(opened->Describe()->rank, 1u);
  EXPECT_EQ(other->Describe()->rank, 0u);
}

TEST_F(CapiTest, TheCppApiWrapsAllOfIt) {
  namespace api = hotplane::api;
  EXPECT_EQ(api::Engine::Open(store_ + "/none").error().code, HOTPLANE_USAGE);
  uint32_t called = 0;
  api::BootOptions options;
  options.delta_cache_bytes = 1 << 20;
  options.on_layer = [&](const hotplane_layer&) { ++called; };
  api::Engine opened = *api::Engine::Open(store_, options);
  api::Engine engine = std::move(opened);
  EXPECT_EQ(engine.Describe()->layer_count, 3u);
  EXPECT_EQ(engine.Describe()->generation, generation_);
  EXPECT_EQ(engine.DescribeLayers()->at(2).delta, HOTPLANE_PRESENT);
  EXPECT_EQ(engine.WaitLayer(0).error().code, HOTPLANE_USAGE);
  EXPECT_NE(engine.PlanJson()->find("\"actions\""), std::string::npos);
  ASSERT_TRUE(engine.Start().has_value());
  EXPECT_EQ(engine.WaitLayer(2)->ordinal, 2u);
  ASSERT_TRUE(engine.Wait().has_value());
  EXPECT_EQ(called, 3u);
  EXPECT_EQ(engine.Layers().size(), 3u);
  const std::vector<std::byte> read = engine.ReadRecord(HOTPLANE_DELTA, 1, 3).value();
  std::vector<std::byte> batched(read.size());
  ASSERT_TRUE(engine.ReadRecords(HOTPLANE_DELTA, 1, {3}, {batched.data()}).has_value());
  EXPECT_EQ(read, batched);
  EXPECT_FALSE(engine.ReadRecords(HOTPLANE_DELTA, 1, {3, 2}, {batched.data()}).has_value());
  EXPECT_EQ(engine.Prefetch(HOTPLANE_DELTA, 1, {0, 1, 2, 3}).value(), 4u);
  const api::Record record = engine.GetRecord(HOTPLANE_DELTA, 1, 3).value();
  const hotplane_record_view view = record.View();
  EXPECT_EQ(std::memcmp(view.parts[0], read.data(), view.part_bytes[0]), 0);
  EXPECT_EQ(engine.CacheStats(HOTPLANE_DELTA).hits, 1u);
  EXPECT_EQ(engine.GetRecord(HOTPLANE_DELTA, 1, 4).error().code, HOTPLANE_USAGE);
}

}  // namespace
