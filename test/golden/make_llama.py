"""Golden curves of tiny Llamas from PyTorch (f32, CPU): llama.* (grouped heads, untied) and qwen.*
(bias on q, k, v; norm of q and k; a head width of its own; tied)."""

import torch
import torch.nn.functional as F
from torch import nn

from common import train

LLAMA = {"kind": "llama", "vocab_size": 71, "context_length": 29, "num_layers": 3, "num_heads": 4,
         "num_kv_heads": 2, "width": 40, "head_width": 10, "ffn_width": 52, "tied": False,
         "qkv_bias": False, "qk_norm": False, "rope_theta": 10000.0, "norm_eps": 1e-5,
         "num_tokens": 23}
QWEN = {"kind": "llama", "vocab_size": 59, "context_length": 31, "num_layers": 2, "num_heads": 6,
        "num_kv_heads": 2, "width": 28, "head_width": 14, "ffn_width": 44, "tied": True,
        "qkv_bias": True, "qk_norm": True, "rope_theta": 500.0, "norm_eps": 1e-6,
        "num_tokens": 19}


class Projection(nn.Module):
    def __init__(self, num_inputs, num_outputs, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_outputs)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return y.to(x.dtype)


def rotate(x, theta):
    """Pairs (i, i + D/2) of x [B, T, H, D] turn by position * theta^(-2i/D)."""
    t, d = x.shape[1], x.shape[-1]
    rate = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.outer(torch.arange(t, dtype=torch.float64), rate)[:, None, :]
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., : d // 2].float(), x[..., d // 2:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        h, g, d = c["num_heads"], c["num_kv_heads"], c["head_width"]
        self.qkv = Projection(c["width"], (h + 2 * g) * d, c["qkv_bias"])
        if c["qk_norm"]:
            self.q_norm = RmsNorm(d, c["norm_eps"])
            self.k_norm = RmsNorm(d, c["norm_eps"])
        self.out = Projection(h * d, c["width"])

    def forward(self, x):
        c = self.c
        h, g, d = c["num_heads"], c["num_kv_heads"], c["head_width"]
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, h + 2 * g, d).split([h, g, g], dim=2)
        if c["qk_norm"]:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
        k, v = (y.repeat_interleave(h // g, dim=2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        scores = (q.float() @ k.float().transpose(-1, -2)) * d ** -0.5
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        y = (scores.masked_fill(later, float("-inf")).softmax(-1) @ v.float()).to(x.dtype)
        return self.out(y.transpose(1, 2).reshape(b, t, h * d))


class SwiGlu(nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.gate_up = Projection(width, 2 * ffn)
        self.down = Projection(ffn, width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = RmsNorm(c["width"], c["norm_eps"])
        self.attn = Attention(c)
        self.norm2 = RmsNorm(c["width"], c["norm_eps"])
        self.mlp = SwiGlu(c["width"], c["ffn_width"])

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c["vocab_size"], c["width"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_layers"]))
        self.norm = RmsNorm(c["width"], c["norm_eps"])
        if not c["tied"]:
            self.head = Projection(c["width"], c["vocab_size"])

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if hasattr(self, "head") else F.linear(x, self.embed.weight)


if __name__ == "__main__":
    train("llama", LLAMA, Llama(LLAMA))
    train("qwen", QWEN, Llama(QWEN))
