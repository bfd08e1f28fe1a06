#!/usr/bin/env python3
"""How training speed grows with the size of the work: tokens a second by context, depth, vocabulary
and number of ranks, each beside what its formula says.

    python3 apps/compare/growth.py build/apps/bench/tessera-bench-train [--steps 5] [--device cpu]

A small GPT-2 (4 layers of width 256, 4 heads, 4 x 128 tokens) of which one size at a time changes.
`step / floor` is what tessera-bench-train prints: time over that of the formula's multiply-adds and
optimizer bytes, so a curve that grows as its formula has the same value in every line. Needs an
otherwise idle machine."""

import argparse
import json
import subprocess

BASE = {"layers": 4, "heads": 4, "width": 256, "context": 128, "vocab": 4096, "micro-batch": 4}
SWEEPS = {
    # The same number of tokens a step, so that only attention grows.
    "context": [{"context": t, "micro-batch": max(1, 4096 // t)} for t in
                (64, 128, 256, 512, 1024, 2048, 4096)],
    "depth": [{"layers": n} for n in (2, 4, 8, 16, 32, 48)],
    "vocabulary": [{"vocab": v} for v in (256, 1024, 4096, 16384, 65536, 131072)],
    "ranks": [{"ranks": n} for n in (1, 2, 4, 8)],
}


def run(args, sizes):
    options = [f"--{key}={value}" for key, value in (BASE | sizes).items()]
    out = subprocess.run(
        [args.bench, "--json", f"--steps={args.steps}", f"--device={args.device}", *options],
        check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for name, points in SWEEPS.items():
        print(f"{name:<12} {'tokens/s':>10} {'step ms':>10} {'Mflop/token':>12} {'step/floor':>11}")
        for sizes in points:
            r = run(args, sizes)
            label = sizes.get(next(iter(sizes)))
            print(f"{label:<12} {r['tokens_per_s']:>10.0f} {r['step_ms']:>10.2f} "
                  f"{r['flops_per_token'] * 1e-6:>12.2f} {r['step_over_floor']:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
