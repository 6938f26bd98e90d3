#include "checkpoint.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tinylm {
namespace {

using nlohmann::json;

// The format's own limit: a longer header is a damaged length.
constexpr uint64_t kHeaderBytesMax = 100'000'000;

std::string ShapeText(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

bool ReadAt(std::ifstream& file, uint64_t offset, void* to, uint64_t bytes) {
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
  return file.good();
}

uint64_t ElementBytes(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "BF16" || dtype == "F16" || dtype == "I16" || dtype == "U16") return 2;
  return 1;
}

// Whether `values` is an array of unsigned numbers; then they are in `out`.
bool Unsigned(const json& values, std::vector<uint64_t>& out) {
  if (!values.is_array()) return false;
  for (const json& value : values) {
    if (!value.is_number_unsigned()) return false;
    out.push_back(value.get<uint64_t>());
  }
  return true;
}

}  // namespace

json ParseUntrusted(const std::string& text) {
  constexpr int kDepthMax = 64;
  bool too_deep = false;
  const json::parser_callback_t callback = [&](int depth, json::parse_event_t, json&) {
    too_deep = too_deep || depth > kDepthMax;
    return !too_deep;
  };
  json parsed = json::parse(text, callback, /*allow_exceptions=*/false);
  return too_deep ? json(json::value_t::discarded) : parsed;
}

Result<Checkpoint> Checkpoint::Open(const std::string& folder) {
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  std::vector<std::string> paths;
  std::error_code failed;
  for (std::filesystem::directory_iterator at(folder, failed), end; !failed && at != end;
       at.increment(failed)) {
    if (at->path().extension() == ".safetensors") paths.push_back(at->path().string());
  }
  if (failed) {
    return Failure(HOTPLANE_SYSTEM, "the model's folder cannot be read", folder, "a folder",
                   failed.message());
  }
  if (paths.empty()) {
    return Failure(HOTPLANE_DATA, "no weights in the model's folder", folder, "*.safetensors",
                   "none");
  }
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) {
    const Result<void> added = checkpoint.AddFile(path);
    if (!added) return Failure(added.error());
  }
  return checkpoint;
}

Result<void> Checkpoint::AddFile(const std::string& path) {
  std::error_code failed;
  const uint64_t file_bytes = std::filesystem::file_size(path, failed);
  std::ifstream file(path, std::ios::binary);
  if (failed || !file) {
    return Failure(HOTPLANE_SYSTEM, "a safetensors file cannot be opened", path, "a file",
                   failed ? failed.message() : std::strerror(errno));
  }
  uint64_t header_bytes = 0;
  static_assert(std::endian::native == std::endian::little, "the format's numbers are read as is");
  if (file_bytes < 8 || !ReadAt(file, 0, &header_bytes, 8)) {
    return Failure(HOTPLANE_DATA, "a safetensors file has no header", path, "8 bytes or more",
                   std::to_string(file_bytes));
  }
  if (header_bytes > kHeaderBytesMax || header_bytes > file_bytes - 8) {
    return Failure(HOTPLANE_DATA, "a safetensors header does not fit in its file", path,
                   std::to_string(std::min(kHeaderBytesMax, file_bytes - 8)) + " bytes or less",
                   std::to_string(header_bytes));
  }
  std::string text(header_bytes, '\0');
  if (!ReadAt(file, 8, text.data(), header_bytes)) {
    return Failure(HOTPLANE_SYSTEM, "a safetensors header cannot be read", path);
  }
  const json header = ParseUntrusted(text);
  if (!header.is_object()) {
    return Failure(HOTPLANE_DATA, "a safetensors header is not JSON", path, "an object",
                   header.is_discarded() ? "malformed text" : header.type_name());
  }
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const Result<void> added = AddTensor(path, 8 + header_bytes, file_bytes, name, entry);
    if (!added) return added;
  }
  return {};
}

Result<void> Checkpoint::AddTensor(const std::string& path, uint64_t data_begin,
                                   uint64_t file_bytes, const std::string& name,
                                   const json& entry) {
  Tensor tensor;
  tensor.file = path;
  std::vector<uint64_t> range;
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !Unsigned(entry["shape"], tensor.shape) ||
      !entry.contains("data_offsets") || !Unsigned(entry["data_offsets"], range) ||
      range.size() != 2) {
    return Failure(HOTPLANE_DATA, "malformed header entry of tensor " + name, path,
                   "dtype, shape and two data_offsets",
                   entry.dump(-1, ' ', true, json::error_handler_t::replace));
  }
  tensor.dtype = entry["dtype"].get<std::string>();
  const uint64_t data_bytes = file_bytes - data_begin;
  if (range[0] > range[1] || range[1] > data_bytes) {
    return Failure(HOTPLANE_DATA, "tensor " + name + " lies outside its file", path,
                   "bytes within 0.." + std::to_string(data_bytes),
                   std::to_string(range[0]) + ".." + std::to_string(range[1]));
  }
  tensor.offset = data_begin + range[0];
  tensor.bytes = range[1] - range[0];
  uint64_t wanted = ElementBytes(tensor.dtype);
  for (const uint64_t size : tensor.shape) {
    if (__builtin_mul_overflow(wanted, size, &wanted)) wanted = UINT64_MAX;
  }
  if (wanted != tensor.bytes) {
    return Failure(HOTPLANE_DATA, "tensor " + name + " has another size than its shape", path,
                   tensor.dtype + " " + ShapeText(tensor.shape),
                   std::to_string(tensor.bytes) + " bytes");
  }
  const auto [place, is_new] = tensors_.emplace(name, tensor);
  if (!is_new) {
    return Failure(HOTPLANE_DATA, "tensor " + name + " is in two files", path, "one",
                   place->second.file);
  }
  return {};
}

bool Checkpoint::HasDeepSeekNames() const {
  const auto first = tensors_.lower_bound("layers.");
  return first != tensors_.end() && first->first.compare(0, 7, "layers.") == 0;
}

Result<const Tensor*> Checkpoint::Find(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return Failure(HOTPLANE_DATA, "the checkpoint lacks a tensor", folder_, name, "none");
  }
  return &found->second;
}

Result<std::vector<uint8_t>> Checkpoint::Bytes(const std::string& name, const std::string& dtype,
                                               const std::vector<uint64_t>& shape) const {
  const Result<const Tensor*> found = Find(name);
  if (!found) return Failure(found.error());
  const Tensor& tensor = **found;
  if (tensor.dtype != dtype || tensor.shape != shape) {
    return Failure(HOTPLANE_DATA, "tensor " + name + " is not as the config says", tensor.file,
                   dtype + " " + ShapeText(shape), tensor.dtype + " " + ShapeText(tensor.shape));
  }
  std::vector<uint8_t> bytes(tensor.bytes);
  std::ifstream file(tensor.file, std::ios::binary);
  if (!file || !ReadAt(file, tensor.offset, bytes.data(), bytes.size())) {
    return Failure(HOTPLANE_SYSTEM, "tensor " + name + " cannot be read", tensor.file,
                   std::to_string(bytes.size()) + " bytes at " + std::to_string(tensor.offset));
  }
  return bytes;
}

Result<std::vector<float>> Checkpoint::Floats(const std::string& name,
                                              const std::vector<uint64_t>& shape) const {
  const Result<const Tensor*> found = Find(name);
  if (!found) return Failure(found.error());
  const bool is_f32 = (*found)->dtype == "F32";
  const Result<std::vector<uint8_t>> bytes = Bytes(name, is_f32 ? "F32" : "BF16", shape);
  if (!bytes) return Failure(bytes.error());
  std::vector<float> values(bytes->size() / (is_f32 ? 4 : 2));
  if (is_f32) {
    std::memcpy(values.data(), bytes->data(), bytes->size());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t high;
    std::memcpy(&high, bytes->data() + 2 * i, 2);
    values[i] = std::bit_cast<float>(uint32_t{high} << 16);
  }
  return values;
}

}  // namespace tinylm
