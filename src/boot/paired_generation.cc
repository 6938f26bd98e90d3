#include "boot/paired_generation.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/format_text.h"
#include "boot/describe.h"
#include "boot/shard_choice.h"

namespace hotplane {

Result<std::string> FindPairedGeneration(const Store& store, std::string_view prefix,
                                         const Digest128& fingerprint) {
  HP_ASSIGN(const std::vector<Store::Entry> found, store.FindGenerations(prefix));
  std::vector<Store::Entry> mine;
  std::copy_if(found.begin(), found.end(), std::back_inserter(mine),
               [&](const Store::Entry& entry) {
                 return entry.identity && entry.identity->source_fingerprint == fingerprint;
               });
  if (mine.empty()) return std::string(prefix);
  HP_ASSIGN(const GenerationChoice choice, ChooseGeneration(mine, store.directory()));
  return ToHex(choice.id);
}

Result<Generation> OpenPairedGeneration(const Store& store, std::string_view prefix,
                                        const Checkpoint& checkpoint, const MoeModel& model,
                                        const Store::OpenOptions& options) {
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint, model));
  HP_ASSIGN(const std::string name, FindPairedGeneration(store, prefix, fingerprint));
  HP_ASSIGN(const std::vector<Store::Entry> found, store.FindGenerations(name));
  if (found.size() > 1)
    return Fail(Status::Data("no generation of this store was built from this checkpoint")
                    .File(store.directory())
                    .Expected(Text("a generation of fingerprint {}", ToHex(fingerprint)))
                    .Found(Store::ListText(found))
                    .Advice("build it first, or give the checkpoint that the store is of"));
  HP_ASSIGN(Generation generation, store.OpenGeneration(name, options));
  HP_TRY(CheckSamePair(generation, checkpoint, model, fingerprint));
  return generation;
}

}  // namespace hotplane
