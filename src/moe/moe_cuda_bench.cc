// The operator on a GPU beside the rate at which the same run reads device memory. Routing is
// uniform and random; calls rotate over layers, so that no weight is met in a cache. A graph of
// many calls is timed, five times: medians.
//
// --shared: few assignments have no blocks of their own either.
//
// Quintals are random valid words: the digits of random codes.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <set>
#include <string>

#include "base/format_text.h"
#include "base/result_file.h"
#include "moe/moe_cuda_testing.h"

namespace hotplane {

extern const unsigned char kMoeCudaBenchImage[];

namespace {

using namespace moe_cuda;
using namespace moe_cuda_testing;

struct Shape {
  const char* name;
  LayerGeometry geometry;
  uint32_t top_k;
  Activation activation;
};
constexpr Activation kSilu = {ActivationKind::kSiluGated, 0, 0};
constexpr Shape kShapes[] = {
    {"ds4-flash", {256, 4096, 2048}, 6, {ActivationKind::kSiluGatedClamped, 10, 0}},
    {"glm-5.2", {256, 6144, 2048}, 8, kSilu},
    {"kimi-k2", {384, 7168, 2048}, 8, kSilu},
    {"gpt-oss-120b", {128, 2880, 2880, true}, 4, {ActivationKind::kSwigluOai, 7, 1.702}},
    {"qwen3-30b", {128, 2048, 768}, 8, kSilu},
};

struct Options {
  bool smoke = false;
  bool fp8 = false;       // activations
  std::string shape;      // empty: all
  std::string precision;  // empty: all
  std::string json_path;
  CudaMoeKernels kernels;
  uint64_t memory = uint64_t{48} << 30;  // of planes at most
  std::vector<uint32_t> tokens = {1, 2, 4, 8, 16, 32, 128, 1024, 4096};
};

#define CHECK_CUDA(call) HP_CHECK((call) == CUDA_SUCCESS)

enum class Kind { kBase, kNibbles, kQuintals, kHalf };
constexpr struct {
  const char* name;
  Kind kind;
} kKinds[] = {{"base", Kind::kBase},
              {"fp4-nibbles", Kind::kNibbles},
              {"fp4-quintals", Kind::kQuintals},
              {"half-fp4", Kind::kHalf}};

uint64_t ExpertBytes(const LayerGeometry& g, Kind kind, bool fp4) {
  const uint64_t elements = g.n13() * g.k13() + g.n2() * g.k2();
  const uint64_t scales = elements / 32;
  if (kind == Kind::kBase || (kind == Kind::kHalf && !fp4)) return scales + elements / 4;
  if (kind == Kind::kQuintals) return scales + elements / 4 + elements / 16 * 5;
  return scales + elements / 2;
}

class Bench {
 public:
  Bench(Gpu& gpu, CudaMoe& moe, const Options& options) : gpu_(gpu), moe_(moe), options_(options) {
    CHECK_CUDA(gpu.driver.cuModuleLoadData(&module_, kMoeCudaBenchImage));
    CHECK_CUDA(gpu.driver.cuModuleGetFunction(&read_, module_, "hotplane_bench_read"));
    CHECK_CUDA(gpu.driver.cuModuleGetFunction(&fill_, module_, "hotplane_bench_fill"));
    CHECK_CUDA(gpu.driver.cuEventCreate(&start_, CU_EVENT_DEFAULT));
    CHECK_CUDA(gpu.driver.cuEventCreate(&end_, CU_EVENT_DEFAULT));
  }

  void Run(const Shape& shape) {
    MakeLayers(shape.geometry);
    const double limit = ReadRate();
    std::printf(
        "%s: E=%u H=%u I=%u top %u, %zu layers, memory is read at %.0f GB/s, prefill by %s, "
        "of few by %s\n",
        shape.name, shape.geometry.experts, shape.geometry.hidden, shape.geometry.intermediate,
        shape.top_k, layers_, limit / 1e9, NameOf(moe_.prefill()), NameOf(moe_.prefill_of_few()));
    std::printf("  %-13s %6s %10s %10s %9s %7s %8s\n", "precision", "tokens", "us", "MB", "GB/s",
                "share", "TFLOP/s");
    for (const auto& kind : kKinds) {
      if (!options_.precision.empty() && options_.precision != kind.name) continue;
      for (const uint32_t tokens : options_.tokens)
        Measure(shape, kind.kind, kind.name, tokens, limit);
    }
  }

  std::string json() const { return "[" + json_ + "\n]\n"; }

 private:
  void Fill(const Buffer& buffer, bool scales) {
    CUdeviceptr at = buffer.address();
    uint64_t count = buffer.bytes() / 4;
    uint32_t as_scales = scales ? 1 : 0;
    void* arguments[] = {&at, &count, &as_scales};
    CHECK_CUDA(gpu_.driver.cuLaunchKernel(fill_, 2048, 1, 1, 256, 1, 1, 0, gpu_.stream, arguments,
                                          nullptr));
    CHECK_CUDA(gpu_.Wait());
  }

  // As many layers as the memory allows, at most 16. Each kind of part is one buffer over all
  // layers; quintals stand in for nibbles' bytes, words above 624 are no harm to the time.
  void MakeLayers(const LayerGeometry& g) {
    const uint64_t elements = g.n13() * g.k13() + g.n2() * g.k2();
    const uint64_t of_layer = elements * g.experts;
    layers_ = std::clamp<size_t>(options_.memory / (of_layer * 35 / 32), 1, 16);
    codes_ = Buffer(gpu_, of_layer / 4 * layers_);
    scales_ = Buffer(gpu_, of_layer / 32 * layers_);
    nibbles_ = Buffer(gpu_, of_layer / 2 * layers_);
    quintals_ = Buffer(gpu_, of_layer / 16 * 5 * layers_);
    biases_ = Buffer(gpu_, (g.n13() + g.n2()) * g.experts * sizeof(float));
    Fill(codes_, false);
    Fill(scales_, true);
    Fill(nibbles_, false);
    Fill(quintals_, false);
    CHECK_CUDA(gpu_.driver.cuMemsetD8(biases_.address(), 0, biases_.bytes()));
    std::vector<ExpertSlot> slots[2];
    for (size_t i = 0; i < layers_ * g.experts; ++i) {
      ExpertSlot slot = {};
      const uint64_t at = i * elements, w13 = g.n13() * g.k13();
      slot.planes13 = codes_.as<uint8_t>() + at / 4;
      slot.planes2 = slot.planes13 + w13 / 4;
      slot.sc13 = scales_.as<uint8_t>() + at / 32;
      slot.sc2 = slot.sc13 + w13 / 32;
      slot.fp13 = nibbles_.as<uint8_t>() + at / 2;
      slot.fp2 = slot.fp13 + w13 / 2;
      slot.bias13 = biases_.as<float>() + i % g.experts * (g.n13() + g.n2());
      slot.bias2 = slot.bias13 + g.n13();
      slots[0].push_back(slot);
      slot.fp13 = quintals_.as<uint8_t>() + at / 16 * 5;
      slot.fp2 = slot.fp13 + w13 / 16 * 5;
      slot.fp_quintals = 1;
      slots[1].push_back(slot);
    }
    for (int i = 0; i < 2; ++i) slots_[i] = Buffer(gpu_, std::span<const ExpertSlot>(slots[i]));
    std::vector<uint8_t> half;
    for (uint32_t e = 0; e < g.experts; ++e) half.push_back(e % 2 == 0 ? kWantBase : kWantFp4);
    half_ = Buffer(gpu_, std::span<const uint8_t>(half));
  }

  double ReadRate() {
    CUdeviceptr at = nibbles_.address();
    uint64_t count = std::min<uint64_t>(nibbles_.bytes(), uint64_t{8} << 30) / 16;
    CUdeviceptr sink = biases_.address();
    void* arguments[] = {&at, &count, &sink};
    return static_cast<double>(count * 16) / Median([&] {
             CHECK_CUDA(gpu_.driver.cuLaunchKernel(read_, 132 * 4, 1, 1, 512, 1, 1, 0, gpu_.stream,
                                                   arguments, nullptr));
           });
  }

  // Seconds of device time, of five, after one to warm up.
  template <typename Work>
  double Median(Work&& work) {
    std::vector<double> times;
    work();
    for (int i = 0; i < 5; ++i) {
      CHECK_CUDA(gpu_.driver.cuEventRecord(start_, gpu_.stream));
      work();
      CHECK_CUDA(gpu_.driver.cuEventRecord(end_, gpu_.stream));
      CHECK_CUDA(gpu_.Wait());
      float milliseconds = 0;
      CHECK_CUDA(extras_.cuEventElapsedTime(&milliseconds, start_, end_));
      times.push_back(milliseconds * 1e-3);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  // Ids of several calls, each token's different, and the bytes of weights that all of them need.
  struct Choices {
    std::vector<int32_t> ids;
    uint64_t bytes = 0;
  };
  static Choices Route(const Shape& shape, Kind kind, uint32_t tokens, size_t calls) {
    Choices choices;
    std::mt19937 random(tokens);
    for (size_t call = 0; call < calls; ++call) {
      std::set<int32_t> met;
      for (uint32_t t = 0; t < tokens; ++t) {
        std::set<int32_t> chosen;
        while (chosen.size() < shape.top_k)
          chosen.insert(static_cast<int32_t>(random() % shape.geometry.experts));
        choices.ids.insert(choices.ids.end(), chosen.begin(), chosen.end());
        met.insert(chosen.begin(), chosen.end());
      }
      for (const int32_t e : met) choices.bytes += ExpertBytes(shape.geometry, kind, e % 2 == 1);
    }
    return choices;
  }

  // Seconds of one call, from a graph of them over the layers.
  double TimeCalls(CudaMoeCall call, Kind kind, size_t calls, const Buffer& ids) {
    CHECK_CUDA(extras_.cuStreamBeginCapture(gpu_.stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    for (size_t i = 0; i < calls; ++i) {
      call.slots = slots_[kind == Kind::kQuintals].as<ExpertSlot>() +
                   (layer_++ % layers_) * call.geometry.experts;
      call.ids = ids.as<int32_t>() + i * call.token_count * call.top_k;
      const Result<void> done = moe_.Forward(call, gpu_.stream);
      HP_CHECK(done);
    }
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    CHECK_CUDA(extras_.cuStreamEndCapture(gpu_.stream, &graph));
    CHECK_CUDA(extras_.cuGraphInstantiate(&exec, graph, 0));
    const double seconds = Median([&] { CHECK_CUDA(extras_.cuGraphLaunch(exec, gpu_.stream)); });
    CHECK_CUDA(extras_.cuGraphExecDestroy(exec));
    CHECK_CUDA(extras_.cuGraphDestroy(graph));
    return seconds / static_cast<double>(calls);
  }

  void Measure(const Shape& shape, Kind kind, const char* name, uint32_t tokens, double limit) {
    const LayerGeometry& g = shape.geometry;
    const size_t calls = tokens <= 32 ? 64 : tokens <= 1024 ? 8 : 2;
    std::mt19937 random(tokens);
    std::vector<uint16_t> x(size_t{tokens} * g.hidden);
    for (uint16_t& v : x) v = ToBf16(std::normal_distribution<float>()(random));
    std::vector<float> weights(size_t{tokens} * shape.top_k,
                               1.0f / static_cast<float>(shape.top_k));
    const Choices choices = Route(shape, kind, tokens, calls);
    const Buffer device_x(gpu_, std::span<const uint16_t>(x));
    const Buffer device_ids(gpu_, std::span<const int32_t>(choices.ids));
    const Buffer device_weights(gpu_, std::span<const float>(weights));
    const Buffer y(gpu_, x.size() * 2);
    const Buffer workspace(gpu_, CudaMoe::WorkspaceBytes(g, tokens, shape.top_k));
    CHECK_CUDA(gpu_.driver.cuMemsetD8(workspace.address(), 0, CudaMoe::kWorkspaceZeros));
    const Buffer refusal(gpu_, std::span<const Refusal>(std::vector<Refusal>(1)));
    CudaMoeCall call;
    call.geometry = g;
    call.activation = shape.activation;
    call.fp8 = options_.fp8;
    call.token_count = tokens;
    call.top_k = shape.top_k;
    call.wanted = kind == Kind::kHalf ? half_.as<uint8_t>() : nullptr;
    call.wanted_of_all = kind == Kind::kBase ? kWantBase : kWantFp4;
    call.tiers = kind == Kind::kBase       ? kFromBase
                 : kind == Kind::kNibbles  ? kFromNibbles
                 : kind == Kind::kQuintals ? kFromQuintals
                                           : kFromBase | kFromNibbles;
    call.x = device_x.as<uint16_t>();
    call.weights = device_weights.as<float>();
    call.y = y.as<uint16_t>();
    call.workspace = workspace.as<std::byte>();
    call.workspace_bytes = workspace.bytes();
    call.refusal = refusal.as<Refusal>();
    const double seconds = TimeCalls(call, kind, calls, device_ids);
    HP_CHECK(refusal.Download<Refusal>()[0].kind == 0);
    const double of_call = static_cast<double>(choices.bytes) / static_cast<double>(calls);
    const double flops =
        2.0 * tokens * shape.top_k * static_cast<double>(g.n13() * g.k13() + g.n2() * g.k2());
    std::printf("  %-13s %6u %10.2f %10.2f %9.0f %6.1f%% %8.1f\n", name, tokens, seconds * 1e6,
                of_call / 1e6, of_call / seconds / 1e9, 100 * of_call / seconds / limit,
                flops / seconds / 1e12);
    std::fflush(stdout);
    json_ += Text(
        "{}\n  {{\"shape\": \"{}\", \"precision\": \"{}\", \"tokens\": {}, "
        "\"microseconds\": {:.2f}, \"bytes\": {:.0f}, \"read_bytes_per_second\": {:.0f}, "
        "\"teraflops\": {:.2f}}}",
        json_.empty() ? "" : ",", shape.name, name, tokens, seconds * 1e6, of_call, limit,
        flops / seconds / 1e12);
  }

  Gpu& gpu_;
  CudaMoe& moe_;
  const Options& options_;
  GraphCalls extras_;
  CUmodule module_ = nullptr;
  CUfunction read_ = nullptr, fill_ = nullptr;
  CUevent start_ = nullptr, end_ = nullptr;
  size_t layers_ = 0, layer_ = 0;
  Buffer codes_, scales_, nibbles_, quintals_, biases_, half_;
  Buffer slots_[2];
  std::string json_;
};

int Usage() {
  std::fprintf(stderr,
               "usage: moe_cuda_bench [--smoke] [--shape NAME] [--precision NAME] [--tokens N,N] "
               "[--prefill wgmma|mma] [--shared] [--fp8] [--json FILE]\n");
  return 2;
}

int Main(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    const auto value = [&] { return std::string(i + 1 < count ? arguments[++i] : ""); };
    if (name == "--smoke") {
      options.smoke = true;
    } else if (name == "--fp8") {
      options.fp8 = true;
    } else if (name == "--shared") {
      options.kernels.few = false;
    } else if (name == "--shape") {
      options.shape = value();
    } else if (name == "--precision") {
      options.precision = value();
    } else if (name == "--prefill") {
      const std::string wanted = value();
      for (const PrefillKernels kernels : kAllPrefillKernels)
        if (wanted == NameOf(kernels)) options.kernels.prefill = kernels;
      if (!options.kernels.prefill) return Usage();
    } else if (name == "--json") {
      options.json_path = value();
    } else if (name == "--tokens") {
      options.tokens.clear();
      std::string list = value() + ",";
      for (size_t at = 0, next; (next = list.find(',', at)) != std::string::npos; at = next + 1)
        options.tokens.push_back(static_cast<uint32_t>(std::stoul(list.substr(at, next - at))));
    } else {
      return Usage();
    }
  }
  std::string why;
  const std::unique_ptr<Gpu> gpu = Gpu::Open(&why);
  if (gpu == nullptr) {
    std::printf("skipped: %s\n", why.c_str());
    return options.smoke ? 0 : 1;
  }
  if (const Result<void> writable = CheckResultFile(options.json_path); !writable) {
    std::fprintf(stderr, "%s\n", writable.error().ToString().c_str());
    return writable.error().exit_code();
  }
  Result<std::unique_ptr<CudaMoe>> moe =
      CudaMoe::Load(gpu->driver, gpu->context, gpu->device, options.kernels);
  if (!moe || *moe == nullptr) {
    std::printf("%s\n", moe ? "no kernels for this GPU" : moe.error().ToString().c_str());
    return 1;
  }
  if (options.smoke) {
    options.tokens = {1, 40};
    options.memory = 1;
  }
  Bench bench(*gpu, **moe, options);
  for (const Shape& shape : kShapes) {
    if (options.smoke && std::strcmp(shape.name, "qwen3-30b") != 0) continue;
    if (!options.shape.empty() && options.shape != shape.name) continue;
    bench.Run(shape);
  }
  if (const Result<void> written = WriteResultFile(options.json_path, bench.json()); !written) {
    std::fprintf(stderr, "%s\n", written.error().ToString().c_str());
    return written.error().exit_code();
  }
  return 0;
}

}  // namespace
}  // namespace hotplane

int main(int count, char** arguments) { return hotplane::Main(count, arguments); }
