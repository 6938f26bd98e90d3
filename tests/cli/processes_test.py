"""Several processes on one store, signals, and SIGKILL at random moments.

HOTPLANE_KILLS and HOTPLANE_KILL_MIB set how often and how large: the defaults keep the test
short; the full run is
`HOTPLANE_KILLS=200 HOTPLANE_KILL_MIB=4096 python3 tests/cli/processes_test.py Kill`.
"""

import fcntl
import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import command


class Fixture(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-processes-")
        self.addCleanup(shutil.rmtree, self.root)
        self.model = os.path.join(self.root, "model")
        self.store = os.path.join(self.root, "store")

    def synth(self, mebibytes, layers=4):
        """An MXFP4 checkpoint of about this size."""
        experts = max(1, mebibytes * 2**20 // layers // (3 * 1024 * 512 * 17 // 32))
        command.must("synth", self.model, "--geometry", f"{experts},1024,512", "--layers", layers,
                     "--checkpoint", "mxfp4", "--mtp", 1, "-q")

    def temporaries(self):
        return [f for f in command.files_below(self.store) if ".tmp" in os.path.basename(f)]


class Together(Fixture):
    def test_four_builds_build_each_layer_once(self):
        self.synth(96)
        builds = [subprocess.Popen([command.HOTPLANE, "build", self.model, "--store", self.store,
                                    "--json", "--workers", "2"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                  for _ in range(4)]
        reports = []
        for build in builds:
            out, error = build.communicate(timeout=300)
            self.assertEqual(build.returncode, 0, error)
            reports.append(json.loads(out))
        self.assertEqual(sum(report["layers_built"] for report in reports), 5)
        self.assertEqual({report["layers_total"] for report in reports}, {5})
        self.assertEqual(sum(report["layers_attached"] for report in reports), 15)
        self.assertEqual(len({report["generation"] for report in reports}), 1)
        self.assertEqual(self.temporaries(), [])
        self.assertEqual(len(os.listdir(self.store)), 1)
        command.must("verify", self.store, "--source", self.model)
        single = os.path.join(self.root, "single")
        command.must("build", self.model, "--store", single, "--workers", "1", "-q")
        self.assert_same(single, self.store)

    def test_two_first_boots_build_each_layer_once(self):
        self.synth(96)
        boots = [subprocess.Popen([command.HOTPLANE, "boot", self.store, "--checkpoint", self.model,
                                   "--json", "--workers", "2", "--batch", "2"],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                 for _ in range(2)]
        reports = []
        for boot in boots:
            out, error = boot.communicate(timeout=300)
            self.assertEqual(boot.returncode, 0, error)
            reports.append(json.loads(out))
        self.assertEqual(sum(report["layers_built"] for report in reports), 5)
        for report in reports:
            self.assertEqual(report["layers_read"], 5)
            self.assertEqual(report["bytes_read"], report["bytes_needed"])
            self.assertEqual([entry["layer"] for entry in report["source_by_layer"]],
                             list(range(5)))
        self.assertEqual(self.temporaries(), [])
        command.must("verify", self.store, "--source", self.model)
        warm = command.must_json("boot", self.store, "--checkpoint", self.model)
        self.assertEqual((warm["layers_built"], warm["bytes_read_checkpoint"]), (0, 0))
        single = os.path.join(self.root, "single")
        command.must("build", self.model, "--store", single, "--workers", "1", "-q")
        self.assert_same(single, self.store)

    def test_a_complete_store_opens_no_shard(self):
        self.synth(8)
        command.must("boot", self.store, "--checkpoint", self.model, "-q")
        shards = [f for f in command.files_below(self.model) if f.endswith(".safetensors")]
        for shard in shards:
            os.chmod(shard, 0)
        trace = os.path.join(self.root, "opens")
        boot = ["boot", self.store, "--checkpoint", self.model, "--json"]
        if shutil.which("strace"):
            # A sanitizer's search for leaks cannot run under another tracer.
            options = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
            done = subprocess.run(["strace", "-f", "-e", "trace=open,openat,openat2", "-o", trace,
                                   command.HOTPLANE, *boot], capture_output=True, text=True,
                                  env={**os.environ, "ASAN_OPTIONS": options})
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(trace, encoding="utf-8") as lines:
                self.assertNotIn('.safetensors"', lines.read())
        report = command.must_json(*boot[:-1])
        self.assertEqual(report["warnings"], [])
        # A copy has other inodes: it is fingerprinted, and is the same model.
        for shard in shards:
            os.chmod(shard, 0o644)
        copy = os.path.join(self.root, "copy")
        shutil.copytree(self.model, copy)
        command.must("boot", self.store, "--checkpoint", copy, "-q")

    def test_dry_run_writes_nothing(self):
        self.synth(8)
        plan = command.must_json("boot", self.store, "--checkpoint", self.model, "--dry-run")
        self.assertEqual({action["action"] for action in plan["actions"]}, {"build"})
        self.assertFalse(os.path.exists(self.store))
        table = command.must("boot", self.store, "--checkpoint", self.model, "--dry-run").stdout
        self.assertIn("build -> device", table)
        self.assertIn("(MTP)", table)

    def assert_same(self, one, other):
        names = [os.path.relpath(f, one) for f in command.files_below(one)]
        self.assertEqual(names, [os.path.relpath(f, other) for f in command.files_below(other)])
        same, different, errors = filecmp.cmpfiles(one, other, names, shallow=False)
        self.assertEqual((different, errors), ([], []))
        self.assertGreater(len(same), 0)

    def test_gc_beside_a_boot_deletes_nothing(self):
        self.synth(48)
        command.must("build", self.model, "--store", self.store, "-q")
        before = command.files_below(self.store)
        users = os.path.join(self.store, os.listdir(self.store)[0], "locks", "users")
        # Stopped the moment it holds the store; one that was done before we looked is no use.
        for _ in range(50):
            boot = command.start("boot", self.store)
            while boot.poll() is None and not self.has_opened(boot.pid, users):
                pass
            boot.send_signal(signal.SIGSTOP)
            # It has the file open before it holds the lock: only a lock that a process at rest
            # holds stays held.
            if self.is_stopped(boot) and self.is_locked(users):
                break
            boot.send_signal(signal.SIGCONT)
            boot.wait()
        else:
            self.fail("no boot was caught while it held the store")
        generation = os.listdir(self.store)[0]
        report = command.must_json("gc", self.store, "--generation", generation)
        self.assertEqual(report["removed"], [])
        self.assertEqual(len(report["kept_in_use"]), 1)
        self.assertEqual(command.files_below(self.store), before)
        boot.send_signal(signal.SIGCONT)
        self.assertEqual(boot.wait(timeout=60), 0)
        command.must("verify", self.store)
        report = command.must_json("gc", self.store, "--generation", generation)
        self.assertGreater(report["bytes_freed"], 0)
        self.assertEqual(os.listdir(self.store), [])

    @staticmethod
    def has_opened(pid, path):
        try:
            folder = f"/proc/{pid}/fd"
            return any(os.readlink(os.path.join(folder, fd)) == path for fd in os.listdir(folder))
        except OSError:
            return False

    @staticmethod
    def is_stopped(process):
        """Waits until no thread of it runs any more; False when it ended instead."""
        while process.poll() is None:
            try:
                tasks = f"/proc/{process.pid}/task"
                states = set()
                for task in os.listdir(tasks):
                    with open(os.path.join(tasks, task, "stat"), encoding="utf-8") as stat:
                        states.add(stat.read().rpartition(")")[2].split()[0])
                if states == {"T"}:
                    return True
            except OSError:
                pass  # a thread, or the process, ended meanwhile
        return False

    @staticmethod
    def is_locked(path):
        with open(path, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class Signals(Fixture):
    def test_interrupted_builds_clean_up_and_can_go_on(self):
        self.synth(256)
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            build = subprocess.Popen(
                [command.HOTPLANE, "build", self.model, "--store", self.store, "-q"],
                stderr=subprocess.PIPE, text=True)
            while not self.temporaries():
                time.sleep(0.001)
                self.assertIsNone(build.poll(), "the build ended before it could be interrupted")
            build.send_signal(number)
            said = build.communicate(timeout=60)[1]
            self.assertEqual(build.returncode, code)
            self.assertIn("the same command goes on where this one stopped", said)
            self.assertEqual(self.temporaries(), [])
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("verify", self.store, "--source", self.model)


    @unittest.skipUnless(shutil.which("strace"), "strace, which delays system calls, is not here")
    def test_a_disk_that_does_not_answer_ends_the_boot(self):
        self.synth(32)
        command.must("build", self.model, "--store", self.store, "-q")
        # Mapping five layers gives advice five times. Then populating them does not answer; strace
        # holds the process until it does.
        done = subprocess.run(
            ["strace", "-f", "-o", "/dev/null", "-e", "inject=madvise:delay_enter=5000000:when=6+",
             command.HOTPLANE, "boot", self.store, "--map", "--stall-timeout", "1"],
            capture_output=True, text=True, timeout=120,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("no progress for", done.stderr)
        self.assertIn("to fix", done.stderr)


class Kill(Fixture):
    def test_at_random_moments(self):
        kills = int(os.environ.get("HOTPLANE_KILLS", "12"))
        self.synth(int(os.environ.get("HOTPLANE_KILL_MIB", "128")))
        reference = os.path.join(self.root, "reference")
        start = time.monotonic()
        command.must("build", self.model, "--store", reference, "-q")
        whole = time.monotonic() - start
        rng = random.Random(20261129)
        checked = {}
        done = hit = finished = 0
        while done < kills:
            build = command.start("build", self.model, "--store", self.store)
            try:
                build.wait(timeout=rng.uniform(0, whole * 0.6))
            except subprocess.TimeoutExpired:
                build.kill()
                hit += 1
            build.wait()
            done += 1
            self.check(reference, checked)
            if build.returncode == 0:
                finished += 1
                shutil.rmtree(self.store)
                checked.clear()
        self.assertGreater(hit, kills // 2)
        command.must("build", self.model, "--store", self.store, "-q")
        self.check(reference, checked)
        self.assertEqual(
            [os.path.relpath(f, reference) for f in command.files_below(reference)],
            [os.path.relpath(f, self.store) for f in command.files_below(self.store)])
        command.must("verify", self.store, "--source", self.model)
        print(f"{done} builds, {hit} killed, {finished} finished first, {whole:.1f} s undisturbed")

    def check(self, reference, checked):
        """Every published file is whole; what can be booted boots."""
        for path in command.files_below(self.store) if os.path.isdir(self.store) else []:
            if os.path.basename(path).startswith(".tmp"):
                continue
            stamp = (os.stat(path).st_mtime_ns, os.stat(path).st_ino)
            if checked.get(path) == stamp:
                continue
            twin = os.path.join(reference, os.path.relpath(path, self.store))
            self.assertTrue(filecmp.cmp(path, twin, shallow=False), path)
            checked[path] = stamp
            if path.endswith(".base"):
                layer = int(os.path.basename(path)[len("layer-"):-len(".base")])
                command.must("boot", self.store, "--layers", layer, "--map", "-q")


if __name__ == "__main__":
    command.main(unittest)
