"""Tiny random models of every supported family as transformers saves them, with their logits:
hf/FAMILY/{config.json, model.safetensors, logits.json}. One is sharded with an index, some are in
bf16. Needs torch and transformers; the logits are computed in f32. make_hf.py [FAMILY...]"""

import json
import pathlib
import shutil
import sys

import torch
from transformers import (BertConfig, BloomConfig, GPT2Config, LlamaConfig, MistralConfig,
                          Qwen2Config, Qwen3Config, RobertaConfig)
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertModel

HERE = pathlib.Path(__file__).parent / "hf"
VOCAB, NUM_TOKENS = 40, 9

LLAMA = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 100.0}
ENCODER = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
               intermediate_size=24, type_vocab_size=2)

FAMILIES = {
    "gpt2": (GPT2Config(vocab_size=VOCAB, n_positions=24, n_embd=16, n_layer=2, n_head=4),
             torch.float32, {}),
    "llama2": (LlamaConfig(**LLAMA), torch.bfloat16, {}),
    "llama3": (LlamaConfig(**LLAMA, rope_parameters=LLAMA3), torch.float32,
               {"max_shard_size": "6KB"}),
    "mistral": (MistralConfig(**LLAMA, sliding_window=None), torch.bfloat16, {}),
    "mistral_window": (MistralConfig(**LLAMA, sliding_window=4), torch.float32, {}),
    "qwen2": (Qwen2Config(**LLAMA, tie_word_embeddings=True), torch.float32, {}),
    "qwen2_window": (Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=3,
                                 max_window_layers=1), torch.float32, {}),
    "qwen3": (Qwen3Config(**LLAMA, head_dim=8), torch.bfloat16, {}),
    # Six heads: ALiBi's slopes of a number that is no power of two.
    "bloom": (BloomConfig(vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=6), torch.float32,
              {}),
    "bert": (BertConfig(**ENCODER, max_position_embeddings=24), torch.float32, {}),
    "roberta": (RobertaConfig(**ENCODER | {"type_vocab_size": 1}, max_position_embeddings=26),
                torch.float32, {}),
}
ENCODERS = ("bert", "roberta")


def randomize(model):
    """Values that make every parameter count: norms around 1, biases that are not 0."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        values = torch.rand(parameter.shape, generator=generator) - 0.5
        is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
        parameter.data = (1 + 0.4 * values if is_norm else values).to(parameter.dtype)


def draw(shape, low, high, seed):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def save_masked(folder, model):
    """Of an encoder also the loss and gradients of masked tokens: those as a model of their own,
    grads/, whose tensors are called like what they belong to."""
    # Token 1 is RoBERTa's padding, which has no position.
    ids = draw((2, NUM_TOKENS), 2, VOCAB, 2)
    types = draw(ids.shape, 0, model.config.type_vocab_size, 3)
    targets = torch.where(draw(ids.shape, 0, 3, 4) == 0, draw(ids.shape, 0, VOCAB, 5), -100)
    out = model(ids, token_type_ids=types, labels=targets)
    out.loss.backward()
    (folder / "logits.json").write_text(json.dumps(
        {"ids": ids.tolist(), "token_types": types.tolist(), "targets": targets.tolist(),
         "loss": out.loss.item(), "logits": [round(x, 7) for x in out.logits.flatten().tolist()]}))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = gradients[name]
    model.save_pretrained(folder / "grads")
    (folder / "grads/generation_config.json").unlink(missing_ok=True)


def save_hidden():
    """Hidden states and the pooler's output of a BertModel: hf_hidden/bert_model."""
    folder = HERE.parent / "hf_hidden/bert_model"
    shutil.rmtree(folder, ignore_errors=True)
    model = BertModel(BertConfig(**ENCODER, max_position_embeddings=24)).eval()
    randomize(model)
    model.save_pretrained(folder)
    ids, types = draw((2, NUM_TOKENS), 0, VOCAB, 2), draw((2, NUM_TOKENS), 0, 2, 3)
    with torch.no_grad():
        out = model(ids, token_type_ids=types)
    (folder / "hidden.json").write_text(json.dumps(
        {"ids": ids.tolist(), "token_types": types.tolist(),
         "hidden": [round(x, 7) for x in out.last_hidden_state.flatten().tolist()],
         "pooled": [round(x, 7) for x in out.pooler_output.flatten().tolist()]}))


def main():
    if not sys.argv[1:] or "bert_model" in sys.argv[1:]:
        save_hidden()
    for family, (config, dtype, options) in FAMILIES.items():
        if sys.argv[1:] and family not in sys.argv[1:]:
            continue
        folder = HERE / family
        shutil.rmtree(folder, ignore_errors=True)
        kind = AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32).eval()
        randomize(model)
        model.to(dtype).save_pretrained(folder, **options)
        (folder / "generation_config.json").unlink(missing_ok=True)
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        if family in ENCODERS:
            save_masked(folder, model)
            continue
        ids = torch.randint(VOCAB, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            logits = model(ids).logits
        (folder / "logits.json").write_text(json.dumps(
            {"ids": ids.tolist(), "logits": [round(x, 7) for x in logits.flatten().tolist()]}))
        print(family, sorted(p.name for p in folder.iterdir()), f"largest {logits.abs().max():.3f}")


if __name__ == "__main__":
    main()
