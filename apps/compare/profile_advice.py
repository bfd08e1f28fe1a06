"""profile_advice.py BUILD [--pairs N] [--case NAME]: is the advice of a profile true?

Four trainings are slow on purpose: units that are too small, blocks that are all computed again, no
prefetch, data that comes late. Each is profiled (profile.steps), the keys that its table says to try are
taken from profile.json, and the training is timed without and with them, in turn. Prints, a case: what
it is limited by, the keys, both times of a step (medians of medians) and their ratio over pairs. Where
two processors are shared, storage and network are imitated by their waits (debug.slow_data_ms,
debug.slow_link_us). For a machine that does nothing else.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

MODEL = {"device": "cpu", "model.kind": "llama", "model.layers": 8, "model.heads": 4,
         "model.width": 128, "model.context": 64, "train.micro_batch": 4, "train.steps": 40,
         "train.threads": 1, "checkpoint.last": "false", "checkpoint.every_minutes": 0,
         "sample.tokens": 0, "data.val_fraction": 0, "guard.first_steps": 0}

# The number of ranks, keys beside MODEL, and the key that the advice has to name.
CASES = {
    "units too small": (2, {"fsdp.wrap": "class", "fsdp.wrap_class": "Linear",
                            "debug.slow_link_us": 200}, "fsdp.wrap="),
    "recompute everywhere": (1, {"recompute.policy": "full", "model.context": 128},
                             "recompute.policy="),
    "no prefetch": (2, {"fsdp.prefetch_forward": 0, "fsdp.prefetch_backward": 0,
                        "model.width": 256, "model.heads": 8, "precision.param_dtype": "f32",
                        "debug.slow_link_us": 3000}, "fsdp.prefetch_forward="),
    "data too slow": (1, {"model.layers": 2, "model.width": 64, "debug.slow_data_ms": 200},
                      "data.read_ahead="),
}


def train(build, ranks, keys, folder):
    """Milliseconds of the steps of a run, and its profile.json if it has one."""
    out = os.path.join(folder, "out")
    command = [os.path.join(build, "apps/tessera-train")]
    command += [f"--{key}={value}" for key, value in (keys | {"output.dir": out}).items()]
    command += ["--output.overwrite=true"]
    environment = dict(os.environ, OMP_WAIT_POLICY="passive")
    if ranks > 1:
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)] + command
        if os.getuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1",
                            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}: {done.stderr}"
    with open(f"{out}/metrics.jsonl", encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    profile = None
    if os.path.exists(f"{out}/profile.json"):
        with open(f"{out}/profile.json", encoding="utf-8") as f:
            profile = json.load(f)
        os.remove(f"{out}/profile.json")
    return lines[-1]["step_ms"], profile  # a mean over the last 16 steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", choices=CASES, action="append")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        with open(text, "w", encoding="utf-8") as f:
            f.writelines(f"line {i} of a text, {i * i}\n" for i in range(20000))
        for name in arguments.case or CASES:
            ranks, extra, expected = CASES[name]
            slow = MODEL | {"data.text": text} | extra
            _, profile = train(arguments.build, ranks, slow | {"profile.steps": "10..17"}, folder)
            advised = slow | dict(key.split("=", 1) for key in profile["try"])
            ratios, before, after = [], [], []
            for _ in range(arguments.pairs):
                before.append(train(arguments.build, ranks, slow, folder)[0])
                after.append(train(arguments.build, ranks, advised, folder)[0])
                ratios.append(after[-1] / before[-1])
            helps = statistics.median(ratios) < 1
            is_named = any(key.startswith(expected) for key in profile["try"])
            failures += not (helps and is_named)
            print(f"{name}: limited by {profile['limited_by']}; tried {' '.join(profile['try'])}: "
                  f"{statistics.median(before):.1f} -> {statistics.median(after):.1f} ms a step, "
                  f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, "
                  f"{len(ratios)} pairs)"
                  f"{'' if is_named else f'; expected a key {expected}'}"
                  f"{'' if helps else '; it does not help'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
