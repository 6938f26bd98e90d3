#include "engine/record_reader.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"

namespace hotplane {
namespace {

// As boot plans attach them.
constexpr std::array kStoredPreference = {Encoding::kDeltaQuintal, Encoding::kDeltaNibble};
// Nibbles are FP4 already: no base codes to read, nothing to merge.
constexpr std::array kFp4Preference = {Encoding::kDeltaNibble, Encoding::kDeltaQuintal};

size_t PlaceOf(Encoding encoding) {
  const auto place = std::find(kEncodings.begin(), kEncodings.end(), encoding);
  HP_CHECK(place != kEncodings.end());
  return static_cast<size_t>(place - kEncodings.begin());
}

std::span<const std::byte> OfExpert(std::span<const std::byte> part, uint32_t expert,
                                    uint32_t experts) {
  const size_t bytes = part.size() / experts;
  return part.subspan(bytes * expert, bytes);
}

}  // namespace

std::string_view RecordKindName(RecordKind kind) {
  switch (kind) {
    case RecordKind::kDelta: return "delta";
    case RecordKind::kFp4: return "fp4";
    case RecordKind::kBase: return "base";
    case RecordKind::kInvalid: break;
  }
  return "invalid";
}

RecordShape RecordShape::Of(Encoding encoding, const LayerGeometry& g) {
  RecordShape shape;
  shape.encoding = encoding;
  const auto add = [&](std::string_view role, size_t of_part) {
    shape.parts[shape.part_count++] = {role, shape.bytes, of_part};
    shape.bytes += of_part;
  };
  switch (encoding) {
    case Encoding::kBase:
      add("planes13", CodePlaneBytes(g.n13(), g.k13()));
      add("sc13", ScalePlaneBytes(g.n13(), g.k13()));
      add("planes2", CodePlaneBytes(g.n2(), g.k2()));
      add("sc2", ScalePlaneBytes(g.n2(), g.k2()));
      break;
    case Encoding::kDeltaQuintal:
      add("fp13", QuintalPlaneBytes(g.n13(), g.k13()));
      add("fp2", QuintalPlaneBytes(g.n2(), g.k2()));
      break;
    case Encoding::kDeltaNibble:
      add("fp13", NibblePlaneBytes(g.n13(), g.k13()));
      add("fp2", NibblePlaneBytes(g.n2(), g.k2()));
      break;
    case Encoding::kInvalid: HP_CHECK(false);
  }
  return shape;
}

Result<void> ReadPiece(Env& env, const LayerFile& file, std::string_view role, uint32_t expert,
                       std::span<std::byte> destination, uint64_t& reread_bytes) {
  const LayerLayout& layout = file.layout();
  const Section* const section = layout.Find(role);
  HP_CHECK(section != nullptr && destination.size() == section->expert_bytes);
  const auto section_index = static_cast<int32_t>(section - layout.sections.data());
  const uint64_t begin = layout.PieceOffset(*section, expert);
  HP_TRY(ReadFully(file.file(), begin, destination));
  const std::vector<Chunk>& chunks = file.chunks();
  const auto first =
      std::lower_bound(chunks.begin(), chunks.end(), begin,
                       [](const Chunk& chunk, uint64_t offset) { return chunk.offset < offset; });
  uint64_t verified_bytes = 0;
  for (auto chunk = first; chunk != chunks.end(); ++chunk) {
    if (chunk->section != section_index || chunk->expert != expert) break;
    const auto index = static_cast<size_t>(chunk - chunks.begin());
    const std::span<std::byte> bytes = destination.subspan(chunk->offset - begin, chunk->bytes);
    verified_bytes += chunk->bytes;
    const uint64_t found = Checksum64(bytes);
    if (found == file.checksums()[index]) continue;
    Log(LogLevel::kWarning, "{}: reading it once more past the page cache",
        file.ChunkError(index, found).what());
    reread_bytes += chunk->bytes;
    HP_TRY(file.RereadChunk(env, index, bytes));
  }
  HP_CHECK(verified_bytes == destination.size());
  return {};
}

Result<void> MergePart(const Kernels& kernels, const LayerFile& file, std::string_view role,
                       uint32_t expert, std::span<const std::byte> codes,
                       std::span<const std::byte> quintals, std::span<std::byte> nibbles) {
  const LayerLayout& layout = file.layout();
  const bool w13 = role == "fp13";
  const size_t n = w13 ? layout.geometry.n13() : layout.geometry.n2();
  const size_t k = w13 ? layout.geometry.k13() : layout.geometry.k2();
  HP_CHECK(codes.size() == CodePlaneBytes(n, k) && quintals.size() == QuintalPlaneBytes(n, k) &&
           nibbles.size() == NibblePlaneBytes(n, k));
  if (kernels.merge(codes.data(), quintals.data(), n, k, nibbles.data())) return {};
  return Fail(Status::Data(Text("{} of expert {} in layer {} does not fit its base codes", role,
                                expert, layout.layer))
                  .File(file.file().path())
                  .At(layout.PieceOffset(*layout.Find(role), expert))
                  .Expected("quintal words 0 to 624 that fit the codes of the base tier")
                  .Found("a word that no packer writes")
                  .Advice("the two tiers were not built from the same weights: remove this "
                          "file and build the layer's delta tier again"));
}

RecordReader::RecordReader(const Generation& generation)
    : generation_(generation),
      kernels_(*AvailableKernels().front()),
      layers_(generation.manifest().layers.size()) {}

LayerGeometry RecordReader::geometry(uint32_t layer) const { return generation_.geometry(layer); }

Result<void> RecordReader::CheckLayer(uint32_t layer) const {
  if (layer < layers_.size()) return {};
  return Fail(Status::Usage(Text("there is no layer {}", layer))
                  .Expected(Text("0 to {}", layers_.size() - 1)));
}

Result<void> RecordReader::CheckKey(ExpertKey key) const {
  HP_TRY(CheckLayer(key.layer));
  const uint32_t experts = geometry(key.layer).experts;
  if (key.expert < experts) return {};
  return Fail(Status::Usage(Text("layer {} has no expert {}", key.layer, key.expert))
                  .Expected(Text("0 to {}", experts - 1)));
}

const LayerFile* RecordReader::Opened(uint32_t layer, Encoding encoding) const {
  return layers_[layer].files[PlaceOf(encoding)].ready.load(std::memory_order_acquire);
}

Result<const LayerFile*> RecordReader::Open(uint32_t layer, Encoding encoding) {
  if (const LayerFile* const file = Opened(layer, encoding)) return file;
  OpenedFile& slot = layers_[layer].files[PlaceOf(encoding)];
  std::lock_guard lock(slot.mutex);
  if (slot.file == nullptr) {
    HP_ASSIGN(LayerFile file, generation_.OpenLayer(layer, encoding));
    slot.file = std::make_unique<const LayerFile>(std::move(file));
    slot.ready.store(slot.file.get(), std::memory_order_release);
  }
  return slot.file.get();
}

Result<RecordReader::DeltaProbe> RecordReader::ProbeDelta(uint32_t layer) {
  HP_TRY(CheckLayer(layer));
  DeltaProbe result{Presence::kAbsent, Encoding::kInvalid, std::nullopt};
  const Encoding chosen = layers_[layer].delta_encoding.load(std::memory_order_acquire);
  if (chosen != Encoding::kInvalid) return DeltaProbe{Presence::kPresent, chosen, std::nullopt};
  for (const Encoding encoding : kStoredPreference) {
    TierProbe probe = generation_.Probe(layer, encoding);
    if (probe.presence == Presence::kPresent)
      return DeltaProbe{Presence::kPresent, encoding, std::nullopt};
    if (probe.presence != Presence::kAbsent && result.presence == Presence::kAbsent)
      result = {probe.presence, Encoding::kInvalid, std::move(probe.reason)};
  }
  return result;
}

void RecordReader::PreferDelta(uint32_t layer, Encoding encoding) {
  HP_CHECK(layer < layers_.size() && TierOf(encoding) == Tier::kDelta);
  Encoding none = Encoding::kInvalid;
  layers_[layer].delta_encoding.compare_exchange_strong(none, encoding);
}

Result<const LayerFile*> RecordReader::OpenFirst(uint32_t layer,
                                                 std::span<const Encoding> preference) {
  std::optional<Status> failure;
  for (const Encoding encoding : preference) {
    Result<const LayerFile*> file = Open(layer, encoding);
    if (file) return file;
    // A file that is there and bad says more than one that is absent.
    const bool absent = generation_.Probe(layer, encoding).presence == Presence::kAbsent;
    if (!failure || !absent) failure = std::move(file).error();
  }
  return Fail(*std::move(failure));
}

Result<const LayerFile*> RecordReader::OpenDelta(uint32_t layer) {
  std::atomic<Encoding>& chosen = layers_[layer].delta_encoding;
  Encoding encoding = chosen.load(std::memory_order_acquire);
  if (encoding == Encoding::kInvalid) {
    HP_ASSIGN(const LayerFile* const file, OpenFirst(layer, kStoredPreference));
    if (chosen.compare_exchange_strong(encoding, file->layout().encoding)) return file;
  }
  return Open(layer, encoding);
}

Result<RecordShape> RecordReader::Shape(RecordKind kind, uint32_t layer) {
  HP_TRY(CheckLayer(layer));
  switch (kind) {
    case RecordKind::kBase: return RecordShape::Of(Encoding::kBase, geometry(layer));
    case RecordKind::kFp4: return RecordShape::Of(Encoding::kDeltaNibble, geometry(layer));
    case RecordKind::kDelta: {
      HP_ASSIGN(const LayerFile* const file, OpenDelta(layer));
      return RecordShape::Of(file->layout().encoding, geometry(layer));
    }
    case RecordKind::kInvalid: break;
  }
  return Fail(Status::Usage("there is no such kind of record").Expected("delta, fp4 or base"));
}

Result<void> RecordReader::Read(RecordKind kind, ExpertKey key, std::span<std::byte> destination) {
  HP_TRY(CheckKey(key));
  HP_ASSIGN(const RecordShape shape, Shape(kind, key.layer));
  if (destination.size() != shape.bytes)
    return Fail(Status::Usage(Text("the destination of a {} record of layer {} has another size",
                                   RecordKindName(kind), key.layer))
                    .Expected(Text("{} bytes", shape.bytes))
                    .Found(Text("{} bytes", destination.size())));
  if (kind == RecordKind::kDelta) {
    HP_ASSIGN(const LayerFile* const file, Open(key.layer, shape.encoding));
    HP_TRY(ReadParts(*file, shape, key.expert, destination));
  } else if (kind == RecordKind::kFp4) {
    HP_TRY(ReadFp4(key, shape, destination));
  } else {
    HP_TRY(ReadBase(key, shape, destination));
  }
  records_read_.fetch_add(1, std::memory_order_relaxed);
  return {};
}

Result<void> RecordReader::ReadPart(const LayerFile& file, std::string_view role, uint32_t expert,
                                    std::span<std::byte> destination) {
  uint64_t reread_bytes = 0;
  const Result<void> read =
      ReadPiece(generation_.env(), file, role, expert, destination, reread_bytes);
  if (reread_bytes != 0) bytes_reread_.fetch_add(reread_bytes, std::memory_order_relaxed);
  HP_TRY(read);
  bytes_read_.fetch_add(destination.size(), std::memory_order_relaxed);
  return {};
}

Result<void> RecordReader::ReadParts(const LayerFile& file, const RecordShape& shape,
                                     uint32_t expert, std::span<std::byte> destination) {
  for (size_t i = 0; i < shape.part_count; ++i) {
    const RecordShape::Part& part = shape.parts[i];
    HP_TRY(ReadPart(file, part.role, expert, destination.subspan(part.offset, part.bytes)));
  }
  return {};
}

Result<std::span<const std::byte>> RecordReader::Codes(ExpertKey key, bool w13,
                                                       std::span<std::byte> scratch) {
  if (const ResidentBase* const base = Resident(key.layer))
    return OfExpert(w13 ? base->planes13 : base->planes2, key.expert, geometry(key.layer).experts);
  HP_ASSIGN(const LayerFile* const file, Open(key.layer, Encoding::kBase));
  HP_TRY(ReadPart(*file, w13 ? "planes13" : "planes2", key.expert, scratch));
  return std::span<const std::byte>(scratch);
}

Result<void> RecordReader::ReadFp4(ExpertKey key, const RecordShape& shape,
                                   std::span<std::byte> destination) {
  HP_ASSIGN(const LayerFile* const file, OpenFirst(key.layer, kFp4Preference));
  if (file->layout().encoding == Encoding::kDeltaNibble)
    return ReadParts(*file, shape, key.expert, destination);
  const LayerGeometry g = geometry(key.layer);
  const size_t quintal_bytes_max =
      std::max(QuintalPlaneBytes(g.n13(), g.k13()), QuintalPlaneBytes(g.n2(), g.k2()));
  const size_t code_bytes_max =
      std::max(CodePlaneBytes(g.n13(), g.k13()), CodePlaneBytes(g.n2(), g.k2()));
  const auto scratch =
      std::make_unique_for_overwrite<std::byte[]>(quintal_bytes_max + code_bytes_max);
  for (const bool w13 : {true, false}) {
    const RecordShape::Part& part = shape.parts[w13 ? 0 : 1];
    const size_t n = w13 ? g.n13() : g.n2();
    const size_t k = w13 ? g.k13() : g.k2();
    const std::span<std::byte> quintals(scratch.get(), QuintalPlaneBytes(n, k));
    HP_TRY(ReadPart(*file, part.role, key.expert, quintals));
    HP_ASSIGN(const std::span<const std::byte> codes,
              Codes(key, w13, {scratch.get() + quintal_bytes_max, CodePlaneBytes(n, k)}));
    HP_TRY(MergePart(kernels_, *file, part.role, key.expert, codes, quintals,
                     destination.subspan(part.offset, part.bytes)));
  }
  return {};
}

Result<void> RecordReader::ReadBase(ExpertKey key, const RecordShape& shape,
                                    std::span<std::byte> destination) {
  if (const ResidentBase* const base = Resident(key.layer)) {
    const std::array parts = {base->planes13, base->sc13, base->planes2, base->sc2};
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto piece = OfExpert(parts[i], key.expert, geometry(key.layer).experts);
      std::memcpy(destination.data() + shape.parts[i].offset, piece.data(), piece.size());
    }
    return {};
  }
  HP_ASSIGN(const LayerFile* const file, Open(key.layer, Encoding::kBase));
  return ReadParts(*file, shape, key.expert, destination);
}

void RecordReader::SetResident(uint32_t layer, const ResidentBase& base) {
  const RecordShape shape = RecordShape::Of(Encoding::kBase, geometry(layer));
  const size_t experts = geometry(layer).experts;
  HP_CHECK(base.planes13.size() == shape.parts[0].bytes * experts &&
           base.sc13.size() == shape.parts[1].bytes * experts &&
           base.planes2.size() == shape.parts[2].bytes * experts &&
           base.sc2.size() == shape.parts[3].bytes * experts);
  Layer& slot = layers_[layer];
  std::lock_guard lock(slot.mutex);
  HP_CHECK(slot.base == nullptr);
  slot.base = std::make_unique<const ResidentBase>(base);
  slot.resident.store(slot.base.get(), std::memory_order_release);
}

const RecordReader::ResidentBase* RecordReader::Resident(uint32_t layer) const {
  return layers_[layer].resident.load(std::memory_order_acquire);
}

RecordReaderStats RecordReader::stats() const {
  return {records_read_.load(), bytes_read_.load(), bytes_reread_.load()};
}

}  // namespace hotplane
