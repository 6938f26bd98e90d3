// Layers as DLPack tensors. The structs are those of DLPack's ABI, version 1.0.
#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <new>

#include "capi/capi_state.h"

namespace hotplane::capi {
namespace {

enum DlDeviceType : int32_t { kDlCpu = 1, kDlCuda = 2 };
enum DlTypeCode : uint8_t { kDlUInt = 1, kDlFloat = 2 };
constexpr uint64_t kDlReadOnly = 1;

struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t dimensions;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48 && offsetof(DlTensor, shape) == 24);

struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};
static_assert(sizeof(DlManagedTensor) == 64);

struct DlManagedTensorVersioned {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(DlManagedTensorVersioned*);
  uint64_t flags;
  DlTensor tensor;
};
static_assert(sizeof(DlManagedTensorVersioned) == 80);

// A tensor with what it stands on.
template <typename Managed>
struct Owned {
  Managed managed;
  int64_t shape[2];
  int64_t strides[2];
  std::shared_ptr<EngineState> state;
};

template <typename Managed>
void Delete(Managed* managed) {
  delete static_cast<Owned<Managed>*>(managed->context);
}

// A part of a layer before it has an owner.
struct Part {
  const void* data;
  size_t bytes;
  uint8_t type_code;
  uint8_t type_bits;
};

Result<Part> PartOf(const hotplane_layer& layer, int part) {
  switch (part) {
    case HOTPLANE_PLANES13: return Part{layer.planes13, layer.planes13_bytes, kDlUInt, 8};
    case HOTPLANE_SC13: return Part{layer.sc13, layer.sc13_bytes, kDlUInt, 8};
    case HOTPLANE_PLANES2: return Part{layer.planes2, layer.planes2_bytes, kDlUInt, 8};
    case HOTPLANE_SC2: return Part{layer.sc2, layer.sc2_bytes, kDlUInt, 8};
    case HOTPLANE_BIAS13: return Part{layer.bias13, layer.bias13_bytes, kDlFloat, 32};
    case HOTPLANE_BIAS2: return Part{layer.bias2, layer.bias2_bytes, kDlFloat, 32};
    default: return Fail(Status::Usage("there is no such hotplane_part").Found(Text("{}", part)));
  }
}

template <typename Managed>
Managed* Make(const Part& part, const hotplane_layer& layer, std::shared_ptr<EngineState> state) {
  auto owned = std::make_unique<Owned<Managed>>();
  owned->state = std::move(state);
  const size_t item_bytes = part.type_bits / 8u;
  owned->shape[0] = layer.experts;
  owned->shape[1] = static_cast<int64_t>(part.bytes / item_bytes / layer.experts);
  owned->strides[0] = owned->shape[1];
  owned->strides[1] = 1;
  DlTensor& tensor = owned->managed.tensor;
  tensor.data = const_cast<void*>(part.data);
  tensor.device_type = layer.device < 0 ? kDlCpu : kDlCuda;
  tensor.device_id = layer.device < 0 ? 0 : layer.device;
  tensor.dimensions = 2;
  tensor.type_code = part.type_code;
  tensor.type_bits = part.type_bits;
  tensor.type_lanes = 1;
  tensor.shape = owned->shape;
  tensor.strides = owned->strides;
  owned->managed.context = owned.get();
  owned->managed.deleter = Delete<Managed>;
  return &owned.release()->managed;
}

Result<void*> LayerTensor(const std::shared_ptr<EngineState>& state, uint32_t index, int part,
                          bool versioned) {
  std::lock_guard lock(state->mutex);
  if (index >= state->layers.size())
    return Fail(Status::Usage(Text("there is no booted layer {}", index))
                    .Expected(Text("below {}", state->layers.size())));
  const hotplane_layer& layer = state->layers[index];
  HP_ASSIGN(const Part wanted, PartOf(layer, part));
  if (wanted.bytes == 0) return Fail(Status::Usage(Text("layer {} has no biases", layer.ordinal)));
  if (!versioned) return Make<DlManagedTensor>(wanted, layer, state);
  auto* const managed = Make<DlManagedTensorVersioned>(wanted, layer, state);
  managed->major = 1;
  managed->flags = kDlReadOnly;
  return managed;
}

// Functions of the interpreter in this process; the library itself links none.
struct Python {
  using Destructor = void (*)(void*);
  void* (*capsule_new)(void*, const char*, Destructor);
  int (*is_valid)(void*, const char*);
  void* (*pointer_of)(void*, const char*);
  int (*set_pointer)(void*, void*);
  int (*set_name)(void*, const char*);
  int (*set_destructor)(void*, Destructor);

  // Null where there is none.
  static const Python* Get() {
    static const Python python = Find();
    return python.capsule_new == nullptr ? nullptr : &python;
  }

 private:
  template <typename Function>
  static bool Find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
  }
  static Python Find() {
    Python python = {};
    const bool found = Find(python.is_valid, "PyCapsule_IsValid") &&
                       Find(python.pointer_of, "PyCapsule_GetPointer") &&
                       Find(python.set_pointer, "PyCapsule_SetPointer") &&
                       Find(python.set_name, "PyCapsule_SetName") &&
                       Find(python.set_destructor, "PyCapsule_SetDestructor") &&
                       Find(python.capsule_new, "PyCapsule_New");
    return found ? python : Python{};
  }
};

constexpr char kTensorName[] = "dltensor";
constexpr char kVersionedName[] = "dltensor_versioned";
constexpr char kOwnerName[] = "hotplane_owner";

template <typename Managed>
void Drop(void* tensor) {
  auto* const managed = static_cast<Managed*>(tensor);
  managed->deleter(managed);
}

// Calls the deleter of the tensor in a capsule of this name; its consumer has renamed it.
template <typename Managed>
void DropCapsule(void* capsule, const char* name) {
  const Python* const python = Python::Get();
  if (python == nullptr || python->is_valid(capsule, name) == 0) return;
  Drop<Managed>(python->pointer_of(capsule, name));
}

// What the capsule of an owner points to.
struct Place {
  void* object;  // first: what is seen from outside
  hotplane_owned what;
  pid_t process;
};

void DropOwner(void* capsule) {
  const std::unique_ptr<Place> place(
      static_cast<Place*>(Python::Get()->pointer_of(capsule, kOwnerName)));
  if (place->object == nullptr || place->process != getpid()) return;
  switch (place->what) {
    case HOTPLANE_OWNED_TENSOR: return Drop<DlManagedTensor>(place->object);
    case HOTPLANE_OWNED_TENSOR_VERSIONED: return Drop<DlManagedTensorVersioned>(place->object);
    case HOTPLANE_OWNED_RECORD:
      return hotplane_record_release(static_cast<hotplane_record*>(place->object));
  }
}

}  // namespace
}  // namespace hotplane::capi

extern "C" void hotplane_drop_capsule(void* capsule) {
  using namespace hotplane::capi;
  DropCapsule<DlManagedTensor>(capsule, kTensorName);
  DropCapsule<DlManagedTensorVersioned>(capsule, kVersionedName);
}

extern "C" void* hotplane_owner_new(hotplane_owned what) {
  using namespace hotplane::capi;
  const Python* const python = Python::Get();
  if (python == nullptr) return nullptr;
  std::unique_ptr<Place> place(new (std::nothrow) Place{nullptr, what, getpid()});
  if (place == nullptr) return nullptr;
  void* const capsule = python->capsule_new(place.get(), kOwnerName, DropOwner);
  if (capsule != nullptr) static_cast<void>(place.release());
  return capsule;
}

extern "C" int hotplane_owner_to_dlpack(void* capsule) {
  using namespace hotplane::capi;
  const Python* const python = Python::Get();
  if (python == nullptr || python->is_valid(capsule, kOwnerName) == 0) return -1;
  auto* const place = static_cast<Place*>(python->pointer_of(capsule, kOwnerName));
  if (place->object == nullptr || place->what == HOTPLANE_OWNED_RECORD) return -1;
  const std::unique_ptr<Place> done(place);
  // None of these fails for a capsule and a pointer.
  python->set_pointer(capsule, place->object);
  python->set_destructor(capsule, hotplane_drop_capsule);
  python->set_name(capsule, place->what == HOTPLANE_OWNED_TENSOR ? kTensorName : kVersionedName);
  return 0;
}

extern "C" hotplane_code hotplane_layer_dlpack(const hotplane_engine* engine, uint32_t index,
                                               hotplane_part part, int versioned, void** tensor) {
  using hotplane::capi::Guarded;
  using hotplane::capi::Need;
  if (tensor != nullptr) *tensor = nullptr;
  return Guarded([&]() -> hotplane::Result<void> {
    HP_TRY(Need(engine != nullptr && tensor != nullptr,
                "an engine and a place for the tensor are needed"));
    HP_ASSIGN(*tensor, hotplane::capi::LayerTensor(engine->state, index, part, versioned != 0));
    return {};
  });
}
