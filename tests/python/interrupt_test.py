"""Boots and builds that end early leave no thread and no mapping; python -m hotplane."""

import os
import re
import signal
import subprocess
import sys
import time
import unittest

import package
from package import LAYERS, MODEL, WithStore, command

import hotplane

# What a child tells about itself: its threads, and the bytes and store files it has mapped.
CHILD = '''
import fcntl, glob, os, signal, sys, threading, time
import package
import hotplane

def state(expected=None):
    with open("/proc/self/maps") as file:
        files = file.read().count(".base")
    threads = package.settled(expected)
    return threads, package.mapped_bytes(), files

def interrupted(call, before):
    try:
        call()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    else:
        sys.exit("was not interrupted")
    threads, mapped, files = state(before[0])
    assert threads == before[0], f"{threads} threads, {before[0]} before"
    assert files == 0, f"{files} layer files are mapped"
    assert mapped < before[1] + (32 << 20), f"{mapped - before[1]} bytes are left"
    assert threading.enumerate() == [threading.main_thread()]
    print("clean")

def self_interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)

class Interrupter:
    """To be traced with: KeyboardInterrupt at this instruction of the package, counted from 1."""
    def __init__(self, instruction):
        self.left = instruction
    def __call__(self, frame, event, _):
        if not frame.f_globals.get("__name__", "").startswith("hotplane"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

store = hotplane.open(sys.argv[1])
'''


def read_until(process, word):
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"the child never said {word!r}")


class Boots(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        WithStore.setUpClass.__func__(cls)
        cls.large = os.path.join(cls.root, "large")
        command("synth", cls.large, "--geometry", "64,1024,1024", "--layers", 3, "-q")

    def child(self, code, *arguments):
        done = package.python(CHILD + code, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertIn("clean", done.stdout)

    def test_interrupted_between_layers(self):
        for options in ("", "map=True, "):
            self.child(f"""
store.boot({options}).close()
before = state()
interrupted(lambda: store.boot({options}on_layer=self_interrupt), before)
with store.boot({options}) as engine:
    assert len(engine.layers) == 3
""", self.large)

    def test_interrupted_while_arrays_come_and_go(self):
        self.child("""
PARTS = "planes13", "sc13", "planes2", "sc2"
def copy(layer):
    for name in PARTS:
        getattr(layer, name).tobytes()
def boot():
    store.boot(on_layer=copy).close()
boot()
before = state()
begin = time.monotonic()
boot()
seconds = time.monotonic() - begin
arrived = 0
for turn in range(24):
    timer = threading.Timer(seconds * turn / 18, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        boot()
        timer.join()
        time.sleep(1)
    except KeyboardInterrupt:
        arrived += 1
    timer.join()
    after = state(before[0])
    assert after[0] == before[0] and after[1] < before[1] + (32 << 20), (turn, after, before)
assert arrived == 24, arrived
print("clean")
""", self.large)

    def test_interrupted_at_any_instruction(self):
        """What KeyboardInterrupt may come between: every instruction of the package."""
        self.child("""
def interrupted_everywhere(call):
    count = 0
    while True:
        interrupter = Interrupter(count + 1)
        sys.settrace(interrupter)
        try:
            call()
        except KeyboardInterrupt:
            count += 1
        else:
            assert interrupter.left > 0, f"the one at instruction {count + 1} was lost"
            return count
        finally:
            sys.settrace(None)

store.boot().close()
before = state()
for call in (lambda part, engine: part.tobytes(), lambda part, engine: part[1],
             lambda part, engine: part.__dlpack__(),
             lambda part, engine: part.__dlpack__(max_version=(1, 0)),
             lambda part, engine: engine.record("base", 0, 1)):
    engine = store.boot()
    part = engine.layers[0].planes13
    assert interrupted_everywhere(lambda: call(part, engine)) > 50
    engine.close()
    after = state(before[0])
    assert after[0] == before[0] and after[1] < before[1] + (32 << 20), (after, before)
print("clean")
""", self.store_path)

    def test_an_interrupted_call_is_over(self):
        """Wherever in entering or leaving a call it came: another thread can close the engine."""
        self.child("""
def interrupted_at(instruction, engine):
    sys.settrace(Interrupter(instruction))
    try:
        engine.record_bytes("base", 0)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False

count = 0
while True:
    if count == 10:
        before = state()
    engine = store.boot()
    interrupted = interrupted_at(count + 1, engine)
    assert all(call() is None for call in engine._handle._calls.values()), count
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), f"close waits after one at instruction {count + 1}"
    if not interrupted:
        break
    count += 1
assert count > 40, count
after = state(before[0])
assert after[0] == before[0] and after[1] < before[1] + (32 << 20), (after, before)
print("clean")
""", self.store_path)

    def test_a_close_waits_for_a_call_and_for_no_longer(self):
        self.child("""
engine = store.boot()
entered, leave = threading.Event(), threading.Event()
def call():
    with engine._handle.call():
        entered.set()
        leave.wait()
calling = threading.Thread(target=call)
calling.start()
entered.wait()
closing = threading.Thread(target=engine.close)
closing.start()
closing.join(0.5)
assert closing.is_alive() and engine.closed
try:
    engine.record_bytes("base", 0)
    sys.exit("a call began on a closed engine")
except hotplane.UsageError:
    pass
leave.set()
closing.join(20)
assert not closing.is_alive()
calling.join()
print("clean")
""", self.store_path)

    def test_interrupted_while_nothing_comes(self):
        """The boot waits for a build of another process, which never ends."""
        path = os.path.join(self.root, "waiting")
        hotplane.build(MODEL, path, layers="0", delta=None)
        process = subprocess.Popen([sys.executable, "-c", CHILD + """
store.boot(layers="0").close()
locks = os.path.join(store.directory, "locks")
for stem in (f"layer-{i:04}" for i in range(4)):
    descriptor = os.open(os.path.join(locks, stem), os.O_RDWR | os.O_CREAT)
    if os.fork() == 0:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(1, b"locked\\n")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)
        os._exit(0)
    os.close(descriptor)
""" + f"""
sys.stdin.readline()
before = state()
print("booting", flush=True)
interrupted(lambda: store.boot(checkpoint={MODEL!r}), before)
with store.boot(wait=False, checkpoint={MODEL!r}) as engine:
    assert engine.wait_layer(0).ordinal == 0
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        engine.wait()
    except KeyboardInterrupt:
        print("waited", flush=True)
    assert state()[0] > before[0]
assert state(before[0])[0] == before[0]
""", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True,
                                   env={**os.environ, "PYTHONPATH": package.PATH})
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stdin.close)
        self.addCleanup(self.end, process)
        for _ in range(LAYERS):
            read_until(process, "locked")
        process.stdin.write("go\n")
        process.stdin.flush()
        read_until(process, "booting")
        time.sleep(0.3)  # into the wait; an earlier signal is right too
        process.send_signal(signal.SIGINT)
        for word in ("clean", "waited"):
            try:
                read_until(process, word)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{process.stderr.read()}") from None
        self.assertEqual(process.wait(timeout=30), 0)

    @staticmethod
    def end(process):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def test_what_a_callback_raises_ends_the_boot(self):
        self.child("""
store.boot().close()
before = state()
def refuse(layer):
    raise LookupError(layer.ordinal)
try:
    store.boot(on_layer=refuse)
except LookupError as error:
    assert error.args == (0,)
else:
    sys.exit("did not raise")
after = state(before[0])
assert after[0] == before[0] and after[1] < before[1] + (32 << 20), (after, before)
print("clean")
""", self.large)

    def test_closed_while_it_boots(self):
        self.child("""
engines = []
original = hotplane.Store._engine
def remember(self, options):
    engines.append(original(self, options))
    return engines[-1]
hotplane.Store._engine = remember
try:
    store.boot(on_layer=lambda layer: engines[-1].close())
except hotplane.UsageError as error:
    assert "closed" in str(error), error
except hotplane.Interrupted:
    pass
else:
    sys.exit("did not raise")
before = state()
for _ in range(10):
    store.boot(wait=False).close()
engine = store.boot(wait=False)
failures = []
def wait():
    try:
        engine.wait()
    except hotplane.Interrupted as error:
        failures.append(error.code)
    except hotplane.UsageError as error:
        failures.append(error.code)
threads = [threading.Thread(target=wait) for _ in range(3)]
for thread in threads: thread.start()
engine.close()
for thread in threads: thread.join()
assert set(failures) <= {2, 130, 143}, failures
assert state(before[0])[0] == before[0], before
print("clean")
""", self.large)

    def test_the_end_of_the_interpreter(self):
        """An engine that boots, views and a log handler are left to the end of the process."""
        done = package.python("""
import logging, sys
import hotplane
logging.basicConfig(level=logging.DEBUG)
store = hotplane.open(sys.argv[1])
booted = store.boot()
view = booted.layers[0].planes13.memoryview()
capsule = booted.layers[0].planes2.__dlpack__()
booting = store.boot(wait=False)
class Late:
    def __del__(self):
        booted.layers and None
late = Late()
""", self.large)
        self.assertEqual(done.returncode, 0, done.stderr)


class Waits(WithStore):
    def test_a_wait_ends_with_its_thread_however_often_it_is_interrupted(self):
        done = package.python("""
import os, signal, threading, time
import package
from hotplane._threads import join
thread = threading.Thread(target=time.sleep, args=(0.5,))
for delay in (0.1, 0.15, 0.2):
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
thread.start()
try:
    join(thread)
except KeyboardInterrupt:
    print("interrupted", thread.is_alive())
""")
        self.assertEqual(done.stdout, "interrupted False\n", done.stderr)

    def test_a_forked_child_ends(self):
        done = package.python(f"""
import os, signal
import package
import hotplane
engine = hotplane.open({self.store_path!r}).boot()
child = os.fork()
if child == 0:
    signal.alarm(20)
    engine.close()
    assert engine.closed
    os._exit(0)
print(os.waitpid(child, 0)[1], engine.closed, len(engine.layers))
engine.close()
""")
        self.assertEqual(done.stdout, f"0 False {LAYERS}\n", done.stderr)


class Builds(WithStore):
    def test_interrupted(self):
        model = os.path.join(self.root, "model")
        command("synth", model, "--geometry", "16,1024,512", "--layers", 12, "--checkpoint",
                "bf16", "-q")
        path = os.path.join(self.root, "partial")
        done = package.python(f"""
import os, signal, sys, threading
import package
import hotplane
from hotplane import _engine
class Stop(_engine.Display):
    def show(self, *event):
        os.kill(os.getpid(), signal.SIGINT)
_engine.Display = Stop
try:
    hotplane.build({model!r}, {path!r}, workers=1)
except KeyboardInterrupt:
    print("interrupted", package.settled(1), threading.active_count())
""")
        self.assertEqual(done.stdout, "interrupted 1 1\n", done.stderr)
        self.assertEqual(hotplane.build(model, path)["layers_total"], 12)
        left = [name for folder, _, names in os.walk(path) for name in names
                if name.startswith(".tmp")]
        self.assertEqual(left, [])


class CommandLine(WithStore):
    def test_it_is_the_program(self):
        for arguments, code in ((["--version"], 0), (["inspect", self.store_path, "--json"], 0),
                                (["boot", self.store_path + "/none"], 2), (["--help"], 0)):
            done = subprocess.run([sys.executable, "-m", "hotplane", *arguments],
                                  capture_output=True, check=False,
                                  env={**os.environ, "PYTHONPATH": package.PACKAGE})
            expected = subprocess.run([package.HOTPLANE, *arguments], capture_output=True,
                                      check=False)
            self.assertEqual(done.returncode, code, done.stderr)
            for found, wanted in ((done.stdout, expected.stdout), (done.stderr, expected.stderr)):
                # --help names the program as it was started
                found, wanted = (re.sub(rb"Usage: \S+", b"Usage:", out) for out in (found, wanted))
                self.assertEqual(found, wanted)

    def test_where_there_is_none(self):
        done = package.python("""
import os, sys
os.environ["HOTPLANE_LIBRARY"] = "/none/lib/libhotplane.so"
os.environ["PATH"] = ""
import hotplane.__main__
hotplane.__main__.__file__ = "/none/hotplane/__main__.py"  # a wheel has the program beside it
sys.exit(hotplane.__main__.main())
""")
        self.assertEqual(done.returncode, 1)
        self.assertIn("neither in the package", done.stderr)


if __name__ == "__main__":
    package.main()
