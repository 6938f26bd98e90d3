#!/usr/bin/env python3
"""readme_numbers.py [--check]: writes the README's figures from the newest file of bench/results/.
With --check it writes nothing and fails when the README says something else."""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- numbers: begin (tools/readme_numbers.py writes this part) -->"
END = "<!-- numbers: end -->"


def newest_result():
    paths = (ROOT / "bench/results").glob("*.json")
    files = [(json.loads(path.read_text()), path) for path in paths]
    if not files:
        return None, None
    return max(files, key=lambda entry: (entry[0]["date"], entry[1].name))


def row(what, reached, limit_name, limit, share=None):
    """`share`: where the benchmark has one by rounds, which is not the ratio of the medians."""
    if limit == 0:
        return f"| {what} | {reached:.2f} GB/s | {limit_name}: not measured | |"
    share = reached / limit if share is None else share
    return f"| {what} | {reached:.2f} GB/s | {limit_name} {limit:.2f} GB/s | {100 * share:.0f}% |"


def listed(words):
    """"a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def quantize_rows(figures):
    """One row per vector instruction set and source; the scalar ones are the reference."""
    memcpy = [entry for entry in figures["rows"] if entry["variant"] == "libc"]
    limit = max(entry["gigabytes_per_second"] for entry in memcpy)
    return [row(f"{entry['case']}, checksums included, one core, {entry['variant']}",
                entry["gigabytes_per_second"], "memcpy", limit)
            for entry in figures["rows"] if entry["variant"] not in ("libc", "scalar")]


def boot_rows(boot):
    size = f"{boot['bytes'] / 2**30:.2f} GiB from the page cache, every byte verified"
    rows = []
    for name, what, limit in (
            ("boot --map", f"`boot --map`, {size}", "reading"),
            ("boot", f"`boot`, {size}", "memcpy"),
            ("cold, bypass", "`boot --cache bypass`, nothing cached", "disk, best raw rate"),
            ("cold, keep", "`boot --cache keep`, nothing cached", "disk, best raw rate"),
            ("half cached", "`boot`, half of it cached", "the slower half's time")):
        rows.append(row(what, boot[name]["gigabytes_per_second"], limit,
                        boot[name]["limit_gigabytes_per_second"], boot[name]["share_of_limit"]))
    rows.append(row("`boot`, planning and fresh memory included",
                    boot["boot"]["all_in_gigabytes_per_second"], "memcpy",
                    boot["boot"]["limit_gigabytes_per_second"]))
    return rows


def warm_boot_table(figures, command):
    """The restart, as the reference system did it and as hotplane does: seconds, and what the
    machine's limit would take for the same bytes."""
    before, after = figures["reference-before"], figures["reference-after"]
    warm, mapped = figures["hotplane warm"], figures["hotplane warm --map"]
    cold, limits = figures["hotplane cold"], figures["limits"]
    disk = max(limits["disk_direct_gigabytes_per_second"],
               limits["disk_buffered_gigabytes_per_second"])
    size = figures["base_bytes"]

    def limit(gigabytes_per_second, what, share=1.0):
        seconds = share * size / 1e9 / gigabytes_per_second
        return f"{seconds:.2f} s ({what}, {gigabytes_per_second:.1f} GB/s)"

    def line(what, row, limit_text, key="seconds", reference=True):
        first, second = ((f"{entry[key]:.2f} s" for entry in (before, after)) if reference
                         else ("-", "-"))
        return f"| {what} | {first} | {second} | {row[key]:.2f} s | {limit_text} | `{command}` |"

    copy, read = limits["copy_gigabytes_per_second"], limits["read_gigabytes_per_second"]
    head = (f"A restart of {figures['layers']} layers of DeepSeek-V4-Flash geometry, base "
            f"{size / 2**30:.2f} GiB, FP4 {figures['fp4_bytes'] / 2**30:.2f} GiB beside it. The "
            "reference system's ways are re-implemented from its description and check nothing; "
            "hotplane verifies every byte.")
    return [head, "",
            "| | reference, before | reference, after | hotplane | machine's limit | command |",
            "|---|---|---|---|---|---|",
            line("warm, into own memory", warm, limit(copy, "memcpy")),
            line("warm, `--map`", mapped, limit(read, "reading")),
            line("cold", cold, limit(disk, "disk"), reference=False),
            line("first layer ready, warm", warm, limit(copy, "memcpy", 1 / figures["layers"]),
                 key="seconds_first_layer"),
            ""]


def build_rows(build):
    """Two limits: what the disk reads, which reads and writes share, and the memory allowed."""
    size = f"{build['bytes_read'] / 2**30:.2f} GiB {build['checkpoint'].upper()}"
    what = f"`build` of {size}, cold, both tiers"
    limit = f"{build['staging_limit_bytes'] // 2**20} MiB"
    peak, allowed = (build[key] / 2**20 for key in ("peak_anonymous_bytes", "allowed_bytes"))
    read, written, disk = (build[key] for key in ("gigabytes_per_second",
                                                  "written_gigabytes_per_second",
                                                  "disk_gigabytes_per_second"))
    limit_text = f"disk reads {disk:.2f} GB/s" if disk else "disk: not measured"
    share = f"{100 * (read + written) / disk:.0f}%" if disk else ""
    return [f"| {what} | {read:.2f} GB/s read and {written:.2f} GB/s written | {limit_text} "
            f"| {share} |",
            f"| the same, staging limit {limit} | peak RssAnon {peak:.0f} MiB | "
            f"allowed {allowed:.0f} MiB | {100 * peak / allowed:.0f}% |"]


def overlap_rows(overlap):
    """Reading and quantizing side by side: the limit is the larger of the two."""
    seconds = overlap["seconds"]
    size = f"{overlap['bytes'] / 2**30:.2f} GiB {overlap['checkpoint'].upper()}"
    workers = overlap["workers"]
    return [f"| `build` of {size} into memory, page cache, {workers} workers | "
            f"{seconds['all_workers']:.2f} s | "
            f"one worker {seconds['one_worker']:.2f} s / {workers} | "
            f"{100 * overlap['scaling'] / workers:.0f}% |",
            f"| the same from the disk, reading beside quantizing | {seconds['from_disk']:.2f} s | "
            f"the larger of the two alone {overlap['seconds_larger']:.2f} s "
            f"(their sum {overlap['seconds_sum']:.2f} s) | "
            f"{100 / overlap['from_disk_over_larger']:.0f}% |"]


def moe_rows(moe):
    """The operator at a few numbers of tokens; weights read, beside what the memory gives."""
    lines = []
    for entry in moe["rows"]:
        if entry["tokens"] in (1, 8):
            tokens = f"{entry['tokens']} token{'s' if entry['tokens'] > 1 else ''}"
            lines.append(row(f"experts, {entry['name']}, {tokens}, {entry['microseconds']:.0f} us",
                             entry["gigabytes_per_second"], "reading",
                             entry["read_gigabytes_per_second"], entry["share_of_read"]))
        elif entry["tokens"] > 8:
            single = next(each for each in moe["rows"]
                          if each["name"] == entry["name"] and each["tokens"] == 1)
            lines.append(
                f"| experts, {entry['name']}, {entry['tokens']} tokens | "
                f"{entry['tokens_per_second']:.0f} tokens/s | one by one "
                f"{single['tokens_per_second']:.0f} tokens/s | "
                f"{entry['tokens_per_second'] / single['tokens_per_second']:.1f} times |")
    return lines


def numbers(result, path):
    machine = result["machine"]
    commits = sorted(set(result.get("commits", {}).values()) or {result["commit"]})
    head = (f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, kernel "
            f"{machine['kernel']}; {result['date']}, "
            f"commit{'s' if len(commits) > 1 else ''} {listed(commits)}, medians; "
            "shares are medians of the rounds' shares. The copy passes each 4 KiB through the L1 "
            "cache and stores it past the others, so it can be faster than memcpy. "
            f"Reproduced by `{result['command']}`; all figures: "
            f"[{path.name}]({path.relative_to(ROOT)}).")
    figures = result["figures"]
    restart = (warm_boot_table(figures["warm_boot"], result["commands"]["warm_boot"])
               if "warm_boot" in figures else [])
    table = ["| what | reached | limit, same run | share |", "|---|---|---|---|",
             *boot_rows(figures["boot"]), *quantize_rows(figures["quantize"]),
             *(line for name in ("build", "build_nvfp4") for line in build_rows(figures[name])),
             *(overlap_rows(figures["build_overlap"]) if "build_overlap" in figures else []),
             *(moe_rows(figures["moe"]) if "moe" in figures else [])]
    return "\n".join([head, "", *restart, *table, *cuda_rows(), *peer_rows(), *moe_gpu_rows()])


def cuda_rows():
    """Of the newest result of a GPU: each boot beside the pinned copy of its run."""
    paths = [path for path in sorted((ROOT / "bench/results/cuda").glob("*.json"))
             if not path.name.startswith(("peers-", "moe-"))]
    if not paths:
        return []
    path = max(paths, key=lambda each: json.loads(each.read_text())["date"])
    result = json.loads(path.read_text())
    machine = result["machine"]
    head = (f"{machine['gpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, kernel "
            f"{machine['kernel']}; {result['date']}, medians, from the boot call on an open "
            "device to the last layer verified; all figures: "
            f"[{path.name}]({path.relative_to(ROOT)}).")
    columns = ("boot into the GPU", "reached", "first layer", "pinned copy, same run", "share",
               "command")
    lines = ["", head, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for key, source in (("warm_ext4_32_layers", "ext4"), ("warm_tmpfs_44_layers", "tmpfs")):
        run = result[key]
        for row in run["rows"]:
            lines.append(
                f"| {run['bytes'] / 2**30:.2f} GiB from {source}, {row['way']} | "
                f"{row['gigabytes_per_second']:.1f} GB/s, {row['seconds_ready']:.2f} s | "
                f"{1e3 * row['seconds_first_layer']:.0f} ms | "
                f"{run['pinned_copy_16mib_gigabytes_per_second']:.1f} GB/s | "
                f"{100 * row['share_of_pinned_copy']:.0f}% | `{run['command']}` |")
    return (lines + case_rows(result.get("cases_8_layers"))
            + gpu_quantize_rows(result.get("quantize")))


def moe_gpu_rows():
    """The operator on a GPU, of each bench/results/cuda/moe-*.json, beside the memory, cuBLAS and
    torch's grouped products of the same run."""
    lines = []
    for path in sorted((ROOT / "bench/results/cuda").glob("moe-*.json")):
        result = json.loads(path.read_text())
        lines += ["", f"The experts on an {result['machine']['gpu']}, a layer a call, rotating "
                  f"over layers, uniform random routing ({result['date']}, commit "
                  f"{result['commit']}, `{result['command']}`); torch: `torch._grouped_mm` on "
                  "bfloat16 weights in the same run, the best of eager and as a CUDA graph"
                  f"{compiled_gain(result)}; all figures: "
                  f"[{path.name}]({path.relative_to(ROOT)}).", "",
                  "| shape | precision | tokens | time | of the memory's read rate | TFLOP/s | "
                  "of cuBLAS | times torch |", "|---|---|---|---|---|---|---|---|"]
        for shape, figures in result["shapes"].items():
            wanted = (1, 8, 32, 128, 1024, 4096) if shape == "ds4-flash" else (8, 32, 4096)
            for row in figures["rows"]:
                if row["tokens"] in wanted and row["precision"] != "half-fp4":
                    lines.append(moe_gpu_row(shape, row, figures))
    return lines


def compiled_gain(result):
    """What torch.compile made of the same, where it was tried."""
    lines = result.get("compiled", {}).get("ds4-flash", {})
    if not lines:
        return ""
    gains = ", ".join(f"{ways['graph'] / ways['compiled']:.2f} times as fast at {tokens}"
                      for tokens, ways in lines.items())
    return f" (with torch.compile, in a run of its own, {gains} tokens of ds4-flash)"


def moe_gpu_row(shape, row, figures):
    seconds = row["microseconds"] / 1e6
    ways = figures.get("grouped_seconds", {}).get(str(row["tokens"]))
    times = f"{min(ways.values()) / seconds:.1f}" if ways else "-"
    of_read = row["bytes"] / seconds / row["read_bytes_per_second"]
    of_product = row["teraflops"] * 1e12 / figures["product_flops_per_second"]
    return (f"| {shape} | {row['precision']} | {row['tokens']} | {row['microseconds']:.0f} us | "
            f"{of_read:.0%} | {row['teraflops']:.0f} | {of_product:.0%} | {times} |")


def gpu_quantize_rows(run):
    """From host memory to planes in host memory, beside what the link gives one way."""
    if run is None:
        return []
    link = run["pinned_copy_gigabytes_per_second"]
    columns = ("source", "1 worker", "4 workers", "all cores", "best, of the link", "kernel alone",
               "CPU")
    lines = ["", "Quantization on the GPU, GB/s of source, from host memory to base and quintals "
             f"in host memory, matrices of {run['n']} x {run['k']} made to be hard "
             f"(`{run['command']}`, {run['date']}). The link gave {link:.1f} GB/s to the GPU in "
             f"the same run. The CPU is all {run['cores']} cores without the GPU; where it has no "
             "figure, the matrices had many scales of 0, whose elements it counts one by one.", "",
             f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in run["rows"]:
        rates = [row[f"{key}_gigabytes_per_second"]
                 for key in ("one_worker", "four_workers", "all_cores")]
        alone = row["cpu_gigabytes_per_second"]
        cpu = "-" if alone is None else f"{alone:.1f}"
        cells = " | ".join(f"{rate:.1f}" for rate in rates)
        lines.append(f"| {row['format'].upper()} | {cells} | {100 * max(rates) / link:.0f}% | "
                     f"{row['kernel_gigabytes_per_second']:.0f} | {cpu} |")
    return lines


def case_rows(cases):
    """Boots that are not plain warm ones; cold ones beside the disk of the same run."""
    if cases is None:
        return []
    raw = max(cases["disk_gigabytes_per_second"].values())
    lines = ["", f"Whole runs of `hotplane boot --device cuda`, {cases['layers']} layers, medians "
             f"of {cases['rounds']} (`{cases['command']}`), commit {cases['commit']}. Plain reads "
             f"of the disk, 8 of 4 MiB at a time, gave at most {raw:.2f} GB/s in the same run.", "",
             "| boot into the GPU | bytes | seconds | reached |", "|---|---|---|---|"]
    for entry in cases["rows"]:
        lines.append(f"| {entry['case']} | {entry['bytes'] / 2**30:.2f} GiB | "
                     f"{entry['seconds']:.3f} s | {entry['gigabytes_per_second']:.2f} GB/s |")
    return lines


def peer_row(row):
    """Of bench/peers: a loader that was not measured says why."""
    if "seconds" not in row:
        return f"| {row['what']} | {row.get('missing') or row['failed']} | | | | |"
    times = f"{row['times_hotplane']:.3g}" if row["times_hotplane"] else ""
    share = 100 * row["gigabytes_per_second"] / row["limit_gigabytes_per_second"]
    return (f"| {row['what']} | {row['bytes'] / 2**30:.2f} GiB | {row['seconds']:.2f} s | "
            f"{row['gigabytes_per_second']:.1f} GB/s | {share:.0f}% | {times} |")


def peer_rows():
    """Other loaders on the same bytes, of each bench/results/cuda/peers-*.json."""
    lines = []
    for path in sorted((ROOT / "bench/results/cuda").glob("peers-*.json")):
        result = json.loads(path.read_text())
        machine = result["machine"]
        commands = ", ".join(f"`{each}`" for each in
                             sorted({row["command"] for row in result["rows"]}))
        lines += ["", f"Other loaders in the same runs as hotplane, files in {result['files']}, "
                  f"{machine['gpu']}, {machine['cores']} cores, {result['date']}, medians of "
                  f"{result['repetitions']} after a first run ({commands}); what each row is: "
                  "[bench/peers](bench/peers/README.md); all figures: "
                  f"[{path.name}]({path.relative_to(ROOT)}).", "",
                  "| loader | base | time | rate | of the pinned copy | times hotplane |",
                  "|---|---|---|---|---|---|",
                  *(peer_row(row) for row in result["rows"])]
    return lines


def main():
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    result, path = newest_result()
    body = numbers(result, path) if result else "No figures yet: run `scripts/bench`."
    wanted = f"{before}{BEGIN}\n{body}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print("README.md does not say what bench/results says: run tools/readme_numbers.py")
            return 1
        return 0
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
