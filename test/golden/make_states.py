"""Writes states.json: what bitsandbytes' AdamW8bit and PyTorch's Adafactor and Muon make of formula
gradients (f32, on the CPU), the dynamic maps and codes of bitsandbytes, and how far Newton-Schulz steps in
f32 are from those in f64 when PyTorch multiplies (relative, in the Frobenius norm).

Codes are those of bitsandbytes' own rounding to the nearest one (`quantize_blockwise` of f64 input).
Its f32 kernel for CPUs (0.50) gives the lowest values other codes: in a sweep of the unsigned map
those next to 0 got code 7. So the f32 calls inside the optimizer are sent through the first."""

import json
import math

import bitsandbytes
import bitsandbytes.backends.cpu.ops as cpu_ops
import torch
from bitsandbytes import functional

torch.set_num_threads(1)


def formula(count, step, salt=0):
    """Integers over an integer: the same f32 in every language. Some elements are far smaller."""
    i = torch.arange(count, dtype=torch.int64)
    top = (i * 7919 + step * 104729 + salt * 1299709) % 2003 - 1001
    small = torch.where(i % 5 == 0, 1 / 1024, 1.0).double()
    return (top.double() / 1001 * small).float()


def curved(count, step, salt=0):
    """The same with a square, so that a matrix of it has no small singular values: what bf16 makes of
    those in Newton-Schulz steps is noise."""
    i = torch.arange(count, dtype=torch.int64)
    top = (i * i * 31 + i * 7919 + i // 7 * step * 1009 + step * 104729 + salt * 1299709) % 2003 - 1001
    return (top.double() / 1001).float()


def nearest(A, code, blocksize):
    return torch.ops.bitsandbytes.quantize_blockwise(A.double(), code, blocksize)


def quantize(A, code, absmax_out, out, blocksize):
    codes, absmax = nearest(A, code, blocksize)
    out.copy_(codes)
    absmax_out.copy_(absmax)


def eight_bit():
    cpu_ops._quant_blockwise_fp32_direct = quantize
    count, steps = 4096, 100  # smaller tensors have f32 states there
    parameter = torch.nn.Parameter(formula(count, 0, 1))
    optimizer = bitsandbytes.optim.AdamW8bit([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                                             weight_decay=0.1)
    for step in range(1, steps + 1):
        parameter.grad = formula(count, step)
        optimizer.step()
    state = optimizer.state[parameter]
    return {"steps": steps, "parameters": parameter.tolist(), "exp_avg": state["state1"].tolist(),
            "exp_avg_sq": state["state2"].tolist(), "exp_avg_absmax": state["absmax1"].tolist(),
            "exp_avg_sq_absmax": state["absmax2"].tolist()}


def maps():
    result = {}
    for signed in (True, False):
        code = functional.create_dynamic_map(signed=signed)
        # On, beside and between the codes; a last 1 in each block is its scale.
        points = torch.cat([code, (code[1:] + code[:-1]) / 2,
                            torch.nextafter((code[1:] + code[:-1]) / 2, torch.tensor(2.0)),
                            formula(256, 7) if signed else formula(256, 7).abs()])
        points = torch.nn.functional.pad(points, (0, -len(points) % 255)).reshape(-1, 255)
        blocks = torch.cat([points, torch.ones(len(points), 1)], 1)
        blocks *= torch.tensor([2.0 ** (k * 3 - 6) for k in range(len(blocks))]).unsqueeze(1)
        codes, absmax = nearest(blocks, code, 256)
        result["signed" if signed else "unsigned"] = {
            "map": code.tolist(), "values": blocks.flatten().tolist(),
            "codes": codes.flatten().tolist(), "absmax": absmax.flatten().tolist()}
    return result


def run(make, shapes, steps, gradient=formula):
    parameters = [torch.nn.Parameter(formula(math.prod(s), 0, k + 1).reshape(s))
                  for k, s in enumerate(shapes)]
    optimizer = make(parameters)
    for step in range(1, steps + 1):
        for k, p in enumerate(parameters):
            p.grad = gradient(p.numel(), step, k).reshape(p.shape)
        optimizer.step()
    return {"shapes": shapes, "steps": steps, "parameters": [p.flatten().tolist() for p in parameters]}


POLYNOMIALS = {
    "original": [(3.4445, -4.7750, 2.0315)] * 5,
    "polar_express": [(8.156554524902461, -22.48329292557795, 15.878769915207462),
                      (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                      (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                      (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                      (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]}


def orthogonalized(g, coefficients):
    x = g / max((g.norm() * (1.02 if coefficients == "polar_express" else 1)).item(), 1e-7)
    for a, b, c in POLYNOMIALS[coefficients]:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz():
    """Of a matrix like a random one, and of one of rank 3 with noise of a millionth."""
    m, n = 150, 200
    full = curved(m * n, 1).reshape(m, n)
    low = sum(curved(m, 2, k).double().reshape(m, 1) * curved(n, 3, k).double() for k in range(3))
    low = (low + curved(m * n, 4).double().reshape(m, n) * 1e-6).float()
    errors = {}
    for coefficients in POLYNOMIALS:
        for kind, g in (("full", full), ("low_rank", low)):
            exact = orthogonalized(g.double(), coefficients)
            error = (orthogonalized(g, coefficients).double() - exact).norm() / exact.norm()
            errors.setdefault(coefficients, {})[kind] = error.item()
    return errors


golden = {
    "maps": maps(),
    "adamw_8bit": eight_bit(),
    "adafactor": run(lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1),
                     [[24, 40], [40, 24], [50]], 30),
    "muon": {f"{scale}": run(lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1,
                                                        adjust_lr_fn=scale), [[24, 40], [40, 24]], 10, curved)
             for scale in ("original", "match_rms_adamw")},
    "newton_schulz": newton_schulz(),
}


def shorter(value):
    """Nine digits tell an f32."""
    if isinstance(value, dict):
        return {key: shorter(v) for key, v in value.items()}
    if isinstance(value, list):
        return [shorter(v) for v in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


with open("states.json", "w", encoding="utf-8") as file:
    json.dump(shorter(golden), file, separators=(",", ":"))
    file.write("\n")
