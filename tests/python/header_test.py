"""The structs, enums and functions of the package are those of hotplane.h."""

import ctypes
import os
import re
import unittest

import package
from hotplane import _library
from hotplane.errors import KINDS

TYPES = {"size_t": ctypes.c_size_t, "int": ctypes.c_int, "uint32_t": ctypes.c_uint32,
         "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64, "double": ctypes.c_double,
         "hotplane_layer_callback": _library.LAYER_CALLBACK,
         "hotplane_progress_callback": _library.PROGRESS_CALLBACK}


def header():
    path = os.path.join(package.SOURCE, "include", "hotplane", "hotplane.h")
    with open(path, encoding="utf-8") as file:
        return re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)


def field(declaration, enums):
    """(name, ctypes type) of `const void* parts[4]` and its like."""
    kind, star, name, count = re.fullmatch(
        r"(?:const )?(\w+)(\*?) ?(\w+)(?:\[(\d+)\])?", declaration).groups()
    if star:
        found = ctypes.c_char_p if kind == "char" else ctypes.c_void_p
    else:
        found = ctypes.c_int if kind in enums else TYPES[kind]
    return name, found if count is None else found * int(count)


class Header(unittest.TestCase):
    def setUp(self):
        self.text = header()
        self.enums = {name: {key: int(value) for key, value in
                             re.findall(r"HOTPLANE_(\w+) = (\d+)", body)}
                      for body, name in re.findall(r"typedef enum \w+ \{(.*?)\} hotplane_(\w+);",
                                                   self.text, re.S)}

    def test_structs(self):
        found = dict((name, body) for body, name in re.findall(
            r"typedef struct \w+ \{(.*?)\} hotplane_(\w+);", self.text, re.S))
        self.assertEqual(set(found), set(_library.STRUCTS))
        enums = {"hotplane_" + name for name in self.enums}
        for name, body in found.items():
            fields = [field(" ".join(part.split()), enums)
                      for part in body.split(";") if part.strip()]
            self.assertEqual(fields, list(_library.STRUCTS[name]._fields_), name)

    def test_enums(self):
        def lower(name, prefix=""):
            return {key[len(prefix):].lower(): value for key, value in self.enums[name].items()}

        self.assertEqual(lower("part"), _library.PARTS)
        self.assertEqual(lower("kind"), _library.RECORD_KINDS)
        self.assertEqual(lower("owned", "OWNED_"), _library.OWNED)
        self.assertEqual(lower("precision", "PRECISION_"), _library.PRECISIONS)
        self.assertEqual(lower("arithmetic"), _library.ARITHMETICS)
        self.assertEqual(lower("residency", "RESIDENCY_"), _library.RESIDENCIES)
        self.assertEqual(lower("cache_mode", "CACHE_"), _library.CACHES)
        self.assertEqual(list(lower("zero_mode", "ZERO_").values()),
                         list(_library.ZERO_MODES.values()))
        self.assertEqual({v: k for k, v in lower("presence").items()}, _library.PRESENCES)
        self.assertEqual({v: k for k, v in lower("activation").items()}, _library.ACTIVATIONS)
        self.assertEqual(list(lower("encoding").values()), list(_library.ENCODINGS.values()))
        self.assertEqual(set(self.enums["log_level"].values()), set(_library.LOG_LEVELS))
        self.assertEqual(set(self.enums["code"].values()) - {0}, set(KINDS))

    def test_functions(self):
        declared = dict(re.findall(r"HOTPLANE_API [^;]*?hotplane_(\w+)\(([^;]*)\);", self.text))
        functions = {**_library.FUNCTIONS, **_library.PYTHON_FUNCTIONS}
        for name, (_, arguments) in functions.items():
            self.assertIn(name, declared)
            listed = declared[name]
            count = 0 if listed == "void" else listed.count(",") + 1
            self.assertEqual(len(arguments), count, name)


class Words(unittest.TestCase):
    """Messages name the options of the command line: for callers of the API each has its words."""

    # What only the command line reaches, and what is no option of ours.
    ELSEWHERE = ("export", "fidelity", "synth", "report", "eval", "warm", "planes_cache_testing")

    def test_every_option_that_a_message_names(self):
        source = os.path.join(package.SOURCE, "src")
        with open(os.path.join(source, "capi", "api_words.cc"), encoding="utf-8") as file:
            known = set(re.findall(r'\{"(--[a-z-]+)', file.read()))
        named = {}
        for folder in ("base", "boot", "checkpoint", "device", "engine", "format", "io", "moe",
                       "quant", "store"):
            for place, _, names in os.walk(os.path.join(source, folder)):
                for name in names:
                    if not name.endswith(".cc") or name.startswith(self.ELSEWHERE) or any(
                            word in name for word in ("_test", "_bench", "_fuzz")):
                        continue
                    with open(os.path.join(place, name), encoding="utf-8") as file:
                        text = " ".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', file.read()))
                    for option in re.findall(r"(?<![a-z-])--[a-z][a-z-]*", text):
                        named.setdefault(option, name)
        self.assertGreater(len(named), 15)
        # In a command line that is turned into a call as a whole.
        self.assertEqual({option: name for option, name in named.items()
                          if option not in known | {"--planes-cache"}}, {})


if __name__ == "__main__":
    package.main()
