"""Bad input and what it gets: exit code, a message that names the place, nothing published, nothing
lost.

The cases are those of the table in docs/faults.md.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

import command


def truncate(path, keep):
    with open(path, "r+b") as file:
        file.truncate(keep)


class BadCheckpoint(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-faults-")
        self.model = os.path.join(self.root, "model")
        self.store = os.path.join(self.root, "store")
        self.addCleanup(shutil.rmtree, self.root)

    def single(self, content):
        os.makedirs(self.model, exist_ok=True)
        path = os.path.join(self.model, "model.safetensors")
        with open(path, "wb") as out:
            out.write(content)
        return path

    def refused(self, code, *words):
        done = command.run("build", self.model, "--store", self.store, "-q")
        self.assertEqual(done.returncode, code, done.stderr)
        for word in words:
            self.assertIn(str(word), done.stderr)
        self.assertEqual([f for f in command.files_below(self.store) if "layer-" in f], [])
        self.assertEqual([f for f in command.files_below(self.store) if ".tmp" in f], [])
        return done.stderr

    def edited(self, edit):
        return self.single(command.safetensors_bytes(command.mxfp4_tensors(), edit))

    def test_truncated(self):
        path = self.single(command.safetensors_bytes(command.mxfp4_tensors()))
        truncate(path, os.path.getsize(path) - 1)
        self.refused(3, path, "expected", "found")

    def test_empty(self):
        self.refused(3, self.single(b""))

    def test_header_longer_than_the_file(self):
        self.refused(3, self.single(struct.pack("<Q", 1 << 20) + b"{}"))

    def test_oversized_header(self):
        self.refused(3, self.single(struct.pack("<Q", 1 << 62) + b"{}" * 100), "at most 200 bytes")

    def test_header_is_not_json(self):
        self.refused(3, self.single(struct.pack("<Q", 8) + b"{\"a\": }}"))

    def test_overlap(self):
        def edit(header):
            names = list(header)
            header[names[1]]["data_offsets"] = list(header[names[1]]["data_offsets"])
            first = header[names[0]]["data_offsets"]
            size = header[names[1]]["data_offsets"][1] - header[names[1]]["data_offsets"][0]
            header[names[1]]["data_offsets"] = [first[0], first[0] + size]
        self.refused(3, self.edited(edit))

    def test_hole(self):
        def edit(header):
            del header[list(header)[1]]
        self.refused(3, self.edited(edit))

    def test_duplicate_key(self):
        content = command.safetensors_bytes(command.mxfp4_tensors())
        name = b"layers.0.ffn.experts.1.w1.weight"
        twin = b"layers.0.ffn.experts.0.w1.weight"
        self.refused(3, self.single(content.replace(name, twin)), twin.decode())

    def test_wrong_dtype(self):
        def edit(header):
            header["layers.0.ffn.experts.1.w1.weight"]["dtype"] = "U8"
        self.refused(3, self.edited(edit), "layers.0.ffn.experts.1.w1.weight")

    def test_unknown_dtype(self):
        def edit(header):
            header["layers.0.ffn.experts.1.w1.weight"]["dtype"] = "Q7"
        self.refused(3, self.edited(edit), "Q7")

    def test_nan_scale(self):
        tensors = command.mxfp4_tensors()
        dtype, shape, data = tensors["layers.1.ffn.experts.2.w3.scale"]
        tensors["layers.1.ffn.experts.2.w3.scale"] = (dtype, shape, data[:7] + b"\xff" + data[8:])
        self.single(command.safetensors_bytes(tensors))
        done = command.run("build", self.model, "--store", self.store, "-q")
        self.assertEqual(done.returncode, 3)
        self.assertIn("layers.1.ffn.experts.2.w3.scale", done.stderr)
        self.assertIn("255", done.stderr)
        self.assertEqual([f for f in command.files_below(self.store) if "layer-0001" in f], [])

    def test_expert_under_another_name(self):
        tensors = command.mxfp4_tensors()
        expert = "layers.1.ffn.experts.1."
        tensors[expert + "wx.weight"] = tensors.pop(expert + "w1.weight")
        command.write_checkpoint(self.model, tensors)
        text = self.refused(3, "layers.1.ffn.experts.1.w1.weight", "layers.1.ffn.experts.1.wx")
        self.assertNotIn("INT8", text)

    def test_missing_expert(self):
        tensors = command.mxfp4_tensors()
        del tensors["layers.1.ffn.experts.1.w2.weight"]
        del tensors["layers.1.ffn.experts.1.w2.scale"]
        self.single(command.safetensors_bytes(tensors))
        self.refused(3, "layers.1.ffn.experts.1.w2")

    def test_unequal_shape(self):
        tensors = command.mxfp4_tensors()
        tensors["layers.1.ffn.experts.1.w2.weight"] = ("I8", [64, 64], command.pattern(4096, 3))
        self.single(command.safetensors_bytes(tensors))
        self.refused(3, "layers.1.ffn.experts.1.w2.weight")

    def test_shapes_that_planes_cannot_have(self):
        self.single(command.safetensors_bytes(command.mxfp4_tensors(hidden=96)))
        self.refused(3, "64")

    def test_no_routed_experts(self):
        self.single(command.safetensors_bytes({"embed.weight": ("BF16", [2, 2], bytes(8))}))
        self.refused(3, "routed experts")

    def test_missing_shard(self):
        command.write_checkpoint(self.model, command.mxfp4_tensors(), shards=3)
        os.remove(os.path.join(self.model, "model-00002-of-00003.safetensors"))
        done = command.run("build", self.model, "--store", self.store, "-q")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("model-00002-of-00003.safetensors", done.stderr)

    def test_duplicate_across_shards(self):
        command.write_checkpoint(self.model, command.mxfp4_tensors(), shards=2)
        tensors = command.mxfp4_tensors()
        names = list(tensors)
        with open(os.path.join(self.model, "model-00002-of-00002.safetensors"), "wb") as out:
            out.write(command.safetensors_bytes({n: tensors[n] for n in names[1::2] + names[:1]}))
        self.refused(3, names[0])

    def test_empty_config(self):
        command.write_checkpoint(self.model, command.mxfp4_tensors())
        path = os.path.join(self.model, "config.json")
        for content in ("", " \n"):
            with open(path, "w", encoding="utf-8") as out:
                out.write(content)
            self.refused(3, path)
        os.remove(path)
        done = command.must("build", self.model, "--store", self.store)
        self.assertIn("has no config.json", done.stderr)
        command.write_checkpoint(self.model, command.mxfp4_tensors())
        done = command.must("build", self.model, "--store", self.store + "-2")
        self.assertNotIn("config.json", done.stderr)

    def test_not_a_checkpoint(self):
        os.makedirs(self.model)
        self.refused(2, self.model)
        done = command.run("build", os.path.join(self.root, "nowhere"), "--store", self.store)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("nowhere", done.stderr)


class BadStore(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-faults-")
        self.addCleanup(shutil.rmtree, self.root)
        self.model = command.write_checkpoint(os.path.join(self.root, "model"),
                                              command.mxfp4_tensors())
        self.store = os.path.join(self.root, "store")
        command.must("build", self.model, "--store", self.store, "-q")
        self.base = [f for f in command.files_below(self.store) if f.endswith("layer-0001.base")][0]
        self.delta = [f for f in command.files_below(self.store)
                      if f.endswith("layer-0001.delta-quintal")][0]
        self.manifest = [f for f in command.files_below(self.store) if f.endswith("manifest")][0]

    def both_refuse(self, code, *words):
        for arguments in (("verify", self.store), ("boot", self.store),
                          ("boot", self.store, "--map")):
            done = command.run(*arguments)
            self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
            for word in words:
                self.assertIn(str(word), done.stdout + done.stderr, arguments)

    def test_cut_short(self):
        truncate(self.base, os.path.getsize(self.base) - 4096)
        self.both_refuse(3, self.base, "expected", "found")

    def test_cut_to_nothing(self):
        truncate(self.base, 0)
        self.both_refuse(3, self.base)

    def test_too_long(self):
        with open(self.base, "ab") as file:
            file.write(b"\0")
        self.both_refuse(3, self.base)

    def test_bit_in_header(self):
        command.flip(self.base, 100)
        self.both_refuse(3, self.base)

    def test_bit_in_table(self):
        command.flip(self.base, 4096 + 3)
        self.both_refuse(3, self.base)

    def test_bit_in_record(self):
        command.flip(self.base, os.path.getsize(self.base) - 4096 + 5)
        self.both_refuse(3, self.base, "chunk")

    def test_bit_in_delta_is_found_by_verify(self):
        command.flip(self.delta, os.path.getsize(self.delta) - 4096 + 5)
        done = command.run("verify", self.store)
        self.assertEqual(done.returncode, 3)
        self.assertIn(self.delta, done.stdout)
        command.must("boot", self.store)  # which does not use that tier

    def test_file_of_another_layer(self):
        shutil.copy(self.base.replace("0001", "0000"), self.base)
        self.both_refuse(3, self.base)

    def test_file_of_another_generation(self):
        other = command.write_checkpoint(os.path.join(self.root, "other"),
                                         command.bf16_tensors(layers=2, experts=3))
        store = os.path.join(self.root, "other-store")
        command.must("build", other, "--store", store, "-q")
        source = [f for f in command.files_below(store) if f.endswith("layer-0001.base")][0]
        shutil.copy(source, self.base)
        self.both_refuse(3, self.base)

    def test_other_format_version(self):
        with open(self.base, "r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", 2))
        self.both_refuse(3, self.base, "version")

    def test_bit_in_manifest(self):
        command.flip(self.manifest, 200)
        self.both_refuse(3, self.manifest)

    def test_store_of_another_checkpoint(self):
        other = command.write_checkpoint(os.path.join(self.root, "other"),
                                         command.bf16_tensors(layers=2, experts=3))
        done = command.run("verify", self.store, "--source", other)
        self.assertEqual(done.returncode, 3)
        self.assertIn("was not built from", done.stderr)

    def test_several_generations_need_a_choice(self):
        other = command.write_checkpoint(os.path.join(self.root, "other"),
                                         command.bf16_tensors())
        command.must("build", other, "--store", self.store, "-q")
        done = command.run("boot", self.store)
        self.assertEqual(done.returncode, 2)
        names = [n for n in os.listdir(self.store) if len(n) == 32]
        self.assertEqual(len(names), 2)
        for name in names:
            self.assertIn(name, done.stderr)
            command.must("boot", self.store, "--generation", name[:8])
        self.assertEqual(command.run("boot", self.store, "--generation", "x").returncode, 2)

    def test_inspect_knows_a_store_that_has_lost_its_manifest(self):
        os.remove(self.manifest)
        for name in ("inspect", "boot"):
            done = command.run(name, self.store)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("the manifest of a generation is missing", done.stderr)

    def test_a_damaged_source_record_says_how_to_go_on(self):
        record = self.base.replace(".base", ".source")
        os.remove(self.base)
        command.flip(record, -5)
        done = command.run("build", self.model, "--store", self.store)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn(record, done.stderr)
        self.assertIn("remove this file and the files of its layer", done.stderr)
        os.remove(record)
        os.remove(self.delta)
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("verify", self.store, "--complete")

    def test_what_verify_advises_about_a_source_record_mends_it(self):
        [generation] = os.listdir(self.store)
        folder = os.path.join(self.store, generation)
        with open(os.path.join(folder, "layer-0001.source"), "a", encoding="utf-8") as file:
            file.write("X")
        done = command.run("verify", self.store)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("of a source record with the files of its layer", done.stderr)
        for name in os.listdir(folder):
            if name.startswith("layer-0001."):
                os.remove(os.path.join(folder, name))
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("verify", self.store, "--complete")

    def test_verify_names_a_file_of_a_layer_that_the_model_does_not_have(self):
        [generation] = os.listdir(self.store)
        folder = os.path.join(self.store, generation)
        for of, name in (("layer-0000.base", "layer-0009.base"),
                         ("layer-0000.source", "layer-0009.source")):
            stray = os.path.join(folder, name)
            shutil.copy(os.path.join(folder, of), stray)
            done = command.run("verify", self.store, "--json")
            self.assertEqual(done.returncode, 3, done.stderr)
            [finding] = json.loads(done.stdout)["findings"]
            self.assertEqual(finding["file"], stray)
            self.assertNotIn("manifest", done.stderr)
            os.remove(stray)
        command.must("verify", self.store)

    def test_verify_chooses_the_generation_of_its_source(self):
        other = command.write_checkpoint(os.path.join(self.root, "other"), command.bf16_tensors())
        command.must("build", other, "--store", self.store, "-q")
        for model, layers in ((self.model, 2), (other, 1)):
            report = command.must_json("verify", self.store, "--source", model)
            self.assertEqual(report["source"]["layers_checked"], layers)
        self.assertEqual(command.run("verify", self.store).returncode, 2)
        third = command.write_checkpoint(os.path.join(self.root, "third"),
                                         command.mxfp4_tensors(layers=1))
        done = command.run("verify", self.store, "--source", third)
        self.assertEqual(done.returncode, 2, done.stderr)
        for name in os.listdir(self.store):
            self.assertIn(name, done.stderr)

    def test_a_generation_is_not_a_store(self):
        generation = os.path.dirname(self.manifest)
        before = command.files_below(self.store)
        for path in (generation, generation + "/"):
            for arguments in (["boot", path], ["boot", path, "--checkpoint", self.model],
                              ["boot", path, "--checkpoint", self.model, "--dry-run"],
                              ["build", self.model, "--store", path], ["gc", path],
                              ["verify", path], ["inspect", path], ["warm", path]):
                done = command.run(*arguments)
                self.assertEqual(done.returncode, 2, (arguments, done.stderr))
                self.assertIn(f"give {self.store}, with --generation", done.stderr)
        self.assertEqual(command.files_below(self.store), before)
        moved = os.path.join(self.root, "moved")
        os.rename(generation, moved)
        self.assertEqual(command.run("boot", moved).returncode, 2)

    def test_gc_lists_the_generations_there_are(self):
        done = command.run("gc", self.store, "--generation", "zz")
        self.assertEqual(done.returncode, 2)
        self.assertIn(os.path.basename(os.path.dirname(self.manifest)), done.stderr)

    def test_what_to_do_about_a_bad_layer_without_a_checkpoint(self):
        size = os.path.getsize(self.base)
        for offset in (size - 4096 + 5, 100):  # in the data, in the header
            command.flip(self.base, offset)
            done = command.run("boot", self.store)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("--checkpoint CHECKPOINT", done.stderr)
            command.flip(self.base, offset)

    def test_one_is_not_plural(self):
        command.flip(self.base, os.path.getsize(self.base) - 4096 + 5)
        done = command.run("verify", self.store)
        self.assertIn("error: 1 finding in the store", done.stderr)
        single = os.path.join(self.root, "single")
        model = command.write_checkpoint(os.path.join(self.root, "one"),
                                         command.bf16_tensors(layers=1))
        built = command.must("build", model, "--store", single).stdout
        self.assertIn("built 1 of 1 layer (0 were there)", built)
        self.assertIn("booted 1 layer,", command.must("boot", single).stdout)
        for text in (command.must("inspect", model).stdout, command.must("inspect", single).stdout,
                     command.must("verify", single, "--source", model).stdout, built):
            self.assertIsNone(re.search(r"\b1 [a-zA-Z]*(?: [a-z]+)?(?<!bytes)s\b", text), text)

    def test_what_stays_on_the_host_is_told(self):
        done = command.must("boot", self.store, "--memory", "1")
        self.assertIn("2 of 2 layers do not fit in the 1 B", done.stderr)
        self.assertNotIn("do not fit", command.must("boot", self.store).stderr)
        self.assertNotIn("do not fit", command.must("boot", self.store, "--map").stderr)

    def test_layer_parser_on_what_cannot_be_read(self):
        parser = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools",
                              "parse_layer.py")
        for path in (self.store + "/nowhere", self.store):
            done = subprocess.run([sys.executable, parser, path], capture_output=True, text=True,
                                  check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn(path, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
        subprocess.run([sys.executable, parser, self.base], capture_output=True, check=True)

    def test_a_damaged_checkpoint_stops_no_boot_that_needs_nothing_of_it(self):
        def cut(path):
            os.truncate(path, os.path.getsize(path) - 1)

        def cut_in_the_header(path):
            os.truncate(path, 100)

        for damage in (cut, cut_in_the_header, os.remove, lambda path: command.flip(path, 9)):
            model = os.path.join(self.root, "hurt")
            shutil.rmtree(model, ignore_errors=True)
            shutil.copytree(self.model, model)
            damage(os.path.join(model, "model-00001-of-00001.safetensors"))
            for more in ((), ("--dry-run",)):
                done = command.must("boot", self.store, "--checkpoint", model, *more)
                self.assertEqual(done.stderr.count("warning: "), 1, done.stderr)
                self.assertIn(f"warning: the store is complete; {model} could not be compared",
                              done.stderr)
            # Where something is needed of it, it is an error as ever.
            store = os.path.join(self.root, "incomplete")
            shutil.rmtree(store, ignore_errors=True)
            shutil.copytree(self.store, store)
            os.remove(os.path.join(store, os.listdir(store)[0], "layer-0000.base"))
            done = command.run("boot", store, "--checkpoint", model)
            self.assertIn(done.returncode, (2, 3), done.stderr)

    def test_nor_does_a_config_that_is_damaged(self):
        config = os.path.join(self.model, "config.json")
        # Of shards that have not changed the config is not looked at.
        os.utime(os.path.join(self.model, "model-00001-of-00001.safetensors"))
        for text in ("{", "", "[]", '{"num_experts_per_tok": -1}'):
            with open(config, "w", encoding="utf-8") as file:
                file.write(text)
            done = command.must("boot", self.store, "--checkpoint", self.model)
            self.assertEqual(done.stderr.count("warning: "), 1, (text, done.stderr))
            self.assertIn("could not be compared with it: ", done.stderr)
            self.assertIn(f"; file {config}", done.stderr)
        # All that is known is told.
        os.remove(config)
        os.symlink(config, config)
        done = command.must("boot", self.store, "--checkpoint", self.model)
        self.assertIn(f"; file {config}; expected a file", done.stderr)
        # Another model's is an error as ever, with a config or without.
        os.remove(config)
        other = command.write_checkpoint(os.path.join(self.root, "other"),
                                         command.bf16_tensors(layers=2, experts=3))
        done = command.run("boot", self.store, "--checkpoint", other)
        self.assertEqual(done.returncode, 3, done.stderr)

    def test_a_damaged_layer_is_built_again_alone(self):
        command.flip(self.base, 100)
        before = {f: os.stat(f).st_mtime_ns for f in command.files_below(self.store)}
        report = command.must_json("build", self.model, "--store", self.store)
        self.assertEqual(report["layers_built"], 1)
        command.must("verify", self.store)
        changed = [f for f in before if os.stat(f).st_mtime_ns != before[f]]
        self.assertEqual(changed, [self.base])


class BadPlace(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-faults-")
        self.addCleanup(shutil.rmtree, self.root)
        self.model = command.write_checkpoint(os.path.join(self.root, "model"),
                                              command.mxfp4_tensors(experts=8, hidden=256,
                                                                    intermediate=256))

    def mount(self, options):
        place = os.path.join(self.root, "mount")
        os.makedirs(place)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
                              capture_output=True, text=True)
        if done.returncode != 0:
            self.skipTest("cannot mount a tmpfs here: " + done.stderr.strip())
        self.addCleanup(subprocess.run, ["umount", place])
        return place

    def test_store_is_a_file(self):
        place = os.path.join(self.root, "file")
        with open(place, "w"):
            pass
        for arguments in (("build", self.model, "--store", place), ("boot", place)):
            done = command.run(*arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(place, done.stderr)

    def test_no_store(self):
        place = os.path.join(self.root, "nowhere")
        for name in ("boot", "verify", "warm", "gc"):
            done = command.run(name, place)
            self.assertEqual(done.returncode, 2, (name, done.stderr))
            self.assertIn(place, done.stderr)
        self.assertFalse(os.path.exists(place))

    def test_full_disk(self):
        place = self.mount("size=256k")
        done = command.run("build", self.model, "--store", os.path.join(place, "store"))
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("free", done.stderr)
        self.assertEqual(os.listdir(place), [])
        done = command.run("boot", os.path.join(place, "store"), "--checkpoint", self.model)
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertEqual(os.listdir(place), [])

    def test_a_trace_that_does_not_fit(self):
        store = os.path.join(self.root, "whole")
        command.must("build", self.model, "--store", store, "-q")
        place = self.mount("size=64k")
        with open(os.path.join(place, "full"), "wb") as file:
            file.write(b"\0" * (64 << 10))
        trace = os.path.join(place, "trace.json")
        done = command.run("boot", store, "--trace", trace, "-q")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn(place, done.stderr)

    def test_read_only_file_system(self):
        place = self.mount("size=64m")
        store = os.path.join(place, "store")
        command.must("build", self.model, "--store", store, "--tiers", "base", "-q")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        command.must("boot", store)
        command.must("verify", store)
        done = command.run("build", self.model, "--store", store)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("Read-only", done.stderr)

    def test_staging_limit_too_small(self):
        done = command.run("build", self.model, "--store", os.path.join(self.root, "s"),
                           "--staging-limit", "1K")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("--staging-limit", done.stderr)


class BadUsage(unittest.TestCase):
    def test_every_kind(self):
        cases = [
            [], ["frobnicate"], ["boot"], ["boot", "/s", "--frob"],
            ["boot", "/s", "--map", "--map=x"],
            ["build", "/m"], ["build", "/m", "--store", "/s", "--store", "/t"],
            ["build", "/m", "--store", "/s", "--tiers", "base,gamma"],
            ["build", "/m", "--store", "/s", "--tiers", "base,base"],
            ["build", "/m", "--store", "/s", "--delta", "octal"],
            ["build", "/m", "--store", "/s", "--zero-mode", "maybe"],
            ["build", "/m", "--store", "/s", "--staging-limit", "lots"],
            ["boot", "/s", "--verify", "some"], ["boot", "/s", "--workers", "-1"],
            ["synth", "/s", "--geometry", "ds5", "--layers", "1"],
            ["synth", "/s", "--geometry", "4,100,64", "--layers", "1"],
            ["export", "/s", "--layer", "0", "--part", "planes13"],
            ["boot", "/s", "--layers", ""], ["build", "/m", "--store", ""], ["boot", ""],
            ["boot", "/s", "-q", "-q"], ["boot", "/s", "--json", "--json"],
            ["boot", "/s", "--stall-timeout", "nan"], ["gc", "/s", "--generation", ""],
            ["boot", "/s", "extra"], ["doctor", "--isa", "sse9"],
            ["export", "/s", "--layer", "010", "--part", "sc2", "--out", "/o"],
            ["boot", "/s", "--experts", "05-6"], ["boot", "/s", "--experts", "5-06"],
            ["boot", "/s", "--experts", "5"], ["boot", "/s", "--experts", "-6"],
            ["boot", "/s", "--memory", "01G"], ["boot", "/s", "--reserve", "00"],
            ["boot", "/s", "--pin-delta", "007M"], ["boot", "/s", "--device", "cuda:01"],
            ["build", "/m", "--store", "/s", "--staging-limit", "02G"],
            ["synth", "/s", "--geometry", "04,64,64", "--layers", "1"],
            ["boot", "/s", "--workers", "0x2"], ["boot", "/s", "--batch", "+1"],
            ["synth", "/s", "--geometry", "4,64,64", "--layers", "1", "--seed", "9" * 25],
            ["synth", "/s", "--geometry", "4,64,64", "--layers", "1", "--mtp", "1"],
            ["synth", "/s", "--geometry", "4,64,64", "--layers", "1", "--checkpoint", "bf16",
             "--delta", "nibble"],
        ]
        for arguments in cases:
            done = command.run(*arguments)
            self.assertEqual(done.returncode, 2, (arguments, done.stderr))
            self.assertNotEqual(done.stderr, "", arguments)
            if "--json" not in arguments:
                self.assertEqual(done.stdout, "", arguments)

    def test_map_and_base_device_contradict_each_other(self):
        root = tempfile.mkdtemp(prefix="hotplane-contradiction-")
        self.addCleanup(shutil.rmtree, root)
        model = command.write_checkpoint(os.path.join(root, "m"), command.mxfp4_tensors())
        store = os.path.join(root, "s")
        command.must("build", model, "--store", store, "-q")
        for extra in ([], ["--dry-run"], ["--checkpoint", model]):
            done = command.run("boot", store, "--map", "--base", "device", *extra)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("leave out --map to land them, or --base device", done.stderr)
            self.assertIn("to fix", done.stderr)
        command.must("boot", store, "--map", "--base", "host", "-q")
        command.must("boot", store, "--map", "--base", "auto", "-q")
        for layers in ("00", "0,01", "00-1"):
            self.assertEqual(command.run("boot", store, "--layers", layers).returncode, 2, layers)
        warnings = command.must_json("boot", store, "--verify", "none")["warnings"]
        self.assertEqual(warnings, ["no byte is checked, as asked"])
        self.assertEqual(command.must_json("boot", store)["warnings"], [])

    def test_an_option_wins_over_its_twin(self):
        # Several commands have --batch and --workers: only the one that is given reads the twins.
        root = tempfile.mkdtemp(prefix="hotplane-twins-")
        self.addCleanup(shutil.rmtree, root)
        model = command.write_checkpoint(os.path.join(root, "m"), command.mxfp4_tensors())
        store = os.path.join(root, "s")
        twins = {"HOTPLANE_BATCH": "0", "HOTPLANE_WORKERS": "9999", "HOTPLANE_TIERS": "gamma"}
        build = ["build", model, "--store", store, "--tiers", "base"]
        report = command.must_json(*build, "--batch", 3, "--workers", 2, env=twins)
        self.assertEqual(report["workers"], 2)
        command.must("boot", store, "--batch", 3, "--workers", 2, "--tiers", "base", env=twins)
        for twin in twins:
            done = command.run(*build[:4], env={twin: twins[twin]})
            self.assertEqual(done.returncode, 2, twin)
        command.must("gc", store, env=twins)

    def test_a_mistyped_word_is_named_with_the_nearest(self):
        for arguments, unknown, nearest in (
                (["build", "m", "--stroe", "s"], "--stroe", "--store"),
                (["biuld", "m", "--store", "s"], "biuld", "build"),
                (["boot", "s", "--tier=base"], "--tier", "--tiers"),
                (["boot", "s", "--frobnicate"], "--frobnicate", "")):
            done = command.run(*arguments)
            self.assertEqual(done.returncode, 2)
            first = done.stderr.splitlines()[0]
            self.assertIn(unknown, first)
            self.assertIn(f"is {nearest} meant" if nearest else "has no option", first)

    def test_help_and_version(self):
        self.assertIn("hotplane", command.must("--version").stdout)
        for name in ("build", "boot", "warm", "inspect", "verify", "export", "gc", "synth",
                     "doctor"):
            text = command.must(name, "--help").stdout
            self.assertIn("Example", text)
            self.assertIn("hotplane " + name, text)

    def test_json_errors_are_json(self):
        import json
        done = command.run("boot", "/nowhere", "--json")
        self.assertEqual(json.loads(done.stdout)["error"]["code"], done.returncode)


if __name__ == "__main__":
    command.main(unittest)
