"""Traces and report pages: a page is one well-formed HTML file that refers to nothing outside
itself, shows every layer, and shows hostile texts as texts."""

import json
import os
import re
import tempfile
import unittest
from html.parser import HTMLParser

import command

VOID = {"meta", "br", "hr", "img", "input", "link", "line", "rect", "path"}


class Page(HTMLParser):
    """Checks nesting, collects tags with their attributes, the text, and the text of the SVGs."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.open, self.faults, self.tags, self.texts = [], [], [], []
        with open(path, encoding="utf-8") as file:
            self.source = file.read()
        self.feed(self.source)
        self.close()
        if self.open:
            self.faults.append(f"never closed: {self.open}")
        self.text = "\n".join(text for tag, text in self.texts if tag != "style")

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def draw(folder, run, trace=None):
    """The page of a run given as an object or as text."""
    path = os.path.join(folder, "run.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(run if isinstance(run, str) else json.dumps(run))
    out = os.path.join(folder, "page.html")
    command.must("report", path, "-o", out, *(["--trace", trace] if trace else []))
    return Page(out)


def booted(layers):
    return {"layers_total": layers, "bytes_needed": 1000 * layers, "bytes_read": 1000 * layers,
            "bytes_verified": 1000 * layers, "seconds": 2.0, "seconds_by_phase": {"land": 1.5},
            "gigabytes_per_second": 1.0, "limit_gigabytes_per_second": 2.0,
            "source_by_layer": [{"layer": i, "source": "page cache", "bytes": 1000,
                                 "bytes_cached": 1000, "seconds_ready": 0.1 * (i + 1)}
                                for i in range(layers)], "warnings": []}


def evaluated():
    rows = [("source", None, 0.5234, 1.0), ("fp4", None, 0.5292, 0.97), ("base", None, 0.5998, 0.9),
            ("mixed", 0.9, 0.5398, 0.96), ("mixed", 0.75, 0.5584, 0.94)]
    return {"command": "tinylm eval", "model": "models/x",
            "rows": [{"precision": precision, "share": share, "loss": loss, "bytes_scored": 1000,
                      "top1_agreement": agreement} for precision, share, loss, agreement in rows]}


class Report(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = self.temporary.name

    def check(self, page):
        self.assertEqual(page.faults, [])
        self.assertNotRegex(page.source, r"(?i)https?:|//[a-z]|@import|url\s*\(")
        for tag, attributes in page.tags:
            self.assertNotIn(tag, {"script", "iframe", "link", "img", "object", "embed", "base"})
            for name in attributes:
                self.assertNotIn(name, {"src", "href", "action", "data"})
                self.assertFalse(name.startswith("on"), f"<{tag} {name}>")

    def layers_drawn(self, page):
        return {int(number) for _, text in page.texts
                for number in re.findall(r"^layer (\d+)$", text)}

    def test_boot_with_trace(self):
        store = os.path.join(self.folder, "store")
        trace = os.path.join(self.folder, "trace.json")
        command.must("synth", store, "--geometry", "4,128,64", "--layers", 5, "--tiers",
                     "base,delta", "-q")
        run = command.must_json("boot", store, "--trace", trace)
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        for name in ("read", "verify", "publish", "probe"):
            self.assertEqual({event["args"]["layer"] for event in spans if event["name"] == name},
                             set(range(5)), name)
        for name in ("plan", "allocate"):
            self.assertTrue([event for event in spans if event["name"] == name], name)
        self.assertEqual(sum(e["args"]["bytes"] for e in spans if e["name"] == "read"),
                         run["bytes_read"])
        page = draw(self.folder, run, trace)
        self.check(page)
        self.assertEqual(self.layers_drawn(page), set(range(5)))
        self.assertIn("What each thread did", page.text)
        self.assertIn(run["generation"], page.text)

    def test_build_with_trace(self):
        model = command.write_checkpoint(os.path.join(self.folder, "model"),
                                         command.mxfp4_tensors(layers=3))
        trace = os.path.join(self.folder, "trace.json")
        run = command.must_json("build", model, "--store", os.path.join(self.folder, "store"),
                                "--trace", trace)
        page = draw(self.folder, run, trace)
        self.check(page)
        self.assertIn("Build: 3 of 3 layers", page.text)
        self.assertEqual(self.layers_drawn(page), {0, 1, 2})
        with open(trace, encoding="utf-8") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        self.assertLessEqual({"quantize", "read", "publish file"}, names)

    def test_a_failed_run_leaves_its_trace(self):
        store = os.path.join(self.folder, "store")
        trace = os.path.join(self.folder, "trace.json")
        command.must("synth", store, "--geometry", "4,128,64", "--layers", 2, "-q")
        layer = next(path for path in command.files_below(store) if "base" in path)
        with open(layer, "r+b") as file:
            file.truncate(os.path.getsize(layer) // 2)
        self.assertEqual(command.run("boot", store, "--trace", trace).returncode, 3)
        with open(trace, encoding="utf-8") as file:
            self.assertIn("probe", {event["name"] for event in json.load(file)["traceEvents"]})

    def test_a_folder_that_is_not_there_is_found_out_first(self):
        store = os.path.join(self.folder, "store")
        command.must("synth", store, "--geometry", "4,128,64", "--layers", 1, "-q")
        done = command.run("boot", store, "--json", "--trace",
                           os.path.join(self.folder, "none", "trace.json"))
        self.assertEqual(done.returncode, 1)
        self.assertNotIn("booting", done.stderr)

    def test_every_layer_of_44(self):
        page = draw(self.folder, booted(44))
        self.check(page)
        self.assertEqual(self.layers_drawn(page), set(range(44)))

    def test_choices_and_warnings_are_told(self):
        run = booted(3)
        run["bytes_skipped"] = 3 << 30
        run["actions"] = [{"layer": layer, "encoding": "quintal", "action": "attach",
                        "reason": "present, stays on disk", "bytes_skipped": 1 << 30}
                       for layer in range(3)]
        run["warnings"] = ["chunk 7 was read twice"]
        page = draw(self.folder, run)
        self.check(page)
        for text in ("present, stays on disk", "0-2", "3.00 GiB", "chunk 7 was read twice"):
            self.assertIn(text, page.text)

    def test_hostile_texts_are_shown_as_texts(self):
        hostile = "\"'><script src=x onerror=alert(1)></script></style></svg>&lt;\x00\x1b"
        run = booted(2)
        run["warnings"] = [hostile]
        run["generation"] = hostile
        run["machine"] = {hostile: hostile}
        run["actions"] = [{"layer": 0, "encoding": hostile, "action": hostile, "reason": hostile}]
        run["seconds_by_phase"] = {hostile: 1.0}
        run[hostile] = hostile
        run["source_by_layer"][0]["source"] = hostile
        trace = os.path.join(self.folder, "trace.json")
        with open(trace, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": [
                {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": hostile}},
                {"ph": "X", "name": hostile, "tid": 1, "ts": 0, "dur": 5, "args": {"layer": 0}},
            ]}, file)
        for page in (draw(self.folder, run), draw(self.folder, run, trace)):
            self.assertEqual(page.faults, [])
            self.assertNotIn("script", {tag for tag, _ in page.tags})
            self.assertFalse([a for _, attributes in page.tags for a in attributes
                              if a.startswith("on")])
            shown = hostile.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
            self.assertIn(shown, page.text)

    def test_odd_numbers_and_types_do_not_break_the_page(self):
        run = booted(2)
        run.update({"seconds": -5, "bytes_read": 1e300, "bytes_needed": 0, "warnings": [1, {}],
                    "seconds_by_phase": {"land": -1}, "machine": [], "actions": {"a": 1}})
        run["source_by_layer"] += [5, {"layer": -1}, {"layer": 1e30}, {"layer": "x"},
                                   {"layer": 9, "bytes": "x", "seconds_ready": 1e300}]
        page = draw(self.folder, run)
        self.check(page)
        self.assertEqual(self.layers_drawn(page), {0, 1, 9})
        self.assertNotRegex(page.source, r"\b(nan|inf)\b")

    def test_fidelity(self):
        model = command.write_checkpoint(os.path.join(self.folder, "model"),
                                         command.bf16_tensors(layers=3))
        store = os.path.join(self.folder, "store")
        command.must("build", model, "--store", store, "-q")
        measured = command.must_json("fidelity", model, "--store", store)
        page = draw(self.folder, measured)
        self.check(page)
        for text in (f"{measured['base']['relative_rms']:.5f}",
                     f"{measured['fp4']['signed_bias']:+.6f}", measured["generation"],
                     "Relative RMS error by layer", "Signed bias by layer"):
            self.assertIn(text, page.text)
        # Two curves of three points in each of three pictures; a row a layer and tier.
        self.assertEqual(len([tag for tag, _ in page.tags if tag == "circle"]), 18)
        self.assertEqual(len([tag for tag, _ in page.tags if tag == "tr"]), 1 + 6)
        self.assertNotIn("Not measured", page.text)
        measured["layers"][1]["fp4"] = {"missing": "no delta tier"}
        page = draw(self.folder, measured)
        self.check(page)
        self.assertIn("layer 1, FP4: no delta tier", page.text)
        self.assertEqual(len([tag for tag, _ in page.tags if tag == "circle"]), 15)

    def test_loss_by_precision(self):
        page = draw(self.folder, evaluated())
        self.check(page)
        for text in ("base 0.5998", "FP4 0.5292", "source 0.5234", "models/x", "0.55840"):
            self.assertIn(text, page.text)
        self.assertEqual(len([tag for tag, _ in page.tags if tag == "circle"]), 8)
        # The loss falls with the share: the curve goes down the page.
        path = next(attributes["d"] for tag, attributes in page.tags
                    if tag == "path" and "stroke-publish" in attributes["class"])
        heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
        self.assertEqual(len(heights), 4)
        self.assertEqual(heights, sorted(heights))

    def test_hostile_figures_do_not_break_these_pages(self):
        hostile = "\"'><script src=x></script></svg>\x1b"
        fidelity = {"command": "fidelity", "model": hostile, "generation": [], "base": 5,
                    "layers": [7, {}, {"layer": -1}, {"layer": 1e300, "base": {"total": {
                        "relative_rms": 1e300, "signed_bias": -1e300}}, "source_format": hostile},
                        {"layer": 2, "base": {"missing": hostile}, "fp4": {"total": {
                            "relative_rms": "x", "signed_bias": None}}},
                        {"layer": 3, "base": {"total": {"relative_rms": 5e-324}}}]}
        loss = evaluated()
        loss["model"] = hostile
        loss["rows"] += [3, {}, {"precision": hostile, "share": -4, "loss": 1e300},
                         {"precision": "mixed", "share": 1e300, "loss": -1e300},
                         {"precision": "mixed", "share": 0.5, "loss": {}}]
        tiny = {"command": "fidelity", "layers": [{"layer": 0, "base": {"total": {
            "relative_rms": 5e-324, "signed_bias": -5e-324, "magnitude_bias": 0}}}]}
        total = {"total": {"relative_rms": 0.1}}
        far = {"command": "fidelity", "layers": [{"layer": layer, "base": total}
                                                 for layer in (1e15, 1e15 + 2)]}
        lone = {"command": "fidelity", "layers": [{"layer": 1e18, "base": total}]}
        for run in (fidelity, far, lone, tiny, loss,
                    {**loss, "rows": [{"precision": "base", "loss": 0}]}):
            page = draw(self.folder, run)
            self.assertEqual(page.faults, [])
            self.assertNotIn("script", {tag for tag, _ in page.tags})
            self.assertNotRegex(page.source, r"\b(nan|inf)\b")
            self.assertLess(len(page.source), 200_000)

    def test_these_pages_are_refused_without_rows_and_with_a_trace(self):
        path = os.path.join(self.folder, "run.json")
        out = os.path.join(self.folder, "page.html")
        for run, extra, code in (({"command": "fidelity"}, [], 3),
                                 ({"command": "fidelity", "layers": [1]}, [], 3),
                                 ({"command": "tinylm eval", "rows": {}}, [], 3),
                                 ({"command": "fidelity", **{str(i): 0 for i in range(300_000)}},
                                  [], 3),
                                 (evaluated(), ["--trace", path], 2)):
            with open(path, "w", encoding="utf-8") as file:
                json.dump(run, file)
            done = command.run("report", path, "-o", out, *extra)
            self.assertEqual(done.returncode, code, run)
            self.assertIn("run.json", done.stderr)
            self.assertFalse(os.path.exists(out))

    def test_help_and_errors_name_what_is_drawn(self):
        path = os.path.join(self.folder, "run.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write("{}")
        refused = command.run("report", path, "-o", os.path.join(self.folder, "page.html"))
        self.assertEqual(refused.returncode, 3)
        for text in (refused.stderr, command.must("report", "--help").stdout):
            self.assertIn("boot, build, fidelity or tinylm eval print", text)

    def test_exit_codes(self):
        """Those of docs/cli.md; no space for the page is in options_test.py."""
        good = os.path.join(self.folder, "fidelity.json")
        bad = os.path.join(self.folder, "bad.json")
        page = os.path.join(self.folder, "page.html")
        with open(good, "w", encoding="utf-8") as file:
            json.dump(evaluated(), file)
        with open(bad, "w", encoding="utf-8") as file:
            file.write("{")
        for code, arguments in (
                (0, [good, "-o", page]), (1, [good + "x", "-o", page]),
                (1, [good, "-o", os.path.join(self.folder, "none", "page.html")]),
                (1, [good, "-o", page, "--trace", good + "x"]), (2, [good, "-o", bad]),
                (2, [good, "-o", page, "--trace", bad]), (2, [good]), (3, [bad, "-o", page])):
            done = command.run("report", *arguments)
            self.assertEqual(done.returncode, code, (arguments, done.stderr))

    def test_other_files_are_refused(self):
        store_like = {"files_checked": 3}
        for text in ("", "{", "[]", "null", "[" * 100000, '{"a":' * 5000, json.dumps(store_like),
                     json.dumps({"error": {"code": 3, "what": "no such layer"}}), "\xff\xfe"):
            path = os.path.join(self.folder, "other.json")
            with open(path, "w", encoding="latin-1") as file:
                file.write(text)
            out = os.path.join(self.folder, "page.html")
            done = command.run("report", path, "-o", out)
            self.assertEqual(done.returncode, 3, text[:40])
            self.assertIn("other.json", done.stderr)
            self.assertFalse(os.path.exists(out))
        run = os.path.join(self.folder, "run.json")
        with open(run, "w", encoding="utf-8") as file:
            json.dump(booted(1), file)
        done = command.run("report", run, "-o", os.path.join(self.folder, "page.html"), "--trace",
                           path)
        self.assertEqual(done.returncode, 3)
        self.assertIn("--trace", done.stderr)


if __name__ == "__main__":
    command.main(unittest)
