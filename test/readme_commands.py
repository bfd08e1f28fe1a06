#!/usr/bin/env python3
"""Runs the commands of all README files and guides, with small substitutes for sizes and files.

Every command of a fenced block without a language is run in order, a directory a page, after the
substitutions below, or is listed with the reason why it cannot run here. One that is neither, a line
that is no command, a program that is elsewhere, a reason that no command needs, and a command that
fails are failures. Links between pages, and to their headings, have to be right, and so have keys of
configurations and their values.
Usage: readme_commands.py ROOT BUILD MPIRUN
"""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

# What stands for what: (in a command that matches, this, becomes that).
SUBSTITUTES = [
    ("", r"^mpirun ", "{mpirun} --oversubscribe "),  # fewer cores than ranks
    ("tessera-train", r"--train\.steps=\d+", "--train.steps=3"),
    ("bash apps/quickstart.sh", r"$", " --programs=build/apps --device=cpu --train.steps=2"
     " --model.layers=1 --model.width=64 --model.heads=2 --model.context=64 --train.micro_batch=2"
     " --train.eval_batches=1 --sample.tokens=3"),
    ("--profile.steps", r"--profile\.steps=[\d.]+", "--profile.steps=2..3"),
    ("configs/fsdp_", r"$", " --device=cpu --train.steps=2 --train.grad_accum_steps=2 --train.eval_every=0"
     " --train.eval_batches=1 --model.layers=1 --model.width=64 --model.heads=2 --model.kv_heads=1"
     " --model.context=64"),
    ("bench-collectives", r"--max=\w+", "--max=64K --runs=1 --device=cpu"),
    ("tessera-train configs/llama_tiny", r"$", " --device=cpu --train.log_every=1"),
    ("--checkpoint.every=100", r"$", " --train.steps=4"),
    ("tessera-train", r"--checkpoint\.every=\d+", "--checkpoint.every=2"),
    ("--model.from", r"--model\.context=\d+", "--model.context=8"),
    ("configs/lora.toml", r"$", " --train.global_batch=0 --train.eval_every=0"),
    ("--model.from", r"$", " --device=cpu --train.steps=3 --train.micro_batch=2"),
    ("tessera-tokenize train", r"--vocab=\d+", "--vocab=270"),
    ("--data.tokenizer=tok", r"$", " --train.steps=3"),
    ("tessera-generate", r"$", " --device cpu --tokens 5"),
]

# What cannot run here, and why.
NOT_RUN = {
    r"bash apps/chat\.sh": "apps/chat_script is it at a small size",
    r"bash test/run\.sh": "runs this suite",
    r"tessera-bench-fsdp (memory|batch)": "is a test of its own (apps/bench/fsdp)",
    r"tessera-bench-fsdp overlap": "measures a quiet machine",
    r"python3 apps/compare/": "needs PyTorch",
    r"meson install|^export |g\+\+|-n 2 (mlp|own_trainer) |custom_op": "is a test of its own (apps/install)",
    r"--device=cuda": "needs a GPU",
    r"test/gpu/bundle\.sh|tessera-gpu/run\.sh": "needs nvcc and a GPU",
}


def pages(root):
    for folder, dirs, files in os.walk(root):
        dirs[:] = sorted(d for d in dirs if not d.startswith((".", "build", "out")))
        for name in sorted(files):
            if name.endswith(".md"):
                yield os.path.join(folder, name)


def commands(path):
    """The commands of the fenced blocks without a language, continued lines joined, no comments."""
    fence, block = None, ""
    for line in open(path, encoding="utf-8"):
        line = line.rstrip("\n")
        if line.startswith("```"):
            fence, block = (line if fence is None else None), ""
            continue
        if fence != "```":
            continue
        block += line
        if block.endswith("\\"):
            block = block[:-1]
            continue
        command = re.sub(r"\s+#\s.*$", "", block).strip()
        block = ""
        if command and not command.startswith("#"):
            yield command


def anchors(path):
    """The headings of a page as a link names them."""
    text = re.sub(r"^```.*?^```", "", open(path, encoding="utf-8").read(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def broken_links(path):
    text = re.sub(r"^```.*?^```", "", open(path, encoding="utf-8").read(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if not os.path.exists(target):
            yield "%s: there is no %s" % (path, link)
        elif anchor and anchor not in anchors(target):
            yield "%s: no heading is %s" % (path, link)


def known_keys(train):
    """Each key of a configuration, and the words that it takes (none: anything)."""
    text = subprocess.run([train, "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    keys = {}
    for key, value in re.findall(r"^  --(\w+\.\w+) .*\n +(.*)$", text, re.MULTILINE):
        words = re.match(r"one of (.*?);", value)
        keys[key] = words.group(1).split(", ") if words else []
    return keys


def wrong_keys(path, keys):
    sections = "|".join(sorted({key.split(".")[0] for key in keys}))
    text = re.sub(r"^```.*?^```", "", open(path, encoding="utf-8").read(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", text):
        if "[[" in span or span.startswith("unknown key"):
            continue
        for key, value in re.findall(r"(?<![\w./-])(?:--)?((?:%s)\.[a-z_0-9]+)\b(?![/.(])(?: ?= ?\"?(\w+))?"
                                     % sections, span):
            if key.endswith((".json", ".safetensors")):
                continue
            if key not in keys:
                yield "%s: `%s`: there is no key %s" % (path, span, key)
            elif value and keys[key] and value not in keys[key] and not value.isupper():
                yield "%s: `%s`: %s is not %s" % (path, span, key, value)


def prepare(folder, root, build):
    for name, target in [("build", build), ("configs", os.path.join(root, "configs"))]:
        os.symlink(target, os.path.join(folder, name))
    os.mkdir(os.path.join(folder, "apps"))  # what quickstart.sh looks for beside itself
    for name in ("quickstart.sh", "mpirun.sh"):
        shutil.copy(os.path.join(root, "apps", name), os.path.join(folder, "apps"))
    for name in ("core", "kernels", "nn", "optim", "dist", "test"):  # without bible-kjv, its text
        os.mkdir(os.path.join(folder, name))
    shutil.copy(os.path.join(root, "core/tensor.h"), os.path.join(folder, "core"))
    model = os.path.join(folder, "Qwen3-0.6B")
    shutil.copytree(os.path.join(root, "test/golden/hf/qwen3"), model)
    with open(os.path.join(model, "tokenizer.json"), "w") as file:  # of 40 ids, as the model has
        json.dump({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"},
                                     "behavior": "Isolated", "invert": False},
                   "decoder": {"type": "Fuse"},
                   "model": {"type": "WordLevel", "unk_token": "?", "vocab": {
                       c: i for i, c in enumerate("?\n 0123456789abcdefghiklmnoprstuvwyI+=$")}}}, file)
    with open(os.path.join(model, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "$",
                   "chat_template": "{% for m in messages %}{{ m.content }}"
                                    "{{ '=' if m.role == 'user' else eos_token }}{% endfor %}"}, file)
    with open(os.path.join(folder, "chats.jsonl"), "w") as chats:
        for i in range(100):
            a, b = i % 5, i % 4
            chats.write(json.dumps({"prompt": "%d+%d" % (a, b), "completion": str(a + b)}) + "\n")
    with open(os.path.join(folder, "val.jsonl"), "w") as texts:
        texts.write(json.dumps({"text": "In the end"}) + "\n")
    with open(os.path.join(folder, "hellaswag.jsonl"), "w") as tasks:
        tasks.write(json.dumps({"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "label": "1",
                                "endings": list("defg")}) + "\n")
    with open(os.path.join(folder, "book.txt"), "w") as book:
        book.writelines("In the beginning was line %d\n" % i for i in range(400))
    tokens = [i * i % 40 for i in range(600)]
    with open(os.path.join(folder, "train_000.bin"), "wb") as shard:
        shard.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        shard.write(struct.pack("<%dH" % len(tokens), *tokens))


def main():
    root, build, mpirun = sys.argv[1:]
    failures, used = [], set()
    environment = dict(os.environ, OMP_WAIT_POLICY="passive")
    if os.getuid() == 0:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    environment["MPIRUN_FLAGS"] = "--oversubscribe"
    keys = known_keys(os.path.join(build, "apps/tessera-train"))
    if len(keys) < 150 or not keys.get("fsdp.strategy"):
        failures.append("--help has %d keys" % len(keys))
    for path in pages(root):
        failures += broken_links(path)
        failures += wrong_keys(path, keys)
        page = list(commands(path))
        if not page:
            continue
        with tempfile.TemporaryDirectory() as folder:
            prepare(folder, root, build)
            for command in page:
                for program in re.findall(r"\bbuild/[\w./-]*tessera-[\w-]+", command):
                    if not os.path.exists(os.path.join(folder, program)):
                        failures.append("%s: there is no %s" % (path, program))
                reasons = [pattern for pattern in NOT_RUN if re.search(pattern, command)]
                if reasons:
                    used.update(reasons)
                    print("not run (%s): %s" % (NOT_RUN[reasons[0]], command))
                    continue
                ranks = re.search(r"^mpirun .*-n (\d+)", command)
                if ranks and int(ranks.group(1)) > 2:
                    failures.append("%s: more ranks than the 2 cores that everyone has" % command)
                run = command
                for where, old, new in SUBSTITUTES:
                    if where in command:
                        run = re.sub(old, new.format(mpirun=mpirun), run, count=1)
                print("+ " + run, flush=True)
                if not re.search(r"build/apps/[\w/]*tessera-|^bash apps/quickstart\.sh |^cmp ", run):
                    failures.append("%s: %s: neither known nor listed as not run" % (path, command))
                    continue
                result = subprocess.run(["bash", "-c", run], cwd=folder, env=environment,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, errors="replace")
                if result.returncode != 0:
                    failures.append("%s: status %d: %s\n%s" % (path, result.returncode, run,
                                                               result.stdout[-2000:]))
    for pattern in sorted(set(NOT_RUN) - used):
        failures.append("%s is listed as not run, but no page has such a command" % pattern)
    for failure in failures:
        print(failure)
    print("%d failures" % len(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
