"""Host time of a unit beside FSDP2's: tessera-bench-host and the same chain of 96 units of one element in PyTorch.

    python3 apps/compare/host_cost.py build/apps/bench/tessera-bench-host [--turns 5] [--steps 50]

One rank on the CPU, so that next to nothing is computed or moved (FSDP2 over gloo). Microseconds a unit,
medians of the steps, of forward and backward beyond the same operations without sharding, and of the end
of the step (clipping by norm, AdamW, gradients to zero in PyTorch; the same there). Each process in its turn; a
line a turn, then medians and the range of the ratio. Needs PyTorch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

UNITS = 96


def measure_fsdp2(num_steps):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    class Single(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.weight

    def run(is_sharded):
        model = torch.nn.Sequential(*(Single() for _ in range(UNITS)))
        if is_sharded:
            mesh = dist.init_device_mesh("cpu", (1,))
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.ones(1)
        times = []
        for _ in range(10 + num_steps):
            at = [time.perf_counter()]
            loss = model(x).sum()
            at.append(time.perf_counter())
            loss.backward()
            at.append(time.perf_counter())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            at.append(time.perf_counter())
            times.append([(b - a) * 1e6 / UNITS for a, b in zip(at, at[1:])])
        return [statistics.median(part) for part in zip(*times[10:])]

    plain, sharded = run(False), run(True)
    dist.destroy_process_group()
    return {"pass_us": sharded[0] + sharded[1] - plain[0] - plain[1], "end_us": sharded[2]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--fsdp2", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fsdp2:
        print(json.dumps(measure_fsdp2(args.steps)))
        return 0

    def figures(command):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.strip().splitlines()[-1])

    ours, theirs = [], []
    for turn in range(args.turns):
        mine = figures([args.bench, "--json", "--steps=%d" % args.steps])
        ours.append((mine["forward_us"] + mine["backward_us"] - mine["plain_us"], mine["end_us"]))
        peer = figures([sys.executable, __file__, args.bench, "--fsdp2", "--steps=%d" % args.steps])
        theirs.append((peer["pass_us"], peer["end_us"]))
        print("turn %d: forward and backward %.1f us, FSDP2 %.1f; end of the step %.1f us, FSDP2 %.1f" %
              (turn + 1, ours[-1][0], theirs[-1][0], ours[-1][1], theirs[-1][1]), flush=True)
    for i, name in enumerate(("forward and backward, beyond unsharded", "end of the step")):
        ratios = [peer[i] / mine[i] for mine, peer in zip(ours, theirs)]
        print("%s: %.1f us a unit, FSDP2 %.1f; %.0f times (%.0f to %.0f)" %
              (name, statistics.median(o[i] for o in ours), statistics.median(t[i] for t in theirs),
               statistics.median(ratios), min(ratios), max(ratios)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
