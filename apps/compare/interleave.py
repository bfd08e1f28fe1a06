"""What the comparisons share: runs of tessera-train as processes, and the ratio of pairs."""

import array
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
METRICS_WINDOW = 16  # steps over which metrics.jsonl has the mean of step_ms


def write_tokens(path, count, vocab):
    """A token shard of random tokens: 256 int32 of header (magic, version, count), then uint16."""
    random.seed(1)
    with open(path, "wb") as f:
        f.write(array.array("i", [20240520, 1, count] + [0] * 253).tobytes())
        f.write(array.array("H", [random.randrange(vocab) for _ in range(count)]).tobytes())


def peak_resident_bytes(pid):
    """High-water mark of a process's resident memory; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as f:
            found = re.search(r"VmHWM:\s+(\d+) kB", f.read())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


class Run:
    """A training by tessera-train: `step_ms` of each step, `peak_bytes` resident (of the launcher
    where there are several ranks), `seconds` of the process, `lines` of its metrics and the `last`."""

    def __init__(self, program, config, options, ranks=1):
        environment = dict(os.environ)
        launch = []
        if ranks > 1:
            launch = ["mpirun", "--bind-to", "none", "-n", str(ranks)]
            if os.getuid() == 0:
                environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1",
                                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.peak_bytes = 0
        with tempfile.TemporaryDirectory() as folder:
            options = {"output.dir": f"{folder}/out", "train.eval_every": 0, "sample.tokens": 0,
                       "device": "cpu", "checkpoint.last": "false",
                       "checkpoint.every_minutes": 0} | options
            command = launch + [program, f"{ROOT}/configs/{config}"]
            command += [f"--{key}={value}" for key, value in options.items()]
            begin = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                  env=environment, text=True) as process:
                while process.poll() is None:
                    self.peak_bytes = max(self.peak_bytes, peak_resident_bytes(process.pid))
                    time.sleep(0.02)
                errors = process.stderr.read()
            self.seconds = time.perf_counter() - begin
            if process.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}: status {process.returncode}: {errors}")
            with open(f"{folder}/out/metrics.jsonl", encoding="utf-8") as f:
                self.lines = [json.loads(line) for line in f]
        lines = self.lines
        self.last = lines[-1]
        # step_ms is a mean of the last METRICS_WINDOW steps: differences of sums are the steps.
        sums = [line["step_ms"] * min(i + 1, METRICS_WINDOW) for i, line in enumerate(lines)]
        self.step_ms = []
        for i, total in enumerate(sums):
            before = sums[i - 1] if i > 0 else 0
            left = self.step_ms[i - METRICS_WINDOW] if i >= METRICS_WINDOW else 0
            self.step_ms.append(total - before + left)


class Pairs:
    """Milliseconds a step of a peer and of Tessera, measured in turn."""

    def __init__(self, peer):
        self.peer, self.theirs, self.ours = peer, [], []

    def add(self, theirs, ours):
        self.theirs.append(theirs)
        self.ours.append(ours)
        print(f"pair {len(self.ours)}: {self.peer} {theirs:.2f} ms, Tessera {ours:.2f} ms, ratio "
              f"{theirs / ours:.2f}", flush=True)

    def summary(self):
        ratios = [t / o for t, o in zip(self.theirs, self.ours)]
        return (f"{self.peer} {statistics.median(self.theirs):.2f} ms, Tessera "
                f"{statistics.median(self.ours):.2f} ms, ratio {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)")
