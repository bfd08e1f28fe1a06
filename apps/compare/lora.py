#!/usr/bin/env python3
"""Training steps of GPT-2 124M with low-rank adapters beside peft in PyTorch eager on the CPU,
interleaved: A B A B ...

    python3 apps/compare/lora.py build/apps/tessera-train [--dtype f32|bf16|both] [--rank 16]
        [--targets c_attn,c_proj,c_fc] [--dropout 0.05] [--batch 4] [--context 64] [--threads 2]
        [--pairs 10] [--steps 5]

Both are transformers' GPT-2 with the same adapters, random tokens, AdamW and clipping at 1. bf16: there the
base model is in bf16 and the adapters in f32, as peft makes them, here parameters are gathered in
bf16 and the masters of the adapters are f32. PyTorch stays alive and waits while Tessera runs; a
measurement is the median of `--steps` steps, after steps that are not counted. Prints each pair's
milliseconds a step and the median ratio (above 1 Tessera is faster). Needs the packages torch,
transformers and peft and an otherwise idle machine.
"""

import argparse
import os
import statistics
import tempfile
import time

from interleave import Pairs, Run, peak_resident_bytes, write_tokens

VOCAB, CONTEXT = 50257, 1024
WARM_UP = 3  # steps that are not counted


class Peft:
    def __init__(self, args, dtype):
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.set_num_threads(args.threads)
        torch.manual_seed(1)
        self.args = args
        model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        model = model.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        self.model = get_peft_model(model, LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, lora_dropout=args.dropout, fan_in_fan_out=True,
            target_modules=args.targets.split(","), task_type="CAUSAL_LM"))
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, fused=True)

    def step_ms(self, steps):
        import torch

        times = []
        for _ in range(steps):
            ids = torch.randint(VOCAB, (self.args.batch, self.args.context))
            begin = time.perf_counter()
            loss = self.model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)


def compare(args, dtype):
    peft, pairs = Peft(args, dtype), Pairs(f"peft, {dtype}")
    peft.step_ms(WARM_UP)
    peak = 0
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens.bin", 200_000, VOCAB)
        for _ in range(args.pairs):
            theirs = peft.step_ms(args.steps)
            run = Run(args.tessera, "gpt2_124m.toml", {
                "data.tokens": f"{folder}/tokens.bin", "train.steps": WARM_UP + args.steps,
                "train.micro_batch": args.batch, "train.global_batch": args.batch,
                "model.context": args.context, "model.max_positions": CONTEXT,
                "train.threads": args.threads, "precision.param_dtype": dtype,
                "lora.targets": args.targets, "lora.rank": args.rank, "lora.alpha": 2 * args.rank,
                "lora.dropout": args.dropout})
            pairs.add(theirs, statistics.median(run.step_ms[WARM_UP:]))
            peak = run.peak_bytes
    print(pairs.summary())
    print(f"peak resident: peft {peak_resident_bytes(os.getpid()) / 2**20:.0f} MiB, Tessera "
          f"{peak / 2**20:.0f} MiB")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("--dtype", choices=["f32", "bf16", "both"], default="both")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="c_attn,c_proj,c_fc")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    for dtype in ("f32", "bf16") if args.dtype == "both" else (args.dtype,):
        compare(args, dtype)


if __name__ == "__main__":
    main()
