#!/usr/bin/env python3
"""The recipe of configs/shakespeare_char_cpu.toml in PyTorch (eager, CPU), for comparison.

    python3 apps/compare/shakespeare_char.py input.txt [--seeds 1 2 3] [--threads 2] [--steps 2000]

Prints one JSON line a seed: validation loss over the whole split (non-overlapping windows, nats a
character) and the wall time of training without evaluation. Needs the package torch.
"""

import argparse
import json
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

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


def train(train_ids, val_ids, vocab, seed, steps):
    torch.manual_seed(seed)
    model = Gpt(vocab)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(CONTEXT)
    begin = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        starts = torch.randint(len(train_ids) - CONTEXT, (BATCH, 1), generator=generator)
        loss = model(train_ids[starts + order], train_ids[starts + order + 1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - begin
    windows = (len(val_ids) - 1) // CONTEXT
    inputs = val_ids[: windows * CONTEXT].view(windows, CONTEXT)
    targets = val_ids[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
    with torch.no_grad():
        total = sum(model(i, t).item() * len(i) for i, t in zip(inputs.split(64), targets.split(64)))
    return total / windows, seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = open(args.text, encoding="utf-8").read()
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([table[c] for c in text])
    split = int(0.9 * len(ids))
    for seed in args.seeds:
        loss, seconds = train(ids[:split], ids[split:], len(table), seed, args.steps)
        print(json.dumps({"seed": seed, "val_loss": round(loss, 4), "seconds": round(seconds, 2)}),
              flush=True)


if __name__ == "__main__":
    main()
