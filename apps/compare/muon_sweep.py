#!/usr/bin/env python3
"""How many steps Muon takes to AdamW's validation loss, here and with torch.optim.Muon.

    python3 apps/compare/muon_sweep.py out/data/kjv.txt build/apps/tessera-train
        [--steps 1500] [--evals 60] [--threads 2] [--rates 5] [--only tessera|torch]

The model, batch and schedule of configs/quickstart.toml on its text, by AdamW and by Muon (scale
match_rms_adamw, weight decay 0.1; embedding and vectors by AdamW with the same rate), each with
`--rates` learning rates a factor of 1.8 apart around 3e-3. Of each optimizer the run with the lowest
final validation loss counts; Muon's steps are those of its run until it is at AdamW's final loss, between
two evaluations on a line. PyTorch trains the same shapes on the same split of the text, with its own
initial values and samples. Needs the package torch; 20 runs of `--steps` steps.
"""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

from interleave import Run

LAYERS, HEADS, KV_HEADS, WIDTH, FFN, CONTEXT, BATCH, VOCAB = 4, 4, 2, 128, 384, 128, 8, 256
HEAD_WIDTH = WIDTH // HEADS
MIDDLE_RATE, FINAL_SHARE, WARMUP, DECAY, CLIP = 3e-3, 0.1, 50, 0.1, 1.0
VAL_FRACTION = 0.02


def rotate(x):
    """Rotary positions of [B, H, T, D], halves paired."""
    half = HEAD_WIDTH // 2
    angles = torch.outer(torch.arange(x.shape[2]), 10000.0 ** (-torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(b, t, -1, HEAD_WIDTH).transpose(1, 2)
                   for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.embed.weight.T).flatten(0, 1), targets.flatten())


def rate_at(step, steps, peak):
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    progress = (step - (WARMUP - 1)) / max(steps - WARMUP, 1)
    return peak * (FINAL_SHARE + 0.5 * (1 - FINAL_SHARE) * (1 + math.cos(math.pi * progress)))


def torch_curve(optimizer, peak, train, val, args):
    """[(step, validation loss)]"""
    torch.manual_seed(1)
    model = Llama()
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    if optimizer == "muon":
        matrices = [p for p in matrices if all(p is not h for h in hidden)]
    optimizers = [torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                                     {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.99))]
    if optimizer == "muon":
        optimizers.append(torch.optim.Muon(hidden, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"))
    windows = (len(val) - 1) // CONTEXT
    inputs = val[: windows * CONTEXT].view(windows, CONTEXT)
    targets = val[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
    generator = torch.Generator().manual_seed(1)
    curve = []
    for step in range(args.steps):
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = rate_at(step, args.steps, peak)
        starts = torch.randint(len(train) - CONTEXT, (BATCH, 1), generator=generator)
        ids = train[starts + torch.arange(CONTEXT + 1)]
        model(ids[:, :-1], ids[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        if (step + 1) % args.every == 0:
            with torch.no_grad():
                losses = [model(i, t).item() * len(i) for i, t in zip(inputs.split(64), targets.split(64))]
            curve.append((step + 1, sum(losses) / windows))
    return curve


def tessera_curve(optimizer, peak, args):
    options = {"data.text": os.path.abspath(args.text), "train.steps": args.steps,
               "train.threads": args.threads, "train.eval_every": args.every, "optim.lr": peak,
               "optim.final_lr": FINAL_SHARE * peak, "optim.name": optimizer,
               "checkpoint.best": "false"}
    if optimizer == "muon":
        options |= {"optim.muon_scale": "match_rms_adamw", "optim.muon_blocks": "projections"}
    lines = Run(args.tessera, "quickstart.toml", options).lines
    return [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]


def steps_to(curve, loss):
    """Where the curve first is at `loss`; None: nowhere."""
    before = None
    for step, value in curve:
        if value <= loss:
            if before is None or before[1] <= value:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (step, value)
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("tessera")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--evals", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rates", type=int, default=5)
    parser.add_argument("--only", choices=["tessera", "torch"])
    args = parser.parse_args()
    args.every = max(args.steps // args.evals, 1)
    torch.set_num_threads(args.threads)
    with open(args.text, "rb") as f:
        ids = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8).long()
    split = int((1 - VAL_FRACTION) * len(ids))
    curves_of = {"tessera": lambda o, rate: tessera_curve(o, rate, args),
                 "torch": lambda o, rate: torch_curve(o, rate, ids[:split], ids[split:], args)}
    rates = [MIDDLE_RATE * 1.8 ** (i - args.rates // 2) for i in range(args.rates)]
    print("| | AdamW, best rate | loss | Muon, best rate | loss | Muon's steps to AdamW's loss | of all |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for who in [args.only] if args.only else ["tessera", "torch"]:
        best = {}
        for optimizer in ("adamw", "muon"):
            curves = {rate: curves_of[who](optimizer, rate) for rate in rates}
            for rate, curve in curves.items():
                print(f"{who} {optimizer} {rate:.2e}: {curve[-1][1]:.4f}", flush=True)
            rate = min(curves, key=lambda r: curves[r][-1][1])
            best[optimizer] = (rate, curves[rate])
        (adamw_rate, adamw), (muon_rate, muon) = best["adamw"], best["muon"]
        steps = steps_to(muon, adamw[-1][1])
        ratio = f"{steps:.0f} | {steps / args.steps:.3f}" if steps else "never | -"
        print(f"| {who} | {adamw_rate:.2e} | {adamw[-1][1]:.4f} | {muon_rate:.2e} | {muon[-1][1]:.4f} "
              f"| {ratio} |", flush=True)


if __name__ == "__main__":
    main()
