"""What transformers' Gemma 2 gives where a model here can do the same: gemma2.json with its
attention (scale of the queries, soft-cap, a window in every second layer, rotary positions, grouped
heads) and its head (soft-cap of the logits, loss), values and gradients. Needs torch and
transformers; f64, so that nothing but the mathematics is compared."""

import json

import torch
from transformers import Gemma2Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.gemma2.modeling_gemma2 import (Gemma2Attention, Gemma2ForCausalLM,
                                                        Gemma2RotaryEmbedding)

from common import HERE, uniform

BATCH, TOKENS, VOCAB = 2, 11, 13
SIZES = {"width": 12, "num_heads": 4, "num_kv_heads": 2, "head_width": 6, "window": 4,
         "query_scalar": 5, "attn_softcap": 1.5, "logit_softcap": 2.0, "rope_theta": 100.0}


def values(name, shape, size):
    """Uniform in [-size, size), from the name alone."""
    numel = int(torch.tensor(shape).prod())
    return torch.from_numpy((uniform(name, numel) - 0.5) * (2 * size)).reshape(shape)


def flat(tensor):
    return [float(f"{x:.9g}") for x in tensor.detach().flatten().tolist()]


def attention(config, layer):
    module = Gemma2Attention(config, layer).double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values(f"{layer}.{name}", tuple(parameter.shape), 1.0))
    x = values("hidden", (BATCH, TOKENS, config.hidden_size), 1.0).requires_grad_()
    positions = torch.arange(TOKENS)[None]
    make_mask = (create_sliding_window_causal_mask if module.sliding_window is not None
                 else create_causal_mask)
    mask = make_mask(config=config, inputs_embeds=x, attention_mask=None, cache=None,
                     position_ids=positions)
    rotation = Gemma2RotaryEmbedding(config=config)(x, positions)
    y = module(x, position_embeddings=rotation, attention_mask=mask)[0]
    (y * values("upstream", tuple(y.shape), 1.0)).sum().backward()
    return {"window": module.sliding_window or 0, "y": flat(y), "dx": flat(x.grad),
            "d_q_proj": flat(module.q_proj.weight.grad),
            "d_k_proj": flat(module.k_proj.weight.grad),
            "d_v_proj": flat(module.v_proj.weight.grad),
            "d_o_proj": flat(module.o_proj.weight.grad)}


class Hidden(torch.nn.Module):
    """In place of the layers: hidden states as they are."""

    def __init__(self, states):
        super().__init__()
        self.states = states

    def forward(self, **kwargs):
        return BaseModelOutputWithPast(last_hidden_state=self.states)


def head(config):
    model = Gemma2ForCausalLM(config).double().eval()
    x = values("hidden", (BATCH, TOKENS, config.hidden_size), 1.0).requires_grad_()
    model.model = Hidden(x)
    model.lm_head.weight = torch.nn.Parameter(
        values("lm_head", (VOCAB, config.hidden_size), 1.0))
    labels = torch.tensor([[(7 * i + 3 * b) % VOCAB for i in range(TOKENS)] for b in range(BATCH)])
    labels[1, 2:5] = -100
    # `shift_labels`: position i is asked for labels[i], as the losses here are.
    out = model(input_ids=labels.clamp(min=0), labels=labels, shift_labels=labels)
    out.loss.backward()
    return {"labels": labels.flatten().tolist(), "logits": flat(out.logits),
            "loss": out.loss.item(), "dx": flat(x.grad), "dw": flat(model.lm_head.weight.grad)}


def main():
    s = SIZES
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=s["width"], num_hidden_layers=2,
        num_attention_heads=s["num_heads"], num_key_value_heads=s["num_kv_heads"],
        head_dim=s["head_width"], intermediate_size=8, sliding_window=s["window"],
        query_pre_attn_scalar=s["query_scalar"], attn_logit_softcapping=s["attn_softcap"],
        final_logit_softcapping=s["logit_softcap"],
        rope_parameters={"rope_type": "default", "rope_theta": s["rope_theta"]},
        attn_implementation="eager", tie_word_embeddings=False)
    golden = {**SIZES, "batch": BATCH, "num_tokens": TOKENS, "vocab_size": VOCAB,
              "layers": [attention(config, 0), attention(config, 1)], "head": head(config)}
    (HERE / "gemma2.json").write_text(json.dumps(golden, indent=None) + "\n")
    for layer in golden["layers"]:
        print(f"window {layer['window']}, y {layer['y'][-1]}")
    print(f"loss {golden['head']['loss']}")


if __name__ == "__main__":
    main()
