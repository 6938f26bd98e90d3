"""Runs the hotplane command for the tests in this folder, and makes small checkpoints by hand."""

import json
import os
import shlex
import struct
import subprocess
import sys

HOTPLANE = os.environ.get("HOTPLANE", "hotplane")


def run(*arguments, env=None, timeout=300):
    """The finished command; stdout and stderr as text."""
    return subprocess.run([HOTPLANE, *map(str, arguments)], capture_output=True, text=True,
                          env=None if env is None else {**os.environ, **env}, timeout=timeout)


def must(*arguments, **options):
    """As run, but any exit code other than 0 is a failure of the test."""
    done = run(*arguments, **options)
    if done.returncode != 0:
        raise AssertionError(f"{arguments} exited {done.returncode}\n{done.stderr}")
    return done


def must_json(*arguments, **options):
    return json.loads(must(*arguments, "--json", **options).stdout)


def start(*arguments, **options):
    """A running command, its output thrown away."""
    return subprocess.Popen([HOTPLANE, *map(str, arguments)], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, **options)


def files_below(directory):
    """Paths of all files without those that hold no content: lock files, and the stamp of where a
    build found its source."""
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(directory)
                  for name in names
                  if os.path.basename(folder) != "locks" and name != "source-stamp")


def flip(path, offset, bit=1):
    """Another byte there, whatever it was; a negative offset counts from the end."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ bit]))


def pattern(count, seed):
    """Bytes without 255 (so that they are valid e8m0 too), different for every seed."""
    return bytes((i * 31 + seed * 17 + (i >> 8) * 7) % 250 for i in range(count))


def mxfp4_tensors(layers=2, experts=3, hidden=64, intermediate=64):
    """name -> (dtype, shape, bytes) of a checkpoint with DeepSeek names."""
    tensors = {}
    seed = 0
    for layer in range(layers):
        for expert in range(experts):
            for role, rows, columns in (("w1", intermediate, hidden), ("w2", hidden, intermediate),
                                        ("w3", intermediate, hidden)):
                seed += 1
                name = f"layers.{layer}.ffn.experts.{expert}.{role}"
                tensors[name + ".weight"] = ("I8", [rows, columns // 2],
                                             pattern(rows * columns // 2, seed))
                tensors[name + ".scale"] = ("F8_E8M0", [rows, columns // 32],
                                            pattern(rows * columns // 32, seed + 1))
    return tensors


def bf16_tensors(layers=1, experts=2, hidden=64, intermediate=64):
    """The same with per-expert HF names and small finite BF16 weights."""
    tensors = {}
    for layer in range(layers):
        for expert in range(experts):
            for role, rows, columns in (("gate_proj", intermediate, hidden),
                                        ("up_proj", intermediate, hidden),
                                        ("down_proj", hidden, intermediate)):
                data = b"".join(struct.pack("<H", 0x3c00 + (i * 13 + expert) % 500)
                                for i in range(rows * columns))
                name = f"model.layers.{layer}.mlp.experts.{expert}.{role}.weight"
                tensors[name] = ("BF16", [rows, columns], data)
    return tensors


def safetensors_bytes(tensors, header_edit=None):
    """One file's bytes; header_edit may change the header's dict first."""
    header = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    if header_edit is not None:
        header_edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def write_checkpoint(directory, tensors, shards=1, config=None):
    """A checkpoint folder of so many shards, with an index when there are several."""
    os.makedirs(directory, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        with open(os.path.join(directory, file), "wb") as out:
            out.write(safetensors_bytes(part))
        weight_map.update({name: file for name in part})
    with open(os.path.join(directory, "model.safetensors.index.json"), "w") as out:
        json.dump({"metadata": {}, "weight_map": weight_map}, out)
    with open(os.path.join(directory, "config.json"), "w") as out:
        json.dump(config or {"num_experts_per_tok": 2, "rope_theta": 10000.0}, out)
    return directory


def main(unittest):
    """Runs the tests of the calling module; exit code 77 when all there was to run was skipped."""
    result = unittest.main(argv=[sys.argv[0], "-v", *sys.argv[1:]], exit=False).result
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(77 if result.skipped and len(result.skipped) == result.testsRun else 0)
