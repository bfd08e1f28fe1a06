#!/usr/bin/env python3
"""Kernels beside PyTorch's operations on the CPU, interleaved: A B A B ...

    python3 apps/compare/ops.py build/apps/tessera-bench-kernels [--shapes gpt2|llama] [--threads 2]
        [--rounds 3] [--filter NAME]

A line a kernel: milliseconds here and in PyTorch (the least of the medians of the rounds), their
ratio (above 1 Tessera is faster) and the percent of the roofline that tessera-bench-kernels prints.
Each run is timed alone after the caches were overwritten, on both sides; backward passes are the
gradient functions alone. Kernels that PyTorch has no operation for are left out. Needs the package
torch and an otherwise idle machine.
"""

import argparse
import json
import re
import statistics
import subprocess
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


def adamw(shape):
    p = torch.randn(shape[0]).requires_grad_()
    p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW([p], lr=1e-4, fused=True)
    return optimizer.step


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
    x = torch.randn(*sizes, dtype=dtype)
    y = torch.randn(*sizes, dtype=dtype)
    simple = {
        "bias_grad": lambda: x.sum(0),
        "add": lambda: x + y,
        "scale": lambda: x * 0.5,
        "cast_to_f32": None if dtype == torch.float32 else (lambda: x.float()),
        "dropout": lambda: F.dropout(x, 0.125),
        "fill_normal": lambda: x.normal_(),
        "sum": lambda: x.sum(dtype=torch.float32),
    }
    if op == "adamw_step" and dtype == torch.float32:
        return adamw(sizes)
    return simple.get(op)


def median_ms(run, flush, runs=20):
    times = []
    for i in range(runs + 2):
        flush.fill_(i)
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("--shapes", default="gpt2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--filter", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    flush = torch.empty(16 << 20)
    ours, theirs, percent = {}, {}, {}
    for _ in range(args.rounds):
        lines = subprocess.run(
            [args.bench, "--json", f"--shapes={args.shapes}", f"--threads={args.threads}",
             f"--filter={args.filter}", "--device=cpu"],
            check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        for line in map(json.loads, lines):
            name = line["bench"]
            if name == "roofline":
                continue
            ours.setdefault(name, []).append(line["ms"])
            percent[name] = max(percent.get(name, 0), line["percent_of_roofline"])
        for name in ours:
            if (run := peer_of(name)) is not None:
                theirs.setdefault(name, []).append(median_ms(run, flush))
    print(f"{'kernel':<44} {'ms':>9} {'PyTorch':>9} {'ratio':>6} {'% of roofline':>14}")
    for name, times in ours.items():
        mine = min(times)
        peer = f"{min(theirs[name]):9.3f} {min(theirs[name]) / mine:6.2f}" if name in theirs \
            else f"{'':>16}"
        print(f"{name:<44} {mine:9.3f} {peer} {percent[name]:14.1f}")


if __name__ == "__main__":
    main()
