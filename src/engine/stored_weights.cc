#include "engine/stored_weights.h"

#include <cstring>

#include "base/format_text.h"

namespace hotplane {

// Where a rank's shard of a projection lies: in the rank's planes, and in the whole matrix.
struct StoredWeights::Place {
  Projection projection;
  LayerGeometry shard;
  uint32_t rank;

  bool down() const { return projection == Projection::kDown; }
  size_t n() const { return down() ? shard.hidden : shard.intermediate; }
  size_t k() const { return down() ? shard.intermediate : shard.hidden; }
  // Rows of gate, then rows of up: whole strips, so each is one run of bytes of w13's planes.
  size_t first_row_in_planes() const { return projection == Projection::kUp ? n() : 0; }
  size_t row() const { return down() ? 0 : rank * n(); }
  size_t column() const { return down() ? rank * k() : 0; }
};

namespace {

std::span<const std::byte> PartOf(const RecordShape& shape, std::span<const std::byte> record,
                                  std::string_view role) {
  for (size_t i = 0; i < shape.part_count; ++i)
    if (shape.parts[i].role == role)
      return record.subspan(shape.parts[i].offset, shape.parts[i].bytes);
  return {};
}

// Rows of `bytes` each from one after the other to where they belong in wider rows.
void Scatter(const std::byte* from, size_t rows, size_t bytes, uint8_t* to, size_t stride) {
  for (size_t row = 0; row < rows; ++row) std::memcpy(to + row * stride, from + row * bytes, bytes);
}

}  // namespace

StoredWeights::StoredWeights(const Generation& generation, const Kernels& kernels)
    : generation_(generation), kernels_(kernels) {
  for (uint32_t rank = 0; rank < generation.world(); ++rank) {
    ranks_.push_back(std::make_unique<const Generation>(generation.ForRank(rank)));
    readers_.push_back(std::make_unique<RecordReader>(*ranks_.back()));
  }
}

LayerGeometry StoredWeights::geometry(uint32_t layer) const {
  return generation_.manifest().layers[layer].geometry;
}

uint64_t StoredWeights::bytes_read() const {
  uint64_t bytes = 0;
  for (const auto& reader : readers_) bytes += reader->stats().bytes_read;
  return bytes;
}

Result<std::optional<std::string>> StoredWeights::FindMissing(uint32_t layer, bool fp4) const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::string of_rank = ranks_.size() > 1 ? Text(" of rank {}", rank) : "";
    TierProbe base = ranks_[rank]->Probe(layer, Encoding::kBase);
    if (base.presence == Presence::kAbsent) return Text("no base tier{}", of_rank);
    if (base.presence != Presence::kPresent) return Fail(*std::move(base.reason));
    if (!fp4) continue;
    HP_ASSIGN(RecordReader::DeltaProbe delta, readers_[rank]->ProbeDelta(layer));
    if (delta.presence == Presence::kAbsent) return Text("no delta tier{}", of_rank);
    if (delta.presence != Presence::kPresent) return Fail(*std::move(delta.reason));
  }
  return std::optional<std::string>();
}

void StoredWeights::TakeBase(const Place& place, StoredExpert& expert) const {
  const RecordShape shape = RecordShape::Of(Encoding::kBase, place.shard);
  const bool down = place.down();
  const size_t n = place.n();
  const size_t k = place.k();
  const size_t skipped = place.first_row_in_planes();
  const std::byte* const codes =
      PartOf(shape, expert.record_, down ? "planes2" : "planes13").data() +
      CodePlaneBytes(skipped, k);
  const std::byte* const scales =
      PartOf(shape, expert.record_, down ? "sc2" : "sc13").data() + ScalePlaneBytes(skipped, k);
  StoredMatrix& matrix = expert.projections[static_cast<size_t>(place.projection)];
  expert.strip_.resize(n * k);
  kernels_.unpack_codes(codes, n, k, expert.strip_.data());
  Scatter(expert.strip_.data(), n, k, matrix.codes.data() + place.row() * matrix.k + place.column(),
          matrix.k);
  kernels_.unpack_scales(scales, n, k, expert.strip_.data());
  Scatter(expert.strip_.data(), n, k / kScaleBlock,
          matrix.scales.data() + (place.row() * matrix.k + place.column()) / kScaleBlock,
          matrix.k / kScaleBlock);
}

void StoredWeights::TakeNibbles(const Place& place, StoredExpert& expert) const {
  const RecordShape shape = RecordShape::Of(Encoding::kDeltaNibble, place.shard);
  const size_t n = place.n();
  const size_t k = place.k();
  const std::byte* const nibbles =
      PartOf(shape, expert.record_, place.down() ? "fp2" : "fp13").data() +
      NibblePlaneBytes(place.first_row_in_planes(), k);
  StoredMatrix& matrix = expert.projections[static_cast<size_t>(place.projection)];
  expert.strip_.resize(n * k / 2);
  kernels_.unpack_nibbles(nibbles, n, k, expert.strip_.data());
  for (size_t row = 0; row < n; ++row) {
    const std::byte* const from = expert.strip_.data() + row * k / 2;
    uint8_t* const to = matrix.nibbles.data() + (place.row() + row) * matrix.k + place.column();
    for (size_t i = 0; i < k / 2; ++i) {
      const auto pair = std::to_integer<uint8_t>(from[i]);
      to[2 * i] = pair & 15;
      to[2 * i + 1] = pair >> 4;
    }
  }
}

Result<void> StoredWeights::Read(ExpertKey key, bool fp4, StoredExpert& expert) const {
  HP_TRY(readers_[0]->CheckKey(key));
  const LayerGeometry whole = geometry(key.layer);
  constexpr std::array kProjections = {Projection::kGate, Projection::kUp, Projection::kDown};
  for (const Projection projection : kProjections) {
    const bool down = projection == Projection::kDown;
    StoredMatrix& matrix = expert.projections[static_cast<size_t>(projection)];
    matrix.n = down ? whole.hidden : whole.intermediate;
    matrix.k = down ? whole.intermediate : whole.hidden;
    matrix.codes.resize(matrix.n * matrix.k);
    matrix.nibbles.resize(fp4 ? matrix.n * matrix.k : 0);
    matrix.scales.resize(matrix.n * matrix.k / kScaleBlock);
  }
  for (uint32_t rank = 0; rank < readers_.size(); ++rank) {
    RecordReader& reader = *readers_[rank];
    const LayerGeometry shard = reader.geometry(key.layer);
    for (const RecordKind kind : {RecordKind::kBase, RecordKind::kFp4}) {
      if (kind == RecordKind::kFp4 && !fp4) continue;
      HP_ASSIGN(const RecordShape shape, reader.Shape(kind, key.layer));
      expert.record_.resize(shape.bytes);
      HP_TRY(reader.Read(kind, key, expert.record_));
      for (const Projection projection : kProjections) {
        const Place place = {projection, shard, rank};
        if (kind == RecordKind::kBase) {
          TakeBase(place, expert);
        } else {
          TakeNibbles(place, expert);
        }
      }
    }
  }
  return {};
}

}  // namespace hotplane
