"""Curves of the tiny Llama of make_llama.py under PyTorch's FSDP2 (`fully_shard` over gloo, CPU) on
2 and 4 ranks, in f32 and in bf16 mixed precision, with accumulation and clipping. Writes
fsdp2.json; tokens, initial weights and learning rates are those of llama.json."""

import json

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import (BATCH, BETAS, CLIP, DECAY, EPS, HERE, IGNORE, PEAK_LR, initial, learning_rate,
                    make_tokens)
from make_llama import LLAMA, Llama

STEPS = 20
STDDEV = 0.15
RUNS = [{"world": world, "param_dtype": dtype, "grad_accum_steps": accum}
        for world in (2, 4) for dtype in ("f32", "bf16") for accum in (1, 2)]


def train(rank, run, port, results):
    world, accum = run["world"], run["grad_accum_steps"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=world)
    model = Llama(LLAMA)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(initial(name, tuple(param.shape), STDDEV))
    # Gradients leave the GEMMs in bf16 and are reduced in f32; masters, norms and the step are f32.
    policy = MixedPrecisionPolicy()
    if run["param_dtype"] == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [model.embed, *model.blocks, model]:
        fully_shard(module, mp_policy=policy)
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": DECAY},
         {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0}],
        lr=PEAK_LR, betas=BETAS, eps=EPS, foreach=False, fused=False)
    ids, targets = (torch.from_numpy(x) for x in make_tokens(LLAMA["vocab_size"],
                                                             LLAMA["num_tokens"]))
    rows = BATCH // world // accum
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        num_valid = (targets[step] != IGNORE).sum().item()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for i in range(accum):
            first = (i * world + rank) * rows
            mine = slice(first, first + rows)
            logits = model(ids[step, mine]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets[step, mine].flatten(),
                                   ignore_index=IGNORE, reduction="sum") / num_valid
            (loss * world).backward()  # FSDP2 takes the mean over ranks
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), CLIP).full_tensor().item()
        optimizer.step()
        dist.all_reduce(total)
        if rank == 0:
            results.put((total.item(), norm))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for index, run in enumerate(RUNS):
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(train, (run, 29650 + index, results), nprocs=run["world"])
        curve = [results.get() for _ in range(STEPS)]
        run["loss"], run["grad_norm"] = ([x[k] for x in curve] for k in (0, 1))
        print({k: v for k, v in run.items() if not isinstance(v, list)},
              f"loss {run['loss'][0]:.6f} -> {run['loss'][-1]:.6f}")
    lines = ",\n".join("  " + json.dumps(run) for run in RUNS)
    text = f'{{\n"torch": "{torch.__version__.split("+")[0]}",\n"runs": [\n{lines}\n]\n}}\n'
    (HERE / "fsdp2.json").write_text(text)
