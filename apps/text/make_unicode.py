"""Writes unicode_data.cc: the character properties, cases and normal forms that Hugging Face's
`tokenizers` has, asked of the installed module for every code point (its parts follow different
versions of Unicode, so no table of one version is right). Usage:

    python3 apps/text/make_unicode.py [--check]

With --check nothing is written: the exit status says whether the file is what the module gives.
Needs tokenizers."""

import pathlib
import sys

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TEXT = "".join(map(chr, CODES))
CATEGORIES = ["Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
              "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs",
              "Co", "Cn"]


def matched(pattern):
    """The code points that a regular expression's class matches."""
    found = set()
    split = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), "removed", invert=True)
    for piece, _ in split.pre_tokenize_str(TEXT):
        found.update(map(ord, piece))
    return found


def alone(pre_tokenizer):
    """The code points that a pre-tokenizer cuts off from letters on both sides."""
    found = set()
    for start in range(0, len(CODES), 4096):
        chunk = CODES[start:start + 4096]
        pieces = pre_tokenizer.pre_tokenize_str("a" + "a".join(map(chr, chunk)) + "a")
        found.update(ord(p[0]) for p, _ in pieces if len(p) == 1 and p != "a")
    return found


def removed(pre_tokenizer):
    """The code points that a pre-tokenizer drops."""
    kept = set()
    for piece, _ in pre_tokenizer.pre_tokenize_str(TEXT):
        kept.update(map(ord, piece))
    return set(CODES) - kept


def mapped(normalizer, between="\n"):
    """What a normalizer makes of each code point alone, where that is another text."""
    out = {}
    for start in range(0, len(CODES), 4096):
        chunk = [c for c in CODES[start:start + 4096] if chr(c) != between]
        results = normalizer.normalize_str(between.join(map(chr, chunk))).split(between)
        assert len(results) == len(chunk), hex(chunk[0])
        out.update((c, r) for c, r in zip(chunk, results) if r != chr(c))
    return out


def combining_classes(nfd):
    """Small numbers, 0 for starters, in the order of the canonical combining classes."""
    def swaps(a, b):
        return nfd("a" + chr(a) + chr(b)) == "a" + chr(b) + chr(a)

    # U+0334 has the lowest class (overlays), U+0345 the highest.
    decomposed = mapped(normalizers.NFD())
    marks = [c for c in CODES if c not in decomposed and (swaps(c, 0x334) or swaps(0x345, c))]
    marks += [0x345] if 0x345 not in marks else []
    classes = []  # lists of one class, ascending
    for c in marks:
        low, high = 0, len(classes)
        while low < high:
            middle = (low + high) // 2
            if swaps(c, classes[middle][0]):
                low = middle + 1
            else:
                high = middle
        if low < len(classes) and not swaps(classes[low][0], c):
            classes[low].append(c)
        else:
            classes.insert(low, [c])
    return {c: i + 1 for i, same in enumerate(classes) for c in same}


def runs(values):
    """(first, value) of each stretch of equal values over all code points."""
    out = []
    for c in range(0x110000):
        value = values(c)
        if not out or out[-1][1] != value:
            out.append((c, value))
    return out


def array(kind, name, numbers):
    lines, line = [], "   "
    for number in numbers:
        text = f" {number}," if number < 10 else f" {number:#x},"
        if len(line) + len(text) > 100:
            lines.append(line)
            line = "   "
        line += text
    lines.append(line)
    return (f"const {kind} {name}[] = {{\n" + "\n".join(lines) + "\n};\n"
            f"const size_t {name}Count = sizeof({name}) / sizeof({name}[0]);\n")


def make():
    category = {}
    for index, name in enumerate(CATEGORIES):
        if name not in ("Cs", "Cn"):
            for c in matched(rf"\p{{{name}}}"):
                assert category.setdefault(c, index) == index, hex(c)
    unassigned = CATEGORIES.index("Cn")
    assert matched(r"\p{Cn}") == set(CODES) - set(category)
    nfd, nfc, nfkd = (mapped(n) for n in (normalizers.NFD(), normalizers.NFC(), normalizers.NFKD()))
    clean = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=False,
                                       strip_accents=False, lowercase=False)
    cleaned = mapped(clean, "a")
    flags = [
        matched(r"\s"),
        matched(r"\w"),
        matched(r"\d"),
        removed(pre_tokenizers.WhitespaceSplit()),
        word_characters(),
        alone(pre_tokenizers.Digits(True)),
        alone(pre_tokenizers.Punctuation()),
        {c for c, r in cleaned.items() if r == ""},
        {c for c, r in cleaned.items() if r == " "} | {0x20},
        {c for c, r in mapped(normalizers.StripAccents()).items() if r == ""},
        bert_accents(),
        alone(pre_tokenizers.BertPreTokenizer()),
    ]
    values = {}

    def value(c):
        key = (category.get(c, unassigned), *(c in f for f in flags))
        return values.setdefault(key, len(values))

    property_runs = runs(value)
    assert len(values) < 256
    kinds = [key[0] | sum(bit << (5 + i) for i, bit in enumerate(key[1:])) for key in values]

    classes = combining_classes(normalizers.NFD().normalize_str)
    class_runs = runs(lambda c: classes.get(c, 0))

    hangul = range(0xAC00, 0xAC00 + 11172)
    canonical = [(c, r) for c, r in sorted(nfd.items()) if c not in hangul]
    compatible = [(c, r) for c, r in sorted(nfkd.items()) if c not in hangul and nfd.get(c) != r]
    compose = normalizers.NFC().normalize_str
    pairs = []
    for c, r in canonical:
        if len(r) >= 2 and compose(r) == chr(c):
            first = compose(r[:-1])
            if len(first) == 1 and compose(first + r[-1]) == chr(c):
                pairs.append((ord(first), ord(r[-1]), c))
            else:  # an accent that goes before another in order
                raise AssertionError(hex(c))
    lower = sorted(mapped(normalizers.Lowercase()).items())
    assert all(len(r) == 1 for c, r in lower if c != 0x130), "a longer lower case"

    def decompositions(items):
        return [n for c, r in items for n in (c, len(r), *map(ord, r))]

    head = (f'#include "apps/text/unicode_data.h"\n\n'
            f"// Made by make_unicode.py from tokenizers {tokenizers.__version__}; do not edit.\n\n"
            "namespace tessera::text::unicode_data {\n\n// clang-format off\n")
    return head + "\n".join([
        array("uint32_t", "kPropertyRuns", [n for run in property_runs for n in run]),
        array("uint32_t", "kPropertyKinds", kinds),
        array("uint32_t", "kClassRuns", [n for run in class_runs for n in run]),
        array("uint32_t", "kCanonical", decompositions(canonical)),
        array("uint32_t", "kCompatible", decompositions(compatible)),
        array("uint32_t", "kPairs", [n for pair in pairs for n in pair]),
        array("uint32_t", "kLowerCases", decompositions(lower)),
    ]) + "// clang-format on\n\n}  // namespace tessera::text::unicode_data\n"


def word_characters():
    """What Whitespace() takes for letters of a word: they stay with an "a" before them."""
    found = set()
    for start in range(0, len(CODES), 4096):
        chunk = CODES[start:start + 4096]
        pieces = pre_tokenizers.Whitespace().pre_tokenize_str(" ".join("a" + chr(c) for c in chunk))
        found.update(ord(p[1]) for p, _ in pieces if len(p) == 2 and p[0] == "a")
    return found


def bert_accents():
    """What BertNormalizer drops as accents."""
    normalizer = normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=False,
                                            strip_accents=True, lowercase=False)
    return {c for c, r in mapped(normalizer).items() if r == ""}


def main():
    path = pathlib.Path(__file__).parent / "unicode_data.cc"
    text = make()
    if "--check" in sys.argv[1:]:
        return 0 if path.read_text() == text else 1
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
