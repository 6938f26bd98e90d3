"""transformers models on hotplane: their routed experts are computed from a store.

    model = from_pretrained("/models/Qwen3-30B-A3B", "/store", precision="fp4")
    model.generate(...)

or, of a model that is there, loaded or on the meta device:

    attachment = attach(model, "/store")
    attachment.detach()

No expert is materialized as a tensor of torch, none is read from the checkpoint but by a build.
transformers 5, for every model whose experts are one module of gate_up_proj and down_proj:
Qwen3-MoE, Mixtral, DeepSeek-V3 and V4, GLM, gpt-oss and their like.
"""

from __future__ import annotations

import glob
import json
import os
import struct
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple, Union

import torch  # type: ignore[import-not-found, unused-ignore]

from .. import DataError, Engine, Store, UsageError, open as open_store
from .._library import ARITHMETICS, logger
from .._options import word
from . import _experts
from . import torch as hotplane_torch
from ._experts import Place
from ._precisions import FP4, joined, options_for_fp4, precisions_of

if TYPE_CHECKING:
    from .._engine import StrPath

    Source = Union[str, "os.PathLike[str]", Store, Engine]

PLAIN_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}


class Attachment:
    """A model that runs on hotplane. Context manager: `detach` at its end.

    engine  the engine; closed by `detach` when attach booted it
    names   of the modules that were replaced, in layer order
    """

    def __init__(self, model: Any, engine: Engine, owned: bool) -> None:
        self.model, self.engine = model, engine
        self.names: List[str] = []
        self._originals: List[Any] = []
        self._owned = owned

    def __repr__(self) -> str:
        state = f"{len(self.names)} layers" if self.names else "detached"
        return f"<hotplane.Attachment of {type(self.model).__name__}, {state}, {self.engine!r}>"

    def _replace(self, place: Place, ours: Any, keep: bool) -> None:
        if not keep:
            place.module.to("meta")
        _experts.replace(self.model, place.name, ours)
        self.names.append(place.name)
        self._originals.append(place.module)

    def detach(self) -> None:
        """Puts the model's own experts back: on the meta device, without weights, unless
        keep=True. Closes the engine where attach booted it. Once more does nothing."""
        for name, module in zip(self.names, self._originals):
            _experts.replace(self.model, name, module.train(self.model.training))
        self.names, self._originals = [], []
        if getattr(self.model, "hotplane", None) is self:
            del self.model.hotplane
            self.model.__dict__.pop("save_pretrained", None)
        if self._owned:
            self.engine.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.detach()


def _refuse_saving(*_arguments: Any, **_options: Any) -> None:
    raise UsageError("the experts of this model are not its own, so that it cannot be saved",
                     advice="`hotplane export --hf` writes a checkpoint with the store's experts")


def _booted(source: Source, checkpoint: Optional[str], precision: Any, device: Optional[str],
            options: Mapping[str, Any], check: Any) -> Tuple[Engine, bool]:
    """An engine, and whether it was booted here. check(store): refuses before anything is read."""
    if isinstance(source, Engine):
        if options or device is not None:
            raise UsageError("an engine that is booted takes no options of a boot",
                             found=", ".join(sorted(options)) or "device")
        check(source)
        source.wait()
        return source, False
    given = dict(options)
    opening = {name: given.pop(name) for name in ("generation", "checkpoint", "rank", "world")
               if name in given}
    if checkpoint is not None:
        opening.setdefault("checkpoint", checkpoint)
    store = source if isinstance(source, Store) else open_store(source, **opening)
    try:
        if store is source and opening.keys() - {"checkpoint"}:
            raise UsageError("a store that is open takes no options of opening",
                             found=", ".join(sorted(opening)))
        check(store)
        given = {**options_for_fp4(precision, store.describe_layers(), device), **given}
        return store.boot(device, **given), True
    finally:
        if store is not source:
            store.close()


def _check_fp4(engine: Engine, tables: Mapping[int, List[str]]) -> None:
    for info in engine.describe_layers():
        if FP4 in tables[info.ordinal] and not info.mtp and info.delta != "present":
            raise DataError(f"layer {info.ordinal} is wanted at FP4 and has no delta tier",
                            file=str(engine.path), expected="present", found=info.delta,
                            advice="build the store with its delta tier, or ask for base")
    cached = any(engine.options.get(name) for name in ("delta_cache_bytes", "pin_delta_bytes"))
    cached = cached or any(layer.device != "cpu" for layer in engine.layers)  # kept on the GPU
    if not cached and any(FP4 in table for table in tables.values()):
        logger.warning("experts at FP4 are read from the store at every call: boot the engine with "
                       "delta_cache_bytes or pin_delta_bytes")


def _attach(model: Any, source: Source, checkpoint: Optional[str], precision: Any,
            arithmetic: str, keep: bool, device: Optional[str],
            options: Mapping[str, Any]) -> Attachment:
    word("arithmetic", ARITHMETICS)(arithmetic)
    places = _experts.find(model)
    engine, owned = _booted(source, checkpoint, precision, device, options,
                            lambda store: _experts.pair(places, store, model))
    try:
        pairs = _experts.pair(places, engine, model)
        tables = precisions_of(precision, engine.describe_layers())
        _experts.check_booted(places, pairs, engine, model)
        _check_fp4(engine, tables)
    except BaseException:
        if owned:
            engine.close()
        raise
    number = hotplane_torch.register(engine)
    attachment = Attachment(model, engine, owned)
    for place in places:
        ordinal = pairs[place.name].ordinal
        attachment._replace(place, _experts.Experts(place, engine, number, ordinal,
                                                    joined(tables[ordinal]), arithmetic), keep)
    model.hotplane = attachment
    model.save_pretrained = _refuse_saving
    return attachment


def attach(model: Any, store: Source, *, precision: Any = "base", arithmetic: str = "fast",
           keep: bool = False, device: Optional[str] = None, **options: Any) -> Attachment:
    """Replaces the routed experts of every MoE layer of `model` by hotplane's. The rest of the
    model stays as it is: loaded, or on the meta device. `model.hotplane` is what is returned.

    model       a transformers model in eval mode: hotplane's experts have no gradient, and a model
                in training is refused, here and at every call
    store       a store's path, an open Store, or a booted Engine, which stays the caller's
    precision   "base", "fp4", or a map as of `hotplane export --hf`: {"default": "base", "layers":
                {3: "fp4", 4: {"default": "base", 17: "fp4"}}}, layers by ordinal
    arithmetic  "fast": activations as int8; "exact": float32; "fp8": as FP8
    keep        True: the model's own experts stay in memory, for `detach`; False: they are freed
    device      where the planes land, "cpu" or "cuda:N"; hidden states may be on another
    options     of `Store.boot` and `open`; at FP4, delta_cache_bytes is by default what the
                records need, 4 GiB at most

    Hidden states are bfloat16, float16 or float32; sums are float32. DataError that names model
    and store where they differ in MoE layers, E, H, I, activation, biases or experts per token;
    UsageError for experts of an unknown interface, and for a store cut for ranks."""
    if model.training:
        raise UsageError("hotplane's experts cannot be trained", found="a model in training",
                         advice="call model.eval()")
    return _attach(model, store, None, precision, arithmetic, keep, device, options)


def _headers(checkpoint: str) -> Dict[str, str]:
    """Tensor name: dtype, of all safetensors files in the folder."""
    found: Dict[str, str] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(checkpoint), "*.safetensors"))):
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
        found.update({name: entry["dtype"] for name, entry in header.items()
                      if name != "__metadata__"})
    return found


def _only_experts_are_quantized(checkpoint: str) -> bool:
    return all(dtype in PLAIN_DTYPES for name, dtype in _headers(checkpoint).items()
               if ".experts." not in name)


def _config(checkpoint: str, given: Dict[str, Any]) -> Any:
    """The model's config; without quantization that was of the experts alone."""
    import transformers
    config = given.pop("config", None)
    if config is None:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint, **{name: given[name] for name in ("trust_remote_code",) if name in given})
    if "quantization_config" not in given and _only_experts_are_quantized(checkpoint):
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
    return config


def _class_of(config: Any) -> Any:
    import transformers
    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    try:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UsageError("transformers has no language model for this config",
                         found=type(config).__name__, advice="give model_class=") from None


def _check_loaded(checkpoint: str, info: Mapping[str, Any], model: Any) -> None:
    """transformers only warns of tensors that it did not find, and draws them."""
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = sorted(map(str, info.get(what) or []))
        if names:
            raise DataError(
                f"the checkpoint does not have what {type(model).__name__} needs",
                file=checkpoint, expected="every tensor but those of routed experts",
                found=f"{what.replace('_', ' ')}: {', '.join(names[:4])} ({len(names)} in all)",
                advice="check the config; key_mapping= renames tensors")


def from_pretrained(checkpoint: StrPath, store: Source, *, precision: Any = "base",
                    arithmetic: str = "fast", model_class: Any = None,
                    device: Optional[str] = None, boot: Optional[Mapping[str, Any]] = None,
                    **options: Any) -> Any:
    """A transformers model in eval mode: its dense tensors from `checkpoint`, its routed experts
    from the store, none of which torch ever sees. `model.hotplane` is the Attachment.

    checkpoint   a folder with config.json and safetensors files
    store        as of `attach`; a path is opened with this checkpoint, so that the generation
                 built from it is chosen, and what is missing is built
    model_class  a class of transformers; None: what the config names
    device       where the planes land; the model's own tensors: device_map=
    boot         options of `Store.boot` and `open`; {"checkpoint": None} opens the store by itself,
                 for a checkpoint that it was not built from, as one of `hotplane export --hf`
    options      of transformers' from_pretrained: dtype, device_map, config, attn_implementation,
                 key_mapping and so on

    A quantization_config that is of the experts alone is left out. Errors: as of `attach`;
    DataError where a tensor is missing, which transformers itself would draw at random."""
    folder = os.fspath(checkpoint)
    if not os.path.isdir(folder):
        raise UsageError("the checkpoint is not a folder", file=str(folder),
                         expected="config.json and safetensors files",
                         advice="huggingface_hub.snapshot_download fetches one")
    config = _config(folder, options)
    base = model_class or _class_of(config)
    wanted = options.pop("output_loading_info", False)
    made: List[Attachment] = []

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        base.__init__(self, *arguments, **keywords)
        made.append(_attach(self, store, folder, precision, arithmetic, False, device, boot or {}))
        self._keys_to_ignore_on_load_unexpected = {
            *(self._keys_to_ignore_on_load_unexpected or ()), r"\.experts\."}

    loader: Any = type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__,
                                           "__doc__": base.__doc__})
    try:
        model, info = loader.from_pretrained(folder, config=config, output_loading_info=True,
                                             **options)
        model.__class__ = base
        _check_loaded(folder, info, model)
    except BaseException:
        for attachment in made:
            attachment.detach()
        raise
    return (model, info) if wanted else model
