// The source fingerprint, as docs/format/fingerprint.md defines it.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "base/format_text.h"
#include "base/units.h"
#include "checkpoint/moe_source.h"

namespace hotplane {
namespace {

// Weights and scales of the three projections.
constexpr size_t kGroupCount = 2 * kProjectionCount;
// Each group of a layer gets this many samples, spread over the experts. The groups interleave, so
// that a layer's samples together fall on 96 places spread over its experts.
constexpr size_t kSamplesPerGroup = 16;

// Every expert tensor, sorted by name. The order is part of the fingerprint.
std::vector<const Tensor*> ListExpertTensors(const MoeModel& model) {
  std::vector<const Tensor*> tensors;
  for (const MoeLayer& layer : model.layers) {
    for (const ExpertTensors& expert : layer.experts) {
      const std::vector<const Tensor*> all = expert.All();
      tensors.insert(tensors.end(), all.begin(), all.end());
    }
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const Tensor* a, const Tensor* b) { return a->name < b->name; });
  return tensors;
}

// Names hold no control characters, so that tabs and line ends separate without ambiguity.
Digest128 HeaderDigest(const MoeModel& model) {
  DigestStream stream;
  const auto add = [&](const std::string& text) { stream.Update(std::as_bytes(std::span(text))); };
  add("hotplane source fingerprint 1\n");
  add(Text("scheme {}\n", model.scheme));
  add(Text("decoding{}\n", model.decoding));
  for (const Tensor* tensor : ListExpertTensors(model)) {
    add(Text("{}\t{}\t{}\n", tensor->name, DtypeName(tensor->dtype), ShapeText(tensor->shape)));
  }
  return stream.Finish();
}

// Counter-based random numbers from a digest: splitmix64's output function over a Weyl sequence.
class Draws {
 public:
  explicit Draws(const Digest128& seed) {
    for (const uint8_t byte : std::span(seed).first(8)) state_ = state_ << 8 | byte;
  }
  // Uniform in [begin, end), begin < end.
  uint64_t Between(uint64_t begin, uint64_t end) {
    const unsigned __int128 product = static_cast<unsigned __int128>(Next()) * (end - begin);
    return begin + static_cast<uint64_t>(product >> 64);
  }

 private:
  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint64_t state_ = 0;
};

void SampleTensor(const Tensor* tensor, Draws& draws, std::vector<SampledPage>& pages) {
  const uint64_t page_count = RoundUp(tensor->bytes, kPageBytes) / kPageBytes;
  const uint64_t offset = draws.Between(0, page_count) * kPageBytes;
  const uint64_t bytes = std::min(kPageBytes, tensor->bytes - offset);
  pages.push_back({tensor, offset, static_cast<uint32_t>(bytes)});
}

void SampleLayer(const MoeLayer& layer, Draws& draws, std::vector<SampledPage>& pages) {
  constexpr size_t kSampleCount = kSamplesPerGroup * kGroupCount;
  const auto draw_expert = [&](size_t sample, size_t sample_count) -> const ExpertTensors& {
    const size_t expert_count = layer.experts.size();
    const size_t begin = sample * expert_count / sample_count;
    const size_t end = std::max(begin + 1, (sample + 1) * expert_count / sample_count);
    return layer.experts[draws.Between(begin, end)];
  };
  for (size_t sample = 0; sample < kSampleCount; ++sample) {
    const ExpertTensors& expert = draw_expert(sample, kSampleCount);
    const size_t group = sample % kGroupCount;
    const size_t projection = group % kProjectionCount;
    const bool scale = group >= kProjectionCount && expert.scale[projection] != nullptr;
    SampleTensor(scale ? expert.scale[projection] : expert.weight[projection], draws, pages);
  }
  // Kinds of tensors that some formats have besides.
  for (const auto kind : {&ExpertTensors::global_scale, &ExpertTensors::bias}) {
    if ((layer.experts.front().*kind)[0] == nullptr) continue;
    constexpr size_t kCount = kSamplesPerGroup * kProjectionCount;
    for (size_t sample = 0; sample < kCount; ++sample) {
      SampleTensor((draw_expert(sample, kCount).*kind)[sample % kProjectionCount], draws, pages);
    }
  }
}

std::vector<SampledPage> SamplePages(const MoeModel& model, const Digest128& header_digest) {
  Draws draws(header_digest);
  std::vector<SampledPage> pages;
  for (const MoeLayer& layer : model.layers) SampleLayer(layer, draws, pages);
  std::sort(pages.begin(), pages.end(), [](const SampledPage& a, const SampledPage& b) {
    if (a.tensor != b.tensor) return a.tensor->name < b.tensor->name;
    return a.offset < b.offset;
  });
  const auto same = [](const SampledPage& a, const SampledPage& b) {
    return a.tensor == b.tensor && a.offset == b.offset;
  };
  pages.erase(std::unique(pages.begin(), pages.end(), same), pages.end());
  return pages;
}

}  // namespace

std::vector<SampledPage> ListSampledPages(const MoeModel& model) {
  return SamplePages(model, HeaderDigest(model));
}

Result<Digest128> Fingerprint(const Checkpoint& checkpoint, const MoeModel& model) {
  const Digest128 header_digest = HeaderDigest(model);
  const std::vector<SampledPage> pages = SamplePages(model, header_digest);

  // Read in file order, digest in name order: disks like the first, and only the second is the same
  // for every way to shard a checkpoint.
  std::vector<size_t> file_order(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) file_order[i] = i;
  std::sort(file_order.begin(), file_order.end(), [&](size_t a, size_t b) {
    const auto position = [&](size_t i) {
      return std::pair(pages[i].tensor->file, pages[i].tensor->offset + pages[i].offset);
    };
    return position(a) < position(b);
  });
  std::vector<Digest128> page_digests(pages.size());
  std::array<std::byte, kPageBytes> buffer;
  for (const size_t i : file_order) {
    const std::span<std::byte> page = std::span(buffer).first(pages[i].bytes);
    HP_TRY(checkpoint.Read(*pages[i].tensor, pages[i].offset, page));
    page_digests[i] = Digest(page);
  }
  DigestStream stream;
  stream.Update(std::as_bytes(std::span(header_digest)));
  stream.Update(std::as_bytes(std::span(page_digests)));
  return stream.Finish();
}

}  // namespace hotplane
