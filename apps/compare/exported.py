#!/usr/bin/env python3
"""Whether transformers reads what was trained here: a tokenizer and a model from a text, and that
model fine-tuned on another text and on conversations.

    ninja -C BUILD test/chat_logits
    exported.py BUILD/apps TEXT OTHER_TEXT [--folder DIR]

Each is exported and loaded by AutoTokenizer and AutoModelForCausalLM. Then the ids of both texts are
those of tessera-tokenize, the mean loss over the validation windows (the end of the text, in windows
of the context) is the last one of the run, and 40 tokens chosen greedily give the text of
tessera-generate. Of conversations apply_chat_template gives the ids that were trained on, marks the same
of them as learned, and the logits are those of the run's own model. Needs torch and transformers.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CONTEXT, VAL_FRACTION = 64, 0.1


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr[-2000:])
    return done.stdout


def check(apps, text, out, exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    content = pathlib.Path(text).read_text()
    ids = tokenizer(content, add_special_tokens=False)["input_ids"]
    ours = [int(i) for i in run(apps / "tessera-tokenize", "ids", text, "--tokenizer", exported).split()]
    assert ids == ours, "other ids"
    assert tokenizer.decode(ids) == content
    # The validation windows: of the last tokens, the last one short.
    kept = int(len(ids) * (1 - VAL_FRACTION))
    val = torch.tensor(ids[kept:])
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(val) - 1, CONTEXT):
            window = val[begin:begin + CONTEXT + 1]
            logits = model(window[None, :-1]).logits[0].double()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    steps = [json.loads(line) for line in open(out / "metrics.jsonl")]
    loss = steps[-1]["val_loss"]
    difference = abs(total / count - loss) / loss
    assert difference < 1e-5, (total / count, loss)
    # Greedy, within the context.
    prompt = content[:30]
    before = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        row = before
        for _ in range(40):
            row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], 1)
    expected = prompt + tokenizer.decode(row[0])[len(tokenizer.decode(before[0])):]
    said = run(apps / "tessera-generate", "--checkpoint", out, "--prompt", prompt, "--tokens", 40,
               "--temperature", 0, "--device", "cpu")
    assert said == expected + "\n", (said, expected)
    print(f"{out.name}: {len(ids)} ids are the same, validation loss {loss:.6f} to {difference:.1e}, "
          f"40 greedy tokens are the same")


TEMPLATE = """{%- for m in messages -%}
  {{- '<|' + m.role + '|>' -}}
  {%- if m.role == 'assistant' -%}
    {%- generation -%}{{- m.content + '<|endoftext|>' -}}{%- endgeneration -%}
  {%- else -%}
    {{- m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def write_chats(path, text):
    """Conversations of one or two turns, so short that they fit: how a line goes on."""
    lines = [line.split() for line in pathlib.Path(text).read_text().splitlines()]
    turns = [(" ".join(line[:2]), " ".join(line[2:6])) for line in lines if len(line) > 2][:120]
    with open(path, "w") as file:
        while turns:
            count = 1 + len(turns) % 2
            taken, turns = turns[:count], turns[count:]
            file.write(json.dumps({"messages": [
                {"role": role, "content": text}
                for turn in taken for role, text in zip(("user", "assistant"), turn)]}) + "\n")


def check_chats(apps, out, exported, chats):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in open(chats)]
    ours = [json.loads(line) for line in
            run(apps.parent / "test/chat_logits", out, chats).splitlines()]
    assert len(ours) == len(rows)
    num_ids = num_trained = 0
    largest = difference = 0.0
    for row, our in zip(rows, ours):
        rendered = tokenizer.apply_chat_template(row["messages"], return_dict=True,
                                                 return_assistant_tokens_mask=True)
        ids, trained = rendered["input_ids"], rendered["assistant_masks"]
        assert our["ids"] == ids, "other ids"
        assert our["trained"] == trained, "another part is learned"
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        theirs, own = logits.double(), torch.tensor(our["logits"], dtype=torch.float64)
        assert theirs.shape == own.shape
        largest = max(largest, theirs.abs().max().item())
        difference = max(difference, (theirs - own).abs().max().item())
        num_ids, num_trained = num_ids + len(ids), num_trained + sum(trained)
    assert difference < 1e-5 * largest, (difference, largest)
    print(f"{out.name}: {len(rows)} conversations, {num_ids} ids and the {num_trained} that are learned are "
          f"the same, {num_ids * own.shape[1]} logits, the largest {largest:.2f}, to {difference:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("apps", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("other", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path)
    args = parser.parse_args()
    folder = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="tessera-exported-"))
    settings = [f"--model.context={CONTEXT}", f"--data.val_fraction={VAL_FRACTION}", "--device=cpu",
                "--train.micro_batch=4", "--train.log_every=1000"]
    run(args.apps / "tessera-tokenize", "train", args.text, "--vocab=600", f"--out={folder}/tok",
        "--special", "<|endoftext|>", "--special", "<|user|>", "--special", "<|assistant|>")
    run(args.apps / "tessera-train", f"--data.text={args.text}", f"--data.tokenizer={folder}/tok",
        "--model.layers=2", "--model.width=64", "--train.steps=60", f"--output.dir={folder}/scratch",
        *settings)
    run(args.apps / "tessera-checkpoint", "export", folder / "scratch", folder / "scratch_hf")
    check(args.apps, args.text, folder / "scratch", folder / "scratch_hf")
    run(args.apps / "tessera-train", f"--model.from={folder}/scratch_hf", f"--data.text={args.other}",
        "--train.steps=20", "--optim.lr=1e-3", f"--output.dir={folder}/tuned", *settings)
    run(args.apps / "tessera-checkpoint", "export", folder / "tuned", folder / "tuned_hf")
    check(args.apps, args.other, folder / "tuned", folder / "tuned_hf")
    (folder / "chat.jinja").write_text(TEMPLATE)
    write_chats(folder / "chats.jsonl", args.other)
    run(args.apps / "tessera-train", f"--model.from={folder}/scratch_hf", f"--data.chat={folder}/chats.jsonl",
        f"--data.chat_template={folder}/chat.jinja", "--train.steps=60", "--optim.lr=1e-3",
        f"--output.dir={folder}/chat", *settings)
    run(args.apps / "tessera-checkpoint", "export", folder / "chat", folder / "chat_hf")
    check_chats(args.apps, folder / "chat", folder / "chat_hf", folder / "chats.jsonl")


if __name__ == "__main__":
    main()
