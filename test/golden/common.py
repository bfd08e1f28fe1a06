"""What the golden-curve scripts share: initial weights by formula, tokens, the training loop.

Weights are a function of (parameter name, element) alone, in integers and f64 with one rounding to
f32, so that test/golden/golden.cc computes the same bits and no weights are stored.
"""

import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).parent
NUM_STEPS = 30
BATCH = 8
IGNORE = -100
PEAK_LR, FINAL_LR, WARMUP = 3e-3, 3e-4, 5
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


def hash_name(name):
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def uniform(name, numel):
    """numel values in [0, 1): the upper 24 bits of SplitMix64 of hash(name) + element."""
    with np.errstate(over="ignore"):
        z = np.uint64(hash_name(name)) + np.arange(numel, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float64) * 2.0**-24


def initial(name, shape, std):
    """Centered, uniform, deviation std; the weights of norms (1-D "weight") are around 1."""
    numel = int(np.prod(shape))
    if len(shape) == 1:
        values = (uniform(name, numel) - 0.5) * 0.2
        if name.endswith("weight"):
            values = values + 1.0
    else:
        values = (uniform(name, numel) - 0.5) * (std * math.sqrt(12.0))
    return torch.from_numpy(values.astype(np.float32)).reshape(shape)


def make_tokens(vocab, num_tokens):
    """Rows of a noisy walk over the vocabulary: something to learn, nothing to finish."""
    u = uniform("tokens", NUM_STEPS * BATCH * (num_tokens + 1)).reshape(
        NUM_STEPS, BATCH, num_tokens + 1)
    tokens = np.empty(u.shape, dtype=np.int64)
    tokens[..., 0] = (u[..., 0] * vocab).astype(np.int64)
    for t in range(1, num_tokens + 1):
        walk = (3 * tokens[..., t - 1] + 1 + (u[..., t] * 4).astype(np.int64)) % vocab
        jump = (u[..., t] * 7919 * vocab).astype(np.int64) % vocab
        tokens[..., t] = np.where((u[..., t] * 64) % 1.0 < 0.2, jump, walk)
    ids, targets = tokens[..., :-1].copy(), tokens[..., 1:].copy()
    # Unequal numbers of targets that count: a tenth at random, and most of two rows.
    hidden = uniform("hidden", targets.size).reshape(targets.shape) < 0.1
    hidden[:, 1, 2:] = True
    hidden[:, 6, : num_tokens - 3] = True
    targets[hidden] = IGNORE
    return ids, targets


def learning_rate(step):
    """Linear to the peak at step WARMUP - 1, then a cosine to FINAL_LR at the last step."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    progress = (step - (WARMUP - 1)) / (NUM_STEPS - 1 - (WARMUP - 1))
    return FINAL_LR + 0.5 * (PEAK_LR - FINAL_LR) * (1 + math.cos(math.pi * progress))


def train(case, config, model, std=0.15):
    """Trains and writes CASE.json and CASE.grads.bin (step 0, before clipping, in name order)."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(initial(name, tuple(param.shape), std))
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": DECAY},
         {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0}],
        lr=PEAK_LR, betas=BETAS, eps=EPS, foreach=False, fused=False)
    ids, targets = make_tokens(config["vocab_size"], config["num_tokens"])
    losses, norms, rates = [], [], []
    for step in range(NUM_STEPS):
        rates.append(learning_rate(step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        logits = model(torch.from_numpy(ids[step]))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets[step]).flatten(),
                               ignore_index=IGNORE)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if step == 0:
            with open(HERE / f"{case}.grads.bin", "wb") as file:
                for param in params.values():
                    file.write(param.grad.numpy().astype("<f4").tobytes())
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    golden = {
        "torch": torch.__version__.split("+")[0],
        "config": config,
        "init_stddev": std,
        "optimizer": {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY,
                      "clip": CLIP},
        "parameters": [{"name": n, "shape": list(p.shape)} for n, p in params.items()],
        "lr": rates,
        "loss": losses,
        "grad_norm": norms,
        "ids": ids.reshape(NUM_STEPS, -1).tolist(),
        "targets": targets.reshape(NUM_STEPS, -1).tolist(),
    }
    lines = []
    for key, value in golden.items():
        if key in ("ids", "targets", "parameters"):
            rows = ",\n".join("  " + json.dumps(row) for row in value)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    (HERE / f"{case}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{case}: loss {losses[0]:.6f} -> {losses[-1]:.6f}, grad norm {norms[0]:.4f} -> "
          f"{norms[-1]:.4f}, {sum(p.numel() for p in params.values())} parameters")
