"""Adapters of peft for the tiny models in hf/, with what they give: lora/FAMILY/{adapter_config.json,
adapter_model.safetensors, logits.json} of random adapters, and lora/sft/ with 30 steps of trl's
SFTTrainer with peft on hf/qwen3: the adapter before the first, tokens, masks and losses. All in f32 on
the CPU. Needs torch, transformers, peft and trl. make_lora.py [FAMILY... | sft]"""

import json
import pathlib
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

HERE = pathlib.Path(__file__).parent
FAMILIES = {
    "qwen3": dict(r=3, lora_alpha=5, use_rslora=True, target_modules="all-linear"),
    "gpt2": dict(r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "bloom": dict(r=2, lora_alpha=3, target_modules=["query_key_value"]),
    "bert": dict(r=2, lora_alpha=8, target_modules=["query", "value"]),
    # A pattern of whole names, and a module that is trained whole.
    "llama3": dict(r=4, lora_alpha=8, target_modules=r".*\.1\.(self_attn\.k|mlp\.down)_proj",
                   modules_to_save=["lm_head"]),
    # A tied head: one weight that is trained, under both names.
    "qwen2": dict(r=2, lora_alpha=2, target_modules=["q_proj", "up_proj"],
                  modules_to_save=["embed_tokens"], ensure_weight_tying=True),
}
NUM_STEPS, BATCH, NUM_TOKENS, VOCAB = 30, 12, 14, 40
LEARNING_RATE, CLIP = 2e-2, 1.0


def base_model(family):
    kind = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    return kind.from_pretrained(HERE / "hf" / family, dtype=torch.float32)


def save(model, folder):
    """Without the path of the base, which is of this machine, and the card."""
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = ""
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_family(family, options):
    folder = HERE / "lora" / family
    shutil.rmtree(folder, ignore_errors=True)
    task = None if family == "bert" else "CAUSAL_LM"
    model = get_peft_model(base_model(family), LoraConfig(task_type=task, **options)).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.rand(parameter.shape, generator=generator) - 0.5
    save(model, folder)
    known = json.loads((HERE / "hf" / family / "logits.json").read_text())
    types = {"token_type_ids": torch.tensor(known["token_types"])} if family == "bert" else {}
    with torch.no_grad():
        logits = model(torch.tensor(known["ids"]), **types).logits
    (folder / "logits.json").write_text(json.dumps(
        {"logits": [round(x, 7) for x in logits.flatten().tolist()]}))
    change = (logits.flatten() - torch.tensor(known["logits"])).abs().max().item()
    print(f"{family}: largest {logits.abs().max():.3f}, changed by {change:.3f}")


def make_sft():
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    folder = HERE / "lora" / "sft"
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(3)
    rows = NUM_STEPS * BATCH
    # Rows of a noisy walk over the vocabulary, of which a part at the end is learned.
    ids = torch.zeros(rows, NUM_TOKENS, dtype=torch.long)
    ids[:, 0] = torch.randint(VOCAB, (rows,), generator=generator)
    for t in range(1, NUM_TOKENS):
        ids[:, t] = (3 * ids[:, t - 1] + 1 + torch.randint(3, (rows,), generator=generator)) % VOCAB
    first = torch.randint(1, NUM_TOKENS - 1, (rows,), generator=generator)
    labels = torch.where(torch.arange(NUM_TOKENS) >= first[:, None], ids, -100)

    torch.manual_seed(5)
    model = base_model("qwen3")
    peft_config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear",
                             task_type="CAUSAL_LM")
    model = get_peft_model(model, peft_config)
    save(model, folder)

    losses, norms = [], []

    class Trainer(SFTTrainer):
        def _get_train_sampler(self, *_, **__):
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

        def log(self, logs, *args, **kwargs):
            if "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))
            super().log(logs, *args, **kwargs)

    config = SFTConfig(
        output_dir="/tmp/make_lora", max_steps=NUM_STEPS, per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=CLIP, optim="adamw_torch",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, packing=False, max_length=None, completion_only_loss=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_drop_last=True, disable_tqdm=True, dataloader_pin_memory=False)
    dataset = Dataset(InMemoryTable.from_pydict(
        {"input_ids": ids.tolist(), "labels": labels.tolist()}), fingerprint="sft")
    from transformers import PreTrainedTokenizerFast
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    words = PreTrainedTokenizerFast(tokenizer_object=Words(WordLevel({"<pad>": 0, "<eos>": 1}, "<pad>")),
                                    pad_token="<pad>", eos_token="<eos>")
    trainer = Trainer(model=model, args=config, train_dataset=dataset, processing_class=words)
    trainer.train()
    assert len(losses) == NUM_STEPS
    import peft
    import transformers
    import trl
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, trl)}
    (folder / "run.json").write_text(
        "{" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in {
            "versions": versions, "lr": LEARNING_RATE, "clip": CLIP, "batch": BATCH,
            "num_tokens": NUM_TOKENS, "loss": losses, "grad_norm": norms,
            "ids": ids.flatten().tolist(), "first": first.tolist()}.items()) + "}\n")
    print(f"sft: loss {losses[0]:.6f} -> {losses[-1]:.6f}, norms {norms[0]:.4f} -> {norms[-1]:.4f}")


for family, options in FAMILIES.items():
    if not sys.argv[1:] or family in sys.argv[1:]:
        make_family(family, options)
if not sys.argv[1:] or "sft" in sys.argv[1:]:
    make_sft()
