#!/usr/bin/env python3
"""Training steps of GPT-2 124M beside PyTorch on the CPU, interleaved: A B A B ...

    python3 apps/compare/gpt2_124m.py build/apps/tessera-train [--peer eager|compile|fsdp2]
        [--ranks 1] [--batch 4] [--context 64] [--dtype f32|bf16] [--threads 2] [--pairs 10]
        [--steps 5]

Random tokens, AdamW, clipping at 1; `--batch` samples and `--threads` threads on each rank. bf16 is
autocast in PyTorch (with fsdp2 its MixedPrecisionPolicy: bf16 parameters, f32 reduction). Peer fsdp2
is `fully_shard` on every block over gloo, beside `full_shard` here under mpirun; peer self is one
rank of Tessera that has the threads and samples of all, beside `--ranks` of them. PyTorch stays
alive and waits while Tessera runs; a measurement is the median of `--steps` steps, after steps that
are not counted. Prints each pair's milliseconds a step, the median ratio (peer / Tessera: above 1
Tessera is faster) and the peak resident memory. Needs the package torch and an otherwise idle
machine.
"""

import argparse
import os
import statistics
import tempfile
import time

from interleave import Pairs, Run, peak_resident_bytes, write_tokens

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 12, 12, 768, 50257, 1024
WARM_UP = 3  # steps that are not counted


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


class Training:
    """PyTorch's in this process."""

    def __init__(self, args, rank=0):
        import torch

        torch.set_num_threads(args.threads)
        torch.manual_seed(1 + rank)
        self.args = args
        self.model = torch_model()
        if args.peer == "fsdp2":
            self.model = shard(self.model, args.dtype)
        self.run = torch.compile(self.model) if args.peer == "compile" else self.model
        # The fastest of PyTorch's AdamW implementations on CPU.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.autocast = args.dtype == "bf16" and args.peer != "fsdp2"

    def step_ms(self, steps):
        """Median milliseconds of the next `steps` steps."""
        import torch

        times = []
        for _ in range(steps):
            ids = torch.randint(VOCAB, (self.args.batch, self.args.context))
            targets = torch.randint(VOCAB, (self.args.batch, self.args.context))
            begin = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.run(ids, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)

    def peak_bytes(self):
        return peak_resident_bytes(os.getpid())


def torch_rank(rank, args, store, requests, answers):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                            world_size=args.ranks)
    training = Training(args, rank)
    while steps := requests[rank].get():
        answers.put((training.step_ms(steps), training.peak_bytes()))
    dist.destroy_process_group()


class RankTraining:
    """PyTorch's on several ranks, each a process."""

    def __init__(self, args, folder):
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self.requests = [context.SimpleQueue() for _ in range(args.ranks)]
        self.answers = context.SimpleQueue()
        self.peak = 0
        self.ranks = mp.spawn(torch_rank, (args, f"{folder}/store", self.requests, self.answers),
                              nprocs=args.ranks, join=False)

    def step_ms(self, steps):
        for queue in self.requests:
            queue.put(steps)
        answers = [self.answers.get() for _ in self.requests]
        self.peak = max(peak for _, peak in answers)
        return max(ms for ms, _ in answers)

    def peak_bytes(self):
        return self.peak

    def end(self):
        for queue in self.requests:
            queue.put(0)
        self.ranks.join()


class OneRank:
    """Tessera on one rank with all samples and threads."""

    def __init__(self, args, folder):
        self.args, self.folder, self.peak = args, folder, 0

    def step_ms(self, steps):
        run = tessera_run(self.args, self.folder, steps, ranks=1,
                          batch=self.args.batch * self.args.ranks,
                          threads=self.args.threads * self.args.ranks)
        self.peak = run.peak_bytes
        return statistics.median(run.step_ms[WARM_UP:])

    def peak_bytes(self):
        return self.peak


def tessera_run(args, folder, steps, ranks, batch, threads):
    return Run(args.tessera, "gpt2_124m.toml", {
        "data.tokens": f"{folder}/tokens.bin", "train.steps": WARM_UP + steps,
        "train.micro_batch": batch, "train.global_batch": batch * ranks,
        "model.context": args.context, "train.threads": threads,
        "precision.param_dtype": args.dtype}, ranks)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("--peer", choices=["eager", "compile", "fsdp2", "self"], default="eager")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if args.ranks > 1 and args.peer not in ("fsdp2", "self"):
        parser.error("several ranks need --peer fsdp2 or self")
    pairs = Pairs("one rank" if args.peer == "self" else f"PyTorch {args.peer}")
    with tempfile.TemporaryDirectory() as folder:
        tokens = args.batch * args.ranks * args.context
        write_tokens(f"{folder}/tokens.bin", 100_000 + 2 * tokens * (WARM_UP + args.steps), VOCAB)
        if args.peer == "self":
            peer = OneRank(args, folder)
        else:
            peer = RankTraining(args, folder) if args.peer == "fsdp2" else Training(args)
            peer.step_ms(WARM_UP)
        peak = 0
        for _ in range(args.pairs):
            theirs = peer.step_ms(args.steps)
            ours = tessera_run(args, folder, args.steps, args.ranks, args.batch, args.threads)
            peak = max(peak, ours.peak_bytes)
            pairs.add(theirs, statistics.median(ours.step_ms[WARM_UP:]))
        print(f"GPT-2 124M, {args.ranks} ranks, B {args.batch}, T {args.context}, {args.dtype}, "
              f"{args.threads} threads: {pairs.summary()}, {tokens} tokens a step")
        if args.ranks == 1:
            print(f"peak resident: {peer.peak_bytes() / 2**20:.0f} MiB, "
                  f"Tessera {peak / 2**20:.0f} MiB")
        if args.peer == "fsdp2":
            peer.end()


if __name__ == "__main__":
    main()
