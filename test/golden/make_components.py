"""What every component of Hugging Face's tokenizers does, with several settings each: components.json,
which names all types that the module has, so that a test can tell that apps/text does the same or
refuses the type by name. Usage: make_components.py. Needs tokenizers (0.23.3 made the file)."""

import json
import pathlib

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PROBES = ["", " ", "a", "Héllo  Wörld,ß 12½٣4 don't!", " \tÀ\u0323e\u0301\r\nÅ \u00a0ﬁﬀ①가각 ᄀ\u1161\u11a8か\uff9e",
          "日本語 and\u3000漢字。İstanbul ǅ\u200b\ufeff\x01x\u0085y", "▁a▁▁b c", "__a--b..!?(c)", "ab|cd<pad>",
          "مرحبا Привет नमस्ते\u0300\u0301\u0334\u0345 e\u0345\u0334", "𐐀𝒜🙂👍🏽\U0002f800", "aXbXXc", "1234567 89"]
TOKENS = [[], ["a"], ["Ġhe", "llo", "Ċ", "Ã©"], ["<0xE6>", "<0x97>", "<0xa5>", "x", "<0x20>"],
          ["▁Hello", "▁▁w", "orld", "▁"], ["he", "##llo", "wor", "##ld", ".", "do", "n't", "'", "s", " ,x"],
          ["ab</w>", "c", "d</w>", "e"], ["  a ", " b", "c  "], ["h", "h", "<pad>", "e", "|", "|", "l", "<pad>", "l"],
          ["aXb", "X", "##"]]


def all_normalizers():
    n = normalizers
    for flag in (False, True):
        for accents in (None, False, True):
            yield n.BertNormalizer(clean_text=flag, handle_chinese_chars=not flag, strip_accents=accents,
                                   lowercase=flag)
    yield from (n.BertNormalizer(), n.ByteLevel(), n.Lowercase(), n.NFC(), n.NFD(), n.NFKC(), n.NFKD(),
                n.Nmt(), n.StripAccents(), n.Prepend("▁"), n.Prepend(""), n.Replace(" ", "▁"),
                n.Replace(Regex(r"\s+|[aeiou]"), "_"), n.Replace("aX", ""),
                n.Sequence([]), n.Sequence([n.NFD(), n.StripAccents(), n.Sequence([n.Lowercase()])]))
    yield from (n.Strip(left=left, right=right) for left in (False, True) for right in (False, True))


def all_pre_tokenizers():
    p = pre_tokenizers
    yield from (p.BertPreTokenizer(), p.UnicodeScripts(), p.Whitespace(), p.WhitespaceSplit(),
                p.CharDelimiterSplit("X"), p.CharDelimiterSplit("日"), p.FixedLength(1), p.FixedLength(3))
    yield from (p.Digits(flag) for flag in (False, True))
    yield from (p.ByteLevel(add_prefix_space=space, use_regex=regex, trim_offsets=regex)
                for space in (False, True) for regex in (False, True))
    yield from (p.Metaspace("▁", scheme, flag) for scheme in ("always", "first", "never")
                for flag in (False, True))
    yield p.Metaspace("_")
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        yield p.Punctuation(behavior)
        for invert in (False, True):
            yield p.Split("X", behavior, invert)
            yield p.Split(Regex(r"\p{N}+|\s"), behavior, invert)
            yield p.Split(Regex(r"x*"), behavior, invert)
    yield p.Sequence([p.WhitespaceSplit(), p.Metaspace("▁", "first", True)])
    yield p.Sequence([p.Punctuation(), p.Sequence([p.Digits(True)]), p.ByteLevel(add_prefix_space=True)])
    yield p.Sequence([p.ByteLevel(add_prefix_space=False), p.Split("Ġ", "removed")])


def all_decoders():
    d = decoders
    yield from (d.BPEDecoder(), d.BPEDecoder("X"), d.ByteFallback(), d.ByteLevel(), d.CTC(), d.Fuse(),
                d.Replace("a", ""), d.Replace(Regex("[▁X]"), "_"), d.Strip(" ", 1, 0), d.Strip(" ", 1, 2),
                d.Strip("a", 3, 3), d.Sequence([]))
    yield from (d.Metaspace("▁", scheme, flag) for scheme in ("always", "first", "never")
                for flag in (False, True))
    yield from (d.WordPiece(prefix, flag) for prefix in ("##", "x") for flag in (False, True))
    yield d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])


def all_models():
    m = models
    vocab = {t: i for i, t in enumerate(
        ["[U]", "a", "b", "c", " ", "ab", "##b", "##c", "c</w>", "b</w>", "bc</w>", "abc", "aX", "X",
         "<0xC3>", "<0xA9>", "<0xE6>", "##bc", "é"])}
    merges = [("a", "b"), ("b", "c</w>"), ("a", "X"), ("ab", "c")]
    for unk in (None, "[U]"):
        for fuse in (False, True):
            for fallback in (False, True):
                yield m.BPE(vocab, merges, unk_token=unk, fuse_unk=fuse, byte_fallback=fallback)
    yield m.BPE(vocab, merges, unk_token="[U]", ignore_merges=True)
    yield m.BPE(vocab, merges[1:2], unk_token="[U]", end_of_word_suffix="</w>")
    yield m.BPE(vocab, [("a", "##b"), ("##b", "##c")], unk_token="[U]", continuing_subword_prefix="##")
    yield m.BPE(vocab, merges, unk_token="[U]", dropout=0.0)
    yield m.BPE(vocab, merges, unk_token="[U]", dropout=0.5)
    for limit in (1, 3, 100):
        yield m.WordPiece(vocab=vocab, unk_token="[U]", max_input_chars_per_word=limit)
    yield m.WordPiece(vocab=vocab, unk_token="[U]", continuing_subword_prefix="")
    yield m.WordLevel(vocab=vocab, unk_token="[U]")
    yield m.Unigram([("[U]", 0.0), ("a", -1.0), ("b", -2.0), ("ab", -1.5)], 0)


MODEL_PROBES = ["a", "abc", "ab", "aabbc", "aXbXXc", "\u00e9\u00e9a", "\u65e5b\u65e5", "XX", "bc", "a bc"]


def all_processors():
    x = processors
    pairs = [("<s>", 1), ("</s>", 2)]
    yield from (x.BertProcessing(pairs[1], pairs[0]), x.RobertaProcessing(pairs[1], pairs[0]),
                x.RobertaProcessing(pairs[1], pairs[0], False, False), x.ByteLevel(), x.ByteLevel(False),
                x.TemplateProcessing("$A"), x.TemplateProcessing("<s> $A </s>", "<s> $A $B:1", pairs),
                x.TemplateProcessing("<s> <s> $A:3 </s>", None, pairs),
                x.TemplateProcessing("<s>:7 $0", None, [{"id": "<s>", "ids": [1, 2], "tokens": ["<s>", "</s>"]}]),
                x.Sequence([]), x.Sequence([x.ByteLevel(), x.TemplateProcessing("<s> $A", None, pairs)]))


def config_of(key, part):
    holder = Tokenizer(part if key == "model" else models.BPE())
    if key != "model":
        setattr(holder, key, part)
    return json.loads(holder.to_str())[key]


def attempt(function, argument):
    try:
        return function(argument)
    except BaseException as error:  # a panic, as of Strip on a short token, is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None


def main():
    rows, names = [], {}
    base = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, "a"))

    def processed(part, text):
        base.post_processor = part
        return base.encode(text, add_special_tokens=True).ids

    for key, module, parts, function, probes in (
            ("normalizer", normalizers, all_normalizers(), lambda p, t: p.normalize_str(t), PROBES),
            ("pre_tokenizer", pre_tokenizers, all_pre_tokenizers(),
             lambda p, t: [piece for piece, _ in p.pre_tokenize_str(t)], PROBES),
            ("decoder", decoders, all_decoders(), lambda p, t: p.decode(t), TOKENS),
            ("model", models, all_models(), lambda p, t: [k.id for k in p.tokenize(t)], MODEL_PROBES),
            ("post_processor", processors, all_processors(), processed, ["a"])):
        types = [n for n in dir(module) if isinstance(getattr(module, n), type)]
        base_class = {"normalizer": "Normalizer", "pre_tokenizer": "PreTokenizer", "decoder": "Decoder",
                      "model": "Model", "post_processor": "PostProcessor"}[key]
        names[key] = sorted(set(types) - {base_class, "DecodeStream"})
        for part in parts:
            config = config_of(key, part)
            is_random = config.get("dropout") == 0.5
            rows.append({"key": key, "part": config, "results": None if is_random else [
                attempt(lambda t, part=part: function(part, t), probe) for probe in probes]})
        covered = {row["part"]["type"] for row in rows if row["key"] == key}
        assert covered == set(names[key]) - {"Precompiled"}, (key, covered ^ set(names[key]))
    golden = {"version": tokenizers.__version__, "types": names, "probes": PROBES, "tokens": TOKENS,
              "model_probes": MODEL_PROBES, "rows": rows}
    path = pathlib.Path(__file__).parent / "components.json"
    path.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
