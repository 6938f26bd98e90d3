"""What is said of a value that an option does not take, and of the variable that it came from."""

import os
import shutil
import tempfile
import unittest

import command

REFERENCE = {"HOTPLANE_WORKERS": "VLLM_MOE_W2_BUILD_WORKERS",
             "HOTPLANE_BATCH": "VLLM_MOE_W2_BUILD_BATCH_SIZE",
             "HOTPLANE_ZERO_MODE": "VLLM_MOE_W2_ZERO_MODE"}
SIZE = "suffix K, M, G or T"
# command, option, a value that it does not take, part of what is expected
VALUES = (
    ("build", "--workers", "abc", "from 0 to 1024"), ("build", "--workers", "9999", "0 to 1024"),
    ("build", "--isa", "sse9", "scalar"), ("build", "--tiers", "gamma", "base,delta"),
    ("build", "--tiers", "base,base", "base,delta"), ("build", "--delta", "x", "quintal or nibble"),
    ("build", "--zero-mode", "x", "auto, sign or alt"), ("build", "--batch", "0", "1 to 100000"),
    ("build", "--batch", "010", "leading zeros"), ("build", "--tp", "-1", "1 to 16384"),
    ("build", "--staging-limit", "x", "or auto"), ("build", "--staging-limit", "0", "above 0"),
    ("build", "--stall-timeout", "soon", "seconds"), ("build", "--stall-timeout", "inf", "seconds"),
    ("build", "--device", "gpu", "cuda:N"), ("boot", "--rank", "x", "0 to 16383"),
    ("boot", "--world", "0", "1 to 16384"), ("boot", "--cache", "x", "keep, bypass or auto"),
    ("boot", "--pin-delta", "much", SIZE), ("boot", "--device", "cuda:x", "cuda:N"),
)
# Options that no variable stands for.
OTHER_VALUES = (
    ("boot", "--base", "x", "device, host or auto"), ("boot", "--memory", "0", "above 0"),
    ("boot", "--reserve", "x", "or auto"), ("boot", "--verify", "some", "all or none"),
    ("boot", "--experts", "3-1", "A-B"), ("boot", "--experts", "3", "A-B"),
    ("export", "--layer", "5000000000", "0 to 4294967295"),
    ("export", "--precision", "mixed:", "mixed:MAP.json"), ("export", "--shard-size", "0", "above"),
    ("synth", "--checkpoint", "int4", "mxfp4, nvfp4, fp8 or bf16"), ("synth", "--mtp", "17", "16"),
    ("synth", "--seed", "-1", "at least 0"), ("warm", "--tiers", "x", "base,delta"),
)
PATHS = {"build": ("model", "--store", "store"), "boot": ("store",), "warm": ("store",),
         "export": ("store",), "synth": ("folder", "--geometry", "4,64,64")}


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
        command.flip(command.files_below(self.store)[0], 200)
        done = command.run("boot", self.store, "--json",
                           env={"HOTPLANE_WORKERS": "2", "HOTPLANE_CACHE": "keep"})
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertNotIn("HOTPLANE_", done.stdout)

    def test_options_that_contradict_a_variable(self):
        done = command.run("boot", self.store, "--delta", "nibble", env={"HOTPLANE_TIERS": "base"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("HOTPLANE_TIERS=base", done.stderr)

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


if __name__ == "__main__":
    command.main(unittest)
