#include "boot/plan.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/shard_choice.h"

namespace hotplane {
namespace {

bool Contains(const std::vector<uint32_t>& ordinals, uint32_t ordinal) {
  return std::find(ordinals.begin(), ordinals.end(), ordinal) != ordinals.end();
}

PlanEntry NewEntry(const ManifestLayer& layer, Encoding encoding) {
  PlanEntry entry;
  entry.layer = layer.ordinal;
  entry.model_index = layer.model_index;
  entry.mtp = layer.mtp;
  entry.encoding = encoding;
  return entry;
}

// REQUIRES an encoding of the delta tier.
const char* Numbers(Encoding encoding) {
  return encoding == Encoding::kDeltaNibble ? "nibbles" : "quintals";
}
const char* OtherNumbers(Encoding encoding) {
  return encoding == Encoding::kDeltaNibble ? "quintals" : "nibbles";
}

class Planner {
 public:
  Planner(const PlanFacts& facts, const PlanConfig& config) : facts_(facts), config_(config) {}

  Result<BootPlan> Run();

 private:
  Result<void> CheckShard() const;
  Result<void> CheckExperts() const;
  void PlanLayer(const ManifestLayer& layer);
  void PlanBase(const ManifestLayer& layer, bool selected);
  void PlanDelta(const ManifestLayer& layer, bool selected);
  void NoteUnreadable(uint32_t layer, Tier tier);
  void PlanBuild(const ManifestLayer& layer, PlanEntry& entry);
  uint64_t WantedBytes(const ManifestLayer& layer, const LayerLayout& layout) const;
  Result<void> CheckReadable() const;
  Result<void> CheckMissing() const;
  Result<void> PlaceBases();
  Result<void> PinDelta();
  uint64_t RecordBytes(uint32_t layer, Encoding encoding) const;
  void Sum();

  bool Accepts(Encoding encoding) const {
    return std::ranges::count(config_.delta_encodings, encoding) > 0;
  }
  const FileFacts& File(uint32_t layer, Encoding encoding) const {
    return FactsOf(facts_.layers[layer], encoding);
  }

  const PlanFacts& facts_;
  const PlanConfig& config_;
  BootPlan plan_;
  std::map<std::string, std::vector<uint32_t>> missing_;  // what cannot be booted as is, by tier
  std::vector<uint32_t> otherwise_;  // of them, the layers whose delta tier is in another encoding
  const FileFacts* first_damage_ = nullptr;
  const Status* first_irreplaceable_ = nullptr;
  std::map<std::string, std::vector<uint32_t>> unreadable_;  // of the wanted files, by tier
  const FileFacts* first_unreadable_ = nullptr;
};

Result<void> Planner::CheckShard() const {
  const uint32_t world = facts_.manifest.identity.shard_world;
  if (config_.shard_world != world)
    return Fail(OtherWorld(world, config_.shard_world, "", facts_.directory));
  if (config_.shard_rank >= world)
    return Fail(Status::Usage(Text("there is no rank {}", config_.shard_rank))
                    .Expected(Text("0 to {}", world - 1)));
  return {};
}

Result<void> Planner::CheckExperts() const {
  if (!config_.experts) return {};
  uint32_t fewest = UINT32_MAX;
  for (const uint32_t layer : config_.layers)
    fewest = std::min(fewest, facts_.manifest.layers[layer].geometry.experts);
  if (config_.experts->begin < config_.experts->end && config_.experts->end <= fewest) return {};
  return Fail(Status::Usage(Text("there are no experts {}-{}", config_.experts->begin,
                                 int64_t{config_.experts->end} - 1))
                  .Expected(Text("A-B within 0-{}", fewest - 1)));
}

uint64_t Planner::WantedBytes(const ManifestLayer& layer, const LayerLayout& layout) const {
  if (!config_.experts ||
      (config_.experts->begin == 0 && config_.experts->end == layer.geometry.experts))
    return layout.data_bytes;
  uint64_t bytes = 0;
  for (const Section& section : layout.sections)
    bytes += section.expert_bytes * (config_.experts->end - config_.experts->begin);
  return bytes;
}

// Of a tier that is to be built: none of its files may be there unread.
void Planner::NoteUnreadable(uint32_t layer, Tier tier) {
  for (const Encoding encoding : kEncodings) {
    const FileFacts& file = File(layer, encoding);
    if (TierOf(encoding) != tier || file.presence != Presence::kUnreadable) continue;
    if (first_unreadable_ == nullptr) first_unreadable_ = &file;
    std::vector<uint32_t>& layers = unreadable_[std::string(TierName(tier))];
    if (layers.empty() || layers.back() != layer) layers.push_back(layer);
  }
}

// The source bytes of a layer are read once, whatever is built of it: they count at its base.
void Planner::PlanBuild(const ManifestLayer& layer, PlanEntry& entry) {
  const FileFacts& file = File(layer.ordinal, entry.encoding);
  NoteUnreadable(layer.ordinal, TierOf(entry.encoding));
  const bool damaged = file.presence == Presence::kDamaged;
  entry.action = PlanAction::kBuild;
  entry.reason = damaged ? Text("damaged: {}", file.reason) : "absent";
  if (damaged && first_damage_ == nullptr) first_damage_ = &file;
  if (file.irreplaceable) {
    if (first_irreplaceable_ == nullptr) first_irreplaceable_ = &*file.irreplaceable;
  } else if (damaged) {
    plan_.warnings.push_back(Text("layer {} ({}) is damaged and is built again: {}", layer.ordinal,
                                  EncodingName(entry.encoding), file.reason));
  }
  // By its name: what this boot does not want is not opened. A damaged one of the wanted encoding
  // is what there is to tell then.
  const bool otherwise = !damaged && entry.bytes_skipped > 0;
  if (otherwise) {
    otherwise_.push_back(layer.ordinal);
    entry.reason =
        Text("absent; there are {}, not {}", OtherNumbers(entry.encoding), Numbers(entry.encoding));
  } else {
    missing_[std::string(TierName(TierOf(entry.encoding)))].push_back(layer.ordinal);
  }
  const LayerLayout layout =
      PlanLayerLayout(entry.encoding, layer.geometry.OfShard(config_.shard_world));
  entry.bytes_built = layout.file_bytes;
  if (TierOf(entry.encoding) == Tier::kBase) entry.bytes_store = WantedBytes(layer, layout);
  if (!facts_.checkpoint) return;
  const bool shared =
      TierOf(entry.encoding) == Tier::kDelta && plan_.entries.back().action == PlanAction::kBuild;
  if (shared) {
    entry.reason += ": from the same reads as the base";
  } else {
    entry.bytes_checkpoint = facts_.checkpoint->source_bytes[layer.ordinal];
  }
}

void Planner::PlanBase(const ManifestLayer& layer, bool selected) {
  PlanEntry entry = NewEntry(layer, Encoding::kBase);
  const FileFacts& file = File(layer.ordinal, Encoding::kBase);
  if (!selected || !config_.base) {
    entry.action = PlanAction::kSkip;
    entry.reason = selected ? "the base tier is not wanted" : "the layer is not wanted";
    entry.bytes_skipped = file.file_bytes;
  } else if (file.presence == Presence::kPresent) {
    const LayerLayout layout =
        PlanLayerLayout(Encoding::kBase, layer.geometry.OfShard(config_.shard_world));
    entry.action = PlanAction::kRead;
    entry.reason = "present";
    entry.bytes_store = WantedBytes(layer, layout);
    if (entry.bytes_store < file.data_bytes) {
      entry.bytes_skipped = file.data_bytes - entry.bytes_store;
      entry.reason = Text("present; experts {}-{} of {}", config_.experts->begin,
                          config_.experts->end - 1, layer.geometry.experts);
    }
  } else {
    PlanBuild(layer, entry);
  }
  plan_.entries.push_back(std::move(entry));
}

void Planner::PlanDelta(const ManifestLayer& layer, bool selected) {
  PlanEntry entry = NewEntry(layer, config_.delta_encodings.front());
  uint64_t there_bytes = 0;
  for (const Encoding encoding : kEncodings)
    if (TierOf(encoding) == Tier::kDelta) there_bytes += File(layer.ordinal, encoding).file_bytes;
  if (!selected || !Contains(config_.delta_layers, layer.ordinal)) {
    entry.action = PlanAction::kSkip;
    entry.reason = !selected                      ? "the layer is not wanted"
                   : config_.delta_layers.empty() ? "the delta tier is not wanted"
                                                  : "the delta tier of this layer is not wanted";
    entry.bytes_skipped = there_bytes;
    plan_.entries.push_back(std::move(entry));
    return;
  }
  for (const Encoding encoding : config_.delta_encodings) {
    if (File(layer.ordinal, encoding).presence != Presence::kPresent) continue;
    entry.encoding = encoding;
    entry.action = PlanAction::kAttach;
    entry.reason = "present: stays on disk, unread";
    entry.bytes_skipped = there_bytes;
    break;
  }
  if (entry.action == PlanAction::kInvalid) {
    // Of the encodings that will not do; those that would are damaged, and built again.
    for (const Encoding encoding : kEncodings)
      if (TierOf(encoding) == Tier::kDelta && !Accepts(encoding))
        entry.bytes_skipped += File(layer.ordinal, encoding).file_bytes;
    PlanBuild(layer, entry);
  }
  plan_.entries.push_back(std::move(entry));
}

void Planner::PlanLayer(const ManifestLayer& layer) {
  const bool selected = Contains(config_.layers, layer.ordinal);
  PlanBase(layer, selected);
  PlanDelta(layer, selected);
}

Result<void> Planner::CheckReadable() const {
  if (first_unreadable_ == nullptr) return {};
  std::string what;
  for (const auto& [tier, ordinals] : unreadable_)
    what += Text("{}the {} tier of layer{} {}", what.empty() ? "" : "; ", tier,
                 ordinals.size() == 1 ? "" : "s", LayerListText(ordinals, facts_.manifest));
  const Status reason = first_unreadable_->damage.value_or(
      Status::System(first_unreadable_->reason).File(facts_.directory));
  return Fail(UnreadableFile(reason, what));
}

Result<void> Planner::CheckMissing() const {
  if (missing_.empty() && otherwise_.empty()) return {};
  std::string found;
  const auto add = [&](std::string_view what, const std::vector<uint32_t>& ordinals) {
    if (ordinals.empty()) return;
    found += Text("{}{} of layer{} {}", found.empty() ? "" : "; ", what,
                  ordinals.size() == 1 ? "" : "s", LayerListText(ordinals, facts_.manifest));
  };
  for (const auto& [tier, ordinals] : missing_) add(Text("no usable {} tier", tier), ordinals);
  const Encoding wanted = config_.delta_encodings.front();
  add(Text("the delta tier as {}, not as {},", OtherNumbers(wanted), Numbers(wanted)), otherwise_);
  if (!facts_.checkpoint || config_.no_build) {
    std::string advice =
        config_.no_build ? "boot without --no-build and with --checkpoint, or boot fewer --layers"
                         : "--checkpoint CHECKPOINT builds what is missing; or boot fewer "
                           "--layers or --tiers";
    // Where more is missing, that would be missing then too.
    if (missing_.empty())
      advice = Text("leave out --delta: {} will do; or {}", OtherNumbers(wanted), advice);
    if (first_damage_ != nullptr && first_damage_->damage) {
      const std::string& own = first_damage_->damage->advice();
      return Fail(
          Status(*first_damage_->damage)
              .Advice(own.empty() ? advice : own)
              .Because(found + (first_damage_->irreplaceable ? "; the first file in its place"
                                                             : "; the first damaged file")));
    }
    if (first_damage_ != nullptr) found += Text("; damaged: {}", first_damage_->reason);
    return Fail(Status::Data("the store does not hold all that this boot wants; nothing was read")
                    .File(facts_.directory)
                    .Expected("every wanted layer present, or a checkpoint to build it from")
                    .Found(std::move(found))
                    .Advice(advice));
  }
  if (first_irreplaceable_ != nullptr)
    return Fail(Status(*first_irreplaceable_).Because("nothing was read or built"));
  if (!facts_.store_writable)
    return Fail(Status::System("layers are to be built, and the store cannot be written")
                    .File(facts_.directory)
                    .Expected("a store that can be written")
                    .Found(std::move(found))
                    .Advice("build them where the store can be written, or boot fewer --layers"));
  return {};
}

// In layer order: what must be on the device first, then what may be, as long as it fits.
Result<void> Planner::PlaceBases() {
  const uint64_t limit =
      config_.device_bytes - std::min(config_.device_bytes, config_.reserve_bytes);
  plan_.device_limit_bytes = limit;
  const auto wanted = [this](const PlanEntry& entry) {
    const auto other = config_.base_residency_of.find(entry.layer);
    return other == config_.base_residency_of.end() ? config_.base_residency : other->second;
  };
  std::vector<PlanEntry*> bases;
  for (PlanEntry& entry : plan_.entries)
    if (entry.encoding == Encoding::kBase && entry.action != PlanAction::kSkip)
      bases.push_back(&entry);
  uint32_t fixed_count = 0;
  for (PlanEntry* entry : bases) {
    if (wanted(*entry) != Residency::kDevice) continue;
    entry->residency = Residency::kDevice;
    plan_.bytes_device += entry->bytes_store;
    ++fixed_count;
  }
  if (plan_.bytes_device > limit)
    return Fail(
        Status::Capacity("the planes do not fit in the device's memory; nothing was read")
            .Expected(Text("{} for {} ({} bytes)", FormatBytes(plan_.bytes_device),
                           Counted(fixed_count, "layers"), plan_.bytes_device))
            .Found(Text("{} available, {} of it reserved", FormatBytes(config_.device_bytes),
                        FormatBytes(config_.reserve_bytes)))
            .Advice("--base auto keeps on the host what does not fit; or boot fewer "
                    "--layers or --experts, or lower --reserve"));
  for (PlanEntry* entry : bases) {
    if (entry->residency == Residency::kDevice) continue;
    const bool fits = plan_.bytes_device + entry->bytes_store <= limit;
    if (wanted(*entry) == Residency::kAuto && fits) {
      entry->residency = Residency::kDevice;
      plan_.bytes_device += entry->bytes_store;
      continue;
    }
    entry->residency = Residency::kHost;
    plan_.bytes_host += entry->bytes_store;
    if (entry->action == PlanAction::kRead) entry->action = PlanAction::kMap;
    entry->reason += wanted(*entry) == Residency::kHost ? "; on the host as asked"
                                                        : "; on the host: the device is full";
  }
  for (PlanEntry* entry : bases) {
    if (!config_.keeps_built || entry->action != PlanAction::kBuild ||
        entry->residency != Residency::kDevice)
      continue;
    entry->bytes_kept = std::exchange(entry->bytes_store, 0);
    entry->reason += "; stays on the device";
  }
  return {};
}

Result<void> Planner::PinDelta() {
  if (config_.delta_pinned_bytes == 0) return {};
  std::vector<PlanEntry*> wanted;
  // All records have slots of one size, those of other layers in the store too.
  uint64_t slot_bytes = 0;
  for (PlanEntry& entry : plan_.entries) {
    if (TierOf(entry.encoding) != Tier::kDelta) continue;
    if (entry.action != PlanAction::kSkip) wanted.push_back(&entry);
    for (const Encoding encoding : kEncodings) {
      const bool there = File(entry.layer, encoding).presence == Presence::kPresent;
      if (TierOf(encoding) == Tier::kDelta && (there || encoding == entry.encoding))
        slot_bytes = std::max(slot_bytes, RoundUp(RecordBytes(entry.layer, encoding), kPageBytes));
    }
  }
  if (wanted.empty()) return {};
  uint64_t slots = config_.delta_pinned_bytes / slot_bytes;
  if (slots == 0)
    return Fail(Status::Usage("not one delta record fits in the memory to pin them in")
                    .Expected(Text("--pin-delta of at least {} bytes", slot_bytes))
                    .Found(Text("{} bytes", config_.delta_pinned_bytes)));
  for (PlanEntry* entry : wanted) {
    const uint32_t count = config_.experts ? config_.experts->end - config_.experts->begin
                                           : facts_.manifest.layers[entry->layer].geometry.experts;
    const auto pinned = static_cast<uint32_t>(std::min<uint64_t>(slots, count));
    if (pinned == 0) break;
    slots -= pinned;
    const uint64_t bytes = pinned * RecordBytes(entry->layer, entry->encoding);
    entry->pinned_experts = pinned;
    entry->residency = Residency::kHost;
    entry->bytes_store = bytes;
    plan_.bytes_host += bytes;
    plan_.bytes_pinned += bytes;
    const std::string what = pinned == count
                                 ? std::string("pinned in host memory")
                                 : Text("{} of {} experts pinned in host memory", pinned, count);
    if (entry->action == PlanAction::kAttach) {
      entry->action = PlanAction::kRead;
      entry->bytes_skipped -= bytes;
      entry->reason = "present: " + what;
    } else {
      entry->reason += "; " + what;
    }
  }
  const uint64_t others = config_.device_is_host ? plan_.bytes_device : 0;
  if (plan_.bytes_pinned <= config_.host_bytes - std::min(config_.host_bytes, others)) return {};
  return Fail(Status::Capacity("the delta records to pin do not fit in memory; nothing was read")
                  .Expected(Text("{} beside {} of planes", FormatBytes(plan_.bytes_pinned),
                                 FormatBytes(others)))
                  .Found(Text("{} available", FormatBytes(config_.host_bytes)))
                  .Advice("a lower --pin-delta, or none: a delta tier is used from disk as well"));
}

uint64_t Planner::RecordBytes(uint32_t layer, Encoding encoding) const {
  const LayerLayout layout = PlanLayerLayout(
      encoding, facts_.manifest.layers[layer].geometry.OfShard(config_.shard_world));
  uint64_t bytes = 0;
  for (const Section& section : layout.sections) bytes += section.expert_bytes;
  return bytes;
}

void Planner::Sum() {
  plan_.layers_total = static_cast<uint32_t>(config_.layers.size());
  plan_.shard_rank = config_.shard_rank;
  plan_.shard_world = config_.shard_world;
  for (const PlanEntry& entry : plan_.entries) {
    plan_.bytes_store += entry.bytes_store;
    plan_.bytes_checkpoint += entry.bytes_checkpoint;
    plan_.bytes_built += entry.bytes_built;
    plan_.bytes_kept += entry.bytes_kept;
    plan_.bytes_skipped += entry.bytes_skipped;
  }
}

Result<BootPlan> Planner::Run() {
  HP_CHECK(facts_.layers.size() == facts_.manifest.layers.size());
  HP_CHECK(!config_.layers.empty() && !config_.delta_encodings.empty());
  HP_TRY(CheckShard());
  HP_TRY(CheckExperts());
  for (const ManifestLayer& layer : facts_.manifest.layers) PlanLayer(layer);
  HP_TRY(CheckReadable());
  HP_TRY(CheckMissing());
  HP_TRY(PlaceBases());
  HP_TRY(PinDelta());
  Sum();
  return std::move(plan_);
}

std::string ActionText(const PlanEntry& entry) {
  if (entry.residency == Residency::kInvalid) return std::string(PlanActionName(entry.action));
  return Text("{} -> {}", PlanActionName(entry.action), ResidencyName(entry.residency));
}

bool SameTreatment(const PlanEntry& a, const PlanEntry& b) {
  return a.mtp == b.mtp && a.encoding == b.encoding && a.action == b.action &&
         a.residency == b.residency && a.reason == b.reason;
}

}  // namespace

std::string_view ResidencyName(Residency residency) {
  switch (residency) {
    case Residency::kDevice: return "device";
    case Residency::kHost: return "host";
    case Residency::kAuto: return "auto";
    case Residency::kInvalid: break;
  }
  return "invalid";
}

std::optional<Residency> ParseResidency(std::string_view name) {
  for (const Residency residency : {Residency::kDevice, Residency::kHost, Residency::kAuto})
    if (name == ResidencyName(residency)) return residency;
  return std::nullopt;
}

std::string_view PlanActionName(PlanAction action) {
  switch (action) {
    case PlanAction::kAttach: return "attach";
    case PlanAction::kRead: return "read";
    case PlanAction::kMap: return "map";
    case PlanAction::kBuild: return "build";
    case PlanAction::kSkip: return "skip";
    case PlanAction::kInvalid: break;
  }
  return "invalid";
}

uint64_t UsableDeviceBytes(uint64_t free_bytes) {
  constexpr uint64_t kOverheadBytes = 64 * kMiB;
  return free_bytes - std::min(free_bytes, kOverheadBytes);
}

const FileFacts& FactsOf(const LayerFacts& layer, Encoding encoding) {
  const auto place = std::find(kEncodings.begin(), kEncodings.end(), encoding);
  HP_CHECK(place != kEncodings.end());
  return layer[static_cast<size_t>(place - kEncodings.begin())];
}

FileFacts& FactsOf(LayerFacts& layer, Encoding encoding) {
  return const_cast<FileFacts&>(FactsOf(std::as_const(layer), encoding));
}

const PlanEntry& BootPlan::Of(uint32_t layer, Tier tier) const {
  const size_t index = size_t{2} * layer + (tier == Tier::kBase ? 0 : 1);
  HP_CHECK(index < entries.size());
  return entries[index];
}

Status UnreadableFile(const Status& reason, std::string_view what) {
  return Status(reason)
      .Advice(
          "let this user read the file, or look after the disk; nothing is built in the place "
          "of what may well be right")
      .Because(Text("unreadable: {}", what));
}

Result<BootPlan> PlanBoot(const PlanFacts& facts, const PlanConfig& config) {
  return Planner(facts, config).Run();
}

std::string LayerListText(const std::vector<uint32_t>& ordinals, const Manifest& manifest) {
  std::string text;
  const auto mtp = [&manifest](uint32_t ordinal) { return manifest.layers[ordinal].mtp; };
  for (size_t i = 0; i < ordinals.size();) {
    size_t last = i;
    while (last + 1 < ordinals.size() && ordinals[last + 1] == ordinals[last] + 1 &&
           mtp(ordinals[last + 1]) == mtp(ordinals[i]))
      ++last;
    text += text.empty() ? "" : ", ";
    text += last == i ? Text("{}", ordinals[i]) : Text("{}-{}", ordinals[i], ordinals[last]);
    if (mtp(ordinals[i])) text += " (MTP)";
    i = last + 1;
  }
  return text;
}

std::string PlanTable(const BootPlan& plan) {
  std::string text =
      plan.shard_world > 1 ? Text("rank {} of {}\n", plan.shard_rank, plan.shard_world) : "";
  text += Text("{:<12} {:<14} {:<15} {:>12} {:>12} {:>12} {:>12}  {}\n", "layers", "tier", "action",
               "store", "checkpoint", "written", "skipped", "why");
  for (const size_t tier : {0, 1}) {
    for (size_t i = tier; i < plan.entries.size();) {
      PlanEntry run = plan.entries[i];
      size_t next = i + 2;
      for (; next < plan.entries.size() && SameTreatment(plan.entries[next], run); next += 2) {
        run.bytes_store += plan.entries[next].bytes_store;
        run.bytes_checkpoint += plan.entries[next].bytes_checkpoint;
        run.bytes_built += plan.entries[next].bytes_built;
        run.bytes_skipped += plan.entries[next].bytes_skipped;
      }
      const uint32_t last = plan.entries[next - 2].layer;
      const std::string layers =
          (last == run.layer ? Text("{}", last) : Text("{}-{}", run.layer, last)) +
          (run.mtp ? " (MTP)" : "");
      text += Text("{:<12} {:<14} {:<15} {:>12} {:>12} {:>12} {:>12}  {}\n", layers,
                   EncodingName(run.encoding), ActionText(run), FormatBytes(run.bytes_store),
                   FormatBytes(run.bytes_checkpoint), FormatBytes(run.bytes_built),
                   FormatBytes(run.bytes_skipped), Printable(run.reason));
      i = next;
    }
  }
  return text + Text("{:<43} {:>12} {:>12} {:>12} {:>12}  device {} of {}, host {}", "in all",
                     FormatBytes(plan.bytes_store), FormatBytes(plan.bytes_checkpoint),
                     FormatBytes(plan.bytes_built), FormatBytes(plan.bytes_skipped),
                     FormatBytes(plan.bytes_device), FormatBytes(plan.device_limit_bytes),
                     FormatBytes(plan.bytes_host));
}

}  // namespace hotplane
