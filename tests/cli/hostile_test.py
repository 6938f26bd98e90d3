"""What a hostile or unlucky surrounding does to the command: closed and full outputs, limits,
FIFOs, foreign files, other users. Every failure has an exit code and a message, none a signal."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import command


class Hostile(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-hostile-")
        os.chmod(self.root, 0o755)
        self.addCleanup(shutil.rmtree, self.root)
        self.model = command.write_checkpoint(os.path.join(self.root, "model"),
                                              command.mxfp4_tensors())
        self.store = os.path.join(self.root, "store")
        command.must("build", self.model, "--store", self.store, "-q")
        self.generation = os.path.join(self.store, os.listdir(self.store)[0])

    def layer(self, name):
        return os.path.join(self.generation, name)

    def snapshot(self, store=None):
        """Path below the store -> bytes of every file."""
        content = {}
        for path in command.files_below(store or self.store):
            with open(path, "rb") as file:
                content[os.path.relpath(path, store or self.store)] = file.read()
        return content


class Outputs(Hostile):
    def test_a_report_that_cannot_be_written_is_a_failure(self):
        for arguments in (["boot", self.store, "--json"], ["verify", self.store], ["--version"],
                          ["inspect", self.store], ["boot", "--help"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([command.HOTPLANE, *arguments], stdout=full,
                                      stderr=subprocess.PIPE, text=True, check=False)
            self.assertEqual(done.returncode, 1, arguments)
            self.assertIn("stdout", done.stderr)

    def test_closed_descriptors_never_become_files_of_the_store(self):
        before = self.snapshot()
        other = os.path.join(self.root, "other")
        for redirect in (">&- 2>&-", "<&- >&- 2>&-", "2>&-"):
            shutil.rmtree(other, ignore_errors=True)
            subprocess.run(f"{command.HOTPLANE} build {self.model} --store {other} -v {redirect}",
                           shell=True, check=False)
            self.assertEqual(self.snapshot(other), before)
            locks = os.path.join(other, os.path.basename(self.generation), "locks")
            self.assertEqual([os.path.getsize(os.path.join(locks, n)) for n in os.listdir(locks)],
                             [0] * len(os.listdir(locks)))

    def test_json_is_one_object_whatever_happens(self):
        cases = [["verify", self.store], ["boot", self.store], ["inspect", self.store],
                 ["boot", self.store, "--bogus"], ["boot", "/nowhere"], ["verify"],
                 ["inspect", self.model], ["doctor", "--store", "/nowhere"]]
        for damage in (False, True):
            if damage:
                command.flip(self.layer("layer-0000.base"), -5000)
            for arguments in cases:
                done = command.run(*arguments, "--json")
                report = json.loads(done.stdout)
                self.assertIsInstance(report, dict)
                if done.returncode != 0 and "findings" not in report:
                    self.assertEqual(report["error"]["code"], done.returncode, arguments)

    def test_a_reader_that_leaves_is_no_crash(self):
        build = f"{command.HOTPLANE} build {self.model} --store {self.root}/s2 -v 2>&1"
        done = subprocess.run(f"({build}; echo code $? >&2) | true", shell=True,
                              capture_output=True, text=True, check=False)
        self.assertNotIn("code 141", done.stderr)
        self.assertEqual([f for f in command.files_below(self.root) if ".tmp" in f], [])

    def test_control_characters_do_not_reach_the_terminal(self):
        done = command.run("boot", "/nowhere\x1b[31m\nred")
        self.assertNotIn("\x1b", done.stderr)
        self.assertIn("\\x1b", done.stderr)


    def test_names_from_outside_do_not_steer_the_terminal(self):
        """Names that clear the screen, forge a line, or end one, in results, logs and errors."""
        root = os.path.join(self.root, "a\x1b[31m\x07\nOK forged\r\x7f\x9b")
        os.mkdir(root)
        model, store, synthetic, cache = (os.path.join(root, name) for name in
                                          ("model", "store", "synthetic", "cache"))
        shutil.move(self.model, model)
        run_json, page = os.path.join(root, "run.json"), os.path.join(root, "page.html")
        seen = set()

        def look(code, *arguments):
            done = command.run(*arguments)
            self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
            text = done.stdout + done.stderr
            seen.add("\\x1b[31m\\x07\\x0aOK forged\\x0d\\x7f\\xc2\\x9b" in text)
            controls = [c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]
            self.assertEqual(controls, [], (arguments, text))
            self.assertNotIn("\nOK forged", text, arguments)

        look(0, "build", model, "--store", store, "-v")
        for verb in (("boot", "--checkpoint", model, "-v"), ("boot", "--dry-run"), ("warm",),
                     ("verify", "--source", model), ("inspect",),
                     ("export", "--layer", "0", "--part", "sc2", "--out",
                      os.path.join(root, "part")),
                     ("export", "--hf", os.path.join(root, "hf"), "--checkpoint", model,
                      "--precision", "fp4"),
                     ("export", "--planes-cache", cache, "--checkpoint-id", "m")):
            look(0, verb[0], store, *verb[1:])
        look(0, "doctor", "--store", store)
        look(0, "inspect", model)
        look(0, "fidelity", model, "--store", store)
        look(0, "import", "--planes-cache", cache, "--layers-geometry", "3,64,64",
             os.path.join(root, "imported"))
        look(0, "synth", synthetic, "--geometry", "2,64,64", "--layers", "1")
        with open(run_json, "w", encoding="utf-8") as out:
            out.write(command.must("boot", store, "--json").stdout)
        look(0, "report", run_json, "-o", page)
        generation = os.path.join(store, os.listdir(store)[0])
        for name in os.listdir(generation):
            if name != "locks":
                look(0, "inspect", os.path.join(generation, name))
        os.remove(os.path.join(generation, "layer-0000.source"))
        command.flip(os.path.join(generation, "layer-0000.base"), 100)
        os.truncate(os.path.join(generation, "layer-0001.base"), 4096)
        os.remove(os.path.join(generation, "layer-0001.delta-quintal"))
        for arguments in (("verify", store), ("boot", store), ("doctor", "--store", store),
                          ("inspect", store), ("boot", store, "--dry-run", "--checkpoint", model),
                          ("boot", store, "--checkpoint", model, "-v"), ("synth", store,
                          "--geometry", "2,64,64", "--layers", "1")):
            done = command.run(*arguments)
            look(done.returncode, *arguments)
        look(0, "gc", store, "--generation", os.path.basename(generation)[:6])
        self.assertIn(True, seen)

    def test_tinylm_shows_no_control_characters_of_names(self):
        if "TINYLM" not in os.environ:
            self.skipTest("TINYLM does not name the program")
        done = subprocess.run([os.environ["TINYLM"], "generate",
                               os.path.join(self.root, "no\x1b[31m\nmodel"), "--precision",
                               "source"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("no\\x1b[31m\\x0amodel", done.stderr)


class Limits(Hostile):
    def limited(self, limits, *arguments, user=None):
        def apply():
            for what, value in limits.items():
                resource.setrlimit(what, (value, value))
        return subprocess.run([command.HOTPLANE, *map(str, arguments)], capture_output=True,
                              text=True, preexec_fn=apply, user=user, check=False, timeout=120)

    def test_threads_that_are_refused(self):
        if os.getuid() != 0:
            self.skipTest("only root can become a user without processes")
        for name in ("boot", "verify"):
            done = self.limited({resource.RLIMIT_NPROC: 1}, name, self.store, "-q", user=65534)
            self.assertIn(done.returncode, (0, 1), done.stderr)

    def test_little_address_space(self):
        if "asan" in command.HOTPLANE:
            self.skipTest("a sanitizer needs the address space for itself")
        done = self.limited({resource.RLIMIT_AS: 200 << 20}, "synth", f"{self.root}/sy",
                            "--geometry", "1,65536,65536", "--layers", "1")
        self.assertEqual(done.returncode, 4, done.stderr)
        done = self.limited({resource.RLIMIT_AS: 300 << 20}, "boot", self.store, "--workers",
                            "1024")
        self.assertIn(done.returncode, (0, 1, 4), done.stderr)

    def test_no_thread_registers_a_destructor(self):
        """Registering one allocates, and where memory is short the C library ends the process."""
        if any(preset in command.HOTPLANE for preset in ("asan", "tsan")):
            self.skipTest("a sanitizer's runtime has destructors of its own")
        with open(command.HOTPLANE, "rb") as program:
            self.assertNotIn(b"__cxa_thread_atexit", program.read())

    def test_a_file_size_limit_is_an_error_and_leaves_nothing(self):
        done = self.limited({resource.RLIMIT_FSIZE: 20 << 10}, "build", self.model, "--store",
                            f"{self.root}/s2", "-q")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual([f for f in command.files_below(self.root) if ".tmp" in f], [])


class Places(Hostile):
    def test_export_replaces_files_only_and_none_of_the_store(self):
        before = self.snapshot()
        fifo = os.path.join(self.root, "fifo")
        os.mkfifo(fifo)
        inside = self.layer("layer-0000.base")
        for out in (fifo, "/dev/null", self.root, inside, self.layer("new"),
                    os.path.join(self.root, "model", "..", "store", "x")):
            done = command.run("export", self.store, "--layer", 0, "--part", "sc2", "--out", out)
            self.assertEqual(done.returncode, 2, out)
            self.assertIn(out, done.stderr)
        self.assertEqual(self.snapshot(), before)
        self.assertTrue(os.path.exists("/dev/null") and not os.path.isfile("/dev/null"))

    def test_traces_and_reports_replace_only_their_own(self):
        files = [f for f in command.files_below(self.store) if os.path.getsize(f) > 0]
        before = {f: open(f, "rb").read() for f in files}
        run = os.path.join(self.root, "run.json")
        with open(run, "w", encoding="utf-8") as out:
            out.write(command.must("boot", self.store, "--json").stdout)
        for path in files[:4] + [run]:
            done = command.run("boot", self.store, "--trace", path)
            self.assertEqual(done.returncode, 2, (path, done.stderr))
            done = command.run("report", run, "-o", path)
            self.assertEqual(done.returncode, 2, (path, done.stderr))
        self.assertEqual(before, {f: open(f, "rb").read() for f in files})
        for _ in range(2):
            command.must("boot", self.store, "--trace", os.path.join(self.root, "t"), "-q")
            command.must("report", run, "-o", os.path.join(self.root, "r"), "-q")

    def test_a_fifo_in_a_files_place_does_not_hang(self):
        for name in ("manifest", "layer-0000.base", "layer-0000.delta-quintal",
                     "layer-0000.source"):
            path = self.layer(name)
            os.rename(path, path + ".kept")
            os.mkfifo(path)
            for arguments in (["boot", self.store], ["verify", self.store],
                              ["inspect", self.store], ["warm", self.store]):
                command.run(*arguments, timeout=20)
            self.assertIn(command.run("verify", self.store, timeout=20).returncode, (1, 3), name)
            os.remove(path)
            os.rename(path + ".kept", path)
        command.must("verify", self.store)

    def test_gc_removes_only_what_a_build_can_have_left(self):
        stranger = os.path.join(self.root, "store", "d41d8cd98f00b204e9800998ecf8427e")
        os.makedirs(stranger)
        kept = [os.path.join(stranger, ".tmp-precious"), os.path.join(stranger, "data"),
                self.layer(".tmp-precious"), self.layer("notes")]
        for path in kept:
            with open(path, "w") as file:
                file.write("mine")
        os.makedirs(self.layer(".tmp-layer-0000.base-1-0badf00d"))
        left = self.layer(".tmp-layer-0001.base-1-0badf00d")
        with open(left, "w") as file:
            file.write("half")
        command.must("gc", self.store)
        self.assertFalse(os.path.exists(left))
        for path in kept:
            self.assertTrue(os.path.exists(path), path)
        os.remove(self.layer("layer-0000.base"))
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("boot", self.store, "--generation", os.path.basename(self.generation))

    def test_gc_leaves_what_stands_for_a_lock_and_is_none(self):
        os.remove(self.layer("locks/layer-0000"))
        os.mkdir(self.layer("locks/layer-0000"))
        os.mkfifo(self.layer("locks/layer-0007"))
        # Who cannot be locked may be in use: then nothing at all is deleted.
        os.symlink("itself", self.layer("locks/itself"))
        before = self.snapshot()
        gc = ["gc", self.store, "--generation", os.path.basename(self.generation)]
        for dry in (["--dry-run"], []):
            self.assertEqual(command.must_json(*gc, *dry)["kept_in_use"], [self.generation])
            self.assertEqual(self.snapshot(), before)
        os.remove(self.layer("locks/itself"))
        for dry in (["--dry-run"], []):
            done = command.must(*gc, "--json", *dry)
            report = json.loads(done.stdout)
            self.assertEqual(report["kept_in_use"], [])
            self.assertEqual(report["removed"], [])
            for name in ("locks/layer-0000", "locks/layer-0007"):
                self.assertIn(self.layer(name) + " is no file of a store", done.stderr)
                self.assertTrue(os.path.exists(self.layer(name)))
            self.assertEqual(os.path.exists(self.layer("manifest")), bool(dry))
        self.assertEqual(sorted(os.listdir(self.generation)), ["locks"])

    def test_nothing_is_written_among_the_files_of_a_store(self):
        run = os.path.join(self.root, "run.json")
        with open(run, "w", encoding="utf-8") as file:
            file.write(command.must("boot", self.store, "--json").stdout)
        os.symlink(self.generation, os.path.join(self.root, "link"))
        before = self.snapshot()
        for folder in (self.generation, os.path.join(self.root, "link")):
            for name in ("locks/users", "locks/new", "layer-0009.base", "trace.json"):
                place = os.path.join(folder, name)
                for arguments in (("boot", self.store, "--trace", place),
                                  ("report", run, "-o", place)):
                    done = command.run(*arguments)
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertIn("lies among the files of a store", done.stderr)
                    self.assertIn(place, done.stderr)
        self.assertEqual(self.snapshot(), before)
        self.assertFalse(os.path.exists(self.layer("locks/new")))

    def test_gc_removes_nothing_through_a_link(self):
        other = os.path.join(self.root, "other")
        os.mkdir(other)
        before = self.snapshot()
        for name in (os.path.basename(self.generation), "4" * 32):
            link = os.path.join(other, name)
            os.symlink(self.generation, link)
            for dry in (["--dry-run"], []):
                done = command.run("gc", other, "--generation", name[:6], *dry)
                self.assertEqual(done.returncode, 2, done.stderr)
                for words in (link, "a link to one that may be another store's", "to fix"):
                    self.assertIn(words, done.stderr)
                done = command.must("gc", other, "--json", *dry)
                self.assertEqual(json.loads(done.stdout)["removed"], [])
                self.assertIn(f"{link} is a link", done.stderr)
            os.remove(link)
        self.assertEqual(self.snapshot(), before)
        # Nor through the folder of locks.
        copy = os.path.join(other, os.path.basename(self.generation))
        shutil.copytree(self.generation, copy)
        shutil.rmtree(os.path.join(copy, "locks"))
        os.symlink(os.path.join(self.generation, "locks"), os.path.join(copy, "locks"))
        done = command.must("gc", other, "--generation", os.path.basename(copy), "--json")
        self.assertEqual(json.loads(done.stdout)["kept_in_use"], [copy])
        self.assertIn("locks is no folder", done.stderr)
        self.assertEqual(self.snapshot(), before)
        self.assertTrue(os.path.exists(os.path.join(copy, "manifest")))

    def test_a_link_to_itself_is_one_finding_and_no_end(self):
        link = self.layer("layer-0000.base")
        os.remove(link)
        os.symlink(os.path.basename(link), link)
        left = self.layer(".tmp-layer-0001.base-1-0badf00d")
        os.symlink(os.path.basename(left), left)
        half = self.layer(".tmp-layer-0001.delta-quintal-1-0badf00d")
        with open(half, "w", encoding="utf-8") as file:
            file.write("half")
        command.flip(self.layer("layer-0001.base"), -5000)
        done = command.run("verify", self.store, "--json")
        self.assertEqual(done.returncode, 3, done.stderr)
        found = {f["file"] for f in json.loads(done.stdout)["findings"]}
        self.assertEqual(found, {link, self.layer("layer-0001.base")})
        done = command.must("gc", self.store)
        self.assertIn(left, done.stderr)
        self.assertTrue(os.path.islink(left))
        self.assertFalse(os.path.exists(half))
        command.must("build", self.model, "--store", self.store, "-q")
        os.remove(left)
        command.must("boot", self.store, "--layers", 0, "-q")

    def test_a_directory_in_a_layer_files_place_is_bad_data(self):
        path = self.layer("layer-0000.base")
        os.remove(path)
        os.mkdir(path)
        before = self.snapshot()
        for arguments in (["boot", self.store], ["verify", self.store], ["inspect", self.store],
                          ["boot", self.store, "--checkpoint", self.model, "--dry-run"],
                          ["boot", self.store, "--checkpoint", self.model],
                          ["build", self.model, "--store", self.store]):
            done = command.run(*arguments)
            told = done.stdout + done.stderr
            self.assertEqual(done.returncode, 3, (arguments, done.stderr))
            self.assertIn(path, told)
            self.assertIn("a directory is in the place of layer 0's file", told)
            self.assertIn("to fix    move it away", told)
            # Not planned as something to build, nor tried.
            self.assertNotIn("built again", told)
            self.assertNotIn("the store lacks", told)
            self.assertNotIn("remove the files", told)
            self.assertNotIn("damaged", told.replace("missing or damaged", ""))
            if arguments[0] in ("verify", "inspect"):
                self.assertIn("no build replaces", done.stderr)
        self.assertIn("foreign", command.run("inspect", self.store).stdout)
        # Beside one that a build does replace, each has its own way.
        command.flip(self.layer("layer-0001.base"), 100)
        told = command.run("verify", self.store).stderr
        self.assertIn("no build replaces; remove the other files named above", told)
        command.flip(self.layer("layer-0001.base"), 100)
        self.assertTrue(os.path.isdir(path))
        self.assertEqual(self.snapshot(), before)

    def test_inspect_and_doctor_write_nothing(self):
        shutil.rmtree(self.layer("locks"))
        before = sorted(os.walk(self.store))
        command.must("inspect", self.store)
        command.must("doctor", "--store", self.store)
        self.assertEqual(sorted(os.walk(self.store)), before)

    def test_what_cannot_be_read_is_not_called_damaged(self):
        if os.getuid() != 0:
            self.skipTest("only root can become another user")
        path = self.layer("layer-0000.base")
        os.chmod(path, 0)
        for name in ("verify", "boot"):
            done = subprocess.run([command.HOTPLANE, name, self.store], capture_output=True,
                                  text=True, user=65534, check=False)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertNotIn("remove", done.stderr)
            self.assertIn(path, done.stdout + done.stderr)

    def test_permission_errors_say_what_to_do(self):
        if os.getuid() != 0:
            self.skipTest("only root can become another user")
        cache = os.path.join(self.root, "cache")
        command.must("export", self.store, "--planes-cache", cache, "--checkpoint-id", "m", "-q")
        run_json = os.path.join(self.root, "run.json")
        with open(run_json, "w", encoding="utf-8") as out:
            out.write(command.must("boot", self.store, "--json").stdout)
        copy = os.path.join(self.root, "copy")
        shutil.copytree(self.model, copy)
        shard = os.path.join(copy, "model-00001-of-00001.safetensors")
        shutil.copytree(self.store, os.path.join(self.root, "other"))
        other = os.path.join(self.root, "other", os.path.basename(self.generation))
        os.remove(os.path.join(other, "layer-0001.base"))
        new, incomplete = os.path.join(self.root, "new"), os.path.dirname(other)
        geometry = ("--layers-geometry", "3,64,64")
        for closed, commands in (
                (self.store, (("boot", self.store), ("verify", self.store), ("warm", self.store),
                              ("inspect", self.store), ("gc", self.store),
                              ("doctor", "--store", self.store),
                              ("build", self.model, "--store", self.store),
                              ("fidelity", self.model, "--store", self.store))),
                (self.generation, (("boot", self.store), ("inspect", self.store),
                                   ("verify", self.store), ("gc", self.store))),
                (self.layer("manifest"), (("boot", self.store), ("verify", self.store),
                                          ("inspect", self.store),
                                          ("inspect", self.layer("manifest")))),
                (self.layer("layer-0000.base"), (("boot", self.store), ("verify", self.store),
                                                 ("inspect", self.store))),
                (copy, (("build", copy, "--store", new), ("inspect", copy),
                        ("boot", incomplete, "--checkpoint", copy))),
                (shard, (("build", copy, "--store", new), ("inspect", shard), ("inspect", copy),
                         ("boot", incomplete, "--checkpoint", copy))),
                (cache, (("import", "--planes-cache", cache, *geometry, new),)),
                (run_json, (("report", run_json, "-o", os.path.join(self.root, "page.html")),)),
                (None, (("build", self.model, "--store", new),
                        ("build", self.model, "--store", incomplete),
                        ("synth", new, "--geometry", "2,64,64", "--layers", "1"),
                        ("gc", self.store, "--generation", os.path.basename(self.generation)),
                        ("export", self.store, "--layer", "0", "--part", "sc2", "--out", new),
                        ("boot", self.store, "--trace", new)))):
            mode = None if closed is None else os.stat(closed).st_mode & 0o777
            if closed is not None:
                os.chmod(closed, 0)
            for arguments in commands:
                with self.subTest(closed=closed, arguments=arguments):
                    done = subprocess.run([command.HOTPLANE, *arguments], capture_output=True,
                                          text=True, user=65534, group=65534, extra_groups=[],
                                          check=False)
                    told = done.stdout + done.stderr
                    self.assertIn("ermission denied", told)
                    self.assertIn("to fix", told)
                    self.assertIn(done.returncode, (1,), told)
            if closed is not None:
                os.chmod(closed, mode)

    def test_nothing_is_built_over_what_cannot_be_read(self):
        if os.getuid() != 0:
            self.skipTest("only root can become another user")
        for folder, _, names in os.walk(self.store):
            os.chmod(folder, 0o777)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o666)
        before = self.snapshot()
        for name in ("layer-0000.base", "layer-0001.delta-quintal"):
            path = self.layer(name)
            os.chmod(path, 0)
            for arguments in (["boot", self.store, "--checkpoint", self.model, "--dry-run"],
                              ["boot", self.store, "--checkpoint", self.model],
                              ["build", self.model, "--store", self.store]):
                done = subprocess.run([command.HOTPLANE, *arguments], capture_output=True,
                                      text=True, user=65534, check=False)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("unreadable", done.stderr)
                self.assertIn(path, done.stderr)
                self.assertNotIn("damaged", done.stderr + done.stdout)
            os.chmod(path, 0o666)
        self.assertEqual(self.snapshot(), before)

    def test_synth_writes_beside_nothing_that_it_cannot_read(self):
        if os.getuid() != 0:
            self.skipTest("only root can become another user")
        os.chmod(self.store, 0o777)
        for closed, mode in ((self.generation, 0o700), (self.layer("manifest"), 0)):
            was = os.stat(closed).st_mode & 0o777
            os.chmod(closed, mode)
            done = subprocess.run([command.HOTPLANE, "synth", self.store, "--geometry",
                                   "4,128,64", "--layers", "1"], capture_output=True, text=True,
                                  user=65534, group=65534, extra_groups=[], check=False)
            os.chmod(closed, was)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("ermission denied", done.stderr)
            self.assertEqual(os.listdir(self.store), [os.path.basename(self.generation)])

    def test_no_proof_without_source_records(self):
        os.remove(self.layer("layer-0001.source"))
        done = command.run("verify", self.store, "--source", self.model)
        self.assertEqual(done.returncode, 3)
        self.assertIn("layer 1", done.stderr)

    def test_waiting_for_a_collector_can_be_interrupted(self):
        lock = self.layer("locks/users")
        holder = subprocess.Popen(["flock", "-x", lock, "sleep", "30"])
        time.sleep(0.3)
        verify = command.start("verify", self.store)
        time.sleep(0.3)
        verify.send_signal(signal.SIGINT)
        self.assertEqual(verify.wait(timeout=10), 130)
        holder.kill()
        holder.wait()

    def test_a_lock_that_nobody_lets_go_of(self):
        os.remove(self.layer("layer-0000.base"))
        build = ["build", self.model, "--store", self.store, "-q"]
        boot = ["boot", self.store, "--checkpoint", self.model, "-q"]
        cases = [("locks/layer-0000", build), ("locks/layer-0000", boot), ("locks/users", build),
                 ("locks/users", boot), ("locks/generation", build)]
        for name, arguments in cases:
            lock = self.layer(name)
            if name == "locks/generation":
                os.remove(self.layer("manifest"))
            with open(lock, "w", encoding="utf-8") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                done = command.run(*arguments, "--stall-timeout", "0.5", timeout=60)
                self.assertEqual(done.returncode, 1, (name, arguments, done.stderr))
                self.assertIn("error: ", done.stderr)
                self.assertIn("no progress for 0.5 s", done.stderr)
                self.assertIn(lock, done.stderr)
                waiting = command.start(*arguments)
                time.sleep(0.5)
                self.assertIsNone(waiting.poll(), (name, arguments))
                waiting.send_signal(signal.SIGINT)
                self.assertEqual(waiting.wait(timeout=20), 130, (name, arguments))
        command.must(*build)
        command.must("verify", self.store, "--source", self.model)

    def test_names_that_are_not_there_are_wrong_usage(self):
        for arguments in (["inspect", "/nowhere"],
                          ["inspect", self.store, "--generation", "zz"],
                          ["boot", self.store, "--generation", "zz"]):
            self.assertEqual(command.run(*arguments).returncode, 2, arguments)


if __name__ == "__main__":
    command.main(unittest)
