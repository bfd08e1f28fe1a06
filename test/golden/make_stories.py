"""Greedy tokens of a trained model by transformers: writes stories_greedy.json.

    python make_stories.py STORIES260K

STORIES260K is a folder with stories260K.bin (karpathy/tinyllamas, version 0 of llama2.c's format).
500 tokens behind the token that begins a text, in f32, with a cache of keys and values.
"""
import json
import pathlib
import struct
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = [("input_layernorm", 1), ("self_attn.q_proj", 2), ("self_attn.k_proj", 2), ("self_attn.v_proj", 2),
         ("self_attn.o_proj", 2), ("post_attention_layernorm", 1), ("mlp.gate_proj", 2), ("mlp.down_proj", 2),
         ("mlp.up_proj", 2)]


def load(path):
    data = path.read_bytes()
    width, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", data[:28])
    values = torch.from_numpy(np.frombuffer(data, "<f4", offset=28).copy())
    config = LlamaConfig(vocab_size=abs(vocab), hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=context,
                         rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=vocab > 0)
    model = LlamaForCausalLM(config).eval()
    state, at = model.state_dict(), 0

    def take(shape):
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return values[at - count:at].reshape(shape)

    def halves(matrix, count):
        """Rows of a head from pairs (2 i, 2 i + 1) to halves (i, i + D / 2)."""
        head = matrix.shape[0] // count
        return matrix.reshape(count, head // 2, 2, width).transpose(1, 2).reshape(matrix.shape)

    state["model.embed_tokens.weight"] = take((abs(vocab), width))
    for name, _ in NAMES:
        for layer in range(layers):
            key = f"model.layers.{layer}.{name}.weight"
            tensor = take(tuple(state[key].shape))
            if name.endswith("q_proj"):
                tensor = halves(tensor, heads)
            if name.endswith("k_proj"):
                tensor = halves(tensor, kv_heads)
            state[key] = tensor
    state["model.norm.weight"] = take((width,))
    if vocab > 0:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def main():
    model = load(pathlib.Path(sys.argv[1]) / "stories260K.bin")
    with torch.no_grad():
        ids = model.generate(torch.tensor([[1]]), max_new_tokens=500, min_new_tokens=500, do_sample=False,
                             pad_token_id=0, eos_token_id=None)[0].tolist()
    target = pathlib.Path(__file__).resolve().parent / "stories_greedy.json"
    target.write_text(json.dumps({"greedy_ids": ids}) + "\n")
    print(len(ids), ids[:10])


if __name__ == "__main__":
    sys.exit(main())
