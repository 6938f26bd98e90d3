// One expert's record, read from the store by expert: its delta record as it is stored, its exact
// FP4 planes, or its base parts. Every byte handed out was verified in the read that brought it: a
// chunk that was right an hour ago is checked again after it left the page cache.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

struct ExpertKey {
  uint32_t layer = 0;  // ordinal
  uint32_t expert = 0;
  bool operator==(const ExpertKey&) const = default;
};

enum class RecordKind : uint8_t {
  kInvalid = 0,
  kDelta,  // fp13, fp2 as stored: quintals or nibbles
  kFp4,    // fp13, fp2 as nibble planes, whatever is stored
  kBase,   // planes13, sc13, planes2, sc2
};
inline constexpr std::array kRecordKinds = {RecordKind::kDelta, RecordKind::kFp4,
                                            RecordKind::kBase};
std::string_view RecordKindName(RecordKind kind);  // "delta", "fp4", "base"

// Where the parts of a record lie in its destination: one after the other, without gaps.
struct RecordShape {
  struct Part {
    std::string_view role;
    size_t offset = 0;
    size_t bytes = 0;
  };
  Encoding encoding = Encoding::kInvalid;  // of the bytes; kDeltaNibble for kFp4
  std::array<Part, 4> parts;
  size_t part_count = 0;
  size_t bytes = 0;

  // `encoding` is that of the bytes.
  static RecordShape Of(Encoding encoding, const LayerGeometry& geometry);
};

// One expert's piece of a section of an opened layer file, into `destination` of exactly its size,
// verified; a bad chunk is read once more past the page cache, and those bytes are added to
// `reread_bytes`. kData names the chunk.
Result<void> ReadPiece(Env& env, const LayerFile& file, std::string_view role, uint32_t expert,
                       std::span<std::byte> destination, uint64_t& reread_bytes);

// The nibble plane of part `role` (fp13 or fp2) from base codes and the quintals of `file`; sizes
// as in tsym4.h. kData when the two tiers were not built from the same weights.
Result<void> MergePart(const Kernels& kernels, const LayerFile& file, std::string_view role,
                       uint32_t expert, std::span<const std::byte> codes,
                       std::span<const std::byte> quintals, std::span<std::byte> nibbles);

struct RecordReaderStats {
  uint64_t records_read = 0;
  uint64_t bytes_read = 0;    // from layer files, verified
  uint64_t bytes_reread = 0;  // of bad chunks, past the page cache
};

// Thread-safe. Layer files are opened at the first read that needs them, once each; a failure to
// open is told and tried again by the next read. `generation` outlives it.
class RecordReader {
 public:
  explicit RecordReader(const Generation& generation);

  // Of two delta tiers of a layer, the one to read; before the layer's first delta record.
  void PreferDelta(uint32_t layer, Encoding encoding);
  // Is there a delta tier to read, by header alone? Quintals first, as boot plans attach them. A
  // file that must not be used is kDamaged or kUnreadable with the reason, never present. kUsage
  // for a layer that the model does not have.
  struct DeltaProbe {
    Presence presence = Presence::kInvalid;
    Encoding encoding = Encoding::kInvalid;  // of kPresent
    std::optional<Status> reason;            // of kDamaged and kUnreadable
  };
  Result<DeltaProbe> ProbeDelta(uint32_t layer);

  // kDelta: opens the layer's file; kData when there is none to be used. The others need no file.
  Result<RecordShape> Shape(RecordKind kind, uint32_t layer);

  // `destination` has exactly the bytes of Shape. kUsage for what the model does not have or a
  // destination of another size, kData for damage or an absent tier, kSystem for a failing disk.
  // After an error the content of `destination` is unspecified.
  Result<void> Read(RecordKind kind, ExpertKey key, std::span<std::byte> destination);

  // From now on codes and base parts of this layer come from memory that was verified when it was
  // filled, and that outlives the reader: arrays over all experts. Once per layer.
  struct ResidentBase {
    std::span<const std::byte> planes13, sc13, planes2, sc2;
  };
  void SetResident(uint32_t layer, const ResidentBase& base);
  const ResidentBase* Resident(uint32_t layer) const;  // null: none

  LayerGeometry geometry(uint32_t layer) const;  // REQUIRES a layer of the model
  size_t layer_count() const { return generation_.manifest().layers.size(); }
  Result<void> CheckKey(ExpertKey key) const;  // kUsage
  RecordReaderStats stats() const;

 private:
  struct OpenedFile {
    std::mutex mutex;
    std::unique_ptr<const LayerFile> file;
    std::atomic<const LayerFile*> ready{nullptr};
  };
  struct Layer {
    std::array<OpenedFile, kEncodings.size()> files;
    // Of kDelta records: what the first of them was, so that their size never changes.
    std::atomic<Encoding> delta_encoding{Encoding::kInvalid};
    std::mutex mutex;
    std::unique_ptr<const ResidentBase> base;
    std::atomic<const ResidentBase*> resident{nullptr};
  };

  Result<void> CheckLayer(uint32_t layer) const;
  const LayerFile* Opened(uint32_t layer, Encoding encoding) const;
  Result<const LayerFile*> Open(uint32_t layer, Encoding encoding);
  Result<const LayerFile*> OpenFirst(uint32_t layer, std::span<const Encoding> preference);
  Result<const LayerFile*> OpenDelta(uint32_t layer);
  Result<void> ReadPart(const LayerFile& file, std::string_view role, uint32_t expert,
                        std::span<std::byte> destination);
  Result<void> ReadParts(const LayerFile& file, const RecordShape& shape, uint32_t expert,
                         std::span<std::byte> destination);
  Result<void> ReadFp4(ExpertKey key, const RecordShape& shape, std::span<std::byte> destination);
  Result<void> ReadBase(ExpertKey key, const RecordShape& shape, std::span<std::byte> destination);
  Result<std::span<const std::byte>> Codes(ExpertKey key, bool w13, std::span<std::byte> scratch);

  const Generation& generation_;
  const Kernels& kernels_;
  std::vector<Layer> layers_;
  std::atomic<uint64_t> records_read_{0};
  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<uint64_t> bytes_reread_{0};
};

}  // namespace hotplane
