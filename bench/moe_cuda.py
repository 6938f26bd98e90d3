"""The experts on a GPU, all shapes in one run: moe_cuda_bench beside torch on the same machine.

    python3 bench/moe_cuda.py --binary build/release/src/moe/moe_cuda_bench --json FILE

Of each shape: the rate of a plain bfloat16 product by cuBLAS (torch.mm), and, where they fit the
GPU, torch's grouped products (torch._grouped_mm) over the same experts in bfloat16, which is what
dequantized weights cost: routing, both products, the activation and the weighted sum. Times are
medians of seven, by events on the device, inputs there. Of torch the best counts: eagerly, as a
CUDA graph, and with --compile what torch.compile makes of it, as a graph too (it compiles anew for
each number of tokens, which takes a while). Without torch only hotplane's figures are there, and
it says so. Ends with 77 where there is no GPU."""

import argparse
import json
import subprocess
import sys

from result_file import result_file

TOKENS = (1, 2, 4, 8, 16, 32, 128, 1024, 4096)
SHAPES = {  # E, H, I, top k: those of moe_cuda_bench
    "ds4-flash": (256, 4096, 2048, 6),
    "glm-5.2": (256, 6144, 2048, 8),
    "kimi-k2": (384, 7168, 2048, 8),
    "gpt-oss-120b": (128, 2880, 2880, 4),
    "qwen3-30b": (128, 2048, 768, 8),
}


def median_seconds(torch, work, times=7):
    """Device time of `work`, after two runs to warm up."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return sorted(seconds)[times // 2]


def product_rate(torch, hidden, intermediate):
    """Operations per second of a bfloat16 product, [24576, H] by [H, 2I]."""
    rows = 24576
    options = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(rows, hidden, **options), torch.randn(hidden, 2 * intermediate, **options)
    return 2 * rows * hidden * 2 * intermediate / median_seconds(torch, lambda: torch.mm(a, b))


def grouped(torch, x, ids, weights, w13, w2):
    """The operator by torch's grouped products. x [T, H], ids and weights [T, k], w13 [E, H, 2I],
    w2 [E, I, H]."""
    experts, top_k = w13.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    tokens = order // top_k
    gate, up = torch._grouped_mm(x[tokens], w13, offs=ends).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * up
    results = torch._grouped_mm(inner, w2, offs=ends) * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add_(0, tokens, results)


def graphed(torch, work):
    """`work` as a CUDA graph, which leaves out what Python and launches cost."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def grouped_seconds(torch, shape, tokens_of, with_compiler):
    """By number of tokens: seconds by way of running it."""
    experts, hidden, intermediate, top_k = SHAPES[shape]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    w13 = torch.empty(experts, hidden, 2 * intermediate, **options).normal_(std=0.02)
    w2 = torch.empty(experts, intermediate, hidden, **options).normal_(std=0.02)
    seconds = {}
    for tokens in tokens_of:
        x = torch.randn(tokens, hidden, **options)
        ids = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices
        weights = torch.full((tokens, top_k), 1 / top_k, **options)

        def work(of=grouped, x=x, ids=ids, weights=weights):
            return of(torch, x, ids, weights, w13, w2)

        seconds[tokens] = {"eager": median_seconds(torch, work),
                           "graph": median_seconds(torch, graphed(torch, work))}
        if with_compiler:
            torch.compiler.reset()
            made = torch.compile(grouped, dynamic=False)
            try:
                seconds[tokens]["compiled"] = median_seconds(
                    torch, graphed(torch, lambda made=made, work=work: work(made)))
            except RuntimeError as error:
                print(f"torch.compile, {shape}, {tokens} tokens: {str(error).splitlines()[0]}")
    return seconds


def peers(torch, shape, tokens_of, with_compiler):
    """What torch does on this GPU: the rate of a product, the time of the grouped ones."""
    _, hidden, intermediate, _ = SHAPES[shape]
    result = {"product_flops_per_second": product_rate(torch, hidden, intermediate)}
    try:
        result["grouped_seconds"] = grouped_seconds(torch, shape, tokens_of, with_compiler)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        result["grouped_error"] = str(error).splitlines()[0]
    torch.cuda.empty_cache()
    return result


def show(shape, rows, peer):
    """A table of one shape."""
    product = peer.get("product_flops_per_second")
    seconds = peer.get("grouped_seconds", {})
    print(f"{shape}: E, H, I, k = {SHAPES[shape]}; memory is read at "
          f"{rows[0]['read_bytes_per_second'] / 1e9:.0f} GB/s"
          + (f", cuBLAS does {product / 1e12:.0f} TFLOP/s" if product else ""))
    if "grouped_error" in peer:
        print(f"  torch._grouped_mm: {peer['grouped_error']}")
    print(f"  {'precision':13} {'tokens':>6} {'us':>9} {'MB':>8} {'of read':>8} {'TFLOP/s':>8} "
          f"{'of cuBLAS':>9} {'torch us':>9} {'times':>6} torch as")
    for row in rows:
        share = row["bytes"] / row["microseconds"] * 1e6 / row["read_bytes_per_second"]
        of_product = f"{row['teraflops'] * 1e12 / product:9.1%}" if product else f"{'':9}"
        ways = seconds.get(row["tokens"], {})
        line = (f"  {row['precision']:13} {row['tokens']:6} {row['microseconds']:9.1f} "
                f"{row['bytes'] / 1e6:8.1f} {share:8.1%} {row['teraflops']:8.1f} {of_product}")
        if ways:
            best = min(ways, key=ways.get)
            line += (f" {ways[best] * 1e6:9.1f} {ways[best] * 1e6 / row['microseconds']:6.2f}"
                     f" {best}")
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="moe_cuda_bench")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--precision")
    parser.add_argument("--compile", action="store_true", help="torch.compile is tried, too")
    parser.add_argument("--fp8", action="store_true", help="activations in FP8")
    parser.add_argument("--json", type=result_file, help="file for all figures")
    arguments = parser.parse_args()
    try:
        import torch
        torch = torch if torch.cuda.is_available() else None
    except ImportError:
        torch = None
    if torch is None:
        print("no torch with a GPU here: hotplane's figures alone")
    tokens_of = [int(tokens) for tokens in arguments.tokens.split(",")]
    figures = {}
    for shape in arguments.shape or SHAPES:
        command = [arguments.binary, "--shape", shape, "--tokens", arguments.tokens, "--json",
                   "/dev/fd/3"]
        if arguments.precision:
            command += ["--precision", arguments.precision]
        if arguments.fp8:
            command.append("--fp8")
        command = ["/bin/sh", "-c", '"$@" 3>&1 >/dev/null', "sh", *command]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            print("skipped: no CUDA device")
            return 77
        rows = json.loads(done.stdout)
        peer = peers(torch, shape, tokens_of, arguments.compile) if torch else {}
        show(shape, rows, peer)
        figures[shape] = {"rows": rows, **peer}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
