#include "boot/verify_source.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "base/format_text.h"
#include "base/units.h"
#include "boot/describe.h"

namespace hotplane {
namespace {

constexpr uint64_t kPieceBytes = 4 * kMiB;

struct Expectation {
  const Tensor* tensor;
  uint32_t layer;
  Digest128 digest;
};

// The tensors of all layers that have a source record, in file order.
Result<std::vector<Expectation>> ListExpectations(const Generation& generation,
                                                  const Checkpoint& checkpoint,
                                                  const MoeModel& model, SourceReport* report) {
  std::vector<Expectation> all;
  for (const MoeLayer& layer : model.layers) {
    HP_ASSIGN(const std::optional<SourceRecord> record, generation.ReadSourceRecord(layer.ordinal));
    if (!record) {
      // A layer file without its record cannot be proved: that is a failed proof, not a pass.
      if (generation.HasLayerFile(layer.ordinal))
        return Fail(Status::Data(Text("layer {} has no source record: nothing proves what it was "
                                      "built from",
                                      layer.ordinal))
                        .File(generation.SourceRecordPath(layer.ordinal))
                        .Expected("the layer's .source file beside its layer files")
                        .Found("no such file")
                        .Advice("remove the layer's files and build it again"));
      ++report->layers_without_record;
      continue;
    }
    ++report->layers_checked;
    const auto tensors = SourceTensorsByName(layer);
    for (const SourceTensorDigest& entry : record->tensors) {
      const auto found_tensor = tensors.find(entry.name);
      const Tensor* const tensor = found_tensor == tensors.end() ? nullptr : found_tensor->second;
      if (tensor == nullptr)
        return Fail(
            Status::Data(Text("the checkpoint has no tensor {}, which layer {} was built from",
                              entry.name, layer.ordinal))
                .File(checkpoint.path()));
      all.push_back({tensor, layer.ordinal, entry.digest});
    }
  }
  std::sort(all.begin(), all.end(), [](const Expectation& a, const Expectation& b) {
    return std::pair(a.tensor->file, a.tensor->offset) <
           std::pair(b.tensor->file, b.tensor->offset);
  });
  return all;
}

Result<Digest128> DigestTensor(const Checkpoint& checkpoint, const Tensor& tensor) {
  DigestStream stream;
  std::vector<std::byte> piece(std::min(kPieceBytes, tensor.bytes));
  for (uint64_t offset = 0; offset < tensor.bytes; offset += kPieceBytes) {
    const uint64_t bytes = std::min(kPieceBytes, tensor.bytes - offset);
    HP_TRY(checkpoint.Read(tensor, offset, {piece.data(), bytes}));
    stream.Update({piece.data(), bytes});
  }
  return stream.Finish();
}

}  // namespace

Result<SourceReport> VerifySource(const Generation& generation, const Checkpoint& checkpoint,
                                  const MoeModel& model, WorkerPool& pool,
                                  const CancelToken* cancel, Progress* progress) {
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint, model));
  HP_TRY(CheckSamePair(generation, checkpoint, model, fingerprint));
  SourceReport report;
  HP_ASSIGN(const std::vector<Expectation> expectations,
            ListExpectations(generation, checkpoint, model, &report));
  uint64_t total = 0;
  for (const Expectation& expectation : expectations) total += expectation.tensor->bytes;
  if (progress != nullptr) progress->Begin("reading the checkpoint", total);
  HP_TRY(pool.ParallelFor(expectations.size(), [&](size_t index, size_t) -> Result<void> {
    if (cancel != nullptr) HP_TRY(cancel->Check());
    const Expectation& expectation = expectations[index];
    HP_ASSIGN(const Digest128 found, DigestTensor(checkpoint, *expectation.tensor));
    if (progress != nullptr) progress->Add(expectation.tensor->bytes);
    if (found == expectation.digest) return {};
    return Fail(Status::Data(Text("{} is not what layer {} of the store was built from",
                                  expectation.tensor->name, expectation.layer))
                    .File(checkpoint.files()[expectation.tensor->file])
                    .At(expectation.tensor->offset)
                    .Expected(ToHex(expectation.digest))
                    .Found(ToHex(found))
                    .Advice("restore the checkpoint, or build a store from this one"));
  }));
  report.tensors_checked = expectations.size();
  report.bytes_checked = total;
  return report;
}

}  // namespace hotplane
