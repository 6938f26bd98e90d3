// Fuzzes all that reads untrusted checkpoint text: one input is taken as a safetensors file, as the
// index of its folder, and as its config.json. Whatever is accepted must hold together.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/moe_source.h"
#include "checkpoint/safetensors_writer.h"
#include "io/mem_env.h"

namespace hotplane {
namespace {

void CheckTensors(const Checkpoint& checkpoint) {
  std::vector<std::byte> data;
  const Tensor* before = nullptr;
  for (const Tensor& tensor : checkpoint.tensors()) {
    HP_CHECK(before == nullptr || before->name < tensor.name);
    HP_CHECK(checkpoint.Find(tensor.name) == &tensor);
    data.resize(tensor.bytes);
    HP_CHECK(checkpoint.Read(tensor, 0, data).has_value());
    before = &tensor;
  }
}

void CheckModel(const Checkpoint& checkpoint) {
  const Result<MoeModel> model = DiscoverMoe(checkpoint);
  if (!model) {
    HP_CHECK(model.error().code() == StatusCode::kData);
    return;
  }
  for (const MoeLayer& layer : model->layers) {
    HP_CHECK(layer.experts.size() == layer.geometry.experts && !layer.experts.empty());
    for (const ExpertTensors& expert : layer.experts) {
      for (size_t p = 0; p < kProjectionCount; ++p) {
        HP_CHECK(expert.weight[p] != nullptr);
        const bool scaled = layer.format == SourceFormat::kMxfp4 ||
                            layer.format == SourceFormat::kNvfp4 ||
                            layer.format == SourceFormat::kFp8;
        HP_CHECK((expert.scale[p] != nullptr) == scaled);
      }
    }
  }
  HP_CHECK(Fingerprint(checkpoint, *model).has_value());
}

void TryOpen(MemEnv& env, const std::string& path) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(env, path);
  if (!checkpoint) {
    HP_CHECK(checkpoint.error().code() == StatusCode::kData);
    HP_CHECK(!checkpoint.error().ToString().empty());
    return;
  }
  CheckTensors(*checkpoint);
  CheckModel(*checkpoint);
}

// The header alone: the length field is right whatever the input, and so, by the last byte of the
// input, is the data's size now and then.
void TryHeader(std::string_view text) {
  if (text.empty()) return;
  const uint64_t data_bytes = static_cast<uint8_t>(text.back());
  text.remove_suffix(1);
  const uint64_t data_start = 8 + text.size();
  const auto tensors = ParseSafetensorsHeader(text, data_start + data_bytes, "f");
  if (!tensors) {
    HP_CHECK(tensors.error().code() == StatusCode::kData);
    return;
  }
  uint64_t end = data_start;
  for (const Tensor& tensor : *tensors) {
    HP_CHECK(tensor.offset == end);
    end += tensor.bytes;
  }
  HP_CHECK(end == data_start + data_bytes);
}

// One layer with one expert, all zeros.
const std::string& SmallMoeFile() {
  static const std::string file = [] {
    std::vector<TensorSpec> specs;
    for (const char* role : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string name = std::string("layers.0.mlp.experts.0.") + role + ".weight";
      specs.push_back({name, Dtype::kBf16, {64, 64}});
    }
    return EncodeSafetensorsHeader(specs) + std::string(3 * 64 * 64 * 2, '\0');
  }();
  return file;
}

void TryInput(std::span<const std::byte> input) {
  TryHeader({reinterpret_cast<const char*>(input.data()), input.size()});
  MemEnv env;
  env.SetFile("/file/x.safetensors", input);
  TryOpen(env, "/file");
  env.SetFile("/index/model.safetensors.index.json", input);
  env.SetFile("/index/model-00001-of-00001.safetensors", std::as_bytes(std::span(SmallMoeFile())));
  TryOpen(env, "/index");
  env.SetFile("/config/x.safetensors", std::as_bytes(std::span(SmallMoeFile())));
  env.SetFile("/config/config.json", input);
  TryOpen(env, "/config");
}

}  // namespace
}  // namespace hotplane

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  hotplane::TryInput({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
