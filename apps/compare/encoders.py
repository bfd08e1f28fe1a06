"""Tokens a CPU second of tessera-tokenize beside tiktoken, gigatoken and tokenizers, one thread each, in
turns: encoders.py TESSERA_TOKENIZE VOCAB_DIR WARM_UP TEXT [TURNS [TOOL ...]]. VOCAB_DIR has GPT-2's
vocab.bpe and encoder.json. Each process loads the vocabulary, encodes WARM_UP, then TEXT, of which the
CPU seconds count; the numbers of tokens must be equal. With `train` in place of VOCAB_DIR: 8,192 tokens
learned from TEXT by each trainer, CPU seconds of the whole process. Needs the tools from PyPI."""

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
ONE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def encode_tiktoken(folder, warm_up, text):
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    ranks = data_gym_to_mergeable_bpe_ranks(folder + "/vocab.bpe", folder + "/encoder.json")
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 50256})
    encoding.encode_ordinary(read(warm_up))
    data = read(text)
    start = time.process_time()
    count = len(encoding.encode_ordinary(data))
    return count, time.process_time() - start


def gpt2(folder):
    import tokenizers
    with open(folder + "/vocab.bpe", encoding="utf-8") as file:
        merges = [tuple(line.split(" ")) for line in file.read().split("\n")[1:] if line]
    model = tokenizers.models.BPE(json.loads(read(folder + "/encoder.json")), merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def encode_gigatoken(folder, warm_up, text):
    import gigatoken
    tokenizer = gigatoken.Tokenizer(gpt2(folder))
    tokenizer.encode(read(warm_up))
    data = read(text)
    start = time.process_time()
    count = len(tokenizer.encode(data))
    return count, time.process_time() - start


def encode_tokenizers(folder, warm_up, text):
    tokenizer = gpt2(folder)
    tokenizer.encode_batch_fast([read(warm_up)])
    data = read(text)
    start = time.process_time()
    count = len(tokenizer.encode_batch_fast([data])[0].ids)
    return count, time.process_time() - start


def encode_tessera(program, folder, warm_up, text):
    line = subprocess.run([program, "bench", "--tokenizer=" + folder, "--threads=1",
                           "--warm-up=" + warm_up, text], check=True, stdout=subprocess.PIPE,
                          text=True).stdout
    count, rate = re.search(r"(\d+) tokens, .* ([\d.]+) MB a CPU", line).groups()
    return int(count), os.path.getsize(text) / float(rate) / 1e6


def train(tool, text):
    data = read(text)
    if tool == "rustbpe":
        import rustbpe
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator([data], 8192, pattern=GPT4)
    else:
        import tokenizers
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.train_from_iterator([data], tokenizers.trainers.BpeTrainer(
            vocab_size=8192, show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return 8192


def one(program, tool, folder, warm_up, text):
    """Tokens and CPU seconds of a fresh process."""
    if folder == "train" and tool == "tessera":
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([program, "train", text, "--format=text", "--out=/tmp/tessera-trained",
                        "--vocab=8192"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 8192, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if tool == "tessera":
        return encode_tessera(program, folder, warm_up, text)
    out = subprocess.run([sys.executable, __file__, "--one", tool, folder, warm_up, text],
                         check=True, stdout=subprocess.PIPE, text=True,
                         env={**os.environ, **ONE}).stdout
    count, seconds = out.split()[-2:]
    return int(count), float(seconds)


def main():
    if sys.argv[1] == "--one":
        tool, folder, warm_up, text = sys.argv[2:]
        if folder == "train":
            start = time.process_time()
            print(train(tool, text), time.process_time() - start)
        else:
            print(*{"tiktoken": encode_tiktoken, "gigatoken": encode_gigatoken,
                    "tokenizers": encode_tokenizers}[tool](folder, warm_up, text))
        return
    program, folder, warm_up, text = sys.argv[1:5]
    turns = int(sys.argv[5]) if len(sys.argv) > 5 else 5
    tools = sys.argv[6:] or ["tessera", "tiktoken", "tokenizers"]
    seconds, counts = {tool: [] for tool in tools}, set()
    for _ in range(turns):
        for tool in tools:
            count, spent = one(program, tool, folder, warm_up, text)
            counts.add(count)
            seconds[tool].append(spent)
    assert len(counts) == 1, counts
    for tool in tools:
        middle = statistics.median(seconds[tool])
        print(f"{tool}: {middle:.3f} CPU s, {os.path.getsize(text) / middle / 1e6:.1f} MB/s, "
              f"{middle / statistics.median(seconds[tools[0]]):.2f} x {tools[0]}")


if __name__ == "__main__":
    main()
