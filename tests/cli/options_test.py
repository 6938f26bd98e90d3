"""What is said of a value that an option does not take, and of the variable that it came from."""

import os
import re
import shutil
import tempfile
import unittest

import command

REFERENCE = {"HOTPLANE_WORKERS": "VLLM_MOE_W2_BUILD_WORKERS",
             "HOTPLANE_BATCH": "VLLM_MOE_W2_BUILD_BATCH_SIZE",
             "HOTPLANE_ZERO_MODE": "VLLM_MOE_W2_ZERO_MODE"}
SIZE = "a number with K, M, G or T"
# command, option, a value that it does not take, part of what is expected
VALUES = (
    ("build", "--workers", "abc", "from 0 to 1024"), ("build", "--workers", "9999", "0 to 1024"),
    ("build", "--isa", "sse9", "scalar"), ("build", "--tiers", "gamma", "base,delta"),
    ("build", "--tiers", "base,base", "base,delta"), ("build", "--delta", "x", "quintal or nibble"),
    ("build", "--zero-mode", "x", "auto, sign or alt"), ("build", "--batch", "0", "1 to 100000"),
    ("build", "--batch", "010", "leading zeros"), ("build", "--tp", "-1", "1 to 16384"),
    ("build", "--staging-limit", "1e9", SIZE), ("build", "--staging-limit", "1.5", SIZE),
    ("boot", "--pin-delta", "1e-3G", SIZE), ("boot", "--pin-delta", "1.G", SIZE),
    ("boot", "--pin-delta", "+1M", SIZE), ("boot", "--stall-timeout", "1e3", "seconds"),
    ("boot", "--stall-timeout", "010", "seconds"),
    ("build", "--staging-limit", "x", "or auto"), ("build", "--staging-limit", "0", "above 0"),
    ("build", "--stall-timeout", "soon", "seconds"), ("build", "--stall-timeout", "inf", "seconds"),
    ("build", "--device", "gpu", "cuda:N"), ("boot", "--rank", "x", "0 to 16383"),
    ("boot", "--world", "0", "1 to 16384"), ("boot", "--cache", "x", "keep, bypass or auto"),
    ("boot", "--pin-delta", "much", SIZE), ("boot", "--device", "cuda:x", "cuda:N"),
)
# Options that no variable stands for.
OTHER_VALUES = (
    ("boot", "--base", "x", "device, host or auto"), ("boot", "--memory", "0", "above 0"),
    ("boot", "--reserve", "1e9", SIZE), ("boot", "--memory", "1.5", SIZE),
    ("export", "--shard-size", "5e9", SIZE), ("synth", "--shard-size", "0.5", SIZE),
    ("boot", "--reserve", "x", "or auto"), ("boot", "--verify", "some", "all or none"),
    ("boot", "--experts", "3-1", "A-B"), ("boot", "--experts", "3", "A-B"),
    ("export", "--layer", "5000000000", "0 to 4294967295"),
    ("export", "--precision", "mixed:", "mixed:MAP.json"), ("export", "--shard-size", "0", "above"),
    ("synth", "--checkpoint", "int4", "mxfp4, nvfp4, fp8 or bf16"), ("synth", "--mtp", "17", "16"),
    ("synth", "--seed", "-1", "at least 0"), ("warm", "--tiers", "x", "base,delta"),
    ("boot", "--tiers", "base,", "base,delta"), ("synth", "--tiers", "bsae", "base,delta"),
    ("verify", "--tiers", "bsae", "base,delta"), ("verify", "--tiers", "foo", "base,delta"),
    ("verify", "--tiers", "base,base,", "base,delta"), ("verify", "--tiers", "base,", "base,delta"),
    ("export", "--tiers", "delta", "base,delta"), ("import", "--tiers", "delta", "base,delta"),
)
PATHS = {"build": ("model", "--store", "store"), "boot": ("store",), "warm": ("store",),
         "export": ("store",), "synth": ("folder", "--geometry", "4,64,64"),
         "verify": ("store", "--complete"), "import": ("store",)}


def variable_of(option):
    return "HOTPLANE_" + option[2:].upper().replace("-", "_")


class Values(unittest.TestCase):
    def refused(self, arguments, env=None):
        done = command.run(*arguments, "--json", env=env)
        self.assertEqual(done.returncode, 2, (arguments, env, done.stderr))
        return command.json.loads(done.stdout)["error"]

    def test_of_an_option(self):
        for name, option, value, expected in VALUES + OTHER_VALUES:
            with self.subTest(name=name, option=option, value=value):
                error = self.refused((name, *PATHS[name], f"{option}={value}"))
                self.assertEqual(error["what"], f"{option} {value}")
                self.assertIn(expected, error["expected"])
                self.assertEqual(error["found"], f'"{value}"')

    def test_of_a_variable(self):
        for name, option, value, expected in VALUES:
            ours = variable_of(option)
            for variable in filter(None, (ours, REFERENCE.get(ours))):
                with self.subTest(name=name, variable=variable, value=value):
                    error = self.refused((name, *PATHS[name]), env={variable: value})
                    self.assertIn(f"{variable}={value} in the environment", error["what"])
                    self.assertIn(option, error["what"])
                    self.assertIn(expected, error["expected"])
                    self.assertEqual(error["found"], f'"{value}"')
                    self.assertIn(f"correct {variable} or unset it", error["advice"])
                    self.assertIn(f"give {option}", error["advice"])

    def test_an_empty_value(self):
        for option in ("--tiers", "--delta", "--cache", "--layers", "--trace"):
            error = self.refused(("boot", "store", option, ""))
            self.assertEqual(error["what"], f"{option} is empty")


    def test_sizes_with_units(self):
        with tempfile.TemporaryDirectory(prefix="hotplane-options-") as root:
            store = os.path.join(root, "store")
            command.must("synth", store, "--geometry", "2,64,64", "--layers", "1", "-q")
            for text, size in (("1.5G", 3 << 29), ("1.5GiB", 3 << 29), ("0.5gb", 1 << 29),
                               ("2048M", 2 << 30), ("4294967297", (4 << 30) + 1)):
                plan = command.must_json("boot", store, "--dry-run", "--memory", text)
                self.assertEqual(plan["device_limit_bytes"], size, text)


class UnknownVariables(unittest.TestCase):
    """Variables HOTPLANE_... that nothing reads: one warning, whatever the command."""

    def warnings(self, arguments, env, code=0):
        done = command.run(*arguments, env=env)
        self.assertEqual(done.returncode, code, done.stderr)
        return [line for line in done.stderr.splitlines() if line.startswith("warning: ")]

    def test_they_are_named_with_the_nearest(self):
        for arguments, code in ((("doctor", "-q"), 0), (("boot", "/nowhere", "-q"), 2),
                                (("boot",), 2), (("boots",), 2)):
            self.assertEqual(self.warnings(arguments, {"HOTPLANE_WORKRES": "2"}, code),
                             ["warning: in the environment, and read by nothing: "
                              "HOTPLANE_WORKRES: is HOTPLANE_WORKERS meant?"])
        self.assertEqual(
            self.warnings(("doctor", "-q"), {"HOTPLANE_STROE": "/s", "HOTPLANE_A\x1b": "b",
                                             "HOTPLANE_ENTIRELY_ELSE": "1"}),
            ["warning: in the environment, and read by nothing: HOTPLANE_A\\x1b; "
             "HOTPLANE_ENTIRELY_ELSE; HOTPLANE_STROE: is HOTPLANE_STORE meant?"])

    def test_reports_that_have_warnings_have_it(self):
        with tempfile.TemporaryDirectory(prefix="hotplane-variables-") as root:
            model = command.write_checkpoint(f"{root}/model", command.mxfp4_tensors())
            store, odd = f"{root}/store", {"HOTPLANE_WORKRES": "2"}
            for arguments in (("build", model, "--store", store), ("boot", store),
                              ("boot", store, "--dry-run"), ("warm", store), ("verify", store)):
                report = command.must_json(*arguments, env=odd)
                self.assertIn("HOTPLANE_WORKRES: is HOTPLANE_WORKERS meant?",
                              report["warnings"][0], arguments)
                self.assertEqual(command.must_json(*arguments)["warnings"], report["warnings"][1:])
            for arguments in (("inspect", store), ("gc", store), ("doctor",)):
                self.assertNotIn("warnings", command.must_json(*arguments, env=odd), arguments)

    def test_those_of_others_and_of_no_value_are_not(self):
        for env in ({"HOTPLANE_WORKRES": ""}, {"HOTPLANE": "x"}, {"HOTPLANER_X": "1"},
                    {"HOTPLANE_SERVICE_HOST": "10.0.0.1", "HOTPLANE_PORT_80_TCP": "tcp://10.0.0.1"},
                    {"HOTPLANE_NO_IO_URING": "1"}, {"HOTPLANE_RANK": "0", "HOTPLANE_TP": "1"}):
            self.assertEqual(self.warnings(("doctor", "-q"), env), [], env)
        for arguments in (("--version",), ("boot", "--help")):
            self.assertEqual(self.warnings(arguments, {"HOTPLANE_WORKRES": "2"}), [])

    def test_what_the_tests_and_the_python_package_read_is_known(self):
        source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        read = set()
        for part in ("tests", "bench", "scripts", "bindings", "src"):
            for folder, _, names in os.walk(os.path.join(source, part)):
                for name in names:
                    if not name.endswith((".py", ".cc")) or name == "options_test.py":
                        continue
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        read.update(re.findall(r'(?:environ|getenv|envname)\W[^\n]*?'
                                               r'"(HOTPLANE_[A-Z_]+)"', file.read()))
        self.assertLessEqual({"HOTPLANE_SHARED", "HOTPLANE_LIBRARY", "HOTPLANE_KILLS",
                              "HOTPLANE_STORE", "HOTPLANE_ISA"}, read)
        known = {"HOTPLANE_PACKAGE": "1", **{name: "1" for name in read}}
        # A command that takes none of them as its own.
        self.assertEqual(self.warnings(("report", "/nowhere", "-o", "/nowhere.html"),
                                       {**known, "HOTPLANE_ISA": ""}, 1), [])


class InTheStore(unittest.TestCase):
    """Values that only the store, the model or the machine can refuse."""

    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-options-")
        self.addCleanup(shutil.rmtree, self.root)
        self.model = command.write_checkpoint(os.path.join(self.root, "model"),
                                              command.mxfp4_tensors())
        self.store = os.path.join(self.root, "store")
        command.must("build", self.model, "--store", self.store, "-q")

    def test_the_variable_is_named(self):
        folder = os.path.join(self.root, "cache")
        nowhere = os.path.join(self.root, "nowhere")
        for code, arguments, variable, value in (
                (2, ("boot", self.store), "HOTPLANE_GENERATION", "zz"),
                (2, ("boot", self.store), "HOTPLANE_RANK", "5"),
                (2, ("boot", self.store), "HOTPLANE_WORLD", "3"),
                (2, ("boot", self.store), "HOTPLANE_PIN_DELTA", "1"),
                (2, ("export", self.store, "--planes-cache", folder),
                 "HOTPLANE_CHECKPOINT_ID", "a\tb"),
                (2, ("export", self.store, "--planes-cache", folder), "VLLM_MOE_W2_CKPT_ID",
                 "a\tb"),
                (2, ("doctor",), "HOTPLANE_STORE", nowhere),
                (2, ("fidelity", self.model), "HOTPLANE_STORE", nowhere),
                (2, ("build", self.model, "--store", nowhere), "HOTPLANE_TP", "3"),
                (4, ("build", self.model, "--store", nowhere), "HOTPLANE_STAGING_LIMIT", "1"),
                (1, ("boot", self.store), "HOTPLANE_DEVICE", "cuda:9999")):
            with self.subTest(variable=variable):
                done = command.run(*arguments, "--json", env={variable: value})
                self.assertEqual(done.returncode, code, done.stderr)
                advice = command.json.loads(done.stdout)["error"]["advice"]
                self.assertIn(f"{variable}={value}", advice)
                self.assertIn("unset it", advice)
                # and the one who reads the log knows before
                self.assertIn(f"{variable}=", done.stderr)

    def test_an_error_about_something_else_names_no_variable(self):
        none = os.path.join(self.root, "none")
        new = os.path.join(self.root, "new")
        inside = os.path.join(self.root, "tp")  # what the names and values of variables are in
        innocent = {"HOTPLANE_CACHE": "auto", "HOTPLANE_DELTA": "quintal", "HOTPLANE_TP": "1",
                    "HOTPLANE_BATCH": "4", "HOTPLANE_WORKERS": "2", "HOTPLANE_DEVICE": "cpu",
                    "HOTPLANE_STALL_TIMEOUT": "9", "HOTPLANE_TIERS": "base,delta"}
        for arguments, more in (
                (("boot", none), {}), (("warm", none), {}),
                (("build", none, "--store", new), {}), (("build", none), {"HOTPLANE_STORE": new}),
                (("boot", self.store, "--generation", "zz"), {"HOTPLANE_PIN_DELTA": "64K"}),
                (("boot", self.store, "--layers", "99"), {"HOTPLANE_RANK": "0"}),
                (("build", self.model, "--store", new, "--layers", "99"), {}),
                (("build", inside, "--store", new), {}),
                (("boot", self.store, "--rank", "3"), {"HOTPLANE_WORLD": "1"}),
                (("boot", self.store, "--world", "3"), {"HOTPLANE_RANK": "0"}),
                (("fidelity", none, "--store", self.store), {"HOTPLANE_GENERATION": "0"}),
                (("doctor", "--store", none), {"HOTPLANE_GENERATION": "0"}),
                (("export", none, "--planes-cache", new), {"HOTPLANE_CHECKPOINT_ID": "id"})):
            with self.subTest(arguments=arguments):
                done = command.run(*arguments, "--json", env={**innocent, **more})
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertNotIn("HOTPLANE_", done.stdout)

    def test_damage_names_no_variable(self):
        command.flip(command.files_below(self.store)[0], 200)
        done = command.run("boot", self.store, "--json",
                           env={"HOTPLANE_WORKERS": "2", "HOTPLANE_CACHE": "keep",
                                "HOTPLANE_DEVICE": "cpu"})
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertNotIn("HOTPLANE_", done.stdout)

    def test_options_that_contradict_a_variable(self):
        done = command.run("boot", self.store, "--delta", "nibble", env={"HOTPLANE_TIERS": "base"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("HOTPLANE_TIERS=base", done.stderr)
        done = command.run("boot", self.store, "--tiers", "base", "--json",
                           env={"HOTPLANE_DELTA": "nibble", "HOTPLANE_CACHE": "auto"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("HOTPLANE_DELTA=nibble", done.stdout)
        self.assertNotIn("HOTPLANE_CACHE", done.stdout)

    def test_an_empty_variable_counts_as_none(self):
        done = command.must("boot", self.store, "--json",
                            env={"HOTPLANE_RANK": "", "HOTPLANE_WORKERS": "",
                                 "VLLM_MOE_W2_BUILD_WORKERS": "3"})
        self.assertIn("VLLM_MOE_W2_BUILD_WORKERS=3 from the environment stands for --workers",
                      done.stderr)
        self.assertNotIn("HOTPLANE_", done.stderr)

    def test_which_variable_counts_is_told(self):
        both = {"HOTPLANE_WORKERS": "1", "VLLM_MOE_W2_BUILD_WORKERS": "3"}
        done = command.must("boot", self.store, env=both)
        self.assertIn("HOTPLANE_WORKERS=1 from the environment stands for --workers", done.stderr)
        self.assertIn("VLLM_MOE_W2_BUILD_WORKERS is not used", done.stderr)
        done = command.must("boot", self.store, "--workers", 2, env=both)
        self.assertNotIn("VLLM_MOE", done.stderr)
        self.assertNotIn("HOTPLANE_", done.stderr)


class Places(unittest.TestCase):
    """A checkpoint where a store is expected and the other way round, as argument or option."""

    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-places-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.model = command.write_checkpoint(os.path.join(cls.root, "model"),
                                             command.mxfp4_tensors())
        cls.store = os.path.join(cls.root, "the store")
        command.must("build", cls.model, "--store", cls.store, "-q")
        cls.nothing = os.path.join(cls.root, "nothing")

    def refused(self, *arguments, code=2, env=None):
        before = sorted(os.walk(self.root))
        done = command.run(*arguments, "--json", env=env)
        self.assertEqual(done.returncode, code, (arguments, done.stderr))
        self.assertEqual(sorted(os.walk(self.root)), before)
        return command.json.loads(done.stdout)["error"]

    def meant(self, *arguments):
        """The line in the advice, as words, with the paths as they were given."""
        advice = self.refused(*arguments)["advice"]
        self.assertIn("is probably what was meant", advice)
        words = command.shlex.split(advice.split("`")[1])
        self.assertEqual(words[0], "hotplane")
        words.remove("--json")
        return words[1:]

    def test_a_checkpoint_is_no_store(self):
        for arguments in (("boot", self.model), ("warm", self.model), ("verify", self.model),
                          ("gc", self.model), ("doctor", "--store", self.model),
                          ("export", self.model, "--planes-cache", self.nothing),
                          ("boot", self.model, "--checkpoint", self.model),
                          ("build", self.model, "--store", self.model),
                          ("fidelity", self.model, "--store", self.model)):
            with self.subTest(arguments=arguments):
                error = self.refused(*arguments)
                self.assertEqual(error["what"], "this is a checkpoint, not a store")
                self.assertEqual(error["file"], self.model)
                self.assertIn(f"hotplane build {self.model} --store DIR", error["advice"])

    def test_a_folder_with_snapshots_of_its_own_takes_a_store(self):
        for i, name in enumerate(("build", "gc", "synth", "checkpoint")):
            place = os.path.join(tempfile.mkdtemp(dir=self.root), str(i))
            os.makedirs(os.path.join(place, "snapshots", "monday"))
            self.addCleanup(shutil.rmtree, os.path.dirname(place))
            synth = ("synth", place, "--geometry", "4,64,64", "--layers", "1")
            command.must(*{"build": ("build", self.model, "--store", place), "gc": ("gc", place),
                           "synth": synth, "checkpoint": (*synth, "--checkpoint", "bf16")}[name])
            if name == "checkpoint":
                command.must("build", place, "--store", os.path.join(place, "store"))

    def test_a_store_is_no_checkpoint(self):
        for arguments in (("build", self.store, "--store", self.nothing),
                          ("verify", self.store, "--source", self.store),
                          ("fidelity", self.store, "--store", self.store)):
            with self.subTest(arguments=arguments):
                error = self.refused(*arguments)
                self.assertEqual(error["what"], "this is a store, not a checkpoint")
                self.assertEqual(error["file"], self.store)
                self.assertIn("CHECKPOINT", error["advice"])
                self.assertIn("the store was built from", error["advice"])

    def test_exchanged(self):
        for name, option in (("build", "--store"), ("fidelity", "--store")):
            self.assertEqual(self.meant(name, self.store, option, self.model),
                             [name, self.model, option, self.store])
        for name, option in (("boot", "--checkpoint"), ("verify", "--source")):
            self.assertEqual(self.meant(name, self.model, option, self.store),
                             [name, self.store, option, self.model])
        self.assertEqual(self.meant("verify", self.model),
                         ["verify", "DIR", "--source", self.model])
        self.assertEqual(self.meant("build", self.store, "--store", self.nothing),
                         ["build", "CHECKPOINT", "--store", self.store])

    def test_another_error_is_not_explained_by_paths(self):
        folder = tempfile.mkdtemp(dir=self.root)
        self.addCleanup(shutil.rmtree, folder)
        both = os.path.join(folder, "both")
        shutil.copytree(self.store, both)
        shutil.copytree(self.model, both, dirs_exist_ok=True)
        for arguments in (("boot", both, "--checkpoint", both, "--layers", "9"),
                          ("boot", both, "--checkpoint", both, "--rank", "3"),
                          ("build", both, "--store", both, "--layers", "9"),
                          ("fidelity", both, "--store", both, "--generation", "zz"),
                          ("boot", self.store, "--checkpoint", self.store, "--layers", "9"),
                          ("boot", self.store, "--checkpoint", self.store, "--rank", "3")):
            with self.subTest(arguments=arguments):
                self.assertNotIn("meant", self.refused(*arguments).get("advice", ""))

    def test_the_argument_as_an_option(self):
        for name in ("boot", "warm", "verify", "inspect", "gc", "synth"):
            self.assertEqual(self.meant(name, "--store", self.store), [name, self.store])
            self.assertEqual(self.meant(name, "--dir=" + self.store), [name, self.store])
        for name in ("build", "fidelity"):
            for option in ("--checkpoint", "--model"):
                self.assertEqual(
                    self.meant(name, option, self.model, "--store", self.store, "--workers", "1"),
                    [name, self.model, "--store", self.store, "--workers", "1"])
        self.assertEqual(self.meant("boot", self.model, "--store", self.store, "--map"),
                         ["boot", self.store, "--checkpoint", self.model, "--map"])
        self.assertEqual(
            self.meant("import", "--planes-cache", "p", "--layers-geometry", "4,64,64", "--store",
                       self.store),
            ["import", self.store, "--planes-cache", "p", "--layers-geometry", "4,64,64"])

    def test_the_option_as_an_argument(self):
        for name in ("build", "fidelity"):
            for pair in ((self.model, self.store), (self.store, self.model),
                         (self.nothing, self.model)):
                store = self.nothing if self.nothing in pair else self.store
                self.assertEqual(self.meant(name, *pair), [name, self.model, "--store", store])
        for name, option in (("boot", "--checkpoint"), ("verify", "--source")):
            for pair in ((self.store, self.model), (self.model, self.store)):
                self.assertEqual(self.meant(name, *pair), [name, self.store, option, self.model])
        self.assertEqual(self.meant("doctor", self.store), ["doctor", "--store", self.store])

    def test_another_commands_option(self):
        self.assertEqual(self.meant("verify", self.store, "--checkpoint", self.model),
                         ["verify", self.store, "--source", self.model])
        self.assertEqual(self.meant("boot", self.store, "--source", self.model),
                         ["boot", self.store, "--checkpoint", self.model])
        self.assertEqual(self.meant("build", self.model, "--dir", self.store),
                         ["build", self.model, "--store", self.store])

    def test_the_variable_is_no_argument(self):
        error = self.refused("boot", env={"HOTPLANE_STORE": self.store})
        self.assertIn("HOTPLANE_STORE stands for --store", error["what"])
        self.assertIn(f"hotplane boot '{self.store}'", error["advice"])

    def test_what_is_recognised_is_said(self):
        layer = [f for f in command.files_below(self.store) if f.endswith(".base")][0]
        shard = [f for f in command.files_below(self.model) if f.endswith(".safetensors")][0]
        for code, arguments, found in (
                (2, ("boot", layer), "a layer file of a store"),
                (2, ("boot", shard), "a safetensors file"),
                (3, ("boot", self.root), "a folder, with a store in it: " + self.store),
                (2, ("build", self.root, "--store", self.nothing), "with a store in it"),
                (2, ("import", "--planes-cache", self.store, "--layers-geometry", "4,64,64",
                     self.nothing), "no folder v2: a store")):
            with self.subTest(arguments=arguments):
                self.assertIn(found, self.refused(*arguments, code=code)["found"])
        self.assertIn("a layer file of a store",
                      self.refused("build", layer, "--store", self.nothing)["what"])


class Outputs(unittest.TestCase):
    """Places that cannot be written to: found before the work, with what to do."""

    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-outputs-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.model = command.write_checkpoint(os.path.join(cls.root, "model"),
                                             command.mxfp4_tensors())
        cls.store = os.path.join(cls.root, "store")
        command.must("build", cls.model, "--store", cls.store, "-q")
        cls.run_file = os.path.join(cls.root, "run.json")
        with open(cls.run_file, "w") as out:
            out.write(command.must("boot", cls.store, "--json").stdout)
        cls.file = os.path.join(cls.root, "file")
        with open(cls.file, "w") as out:
            out.write("mine")
        cls.folder = os.path.join(cls.root, "folder")
        os.makedirs(cls.folder)

    def files(self, place):
        """Commands that write one file."""
        return (("export", self.store, "--layer", "0", "--part", "sc2", "--out", place),
                ("report", self.run_file, "-o", place), ("boot", self.store, "--trace", place),
                ("build", self.model, "--store", os.path.join(self.root, "new"), "--trace", place))

    def folders(self, place):
        """Commands that write a folder."""
        synth = ("synth", place, "--geometry", "4,64,64", "--layers", "1")
        return (synth, (*synth, "--checkpoint", "bf16"), ("build", self.model, "--store", place),
                ("export", self.store, "--hf", place, "--checkpoint", self.model, "--precision",
                 "fp4"),
                ("export", self.store, "--planes-cache", place, "--checkpoint-id", "a"))

    def refused(self, codes, commands, place, found=""):
        for arguments in commands:
            with self.subTest(arguments=arguments):
                done = command.run(*arguments, "--json")
                self.assertIn(done.returncode, codes, done.stdout + done.stderr)
                error = command.json.loads(done.stdout)["error"]
                self.assertTrue(error["file"] in (place, os.path.dirname(place)) or
                                error["file"].startswith(place + "/"), error)  # of a store in it
                for key in ("expected", "found", "advice"):
                    self.assertTrue(error.get(key), (key, error))
                self.assertIn(found, error["found"])
        self.assertFalse(os.path.exists(os.path.join(self.root, "new")))
        with open(self.file) as there:
            self.assertEqual(there.read(), "mine")

    def test_no_parent(self):
        place = os.path.join(self.root, "none", "out")
        self.refused((1,), self.files(place), place, "No such file or directory")
        self.assertFalse(os.path.exists(os.path.dirname(place)))

    def test_a_file_in_the_place_of_the_parent(self):
        place = os.path.join(self.file, "out")
        self.refused((1,), self.files(place), place, "Not a directory")
        self.refused((1, 2), self.folders(place), place, "a file")

    def test_a_folder_in_the_place_of_a_file(self):
        self.refused((2,), self.files(self.folder), self.folder, "an empty folder")
        self.refused((2,), self.files("/dev/full"), "/dev/full", "a special file")
        new = os.path.join(self.root, "file-to-be") + "/"
        self.refused((2,), self.files(new), new, "ends with /")

    def test_a_file_in_the_place_of_a_folder(self):
        self.refused((1, 2), self.folders(self.file), self.file, "a file")

    def test_a_name_that_is_too_long(self):
        place = os.path.join(self.root, 300 * "x")
        self.refused((1,), self.files(place), place, "too long")

    def test_a_file_system_that_takes_no_files(self):
        self.refused((1,), self.files("/proc/out"), "/proc/out")

    def test_what_is_there_stays(self):
        files = [arguments for arguments in self.files(self.file) if arguments[0] != "export"]
        for arguments in files:
            done = command.run(*arguments, "--json")
            self.assertEqual(done.returncode, 2)
            self.assertIn("this command did not write it", done.stdout)
        for place in (self.model, self.store):
            for arguments in self.folders(place)[1:4]:
                if place == self.store and arguments[0] == "build":
                    continue
                done = command.run(*arguments, "--json")
                self.assertEqual(done.returncode, 2, (arguments, done.stderr))

    def mount(self, options):
        place = os.path.join(self.root, "mount")
        os.makedirs(place, exist_ok=True)
        done = command.subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
                                      capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.skipTest("cannot mount a tmpfs here: " + done.stderr.strip())
        self.addCleanup(command.subprocess.run, ["umount", place], check=True)
        return place

    def test_no_space(self):
        place = self.mount("size=16k,nr_inodes=64")
        with open(os.path.join(place, "full"), "wb") as full:
            full.write(bytes(16 << 10))
        out = os.path.join(place, "out")
        commands = (self.files(out)[1], *self.folders(out))
        for i, arguments in enumerate(commands):
            named = [word + str(i) if word == out else word for word in arguments]
            self.refused((4,), (named,), out + str(i))

    def test_read_only(self):
        place = self.mount("size=64m")
        command.subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        out = os.path.join(place, "out")
        self.refused((1,), (*self.files(out), *self.folders(out)), out, "Read-only")

    def test_no_permission(self):
        if os.geteuid() == 0:
            self.skipTest("root may write everywhere")
        os.chmod(self.folder, 0o555)
        self.addCleanup(os.chmod, self.folder, 0o755)
        out = os.path.join(self.folder, "out")
        self.refused((1,), (*self.files(out), *self.folders(out)), out, "Permission denied")


if __name__ == "__main__":
    command.main(unittest)
