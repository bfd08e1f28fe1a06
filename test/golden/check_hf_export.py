"""Whether transformers reads what we export: check_hf_export.py FOLDER, with FOLDER/FAMILY written by

    TESSERA_HF_EXPORT=FOLDER build/test/dist_checkpoint_huggingface_test "[.hf-export]"

Each must load by `from_pretrained` without a missing or unexpected tensor, give the logits of
hf/FAMILY/logits.json and have the original's ids of begin, end and padding. The list of its files
then becomes hf/FAMILY/export.json, with which the tests compare what is exported now. The same of
hf_classes/FAMILY, exported to FOLDER/classes-FAMILY, without the list. Needs torch and transformers."""

import json
import pathlib
import shutil
import sys

import torch
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM,
                          AutoModelForSequenceClassification)

HERE = pathlib.Path(__file__).parent / "hf"

for golden in sorted((HERE.parent / "hf_classes").iterdir()):
    expected = json.loads((golden / "logits.json").read_text())
    model, info = AutoModelForSequenceClassification.from_pretrained(
        pathlib.Path(sys.argv[1]) / f"classes-{golden.name}", dtype=torch.float32, output_loading_info=True)
    problems = {k: v for k, v in info.items() if v}
    ids = torch.tensor(expected["ids"])
    mask = torch.arange(ids.shape[1]) < torch.tensor(expected["lengths"])[:, None]
    with torch.no_grad():
        logits = model.eval()(ids, attention_mask=mask.long()).logits
    error = (logits.flatten() - torch.tensor(expected["logits"])).abs().max().item()
    names = AutoConfig.from_pretrained(golden).id2label
    print(f"{golden.name}: {type(model).__name__}, largest difference {error:.1e} {problems or ''}")
    assert error < 1e-5 and not problems and model.config.id2label == names, golden.name

for golden in sorted(HERE.iterdir()):
    expected = json.loads((golden / "logits.json").read_text())
    original = AutoConfig.from_pretrained(golden)
    is_masked = original.architectures[0].endswith("MaskedLM")
    kind = AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
    model, info = kind.from_pretrained(
        pathlib.Path(sys.argv[1]) / golden.name, dtype=torch.float32, output_loading_info=True)
    problems = {k: v for k, v in info.items() if v}
    with torch.no_grad():
        types = {"token_type_ids": torch.tensor(expected["token_types"])} if is_masked else {}
        logits = model.eval()(torch.tensor(expected["ids"]), **types).logits
    error = (logits.flatten() - torch.tensor(expected["logits"])).abs().max().item()
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    other = [key for key in ids if getattr(model.config, key) != getattr(original, key)]
    problems |= {"other ids": other} if other else {}
    print(f"{golden.name}: {type(model).__name__}, largest difference {error:.1e} {problems or ''}")
    assert error < 1e-5 and not problems, golden.name
    shutil.copyfile(pathlib.Path(sys.argv[1]) / golden.name / "tessera_export.json",
                    golden / "export.json")
