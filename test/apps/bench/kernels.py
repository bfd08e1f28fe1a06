#!/usr/bin/env python3
"""Every kernel has a row of tessera-bench-kernels, or is listed here with the reason why not.

    kernels.py ROOT BENCH

Runs the bench once on tiny shapes: each line is JSON with a time, none comes twice, and the ops that
are made of other kernels are there.
"""
import json
import os
import re
import subprocess
import sys

A_FEW_NUMBERS = "works on a few numbers"
NO_ROW = {name: A_FEW_NUMBERS for name in (
    "advance_step", "clip_factor", "combine_norms", "loss_total", "unscale_norm",
    "update_loss_scale")}
COMPOSITES = ("cat", "cat_cols", "stack", "stack_cols")


def sources(root, folders):
    for folder in folders:
        for where, _, names in os.walk(os.path.join(root, folder)):
            for name in names:
                if name.endswith((".cc", ".h")):
                    with open(os.path.join(where, name)) as file:
                        yield name, file.read()


def main():
    root, bench = sys.argv[1:]
    kernels = {name for file, text in sources(root, ("core", "kernels")) if file.endswith(".cc")
               for name in re.findall(r"TESSERA_DEFINE_KERNEL\((\w+),", text)}
    timed = {name for file, text in sources(root, ("apps/bench",)) if file == "kernels.cc"
             for name in re.findall(r"\bk::(\w+)", text)}
    failures = []
    if len(kernels) < 40:
        failures.append(f"{len(kernels)} kernels found, expected all")
    for name in sorted(kernels - timed - set(NO_ROW)):
        failures.append(f"{name}: a kernel without a row of the bench")
    for name in sorted(set(NO_ROW) & timed | set(NO_ROW) - kernels):
        failures.append(f"{name}: listed as without a row ({NO_ROW[name]}), but it has one or is gone")
    done = subprocess.run([bench, "--shapes=tiny", "--runs=1", "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        failures.append(f"status {done.returncode}: {done.stderr[-500:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    names = [line["bench"] for line in lines]
    for name in sorted({name for name in names if names.count(name) > 1}):
        failures.append(f"{name}: comes {names.count(name)} times")
    for line in lines[1:]:
        if not (line["ms"] > 0 and line["percent_of_roofline"] > 0):
            failures.append(f"no time, or no rate: {line}")
    for op in COMPOSITES:
        for dtype in ("f32", "bf16"):
            if not any(name.startswith(f"{op}/{dtype}/") for name in names):
                failures.append(f"{op}/{dtype}: no row")
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{len(kernels)} kernels, {len(lines)} lines, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
