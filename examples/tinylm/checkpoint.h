// A folder of safetensors files: tensors by name, read one at a time.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "result.h"

namespace tinylm {

struct Tensor {
  std::string file;
  std::string dtype;  // as in the header: "BF16", "F32", "I8", ...
  std::vector<uint64_t> shape;
  uint64_t offset = 0;  // of the first byte, in `file`
  uint64_t bytes = 0;   // these lie within the file
};

// JSON of a file that nobody vouches for; discarded where it is malformed or nested deeper than any
// checkpoint's is.
nlohmann::json ParseUntrusted(const std::string& text);

// Every *.safetensors file of the folder counts: with an index that is the same, and without one
// there is nothing else to go by. Immutable after Open.
class Checkpoint {
 public:
  static Result<Checkpoint> Open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  bool Has(const std::string& name) const { return tensors_.count(name) != 0; }
  // Whether layers are named as DeepSeek names them, `layers.N.`, and not as Hugging Face does,
  // `model.layers.N.`
  bool HasDeepSeekNames() const;
  Result<const Tensor*> Find(const std::string& name) const;

  // The bytes of a tensor that has this dtype and shape; otherwise an error that names it.
  Result<std::vector<uint8_t>> Bytes(const std::string& name, const std::string& dtype,
                                     const std::vector<uint64_t>& shape) const;
  // A BF16 or F32 tensor of this shape, as float32: exact.
  Result<std::vector<float>> Floats(const std::string& name,
                                    const std::vector<uint64_t>& shape) const;

 private:
  Result<void> AddFile(const std::string& path);
  Result<void> AddTensor(const std::string& path, uint64_t data_begin, uint64_t file_bytes,
                         const std::string& name, const nlohmann::json& entry);

  std::string folder_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace tinylm
