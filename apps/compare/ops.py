#!/usr/bin/env python3
"""Kernels beside PyTorch's operations on the CPU, in turn: A B A B ...

    python3 apps/compare/ops.py build/apps/bench/tessera-bench-kernels [--shapes gpt2,llama] [--threads 2]
        [--pairs 10] [--filter NAME] [--quick]

A Markdown table, a line a kernel: the percent of the roofline that tessera-bench-kernels measures
at its start, and the time of PyTorch over the time here (above 1 Tessera is faster), median and
range of the pairs. A pair is one timing on each side, of one run (three if it is short), each run
alone after the caches were overwritten. Both sides live through the whole run; while one is
timed the other waits for its turn. Backward passes are the gradient functions alone. Kernels that
PyTorch has no operation for have no ratio. Needs the package torch and an otherwise idle machine.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def numbers(shape):
    return [int(n) for n in re.findall(r"\d+", shape)]


def backward(output, inputs):
    """The gradient functions of `output`, called again and again."""
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def leaf(*shape, dtype):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def linear(part, shape, dtype):
    m, n, k = shape
    x, w, dy = (torch.randn(*s, dtype=dtype) for s in ((m, k), (n, k), (m, n)))
    return {"fwd": lambda: x @ w.T, "dx": lambda: dy @ w, "dw": lambda: dy.T @ x}[part]


def attention(part, shape, dtype):
    b, t, h, hk, d = shape
    q = leaf(b, h, t, d, dtype=dtype)
    k, v = (leaf(b, hk, t, d, dtype=dtype) for _ in range(2))

    def run():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != hk)

    return run if part == "fwd" else backward(run(), (q, k, v))


def norm(kind, part, shape, dtype):
    rows, cols = shape
    x, w, b = leaf(rows, cols, dtype=dtype), leaf(cols, dtype=dtype), leaf(cols, dtype=dtype)
    if kind == "layer_norm":
        inputs = (x, w, b)
        run = lambda: F.layer_norm(x, (cols,), w, b, 1e-5)
    else:
        inputs = (x, w)
        run = lambda: F.rms_norm(x, (cols,), w, 1e-5)
    return run if part == "fwd" else backward(run(), inputs)


def unary(function, part, shape, dtype):
    x = leaf(*shape, dtype=dtype)
    run = lambda: function(x)
    return run if part == "fwd" else backward(run(), (x,))


def swiglu(part, shape, dtype):
    gate, up = leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype)
    run = lambda: F.silu(gate) * up
    return run if part == "fwd" else backward(run(), (gate, up))


def embedding(part, shape, dtype, vocab=50304):
    rows, cols = shape
    weight, ids = leaf(vocab, cols, dtype=dtype), torch.randint(vocab, (rows,))
    run = lambda: F.embedding(ids, weight)
    return run if part == "fwd" else backward(run(), (weight,))


def cross_entropy(part, shape, dtype):
    rows, vocab = shape
    logits, targets = leaf(rows, vocab, dtype=dtype), torch.randint(vocab, (rows,))
    run = lambda: F.cross_entropy(logits, targets, reduction="sum")
    return run if part == "fwd" else backward(run(), (logits,))


def add_norm(kind, shape, dtype):
    """Two operations in PyTorch: the sum and its norm."""
    rows, cols = shape
    x, y = (torch.randn(rows, cols, dtype=dtype) for _ in range(2))
    w, b = (torch.randn(cols, dtype=dtype) for _ in range(2))
    if kind == "layer_norm":
        return lambda: F.layer_norm(x + y, (cols,), w, b, 1e-5)
    return lambda: F.rms_norm(x + y, (cols,), w, 1e-5)


def optimizer_step(make, shape):
    p = torch.randn(shape[0]).requires_grad_()
    p.grad = torch.randn_like(p)
    return make([p]).step


def peer_of(name):
    """PyTorch's operation for a kernel's name, or None."""
    op, dtype_name, shape = name.split("/")
    dtype, sizes = DTYPES[dtype_name], numbers(shape)
    part = op.rsplit("_", 1)[-1]
    if op.startswith("linear_"):
        return linear(part, sizes, dtype)
    if op.startswith("attention_"):
        return attention(part, sizes, dtype)
    if op in ("layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd"):
        return norm(op[:-4], part, sizes, dtype)
    if op in ("add_layer_norm_fwd", "add_rms_norm_fwd"):
        return add_norm(op[4:-4], sizes, dtype)
    if op.startswith("gelu_"):
        return unary(lambda x: F.gelu(x, approximate="tanh"), part, sizes, dtype)
    if op.startswith("softmax_"):
        return unary(lambda x: F.softmax(x, -1), part, sizes, dtype)
    if op.startswith("log_softmax_"):
        return unary(lambda x: F.log_softmax(x, -1), part, sizes, dtype)
    if op.startswith("swiglu_"):
        return swiglu(part, sizes, dtype)
    if op.startswith("embedding_"):
        return embedding(part, sizes, dtype)
    if op in ("cross_entropy_fwd", "cross_entropy_bwd"):
        return cross_entropy(part, sizes, dtype)
    if op in ("adamw_step", "sgd_step"):
        if dtype != torch.float32:  # ours also writes the bf16 copy that is sent
            return None
        return optimizer_step(
            (lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)) if op == "adamw_step" else
            (lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=0.1, fused=True)),
            sizes)
    if op == "cast_from_f32":
        wide = torch.randn(*sizes)
        return lambda: wide.to(dtype, copy=True)
    simple = {
        "bias_grad": lambda x, y: x.sum(0, dtype=torch.float32),
        "add": lambda x, y: x + y,
        "scale": lambda x, y: x * 0.5,
        "cast_to_f32": lambda x, y: x.to(torch.float32, copy=True),
        "dropout": lambda x, y: F.dropout(x, 0.125),
        "fill_normal": lambda x, y: x.normal_(),
        "sum": lambda x, y: x.sum(dtype=torch.float32),
        "partial_norm": lambda x, y: torch.linalg.vector_norm(x, dtype=torch.float32),
    }
    function = simple.get(op)
    if function is None:
        return None
    x, y = (torch.randn(*sizes, dtype=dtype) for _ in range(2))
    return lambda: function(x, y)


class Tessera:
    """tessera-bench-kernels, which times a kernel whenever it is asked to."""

    def __init__(self, args, shapes):
        command = [args.bench, "--json", "--ask", "--runs=1", "--device=cpu", f"--shapes={shapes}",
                   f"--threads={args.threads}"]
        if args.filter:
            command.append(f"--filter={args.filter}")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def line(self):
        """The next timing, or None after the last kernel."""
        text = self.process.stdout.readline()
        if text:
            return json.loads(text)
        if self.process.wait() != 0:
            sys.exit(f"error: tessera-bench-kernels ended with status {self.process.returncode}")
        return None

    def say(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def ms(self, runs):
        self.say(f"again {runs}")
        return self.line()["ms"]


class Torch:
    """PyTorch's operation for a kernel, timed the same way."""

    flush = torch.empty(16 << 20)

    def __init__(self, name):
        self.run = peer_of(name)
        for _ in range(2 if self.run else 0):
            self.run()

    def ms(self, runs):
        times = []
        for _ in range(runs):
            self.flush.fill_(1)
            begin = time.perf_counter()
            self.run()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)


def compare(tessera, first, args):
    """The table's line for the kernel whose first timing is `first`."""
    name = first["bench"]
    try:
        peer = Torch(name)
    except (RuntimeError, TypeError, AttributeError) as error:
        print(f"{name}: PyTorch {torch.__version__}: {error}", file=sys.stderr)
        peer = None
    runs = 3 if first["ms"] < 10 and not args.quick else 1
    ours, ratios = [], []
    for _ in range(args.pairs):
        ours.append(tessera.ms(runs))
        if peer is not None and peer.run is not None:
            ratios.append(peer.ms(runs) / ours[-1])
    ms = statistics.median(ours)
    percent = first["percent_of_roofline"] * first["ms"] / ms
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" \
        if ratios else ""
    op, dtype, shape = name.split("/")
    return f"| {op} | {dtype} | {shape} | {ms:.3f} | {percent:.0f} ({first['bound']}) | {ratio} |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("--shapes", default="gpt2,llama", help="one or more, by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--filter", default="", help="only kernels whose name contains this")
    parser.add_argument("--quick", action="store_true", help="two pairs of one run each")
    args = parser.parse_args()
    if args.quick:
        args.pairs = 2
    torch.set_num_threads(args.threads)
    for shapes in args.shapes.split(","):
        tessera = Tessera(args, shapes)
        roofline = tessera.line()
        print(f"\n{shapes}: {args.threads} threads, copy {roofline['gbytes_per_s']:.1f} GB/s, "
              f"products {1e3 * roofline['f32_tflops']:.0f} GFLOP/s (f32) and "
              f"{1e3 * roofline['bf16_tflops']:.0f} (bf16); PyTorch {torch.__version__}, "
              f"{args.pairs} pairs\n\n"
              "| op | dtype | shape | ms | % of roofline | PyTorch / Tessera |\n"
              "| --- | --- | --- | --- | --- | --- |", flush=True)
        while (first := tessera.line()) is not None:
            print(compare(tessera, first, args), flush=True)
            tessera.say("next")


if __name__ == "__main__":
    main()
