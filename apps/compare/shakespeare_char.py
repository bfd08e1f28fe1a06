#!/usr/bin/env python3
"""The recipe of configs/shakespeare_char_cpu.toml beside PyTorch on the CPU, interleaved.

    python3 apps/compare/shakespeare_char.py input.txt build/apps/tessera-train
        [--peer eager|compile] [--seed 1] [--threads 2] [--steps 2000] [--pairs 10]

PyTorch trains its `--steps` steps in `--pairs` parts; after each, Tessera trains as many steps (from
the beginning), of which the first are not counted. Compilation is not counted either. At the end
Tessera trains all steps, and both print their validation loss over the whole split (windows that do
not overlap, nats a character). Needs the package torch and an otherwise idle machine.
"""

import argparse
import math
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from interleave import METRICS_WINDOW, Pairs, Run

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tokens = nn.Embedding(vocab, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step, steps, warmup=100, peak=1e-3, final=1e-4):
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - (warmup - 1)) / (steps - warmup)
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * progress))


class Training:
    def __init__(self, train_ids, vocab, args):
        torch.manual_seed(args.seed)
        self.ids, self.num_steps, self.step = train_ids, args.steps, 0
        self.model = Gpt(vocab)
        self.run = torch.compile(self.model) if args.peer == "compile" else self.model
        # Outside of the time, as nobody trains for 20 seconds only.
        self.run(train_ids[: BATCH * CONTEXT].view(BATCH, -1),
                 train_ids[1 : BATCH * CONTEXT + 1].view(BATCH, -1)).backward()
        self.model.zero_grad(set_to_none=True)
        decay = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.99), fused=True)
        self.generator = torch.Generator().manual_seed(args.seed)

    def step_ms(self, steps):
        """Mean milliseconds of the next `steps` steps."""
        order = torch.arange(CONTEXT)
        begin = time.perf_counter()
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.num_steps)
            self.step += 1
            starts = torch.randint(len(self.ids) - CONTEXT, (BATCH, 1), generator=self.generator)
            loss = self.run(self.ids[starts + order], self.ids[starts + order + 1])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return 1e3 * (time.perf_counter() - begin) / steps

    def loss_over(self, val_ids):
        windows = (len(val_ids) - 1) // CONTEXT
        inputs = val_ids[: windows * CONTEXT].view(windows, CONTEXT)
        targets = val_ids[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
        with torch.no_grad():
            return sum(self.model(i, t).item() * len(i)
                       for i, t in zip(inputs.split(64), targets.split(64))) / windows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("tessera")
    parser.add_argument("--peer", choices=["eager", "compile"], default="eager")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with open(args.text, encoding="utf-8") as f:
        text = f.read()
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([table[c] for c in text])
    split = int(0.9 * len(ids))

    def tessera(steps):
        return Run(args.tessera, "shakespeare_char_cpu.toml", {
            "data.text": os.path.abspath(args.text), "train.seed": args.seed, "train.steps": steps,
            "train.threads": args.threads})

    training = Training(ids[:split], len(table), args)
    pairs = Pairs(f"PyTorch {args.peer}")
    part = args.steps // args.pairs
    for _ in range(args.pairs):
        theirs = training.step_ms(part)
        pairs.add(theirs, statistics.mean(tessera(METRICS_WINDOW + part).step_ms[METRICS_WINDOW:]))
    whole = tessera(args.steps)
    print(f"shakespeare_char_cpu, {args.threads} threads, a step: {pairs.summary()}")
    print(f"validation loss after {args.steps} steps: PyTorch "
          f"{training.loss_over(ids[split:]):.4f}, Tessera {whole.last['val_loss']:.4f}")


if __name__ == "__main__":
    main()
