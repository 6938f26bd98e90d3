#!/usr/bin/env python3
"""Checks the structure of a layer file and prints its sections.

Written from docs/format/layer-file.md alone, with the standard library. Checksums are verified
where the module `xxhash` is installed. Exit code 3 when the file is not what the page describes,
1 when it cannot be read.
"""
import struct
import sys

try:
    import xxhash
except ImportError:
    xxhash = None

PAGE, CHUNK = 4096, 262144
ROLES = {1: ["planes13", "sc13", "planes2", "sc2"], 2: ["fp13", "fp2"], 3: ["fp13", "fp2"]}
HEADER = struct.Struct("<8sII16s16s12I7Q")


def check(condition, what):
    if not condition:
        print(f"not a layer file of format 1: {what}", file=sys.stderr)
        sys.exit(3)


def matches(data, checksum):
    return xxhash is None or xxhash.xxh3_64_intdigest(data) == checksum


def read_sections(data, count):
    sections = []
    for i in range(count):
        role, flags, zero, offset, size, stride, zero2, zero3 = struct.unpack_from(
            "<16sIIQQQQQ", data, 2040 + 64 * i)
        check(zero == zero2 == zero3 == 0 and flags in (0, 1), f"section {i}: reserved bits")
        sections.append((role.rstrip(b"\0").decode("ascii"), flags, offset, size, stride))
    check(not any(data[2040 + 64 * count:4088]), "section entries that are not counted")
    return sections


def list_chunks(sections, experts, begin, end):
    pieces = sorted((offset + stride * e, size, f"{role}[{e}]")
                    for role, _, offset, size, stride in sections for e in range(experts))
    cursor = begin
    for offset, size, name in pieces + [(end, 0, "end")]:
        check(offset in (cursor, -(-cursor // PAGE) * PAGE), f"{name} is out of place")
        if offset != cursor:
            yield cursor, offset - cursor, "gap"
        for start in range(0, size, CHUNK):
            yield offset + start, min(CHUNK, size - start), name
        cursor = offset + size


def main(path):
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        sys.exit(f"cannot read {path}: {error.strerror}")
    check(len(data) >= PAGE, "shorter than a header page")
    (magic, version, header_bytes, generation, _, tier, encoding, layer, model_index, experts,
     hidden, intermediate, rank, world, chunk_bytes, count, zero, chunk_count, table_offset,
     table_bytes, data_offset, data_bytes, file_bytes, table_checksum) = HEADER.unpack_from(data)
    check(magic == b"hotplane", "magic")
    check(version == 1, f"it has version {version}")
    check(matches(data[:4088], struct.unpack_from("<Q", data, 4088)[0]), "header checksum")
    check(file_bytes == len(data) == data_offset + data_bytes, "length")
    check(encoding in ROLES and tier == (1 if encoding == 1 else 2), "tier and encoding")
    check((header_bytes, chunk_bytes, table_offset, zero) == (PAGE, CHUNK, PAGE, 0), "constants")
    check(rank < world and experts > 0 and hidden % 64 == intermediate % 64 == 0, "geometry")
    check(len(ROLES[encoding]) <= count <= 32 and not any(data[152:2040]), "reserved bytes")
    sections = read_sections(data, count)
    check([s[0] for s in sections][:len(ROLES[encoding])] == ROLES[encoding], "roles")
    align = 2 << 20 if data_bytes >= 64 << 20 else PAGE
    check(table_bytes == -(-chunk_count * 8 // PAGE) * PAGE, "table size")
    check(data_offset == -(-(PAGE + table_bytes) // align) * align, "place of the data")
    check(not any(data[PAGE + table_bytes:data_offset]), "padding before the data")
    check(matches(data[PAGE:PAGE + table_bytes], table_checksum), "table checksum")
    chunks = list(list_chunks(sections, experts, data_offset, file_bytes))
    check(len(chunks) == chunk_count, "chunk count")
    for (offset, size, name), (stored,) in zip(chunks, struct.iter_unpack(
            "<Q", data[PAGE:PAGE + 8 * chunk_count])):
        check(matches(data[offset:offset + size], stored), f"checksum of {name} at {offset}")
        check(name != "gap" or not any(data[offset:offset + size]), f"gap at {offset}")
    print(f"layer {layer} (model index {model_index}) of {generation.hex()}, encoding {encoding}: "
          f"E={experts} H={hidden} I={intermediate}, shard {rank} of {world}, "
          f"{chunk_count} chunks, "
          f"checksums {'verified' if xxhash else 'not verified: no module xxhash'}")
    for role, flags, offset, size, stride in sections:
        print(f"{role:<16} {'required' if flags else 'optional'} offset {offset} "
              f"bytes {size} stride {stride}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: parse_layer.py LAYERFILE")
    main(sys.argv[1])
