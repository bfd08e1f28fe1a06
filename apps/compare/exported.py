#!/usr/bin/env python3
"""Whether transformers reads what was trained here: a tokenizer and a model from a text, and that
model fine-tuned on another text.

    exported.py BUILD/apps TEXT OTHER_TEXT [--folder DIR]

Each is exported and loaded by AutoTokenizer and AutoModelForCausalLM. Then the ids of both texts are
those of tessera-tokenize, the mean loss over the validation windows (the end of the text, in windows
of the context) is the last one of the run, and 40 tokens chosen greedily give the text of
tessera-generate. Needs torch and transformers.
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
        "--special", "<|endoftext|>")
    run(args.apps / "tessera-train", f"--data.text={args.text}", f"--data.tokenizer={folder}/tok",
        "--model.layers=2", "--model.width=64", "--train.steps=60", f"--output.dir={folder}/scratch",
        *settings)
    run(args.apps / "tessera-checkpoint", "export", folder / "scratch", folder / "scratch_hf")
    check(args.apps, args.text, folder / "scratch", folder / "scratch_hf")
    run(args.apps / "tessera-train", f"--model.from={folder}/scratch_hf", f"--data.text={args.other}",
        "--train.steps=20", "--optim.lr=1e-3", f"--output.dir={folder}/tuned", *settings)
    run(args.apps / "tessera-checkpoint", "export", folder / "tuned", folder / "tuned_hf")
    check(args.apps, args.other, folder / "tuned", folder / "tuned_hf")


if __name__ == "__main__":
    main()
