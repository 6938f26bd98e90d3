#include "engine/export.h"

#include <algorithm>
#include <vector>

#include "base/format_text.h"
#include "base/units.h"

namespace hotplane {
namespace {

// One expert's piece of a section, verified.
Result<std::vector<std::byte>> ReadPiece(const LayerFile& file, std::string_view role,
                                         uint32_t expert) {
  const LayerLayout& layout = file.layout();
  const Section* const section = layout.Find(role);
  const auto section_index = static_cast<int32_t>(section - layout.sections.data());
  const uint64_t begin = layout.PieceOffset(*section, expert);
  std::vector<std::byte> bytes(section->expert_bytes);
  HP_TRY(ReadFully(file.file(), begin, bytes));
  const auto first =
      std::lower_bound(file.chunks().begin(), file.chunks().end(), begin,
                       [](const Chunk& chunk, uint64_t offset) { return chunk.offset < offset; });
  for (auto chunk = first; chunk != file.chunks().end(); ++chunk) {
    if (chunk->section != section_index || chunk->expert != expert) break;
    const auto index = static_cast<size_t>(chunk - file.chunks().begin());
    const uint64_t found =
        Checksum64(std::span(bytes).subspan(chunk->offset - begin, chunk->bytes));
    if (found != file.checksums()[index]) return Fail(file.ChunkError(index, found));
  }
  return bytes;
}

class Exporter {
 public:
  Exporter(const Generation& generation, const ExportOptions& options)
      : generation_(generation), options_(options) {}

  Result<ExportReport> Run();

 private:
  Result<void> OpenFiles();
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

Result<std::vector<std::byte>> Exporter::Piece(uint32_t expert) const {
  HP_ASSIGN(std::vector<std::byte> stored, ReadPiece(*file_, options_.part, expert));
  if (!base_) return stored;
  const LayerGeometry& g = file_->layout().geometry;
  const bool w13 = options_.part == "fp13";
  HP_ASSIGN(const std::vector<std::byte> codes,
            ReadPiece(*base_, w13 ? "planes13" : "planes2", expert));
  const size_t n = w13 ? g.n13() : g.n2();
  const size_t k = w13 ? g.k13() : g.k2();
  std::vector<std::byte> nibbles(NibblePlaneBytes(n, k));
  if (!kernels_->merge(codes.data(), stored.data(), n, k, nibbles.data()))
    return Fail(Status::Data(Text("{} of expert {} in layer {} does not fit its base codes",
                                  options_.part, expert, options_.layer))
                    .File(file_->file().path())
                    .At(file_->layout().PieceOffset(*file_->layout().Find(options_.part), expert))
                    .Expected("quintal words 0 to 624 that fit the codes of the base tier")
                    .Found("a word that no packer writes")
                    .Advice("the two tiers were not built from the same weights: remove this "
                            "file and build the layer's delta tier again"));
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
