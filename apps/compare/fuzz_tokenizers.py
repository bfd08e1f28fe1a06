"""Whether `tessera-tokenize ids` gives what Hugging Face's tokenizers gives for fuzzed strings or for a
text: fuzz_tokenizers.py TESSERA_TOKENIZE COUNT SEED [TOKENIZER_JSON ...], or TEXT (a file, cut into
pieces of about a megabyte) and any number in place of COUNT and SEED; without tokenizers the small
vocabularies of test/golden/make_text.py. Prints the first strings that differ; the exit status says
whether one did. Needs tokenizers."""

import json
import pathlib
import subprocess
import sys
import tempfile

import tokenizers

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "test/golden"))
import make_text  # noqa: E402


def differing(program, name, tokenizer, path, texts, lines):
    """The strings that get other ids."""
    out = subprocess.run([program, "ids", f"--tokenizer={path}", lines], check=True,
                         stdout=subprocess.PIPE, text=True).stdout.split("\n")
    own = [[int(i) for i in line.split()] for line in out[:len(texts)]]
    tokenizer.no_truncation()
    tokenizer.no_padding()
    expected = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    bad = [(t, a, b) for t, a, b in zip(texts, own, expected) if a != b]
    print(f"{name}: {len(texts)} strings, {len(bad)} differ", flush=True)
    for text, ours, theirs in bad[:3]:
        at = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x != y), 0)
        print(f"  {text[:200]!r}, from id {at} on\n    {ours[at:at + 30]}\n    {theirs[at:at + 30]}")
    return bad


def pieces(path, nbytes=1_000_000):
    """A text cut behind line breaks."""
    data, at = pathlib.Path(path).read_bytes(), 0
    while at < len(data):
        end = data.find(b"\n", at + nbytes) + 1 or len(data)
        yield data[at:end].decode()
        at = end


def main():
    program, what, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    texts = list(make_text.fuzzed(int(what), seed) if what.isdigit() else pieces(what))
    num_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        lines = f"{folder}/texts.jsonl"
        with open(lines, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        if sys.argv[4:]:
            kinds = [(path, tokenizers.Tokenizer.from_file(path)) for path in sys.argv[4:]]
        else:
            kinds = list(make_text.kinds())
        for name, tokenizer in kinds:
            path = f"{folder}/tokenizer.json"
            tokenizer.save(path)
            num_bad += len(differing(program, name, tokenizer, path, texts, lines))
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
