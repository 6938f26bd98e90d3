#include "engine/export.h"

#include <algorithm>
#include <vector>

#include "base/format_text.h"
#include "engine/record_reader.h"

namespace hotplane {
namespace {

class Exporter {
 public:
  Exporter(const Generation& generation, const ExportOptions& options)
      : generation_(generation), options_(options) {}

  Result<ExportReport> Run();

 private:
  Result<void> OpenFiles();
  Result<std::vector<std::byte>> ReadPart(const LayerFile& file, std::string_view role,
                                          uint32_t expert) const;
  Result<std::vector<std::byte>> Piece(uint32_t expert) const;
  bool delta() const { return options_.part == "fp13" || options_.part == "fp2"; }

  const Generation& generation_;
  const ExportOptions& options_;
  const Kernels* kernels_ = nullptr;
  std::optional<LayerFile> file_;
  std::optional<LayerFile> base_;  // beside quintals, to merge with
};

Result<void> Exporter::OpenFiles() {
  if (!delta()) {
    HP_ASSIGN(file_, generation_.OpenLayer(options_.layer, Encoding::kBase));
    return {};
  }
  const bool nibbles =
      generation_.Probe(options_.layer, Encoding::kDeltaNibble).presence != Presence::kAbsent;
  HP_ASSIGN(file_, generation_.OpenLayer(
                       options_.layer, nibbles ? Encoding::kDeltaNibble : Encoding::kDeltaQuintal));
  if (nibbles || options_.encoded) return {};
  HP_ASSIGN(base_, generation_.OpenLayer(options_.layer, Encoding::kBase));
  return {};
}

Result<std::vector<std::byte>> Exporter::ReadPart(const LayerFile& file, std::string_view role,
                                                  uint32_t expert) const {
  std::vector<std::byte> bytes(file.layout().Find(role)->expert_bytes);
  uint64_t reread_bytes = 0;
  HP_TRY(ReadPiece(generation_.env(), file, role, expert, bytes, reread_bytes));
  return bytes;
}

Result<std::vector<std::byte>> Exporter::Piece(uint32_t expert) const {
  HP_ASSIGN(std::vector<std::byte> stored, ReadPart(*file_, options_.part, expert));
  if (!base_) return stored;
  const LayerGeometry& g = file_->layout().geometry;
  const bool w13 = options_.part == "fp13";
  HP_ASSIGN(const std::vector<std::byte> codes,
            ReadPart(*base_, w13 ? "planes13" : "planes2", expert));
  std::vector<std::byte> nibbles(w13 ? NibblePlaneBytes(g.n13(), g.k13())
                                     : NibblePlaneBytes(g.n2(), g.k2()));
  HP_TRY(MergePart(*kernels_, *file_, options_.part, expert, codes, stored, nibbles));
  return nibbles;
}

Result<ExportReport> Exporter::Run() {
  constexpr std::string_view kParts[] = {"planes13", "sc13",  "planes2", "sc2",
                                         "bias13",   "bias2", "fp13",    "fp2"};
  if (std::find(std::begin(kParts), std::end(kParts), options_.part) == std::end(kParts))
    return Fail(Status::Usage(Text("there is no part '{}'", options_.part))
                    .Expected("planes13, sc13, planes2, sc2, bias13, bias2, fp13 or fp2"));
  const std::vector<ManifestLayer>& layers = generation_.manifest().layers;
  if (options_.layer >= layers.size())
    return Fail(Status::Usage(Text("there is no layer {}", options_.layer))
                    .Expected(Text("0 to {}", layers.size() - 1)));
  const uint32_t experts = layers[options_.layer].geometry.experts;
  if (options_.expert && *options_.expert >= experts)
    return Fail(Status::Usage(Text("layer {} has no expert {}", options_.layer, *options_.expert))
                    .Expected(Text("0 to {}", experts - 1)));
  kernels_ = options_.kernels;
  if (kernels_ == nullptr) {
    HP_ASSIGN(kernels_, SelectKernels(std::nullopt));
  }
  HP_TRY(OpenFiles());
  if (file_->layout().Find(options_.part) == nullptr)
    return Fail(Status::Usage(Text("layer {} has no {}", options_.layer, options_.part))
                    .Found("experts without biases"));
  ExportReport report;
  report.encoding = file_->layout().encoding;
  const uint32_t first = options_.expert.value_or(0);
  const uint32_t end = options_.expert ? first + 1 : experts;
  HP_TRY(PublishFileInPieces(generation_.env(), options_.output_path,
                             [&](const FileSink& sink) -> Result<void> {
                               for (uint32_t expert = first; expert < end; ++expert) {
                                 if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
                                 HP_ASSIGN(const std::vector<std::byte> piece, Piece(expert));
                                 HP_TRY(sink(piece));
                                 report.bytes_written += piece.size();
                               }
                               return {};
                             }));
  return report;
}

}  // namespace

Result<ExportReport> ExportPart(const Generation& generation, const ExportOptions& options) {
  return Exporter(generation, options).Run();
}

}  // namespace hotplane
