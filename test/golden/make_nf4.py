"""Writes nf4.json: what bitsandbytes (0.50) makes on the CPU of weights that are a formula: NF4 codes
and scales of blocks of 64, the scales in 8 bits (double quantisation), and what that is in numbers.

Two things are not taken from its kernels. The mean of the scales is that of their sum in f64: torch's
f32 sum depends on the vectors of the processor, and is one unit in the last place away in about half of
all tensors. The codes of the scales are those of bitsandbytes' own rounding to the nearest one
(`quantize_blockwise` of f64 input): its f32 kernel for CPUs gave 7 to 11 of 4,800 scales of normal
weights, 0.2 %, the code beside it."""

import json
import math

import torch
from bitsandbytes import functional

torch.set_num_threads(1)


def weights(count, salt):
    """Integers over an integer, times a power of two and a multiple of 1/32 a block: the same f32 in
    every language."""
    i = torch.arange(count, dtype=torch.int64)
    top = (i * 7919 + salt * 1299709) % 2003 - 1001
    small = torch.where(i % 5 == 0, 1 / 1024, 1.0).double()
    return (top.double() / 1001 * small).float() * (1 + (i // 64 * 13 % 29).float() / 32)


def fnv(tensor):
    """FNV-1a of the bytes, 64 bits."""
    value = 0xCBF29CE484222325
    for byte in tensor.contiguous().flatten().view(torch.uint8).tolist():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def quantized(shape, dtype, salt):
    w = weights(math.prod(shape), salt).to(dtype).reshape(shape)
    codes, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    absmax = state.absmax.clone()
    mean = absmax.double().mean().float()
    dynamic = functional.create_dynamic_map()
    scale_codes, nested = torch.ops.bitsandbytes.quantize_blockwise((absmax - mean).double(), dynamic, 256)
    state.absmax, state.offset, state.nested = scale_codes, mean, True
    state.state2 = functional.QuantState(absmax=nested.float(), code=dynamic, blocksize=256,
                                         dtype=torch.float32)
    hashes = {}
    for name, out in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        state.dtype = out
        hashes[name] = fnv(functional.dequantize_4bit(codes.clone(), state))
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "salt": salt,
            "codes": bytes(codes.flatten().tolist()).hex(), "absmax": shorter(absmax.tolist()),
            "scale_codes": bytes(scale_codes.tolist()).hex(), "nested": shorter(nested.float().tolist()),
            "mean": shorter([mean.item()])[0], "dequantized": hashes}


def shorter(values):
    """Nine digits tell an f32."""
    return [float(f"{value:.9g}") for value in values]


golden = [quantized((48, 64), torch.float32, 1), quantized((7, 33), torch.float32, 2),
          quantized((96, 200), torch.float32, 3), quantized((40, 72), torch.bfloat16, 4),
          quantized((40, 72), torch.float16, 5)]
with open("nf4.json", "w", encoding="utf-8") as file:
    json.dump(golden, file, separators=(",", ":"))
    file.write("\n")
