"""Figures of evaluation tasks by lm-evaluation-harness (PyPI: lm-eval 0.4.13) and transformers.

    python make_eval.py

Writes eval/model (a tiny random GPT-2 with a tokenizer of its own), eval/FORM.jsonl (items of our
own in the shape of each data set) and eval/results.json: what lm-eval makes of each item by its own
task files, which are given our items in place of theirs.
"""
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
scratch = pathlib.Path(tempfile.mkdtemp())
os.environ["HF_HOME"] = str(scratch / "home")

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent / "eval"
TASKS = pathlib.Path(lm_eval.__file__).parent / "tasks"

NOUNS = "lamp river pencil garden letter bridge kettle window café basket".split()
VERBS = "holds finds draws moves opens brings lifts keeps".split()


def sentence(r, words):
    return " ".join(r.choice(NOUNS if i % 2 else VERBS) for i in range(words))


def items(r):
    rows = {}
    rows["hellaswag"] = [{"activity_label": "Making tea", "ctx_a": f"[header] {sentence(r, 4)} [title] {sentence(r, 3)}.",
                          "ctx_b": f"the {r.choice(NOUNS)} ÉCOLE {sentence(r, 2)}", "label": str(r.randrange(4)),
                          "endings": [sentence(r, 1 + r.randrange(6)) + (" [step] on." if i == 1 else ".")
                                      for i in range(4)]} for _ in range(8)]
    rows["arc"] = [{"question": f"What {sentence(r, 5)}?", "answerKey": r.choice("ABC"),
                    "choices": {"text": [sentence(r, 1 + r.randrange(5)) for _ in range(3)], "label": list("ABC")}}
                   for _ in range(8)]
    rows["mmlu"] = [{"question": f"  {sentence(r, 6)}? ", "subject": "high_school_physics",
                     "choices": [sentence(r, 2) for _ in range(4)], "answer": r.randrange(4)} for _ in range(8)]
    rows["piqa"] = [{"goal": sentence(r, 4), "sol1": sentence(r, 3), "sol2": sentence(r, 5), "label": r.randrange(2)}
                    for _ in range(8)]
    rows["winogrande"] = [{"sentence": f"The {r.choice(NOUNS)} {sentence(r, 2)} because _ {sentence(r, 3)}.",
                           "option1": "the " + r.choice(NOUNS), "option2": "a " + r.choice(NOUNS),
                           "answer": r.choice("12")} for _ in range(8)]
    rows["lambada"] = [{"text": sentence(r, 7)} for _ in range(8)]
    rows["choice"] = [{"prompt": sentence(r, 4), "choices": [sentence(r, 2), sentence(r, 4), "naïve " + sentence(r, 1)],
                       "answer": r.randrange(3)} for _ in range(8)]
    rows["generate"] = [{"prompt": f"Q: {sentence(r, 3)}\nA:", "answer": r.choice(NOUNS)} for _ in range(6)]
    rows["text"] = [{"text": sentence(r, n) + ".\n"} for n in (3, 30, 120, 90)]
    return rows


def write_rows(rows):
    HERE.mkdir(exist_ok=True)
    for name, of_form in rows.items():
        with open(HERE / f"{name}.jsonl", "w") as file:
            for row in of_form:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def make_model(rows):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = [json.dumps(row, ensure_ascii=False) for of_form in rows.values() for row in of_form]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=len(fast), n_positions=256, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
                        bos_token_id=fast.bos_token_id, eos_token_id=fast.eos_token_id)
    model = GPT2LMHeadModel(config).eval()
    shutil.rmtree(HERE / "model", ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(HERE / "model")
    fast.save_pretrained(HERE / "model")
    return GPT2LMHeadModel.from_pretrained(HERE / "model", dtype=torch.float32).eval(), fast


def greedy(model, fast, prompt, count):
    ids = fast(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return fast.decode(out[0, ids.shape[1]:])


def add_right_answers(rows, model, fast):
    """Some last words and answers are what the model writes, so that greedy figures are not all 0."""
    for row in rows["lambada"]:
        row["text"] = row["text"].replace("  ", " ")
    for row in rows["lambada"][:3]:
        # A word whose tokens are each the likeliest: the first that begins with a space and has no other.
        context = row["text"].rsplit(" ", 1)[0]
        ids = fast(context, return_tensors="pt").input_ids
        with torch.no_grad():
            order = model(ids).logits[0, -1].argsort(descending=True).tolist()
        text = fast.decode([order[0]])
        if text.startswith(" ") and text.strip() and " " not in text[1:] and fast(context + text).input_ids[-1] == order[0]:
            row["text"] = context + text
    for row in rows["generate"][::2]:
        row["answer"] = ["something else", greedy(model, fast, row["prompt"], 24).split("\n\n")[0].strip()]


def data(path, **splits):
    return {"dataset_path": "json", "dataset_name": None,
            "dataset_kwargs": {"data_files": {name: str(HERE / f"{file}.jsonl") for name, file in splits.items()}},
            "test_split": "test", "validation_split": None, "task": path,
            "training_split": "train" if "train" in splits else None}


def task_files():
    """Those of lm-eval with our items; of the forms of our own as they are documented."""
    def like(file, name, **more):
        return {"include": str(TASKS / file)} | data(name, **more)
    own = {"fewshot_split": "test"}
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    mean = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]
    return {
        "hellaswag": like("hellaswag/hellaswag.yaml", "t_hellaswag", test="hellaswag") | own,
        "arc": like("arc/arc_easy.yaml", "t_arc", test="arc", train="arc") | {"fewshot_split": "train"},
        "mmlu": like("mmlu/default/mmlu_high_school_physics.yaml", "t_mmlu", test="mmlu", dev="mmlu")
        | {"fewshot_split": "dev"},
        "piqa": like("piqa/piqa.yaml", "t_piqa", test="piqa") | own,
        "winogrande": like("winogrande/default.yaml", "t_winogrande", test="winogrande") | own,
        "lambada": like("lambada/lambada_openai.yaml", "t_lambada", test="lambada") | own,
        "choice": data("t_choice", test="choice") | own | {
            "output_type": "multiple_choice", "doc_to_text": "prompt", "doc_to_choice": "choices",
            "doc_to_target": "answer", "metric_list": mean},
        "generate": data("t_generate", test="generate") | own | {
            "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 24}, "metric_list": [exact]},
        "text": data("t_text", test="text") | {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")]},
    }


def run(lm, manager, name, num_fewshot):
    found = lm_eval.simple_evaluate(lm, tasks=[f"t_{name}"], num_fewshot=num_fewshot, task_manager=manager,
                                    log_samples=True, bootstrap_iters=0 if name in ("text", "lambada") else 100)
    samples = sorted(found["samples"][f"t_{name}"], key=lambda s: s["doc_id"])
    figures = {k.split(",")[0]: v for k, v in found["results"][f"t_{name}"].items()
               if isinstance(v, float) and k != "alias"}
    result = {"form": name, "fewshot": num_fewshot, "metrics": figures, "items": []}
    for sample in samples:
        answers = sample["filtered_resps"]
        item = {}
        if name == "generate":
            item["text"] = answers[0]
        elif name == "text":
            item["log_probabilities"] = [answers[0]]
        else:
            item["log_probabilities"] = [a[0] for a in answers]
            item["is_greedy"] = [a[1] for a in answers]
        result["items"].append(item)
    return result


def main():
    r = random.Random(7)
    rows = items(r)
    model, fast = make_model(rows)
    add_right_answers(rows, model, fast)
    write_rows(rows)
    (scratch / "tasks").mkdir()
    for name, task in task_files().items():
        (scratch / "tasks" / f"{name}.yaml").write_text(yaml.dump(task))
    runs = [("hellaswag", 0), ("hellaswag", 2), ("arc", 0), ("arc", 3), ("mmlu", 0), ("mmlu", 2), ("piqa", 0),
            ("piqa", 1), ("winogrande", 0), ("winogrande", 2), ("lambada", 0), ("choice", 0), ("choice", 3),
            ("generate", 0), ("generate", 1), ("text", 0)]
    lm = HFLM(pretrained=model, tokenizer=fast, batch_size=1, backend="causal", device="cpu")
    manager = TaskManager(include_path=str(scratch / "tasks"))
    results = [run(lm, manager, name, shots) for name, shots in runs]
    with open(HERE / "results.json", "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    for result in results:
        print(result["form"], result["fewshot"], result["metrics"])


if __name__ == "__main__":
    sys.exit(main())
