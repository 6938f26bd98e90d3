// Fuzzes discovery: the input is the JSON of a safetensors header and, after a line feed, a
// config.json. The data region is as large as the header says, a file of zeros, so that headers
// that hold together reach the naming schemes. What is accepted must lie in the file.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/moe_source.h"
#include "checkpoint/safetensors_writer.h"
#include "io/mem_env.h"

namespace hotplane {
namespace {

constexpr uint64_t kDataBytesMax = uint64_t{1} << 20;

// The end of the last tensor, when the header can be read with that end.
uint64_t DataBytes(std::string_view header) {
  uint64_t largest = 0;
  uint64_t number = 0;
  for (const char c : header) {
    const bool digit = c >= '0' && c <= '9';
    number = digit && number < kDataBytesMax ? number * 10 + static_cast<uint64_t>(c - '0') : 0;
    if (number > largest && number <= kDataBytesMax) largest = number;
  }
  return largest;
}

void CheckTensor(const Checkpoint& checkpoint, const Tensor& tensor, uint64_t file_bytes) {
  uint64_t bytes = DtypeBytes(tensor.dtype);
  for (const uint64_t n : tensor.shape) bytes *= n;
  HP_CHECK(bytes == tensor.bytes);
  HP_CHECK(tensor.offset <= file_bytes && tensor.bytes <= file_bytes - tensor.offset);
  std::byte first;
  if (tensor.bytes > 0) HP_CHECK(checkpoint.Read(tensor, tensor.bytes - 1, {&first, 1}));
}

void CheckModel(const Checkpoint& checkpoint, const MoeModel& model, uint64_t file_bytes) {
  std::vector<std::pair<uint64_t, uint64_t>> places;  // begin and end
  for (const MoeLayer& layer : model.layers) {
    HP_CHECK(layer.experts.size() == layer.geometry.experts && !layer.experts.empty());
    HP_CHECK(layer.geometry.hidden % 64 == 0 && layer.geometry.intermediate % 64 == 0);
    for (const ExpertTensors& expert : layer.experts) {
      for (const Tensor* weight : expert.weight) HP_CHECK(weight != nullptr);
      for (const Tensor* tensor : expert.All()) {
        CheckTensor(checkpoint, *tensor, file_bytes);
        places.emplace_back(tensor->offset, tensor->offset + tensor->bytes);
      }
    }
  }
  // No two slices share a byte.
  std::sort(places.begin(), places.end());
  for (size_t i = 1; i < places.size(); ++i) HP_CHECK(places[i - 1].second <= places[i].first);
  HP_CHECK(Fingerprint(checkpoint, model).has_value());
}

void TryInput(std::string_view input) {
  const size_t line = input.rfind('\n');
  const std::string_view header = input.substr(0, line);
  const std::string_view config =
      line == std::string_view::npos ? std::string_view() : input.substr(line + 1);
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  file += header;
  file.resize(file.size() + DataBytes(header));
  MemEnv env;
  env.SetFile("/m/x.safetensors", std::as_bytes(std::span(file)));
  if (!config.empty()) env.SetFile("/m/config.json", std::as_bytes(std::span(config)));
  const Result<Checkpoint> checkpoint = Checkpoint::Open(env, "/m");
  if (!checkpoint) return;
  for (const MoeLayerSurvey& layer : SurveyMoe(*checkpoint)) HP_CHECK(!layer.prefix.empty());
  const Result<MoeModel> model = DiscoverMoe(*checkpoint);
  if (!model) {
    HP_CHECK(model.error().code() == StatusCode::kData);
    return;
  }
  CheckModel(*checkpoint, *model, file.size());
}

}  // namespace
}  // namespace hotplane

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  hotplane::TryInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
