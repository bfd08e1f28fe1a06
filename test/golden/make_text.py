"""Ids and texts that Hugging Face's tokenizers gives with small vocabularies of every kind that
apps/text reads, and what its parts make of all code points: text.json, with which the tests compare
ours. Usage: make_text.py. Needs tokenizers (0.23.3 made the file)."""

import json
import pathlib
import random

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

ENGLISH = """The tokenizer reads a file of text and cuts it into words; each word becomes the ids of
its parts. It's what they've said: don't cut where you'd join, we'll see, I'm sure. In 1999 there
were 12345 of them, at 3.14 each.

\tif (value == nullptr) {\r\n\t\treturn std::string("naïve café");  // done
\t}
Привет, мир! 日本語の文章です。 한국어 문장. ١٢٣ ½ Ⅷ ǅ ſ K
"""
GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
         r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BOTH = r"\b\w{2,3}\b|\d+(?=\D)|[^\W\d_]{1,2}+|(?<!a)[\x21-\x2f]+?|\u00e9$|^."


def fuzzed(count, seed=20261130):
    """Strings that mix what tokenizers treat apart."""
    rng = random.Random(seed)
    pieces = ENGLISH.split(" ") + ["<|begin|>", "<|end|>", "<s>", "</s>", "<unk>", "[MASK]", " lead",
                                   "trail  ", "alone", "İé", "AbC", "abc", "'S", "'ſ", "'LL", "'d"]
    spaces = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "\u2028", "\x0b", "\x1c",
              "\u200b", "\ufeff", "\u180e"]
    ranges = [(0x21, 0x7f), (0xa0, 0x250), (0x300, 0x370), (0x600, 0x700), (0x900, 0xe00),
              (0x1100, 0x1200), (0x1e00, 0x2000), (0x2100, 0x2c00), (0x4e00, 0x4f00),
              (0xac00, 0xac80), (0xf900, 0xfb00), (0x1d400, 0x1d800), (0x1f300, 0x1f700),
              (0x2f800, 0x2fa20), (0, 0xd800), (0xe000, 0x110000)]
    for _ in range(count):
        out = ""
        for _ in range(rng.randrange(9)):
            kind = rng.random()
            if kind < 0.4:
                out += rng.choice(pieces) + rng.choice(["", " "])
            elif kind < 0.55:
                out += rng.choice(spaces) * rng.choice([1, 1, 2, 3])
            elif kind < 0.65:
                out += str(rng.randrange(10 ** rng.randrange(1, 9)))
            else:
                out += "".join(chr(rng.randrange(*rng.choice(ranges)))
                               for _ in range(rng.choice([1, 2, 4])))
        yield out


def trained(tokenizer, trainer):
    tokenizer.train_from_iterator([ENGLISH] * 3, trainer)
    return tokenizer


def byte_level(pre_tokenizer, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return trained(tokenizer, trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|begin|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_fallback(pre_tokenizer, normalizer, decoder, fuse=True, fallback=True):
    draft = Tokenizer(models.BPE(unk_token="<unk>"))
    draft.normalizer = normalizers.Replace(" ", "▁")
    draft.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256 if fallback else 0)]
    trained(draft, trainers.BpeTrainer(vocab_size=len(specials) + 160, special_tokens=specials,
                                       limit_alphabet=60, show_progress=False))
    model = json.loads(draft.to_str())["model"]
    tokenizer = Tokenizer(models.BPE(model["vocab"], [tuple(m) for m in model["merges"]],
                                     unk_token="<unk>", fuse_unk=fuse, byte_fallback=fallback))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return tokenizer


def word_piece(normalizer, pre_tokenizer, added=(), post_processor=None):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials,
                                                 show_progress=False))
    tokenizer.post_processor = post_processor or processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.add_tokens(list(added))
    return tokenizer


def kinds():
    sentence_piece = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                               decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    yield "gpt2", byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    yield "prefix space", byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    llama3 = byte_level(split(GPT4), ignore_merges=True)
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(), processors.TemplateProcessing(
            single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", 0)])])
    yield "llama3", llama3
    yield "qwen2", byte_level(split(GPT4.replace("{1,3}", "")), normalizers.NFC())
    yield "two digits", byte_level(split(GPT4.replace("{1,3}", "{1,2}")))
    yield "o200k", byte_level(split(GPT4O))
    yield "tekken", byte_level(split(TEKKEN))
    yield "bloom", byte_level(split(BLOOM))
    yield "smollm", byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    yield "deepseek", byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
        pre_tokenizers.Split(Regex(DEEPSEEK), "isolated"), whole]))
    yield "regex", byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(BOTH), "merged_with_next"),
        pre_tokenizers.Split("e", "merged_with_previous"), whole]),
        normalizers.Replace(Regex(r"\s{2,}"), " "))
    yield "llama2", byte_fallback(None, sentence_piece, llama)
    yield "llama2 without bytes", byte_fallback(None, sentence_piece, llama, False, False)
    yield "mistral", byte_fallback(
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False), None, llama)
    yield "metaspace", byte_fallback(pre_tokenizers.Metaspace(), None, decoders.Metaspace())
    yield "bert", word_piece(normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())
    yield "bert cased", word_piece(
        normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer(), (),
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)))
    yield "words", word_piece(normalizers.Sequence([
        normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
        pre_tokenizers.Whitespace(), (),
        processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)))
    yield "punctuation", word_piece(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
                                 pre_tokenizers.Punctuation("contiguous"),
                                 pre_tokenizers.Digits()]))
    yield "added", word_piece(
        normalizers.NFD(), pre_tokenizers.Sequence([
            pre_tokenizers.CharDelimiterSplit(" "), pre_tokenizers.Punctuation("merged_with_next")]),
        [AddedToken("lead", lstrip=True), AddedToken("trail", rstrip=True),
         AddedToken("alone", single_word=True), AddedToken("İé", normalized=True),
         AddedToken("is w", normalized=False)])
    yield "lengths", word_piece(
        normalizers.Lowercase(), pre_tokenizers.Sequence([
            pre_tokenizers.FixedLength(7), pre_tokenizers.Punctuation("merged_with_previous")]),
        [AddedToken("AbC", special=True, normalized=True), AddedToken("<s>", normalized=False)])
    clip = Tokenizer(models.BPE(unk_token="<u>", end_of_word_suffix="</w>"))
    clip.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    clip.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True)
    clip.decoder = decoders.BPEDecoder()
    yield "clip", trained(clip, trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<u>"], end_of_word_suffix="</w>", limit_alphabet=50,
        show_progress=False))
    marked = Tokenizer(models.BPE(unk_token="<u>", continuing_subword_prefix="##"))
    marked.pre_tokenizer = pre_tokenizers.Whitespace()
    yield "prefix", trained(marked, trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<u>"], continuing_subword_prefix="##", limit_alphabet=50,
        show_progress=False))
    level = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    yield "word level", trained(level, trainers.WordLevelTrainer(
        vocab_size=40, special_tokens=["[UNK]"], show_progress=False))


def fnv(data, value=0xcbf29ce484222325):
    """64-bit FNV-1a, from `value` on."""
    for byte in data:
        value = (value ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return value


def all_characters():
    """For each part that looks at characters the hash of what it makes of all of them."""
    lines = [chr(c) for c in range(0x110000) if not 0xd800 <= c < 0xe000 and c != 10]
    texts = ["\n".join("a" + c + "a" for c in lines[i:i + 1024])
             for i in range(0, len(lines), 1024)]

    def hash_of(function):
        value = fnv(b"")
        for text in texts:
            value = fnv(function(text).encode(), value)
        return value

    for name, part in [("NFC", normalizers.NFC()), ("NFD", normalizers.NFD()),
                       ("NFKC", normalizers.NFKC()), ("NFKD", normalizers.NFKD()),
                       ("Lowercase", normalizers.Lowercase()),
                       ("StripAccents", normalizers.StripAccents()),
                       ("BertNormalizer", normalizers.BertNormalizer())]:
        holder = Tokenizer(models.BPE())
        holder.normalizer = part
        config = json.loads(holder.to_str())["normalizer"]
        yield name, "normalizer", config, hash_of(part.normalize_str)
    for name, part in [("Digits", pre_tokenizers.Digits(True)),
                       ("Punctuation", pre_tokenizers.Punctuation()),
                       ("Whitespace", pre_tokenizers.Whitespace()),
                       ("WhitespaceSplit", pre_tokenizers.WhitespaceSplit()),
                       ("BertPreTokenizer", pre_tokenizers.BertPreTokenizer()),
                       ("gpt2", pre_tokenizers.Split(Regex(GPT2), "isolated")),
                       ("gpt4", pre_tokenizers.Split(Regex(GPT4), "isolated")),
                       ("gpt4o", pre_tokenizers.Split(Regex(GPT4O), "isolated")),
                       (r"\w", pre_tokenizers.Split(Regex(r"\w"), "isolated")),
                       (r"\d", pre_tokenizers.Split(Regex(r"\d"), "isolated")),
                       (r"\p{S}", pre_tokenizers.Split(Regex(r"[\p{S}\p{P}]"), "isolated"))]:
        holder = Tokenizer(models.BPE())
        holder.pre_tokenizer = part
        config = json.loads(holder.to_str())["pre_tokenizer"]
        yield name, "pre_tokenizer", config, hash_of(lambda text, part=part: "\0".join(
            piece for piece, _ in part.pre_tokenize_str(text)))


def main():
    texts = ["", " ", "a", ENGLISH] + list(fuzzed(100))
    golden = {"texts": texts, "kinds": {}, "characters": []}
    for name, tokenizer in kinds():
        ids = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        golden["kinds"][name] = {
            "tokenizer": json.loads(tokenizer.to_str()),
            "ids": ids,
            "template": tokenizer.encode("a b", add_special_tokens=True).ids,
            "decoded": [tokenizer.decode(i, skip_special_tokens=False) for i in ids],
            "skipped": [tokenizer.decode(i, skip_special_tokens=True) for i in ids]}
    for name, key, config, value in all_characters():
        golden["characters"].append({"name": name, "key": key, "part": config, "fnv": str(value)})
    path = pathlib.Path(__file__).parent / "text.json"
    path.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
