"""Tiny random ...ForSequenceClassification models as transformers saves them: hf_classes/FAMILY, with logits,
loss and, as a model of their own in grads/, gradients of three texts of different lengths, padded on the
right; logits by the mean of the states; and the losses of 20 steps of torch's AdamW on all of TEXTS at once.
Needs torch and transformers. make_hf_classes.py"""

import json
import pathlib
import shutil

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, GPT2Config, Qwen3Config, RobertaConfig

from make_hf import ENCODER, LLAMA, draw, randomize

HERE = pathlib.Path(__file__).parent / "hf_classes"
VOCAB = 256  # bytes
CLASSES = {0: "no", 1: "perhaps", 2: "yes"}
COMMON = dict(id2label=CLASSES, label2id={name: i for i, name in CLASSES.items()})
LENGTHS = [9, 6, 4]
TEXTS = [("yes" * (i % 4 + 1) + "?", 2) if i % 3 == 0 else ("no" + "!" * i, 0) if i % 3 == 1 else
         ("who knows" [:4 + i % 6], 1) for i in range(12)]
FAMILIES = {
    "bert": BertConfig(**ENCODER | {"vocab_size": VOCAB}, **COMMON, max_position_embeddings=24, pad_token_id=0),
    "roberta": RobertaConfig(**ENCODER | {"type_vocab_size": 1, "vocab_size": VOCAB}, **COMMON,
                             max_position_embeddings=26, pad_token_id=1),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=24, n_embd=16, n_layer=2, n_head=4, pad_token_id=0, **COMMON),
    "qwen3": Qwen3Config(**LLAMA | {"vocab_size": VOCAB}, head_dim=8, pad_token_id=0, **COMMON),
}


def padded(rows, pad):
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def logits_of_mean(model, ids, mask):
    states = model.base_model(ids, attention_mask=mask)[0]
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    head = model.classifier if hasattr(model, "classifier") else model.score
    return getattr(head, "out_proj", head)(mean)


def losses_of_training(model, pad):
    ids, mask = padded([list(text.encode()) for text, _ in TEXTS], pad)
    labels = torch.tensor([label for _, label in TEXTS])
    of = lambda decays: [p for p in model.parameters() if (p.dim() > 1) == decays]
    optimizer = torch.optim.AdamW([{"params": of(True), "weight_decay": 0.1},
                                   {"params": of(False), "weight_decay": 0.0}], lr=5e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    for name, config in FAMILIES.items():
        config._attn_implementation = "eager"
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
        randomize(model)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        drawn = draw((len(LENGTHS), max(LENGTHS)), 2, VOCAB, 2).tolist()
        ids, mask = padded([row[:n] for row, n in zip(drawn, LENGTHS)], config.pad_token_id)
        labels = torch.tensor([2, 0, 1])
        out = model(ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        golden = {"ids": ids.tolist(), "lengths": LENGTHS, "labels": labels.tolist(), "loss": out.loss.item(),
                  "logits": out.logits.flatten().tolist(),
                  "mean_logits": logits_of_mean(model, ids, mask).flatten().tolist()}
        gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
        values = {key: p.data for key, p in model.named_parameters()}
        for key, parameter in model.named_parameters():
            parameter.data = gradients[key]
        model.save_pretrained(folder / "grads")
        for key, parameter in model.named_parameters():
            parameter.data = values[key]
        if name in ("bert", "qwen3"):
            golden |= {"texts": TEXTS, "losses": losses_of_training(model, config.pad_token_id)}
        (folder / "logits.json").write_text(json.dumps(golden) + "\n")
        for extra in (folder, folder / "grads"):
            (extra / "generation_config.json").unlink(missing_ok=True)
            (extra / "model.safetensors").chmod(0o644)
        print(name, golden["loss"], golden.get("losses", [0])[-1])


if __name__ == "__main__":
    main()
