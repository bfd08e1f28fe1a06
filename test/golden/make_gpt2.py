"""Golden curves of a tiny GPT-2 from PyTorch (f32, CPU). Writes gpt2.json and gpt2.grads.bin."""

import torch
import torch.nn.functional as F
from torch import nn

from common import train

CONFIG = {"kind": "gpt2", "vocab_size": 67, "context_length": 29, "num_layers": 3, "num_heads": 3,
          "width": 36, "ffn_width": 100, "num_tokens": 23}


class Projection(nn.Module):
    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_outputs))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = Projection(width, 3 * width)
        self.out = Projection(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.reshape(b, t, self.heads, -1).transpose(1, 2)
                   for y in self.qkv(x).split(c, dim=-1))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Mlp(nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.up = Projection(width, ffn)
        self.down = Projection(ffn, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = nn.LayerNorm(c["width"])
        self.attn = Attention(c["width"], c["num_heads"])
        self.norm2 = nn.LayerNorm(c["width"])
        self.mlp = Mlp(c["width"], c["ffn_width"])

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c["vocab_size"], c["width"])
        self.position = nn.Embedding(c["context_length"], c["width"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_layers"]))
        self.norm = nn.LayerNorm(c["width"])

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


if __name__ == "__main__":
    train("gpt2", CONFIG, Gpt2(CONFIG))
