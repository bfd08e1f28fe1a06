#!/usr/bin/env python3
"""The recipe of configs/shakespeare_char_cpu.toml in PyTorch on the CPU, for comparison.

    python3 apps/compare/shakespeare_char.py input.txt [--tessera build/apps/tessera-train]
        [--compile] [--seeds 1 2 3] [--threads 2] [--steps 2000]

Prints a JSON line a seed: validation loss over the whole split (non-overlapping windows, nats a
character) and the wall time of training without evaluation; with --tessera, interleaved, the same
of Tessera, whose time is that of the whole process (set-up and the last evaluation included).
Needs the package torch.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
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


def train(train_ids, val_ids, vocab, seed, steps, compiles):
    torch.manual_seed(seed)
    model = Gpt(vocab)
    run = torch.compile(model) if compiles else model
    if compiles:  # outside of the time, as nobody trains for 20 seconds
        run(train_ids[:BATCH * CONTEXT].view(BATCH, -1),
            train_ids[1:BATCH * CONTEXT + 1].view(BATCH, -1)).backward()
        model.zero_grad(set_to_none=True)
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
        loss = run(train_ids[starts + order], train_ids[starts + order + 1])
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


def run_tessera(program, text, seed, steps, threads):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with tempfile.TemporaryDirectory() as folder:
        command = [
            program, f"{root}/configs/shakespeare_char_cpu.toml", f"--data.text={text}",
            f"--output.dir={folder}", f"--train.seed={seed}", f"--train.steps={steps}",
            f"--train.threads={threads}", "--train.eval_every=0", "--sample.tokens=0"]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        with open(f"{folder}/metrics.jsonl", encoding="utf-8") as f:
            return json.loads(f.readlines()[-1])["val_loss"], seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("--tessera")
    parser.add_argument("--compile", action="store_true", help="torch.compile; its time not counted")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = open(args.text, encoding="utf-8").read()
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([table[c] for c in text])
    split = int(0.9 * len(ids))
    losses, ratios = [], []
    for seed in args.seeds:
        loss, seconds = train(ids[:split], ids[split:], len(table), seed, args.steps,
                              args.compile)
        line = {"seed": seed, "val_loss": round(loss, 4), "seconds": round(seconds, 2)}
        if args.tessera:
            ours, our_seconds = run_tessera(args.tessera, args.text, seed, args.steps, args.threads)
            line |= {"tessera_val_loss": round(ours, 4), "tessera_seconds": round(our_seconds, 2)}
            losses.append(ours)
            ratios.append(seconds / our_seconds)
        print(json.dumps(line), flush=True)
    if ratios:
        print(f"Tessera: median validation loss {statistics.median(losses):.4f}, median time ratio "
              f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
