#!/usr/bin/env python3
"""Training steps of GPT-2 124M beside PyTorch on the CPU, interleaved: A B A B ...

    python3 apps/compare/gpt2_124m.py build/apps/tessera-train [--peer eager|compile|fsdp2]
        [--ranks 1] [--batch 4] [--context 64] [--dtype f32|bf16] [--threads 2] [--pairs 5]
        [--steps 20]

Random tokens, AdamW, clipping at 1; `--batch` samples and `--threads` threads on each rank. bf16 is
autocast in PyTorch (with fsdp2 its MixedPrecisionPolicy: bf16 parameters, f32 reduction). Peer fsdp2
is `fully_shard` on every block over gloo, beside `full_shard` here under mpirun. A run is a process
(a launch) of its own with `--steps` steps, of which the first are not counted. Prints each pair's
milliseconds a step and the median ratio (PyTorch / Tessera: above 1 Tessera is faster). Needs the
package torch and an otherwise idle machine.
"""

import argparse
import array
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 12, 12, 768, 50257, 1024


def torch_model():
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)
            for p in self.parameters():
                if p.dim() >= 2:
                    nn.init.normal_(p, std=0.02)

        def forward(self, ids, targets):
            x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = self.norm(x) @ self.tokens.weight.T
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Gpt()


def shard(model, dtype):
    """FSDP2 over all ranks: a unit a block, the rest with the root."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def torch_step_ms(args, rank=0):
    """Median milliseconds of a step, in this process."""
    import torch
    from torch import nn

    torch.set_num_threads(args.threads)
    torch.manual_seed(1 + rank)
    model = torch_model()
    if args.peer == "fsdp2":
        model = shard(model, args.dtype)
    run = torch.compile(model) if args.peer == "compile" else model
    # The fastest of PyTorch's AdamW implementations on CPU.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = args.dtype == "bf16" and args.peer != "fsdp2"
    times = []
    for _ in range(args.steps):
        ids = torch.randint(VOCAB, (args.batch, args.context))
        targets = torch.randint(VOCAB, (args.batch, args.context))
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[len(times) // 4 :])


def torch_rank(rank, args, store, results):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                            world_size=args.ranks)
    step_ms = torch_step_ms(args, rank)
    if rank == 0:
        results.put(step_ms)
    dist.barrier()
    dist.destroy_process_group()


def torch_ranks_step_ms(args):
    import torch.multiprocessing as mp

    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(torch_rank, (args, f"{folder}/store", results), nprocs=args.ranks)
    return results.get()


def write_tokens(path, count):
    """A token shard: 256 int32 of header (magic, version, count), then uint16 tokens."""
    random.seed(1)
    with open(path, "wb") as f:
        f.write(array.array("i", [20240520, 1, count] + [0] * 253).tobytes())
        f.write(array.array("H", [random.randrange(VOCAB) for _ in range(count)]).tobytes())


def tessera_step_ms(args, config, folder):
    launch = []
    if args.ranks > 1:
        launch = ["mpirun", "--bind-to", "none", "-n", str(args.ranks)]
    command = launch + [
        args.tessera, config, f"--data.tokens={folder}/tokens.bin", f"--output.dir={folder}/out",
        f"--train.steps={args.steps}", f"--train.micro_batch={args.batch}",
        f"--train.global_batch={args.batch * args.ranks}", f"--model.context={args.context}",
        f"--train.threads={args.threads}", f"--precision.param_dtype={args.dtype}",
        "--train.eval_every=0", "--sample.tokens=0", "--device=cpu"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(f"{folder}/out/metrics.jsonl", encoding="utf-8") as f:
        return json.loads(f.readlines()[-1])["step_ms"]  # the mean of the last 16 steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("--peer", choices=["eager", "compile", "fsdp2"], default="eager")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--torch-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks > 1 and args.peer != "fsdp2":
        parser.error("several ranks need --peer fsdp2")
    if args.torch_only:
        print(torch_ranks_step_ms(args) if args.peer == "fsdp2" else torch_step_ms(args))
        return
    if args.ranks > 1 and os.getuid() == 0:
        os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens.bin", 200_000 + 2 * args.steps * args.batch * args.ranks * args.context)
        for pair in range(args.pairs):
            theirs = float(subprocess.run(
                [sys.executable, *sys.argv, "--torch-only"], check=True, stdout=subprocess.PIPE,
                text=True).stdout)
            ours = tessera_step_ms(args, f"{root}/configs/gpt2_124m.toml", folder)
            ratios.append(theirs / ours)
            print(f"pair {pair}: PyTorch {theirs:.0f} ms, Tessera {ours:.0f} ms, "
                  f"ratio {ratios[-1]:.2f}", flush=True)
    tokens = args.batch * args.ranks * args.context
    print(f"GPT-2 124M, {args.peer}, {args.ranks} ranks, B {args.batch}, T {args.context}, "
          f"{args.dtype}, {args.threads} threads: median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
          f"{max(ratios):.2f}), {tokens} tokens a step")


if __name__ == "__main__":
    main()
