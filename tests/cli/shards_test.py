"""Tensor-parallel shards over the command line: what each rank gets, how it says which one it is,
and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import unittest

import command

MODEL = os.path.join(os.path.dirname(__file__), "../../models/tinymoe-mxfp4")
EXPERTS, HIDDEN, INTERMEDIATE, LAYERS = 32, 256, 128, 4
# Of one expert: bytes of a tile of 16 rows and 64 columns.
TILE_BYTES = {"planes13": 256, "sc13": 32, "planes2": 256, "sc2": 32, "fp13": 512, "fp2": 512}
# So that the launcher of whoever runs the tests is not heard.
LAUNCHER = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
            "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "HOTPLANE_RANK",
            "HOTPLANE_WORLD", "HOTPLANE_TP"]


def tiles(part, data, rows, columns):
    """{(strip, block): bytes} of one matrix of one expert."""
    size = TILE_BYTES[part]
    blocks = columns // 64
    assert len(data) == rows // 16 * blocks * size, part
    return {(i // blocks, i % blocks): data[i * size:(i + 1) * size]
            for i in range(rows // 16 * blocks)}


def expected_slice(part, data, rank, world):
    """One expert's part as the rank must have it: tile by tile."""
    share = INTERMEDIATE // world
    out = []
    if part.endswith("13"):
        whole = tiles(part, data, 2 * INTERMEDIATE, HIDDEN)
        for half in (0, INTERMEDIATE):
            first = (half + rank * share) // 16
            out += [whole[strip, block] for strip in range(first, first + share // 16)
                    for block in range(HIDDEN // 64)]
    else:
        whole = tiles(part, data, HIDDEN, INTERMEDIATE)
        first = rank * share // 64
        out += [whole[strip, block] for strip in range(HIDDEN // 16)
                for block in range(first, first + share // 64)]
    return b"".join(out)


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Shards(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for name in LAUNCHER:
            os.environ.pop(name, None)
        cls.root = tempfile.mkdtemp(prefix="hotplane-shards-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.whole = os.path.join(cls.root, "whole")
        cls.split = os.path.join(cls.root, "split")
        command.must("build", MODEL, "--store", cls.whole, "-q")
        cls.built = command.must_json("build", MODEL, "--store", cls.split, "--tp", 2)

    def copy(self, store):
        target = os.path.join(tempfile.mkdtemp(dir=self.root), "store")
        shutil.copytree(store, target)
        return target

    def export(self, store, layer, part, *options):
        out = os.path.join(self.root, "part.bin")
        command.must("export", store, "--layer", layer, "--part", part, "--out", out, "-q",
                     *options)
        return read(out)

    def refused(self, code, *arguments, env=None):
        done = command.run(*arguments, "--json", env=env)
        self.assertEqual(done.returncode, code, done.stderr)
        return json.loads(done.stdout)["error"]

    def file(self, store, name):
        [path] = [f for f in command.files_below(store) if os.path.basename(f) == name]
        return path

    def test_each_rank_exports_the_slice_of_the_whole(self):
        for layer in (0, LAYERS - 1):
            for part in TILE_BYTES:
                whole = self.export(self.whole, layer, part)
                size = len(whole) // EXPERTS
                for rank in (0, 1):
                    wanted = b"".join(
                        expected_slice(part, whole[e * size:(e + 1) * size], rank, 2)
                        for e in range(EXPERTS))
                    found = self.export(self.split, layer, part, "--rank", rank)
                    self.assertEqual(found, wanted, f"layer {layer}, {part}, rank {rank}")

    def test_each_rank_boots_its_share(self):
        whole = command.must_json("boot", self.whole)
        self.assertEqual((whole["rank"], whole["world"]), (0, 1))
        self.assertEqual(self.built["world"], 2)
        shares = 0
        for rank in (0, 1):
            report = command.must_json("boot", self.split, "--rank", rank)
            self.assertEqual((report["rank"], report["world"]), (rank, 2))
            self.assertEqual(report["layers_read"], LAYERS)
            self.assertEqual(report["bytes_read"], report["bytes_needed"])
            self.assertEqual(report["bytes_verified"], report["bytes_read"])
            shares += report["bytes_read"]
            plan = command.must_json("boot", self.split, "--rank", rank, "--dry-run")
            self.assertEqual((plan["rank"], plan["world"]), (rank, 2))
            self.assertEqual(plan["bytes_store"], report["bytes_read"])
        self.assertEqual(shares, whole["bytes_read"])
        self.assertIn("rank 1 of 2", command.must("boot", self.split, "--rank", 1).stdout)
        self.assertIn("rank 1 of 2",
                      command.must("boot", self.split, "--rank", 1, "--dry-run").stdout)

    def test_the_report_page_names_the_rank(self):
        run, page = (os.path.join(self.root, name) for name in ("run.json", "run.html"))
        for report, text in ((command.must_json("boot", self.split, "--rank", 1), "rank 1 of 2"),
                             (self.built, "for 2 ranks")):
            with open(run, "w", encoding="utf-8") as out:
                json.dump(report, out)
            command.must("report", run, "-o", page, "-q")
            self.assertIn(text.encode(), read(page))

    def test_the_launcher_says_which_rank(self):
        for env in ({"RANK": "1", "WORLD_SIZE": "2"},
                    {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
                    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
                    {"PMI_RANK": "1", "PMI_SIZE": "2"},
                    {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
                    {"HOTPLANE_RANK": "1", "RANK": "0", "WORLD_SIZE": "2"}):
            self.assertEqual(command.must_json("boot", self.split, env=env)["rank"], 1, env)
            # What was asked for wins; an unsharded store does not look.
            asked = command.must_json("boot", self.split, "--rank", 0, env=env)
            self.assertEqual(asked["rank"], 0, env)
            if "HOTPLANE_RANK" not in env:
                self.assertEqual(command.must_json("boot", self.whole, env=env)["world"], 1)
        done = command.must("boot", self.split, env={"PMI_RANK": "1", "PMI_SIZE": "2"})
        self.assertIn("PMI_RANK=1, PMI_SIZE=2 (PMI)", done.stderr)
        done = command.must("boot", self.whole, env={"PMI_RANK": "1", "PMI_SIZE": "2"})
        self.assertIn("is not used", done.stderr)
        data = self.export(self.split, 0, "sc2", "--rank", 1)
        out = os.path.join(self.root, "by-environment.bin")
        command.must("export", self.split, "--layer", 0, "--part", "sc2", "--out", out, "-q",
                     env={"RANK": "1", "WORLD_SIZE": "2"})
        self.assertEqual(read(out), data)

    def test_ranks_and_worlds_that_do_not_fit(self):
        error = self.refused(2, "boot", self.split)
        self.assertIn("--rank 0 to 1", error["expected"])
        error = self.refused(2, "boot", self.split, "--rank", 2)
        self.assertEqual(error["expected"], "--rank 0 to 1")
        error = self.refused(2, "boot", self.split, "--rank", 1, "--world", 4)
        self.assertEqual((error["expected"], error["found"]),
                         ("a store for 4 ranks", "a store for 2 ranks"))
        error = self.refused(2, "boot", self.whole, "--world", 2)
        self.assertEqual((error["expected"], error["found"]),
                         ("a store for 2 ranks", "a store that is not sharded"))
        self.assertIn("leave --world out", error["advice"])
        error = self.refused(2, "boot", self.split, env={"RANK": "1", "WORLD_SIZE": "4"})
        self.assertIn("WORLD_SIZE=4", error["expected"])
        self.assertIn("--tp 4", error["advice"])
        error = self.refused(2, "boot", self.whole, "--rank", 1)
        self.assertIn("not sharded", error["what"])
        self.refused(2, "export", self.split, "--layer", 0, "--part", "sc2", "--out",
                     os.path.join(self.root, "never"))
        empty = os.path.join(self.root, "empty")
        for world in (3, 4):
            error = self.refused(2, "build", MODEL, "--store", empty, "--tp", world)
            self.assertEqual(error["expected"], "--tp 2")
            self.assertIn(f"128 / {world}", error["found"])
        self.assertFalse(os.path.exists(empty))
        for bad in ("0", "-1", "x", "99999"):
            self.assertEqual(
                command.run("build", MODEL, "--store", empty, "--tp", bad).returncode, 2)

    def test_generations_are_told_apart_by_their_ranks(self):
        store = self.copy(self.split)
        command.must("build", MODEL, "--store", store, "-q")
        self.assertEqual(command.must_json("boot", store)["world"], 1)
        self.assertEqual(command.must_json("boot", store, "--rank", 1)["world"], 2)
        self.assertEqual(command.must_json("boot", store, "--rank", 0)["world"], 2)
        self.assertEqual(command.must_json("boot", store, "--world", 1)["world"], 1)
        env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
        self.assertEqual(command.must_json("boot", store, env=env)["rank"], 1)
        # With the checkpoint at hand the same holds among those that it made.
        report = command.must_json("boot", store, "--checkpoint", MODEL, "--rank", 1)
        self.assertEqual((report["world"], report["layers_built"]), (2, 0))
        error = self.refused(2, "boot", store, "--rank", 2)
        self.assertIn("(2 ranks)", error["found"])
        error = self.refused(2, "verify", store)
        self.assertIn("(2 ranks)", error["found"])

    def test_verify_inspect_warm_doctor_and_gc_know_all_ranks(self):
        store = self.copy(self.split)
        report = command.must_json("verify", store, "--source", MODEL)
        # The manifest; of each layer a record, and two tiers of two ranks.
        self.assertEqual(report["files_checked"], 1 + LAYERS * 5)
        self.assertEqual(report["source"]["layers_checked"], LAYERS)
        self.assertEqual(command.must_json("warm", store)["files"], 2 * LAYERS)
        self.assertEqual(command.must_json("warm", store, "--rank", 1)["files"], LAYERS)
        self.assertIn("8/8 base", command.must("doctor", "--store", store).stdout)
        file = command.must_json("inspect", self.file(store, "layer-0002.rank1.base"))
        self.assertEqual((file["rank"], file["world"]), (1, 2))
        self.assertEqual(file["geometry"]["intermediate"], INTERMEDIATE // 2)

        bad = self.file(store, "layer-0001.rank1.base")
        command.flip(bad, -4096)
        os.remove(self.file(store, "layer-0003.rank0.delta-quintal"))
        done = command.run("verify", store, "--json")
        self.assertEqual(done.returncode, 3)
        [finding] = json.loads(done.stdout)["findings"]
        self.assertEqual((finding["file"], finding["layer"], finding["rank"]), (bad, 1, 1))
        [generation] = command.must_json("inspect", store)["generations"]
        self.assertEqual(generation["world"], 2)
        self.assertEqual(generation["layers"][3]["tiers"]["delta-quintal"], "1/2")
        self.assertEqual(generation["layers"][3]["ranks"]["delta-quintal"], ["absent", "present"])
        self.assertEqual(generation["layers"][0]["tiers"]["base"], "present")
        self.assertIn("2 ranks", command.must("inspect", store).stdout)

        temporary = os.path.join(os.path.dirname(bad), ".tmp-layer-0001.rank1.base-1-00000000")
        with open(temporary, "wb"):
            pass
        self.assertEqual(command.must_json("gc", store)["removed"], [temporary])
        name = os.path.basename(os.path.dirname(bad))
        self.assertEqual(command.must_json("gc", store, "--generation", name)["removed"],
                         [os.path.dirname(bad)])
        self.assertEqual(command.files_below(store), [])

    def test_a_missing_or_bad_rank_is_built_alone(self):
        store = self.copy(self.split)
        content = {f: read(f) for f in command.files_below(store)}
        gone = self.file(store, "layer-0002.rank0.base")
        os.remove(gone)
        error = self.refused(3, "boot", store, "--rank", 0)
        self.assertIn("layer 2", error["found"])
        command.must("boot", store, "--rank", 1)
        times = {f: os.stat(f).st_mtime_ns for f in command.files_below(store)}
        report = command.must_json("build", MODEL, "--store", store, "--tp", 2)
        self.assertEqual(report["layers_built"], 1)
        self.assertEqual(report["bytes_read"] * LAYERS, self.built["bytes_read"])
        for path, time in times.items():
            self.assertEqual(os.stat(path).st_mtime_ns, time, path)
        self.assertEqual({f: read(f) for f in command.files_below(store)}, content)

        # A boot builds what its own rank lacks, and what of it turns out bad.
        other = self.file(store, "layer-0002.rank1.base")
        os.remove(gone)
        os.remove(other)
        bad = self.file(store, "layer-0000.rank0.base")
        command.flip(bad, -4096)
        report = command.must_json("boot", store, "--rank", 0, "--checkpoint", MODEL)
        self.assertEqual(report["layers_built"], 2)
        self.assertTrue(os.path.exists(gone))
        self.assertFalse(os.path.exists(other))
        command.must("boot", store, "--rank", 1, "--checkpoint", MODEL)
        self.assertEqual({f: read(f) for f in command.files_below(store)}, content)

    def test_ranks_that_boot_an_empty_store_at_once_make_it_together(self):
        store = os.path.join(self.root, "together")
        boots = [subprocess.Popen([command.HOTPLANE, "boot", store, "--checkpoint", MODEL,
                                   "--world", "2", "--json"],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, "RANK": str(i % 2), "WORLD_SIZE": "2"})
                 for i in range(4)]
        built = [0, 0]
        for i, boot in enumerate(boots):
            out, error = boot.communicate(timeout=300)
            self.assertEqual(boot.returncode, 0, error)
            report = json.loads(out)
            self.assertEqual(report["rank"], i % 2)
            built[i % 2] += report["layers_built"]
        self.assertEqual(built, [LAYERS, LAYERS])
        mine = {os.path.relpath(f, store): read(f)
                for f in command.files_below(store)}
        theirs = {os.path.relpath(f, self.split): read(f)
                  for f in command.files_below(self.split)}
        self.assertEqual(mine, theirs)

    def test_a_build_that_is_killed_is_finished(self):
        model = os.path.join(self.root, "large")
        command.must("synth", model, "--geometry", "48,512,256", "--layers", 3, "--checkpoint",
                     "mxfp4", "-q")
        reference = os.path.join(self.root, "reference")
        command.must("build", model, "--store", reference, "--tp", 4, "-q")
        for attempt in range(20):
            store = os.path.join(self.root, f"killed-{attempt}")
            build = command.start("build", model, "--store", store, "--tp", 4, "--workers", 1)
            # In the middle of a layer: one rank's temporary is there.
            while build.poll() is None:
                if any(".rank2.base-" in f for f in command.files_below(store)):
                    build.send_signal(signal.SIGKILL)
                    break
            build.wait(timeout=60)
            if build.returncode == -signal.SIGKILL:
                break
        self.assertEqual(build.returncode, -signal.SIGKILL)
        command.must("build", model, "--store", store, "--tp", 4, "-q")
        command.must("verify", store, "-q")
        self.assertEqual({os.path.relpath(f, store): read(f)
                          for f in command.files_below(store)},
                         {os.path.relpath(f, reference): read(f)
                          for f in command.files_below(reference)})


if __name__ == "__main__":
    command.main(unittest)
