"""Whether transformers gives our ids with the tokenizers that we export: make_tokenizers.py FOLDER,
with FOLDER/{byte,char} and FOLDER/text written by

    TESSERA_HF_EXPORT=FOLDER build/test/apps_text_simple_test "[.hf-export]"

Writes tokenizers.json: those files, the text and the ids that transformers gives for it, with which
the tests compare ours. Needs transformers."""

import json
import pathlib
import sys

from transformers import AutoTokenizer

folder = pathlib.Path(sys.argv[1])
text = (folder / "text").read_bytes().decode()
golden = {}
for name in ("byte", "char"):
    files = {p.name: p.read_bytes().decode() for p in sorted((folder / name).iterdir())}
    (folder / name / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text, name
    expected = list(text.encode()) if name == "byte" else [sorted(set(text)).index(c) for c in text]
    assert ids == expected, name
    golden[name] = {"files": files, "text": text, "ids": ids}
path = pathlib.Path(__file__).parent / "tokenizers.json"
path.write_text(json.dumps(golden, ensure_ascii=True, indent=1) + "\n")
