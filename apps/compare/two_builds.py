"""two_builds.py OLD NEW [--pairs N] [--quick]: is a build as fast and as small as another one?

OLD and NEW are build directories with the programs of apps/bench. Each is run in turn, the other one
first in every second pair: GPT-2 124M in f32 and bf16 (tessera-bench-train: step, step / floor, memory
by class), host time a unit and phase of 1 and 2 ranks (tessera-bench-host), bytes a parameter by
strategy (tessera-bench-fsdp memory, once: it has no noise). Prints the medians, and of NEW / OLD the
median over pairs with its range; WORSE where all of the range is above 1. For an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess


def lines_of(build, program, *arguments):
    """The JSON objects that a program prints, one a line."""
    folders = (f"{build}/apps/bench", f"{build}/apps")  # the second in builds of before there was the first
    path = next(f"{folder}/{program}" for folder in folders if os.path.exists(f"{folder}/{program}"))
    command = [path, *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # Status 1 with all figures: what an older build claims of them does not hold.
    assert lines and done.returncode in (0, 1), f"{' '.join(command)}: status {done.returncode}"
    return lines


def compare(name, builds, pairs, run, keys):
    """Runs both in turn; a line for each key of the result."""
    values = {build: [] for build in builds}
    for pair in range(pairs):
        for build in builds if pair % 2 == 0 else builds[::-1]:
            values[build].append(run(build))
        print(f"{name}: pair {pair + 1} of {pairs}", flush=True)
    old, new = (values[build] for build in builds)
    for key in keys:
        pairs_of_key = [(a[key], b[key]) for a, b in zip(old, new)]
        medians = [statistics.median(side) for side in zip(*pairs_of_key)]
        ratios = [b / a for a, b in pairs_of_key if a > 0]
        text = f"  {key:20} old {medians[0]:12.4f}  new {medians[1]:12.4f}"
        if ratios:
            text += f"  new / old {statistics.median(ratios):.3f}"
            text += f" ({min(ratios):.3f} to {max(ratios):.3f})"
            text += "" if min(ratios) <= 1 else "  WORSE"
        print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="a small model: to try the script out")
    options = parser.parse_args()
    builds = [options.old.rstrip("/"), options.new.rstrip("/")]
    model = ["--micro-batch", "4", "--context", "64", "--steps", "10"]
    if options.quick:
        model = ["--layers", "2", "--heads", "2", "--width", "64", "--vocab", "512", "--context", "32",
                 "--micro-batch", "2", "--steps", "3"]
    for dtype in ("f32", "bf16"):
        compare(f"train {dtype}", builds, options.pairs,
                lambda build, d=dtype: lines_of(build, "tessera-bench-train", "--dtype", d,
                                                *model)[-1],
                ["step_ms", "step_over_floor", "other_ms", "optimizer_ms", "exposed_ms", "states_gib",
                 "activations_gib", "gathered_gib", "allocator_peak_gib", "resident_peak_gib"])
    for ranks in ("1", "2"):
        compare(f"host, {ranks} ranks", builds, options.pairs,
                lambda build, r=ranks: lines_of(build, "tessera-bench-host", "--ranks", r)[-1],
                ["forward_us", "backward_us", "end_us", "plain_us"])
    rows = [{(row["strategy"], row["param_dtype"], row["world_size"]): row
             for row in lines_of(build, "tessera-bench-fsdp", "memory") if "strategy" in row}
            for build in builds]
    keys = ("bytes_per_parameter", "gathered_bytes_per_parameter")
    different = [(row, key) for row in rows[0] for key in keys
                 if rows[0][row][key] != rows[1][row][key]]
    print(f"memory: {len(rows[0])} rows, {len(different)} figures differ")
    for row, key in different:
        print(f"  {row} {key}: old {rows[0][row][key]:.4f}  new {rows[1][row][key]:.4f}")


if __name__ == "__main__":
    main()
