"""Adapters of peft for the tiny models in hf/, with what they give: lora/FAMILY/{adapter_config.json,
adapter_model.safetensors, logits.json} of random adapters, and lora/sft/ with 30 steps of trl's
SFTTrainer with peft on hf/qwen3: the adapter before the first, tokens, masks and losses, and lora/qlora/,
a base and an adapter with losses on the same rows, the base as 4-bit layers of bitsandbytes. All in f32
on the CPU. Needs torch, transformers, peft and trl, qlora also bitsandbytes.

    make_lora.py [FAMILY... | sft | qlora]"""

import json
import pathlib
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, Qwen3Config

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
QLORA_LEARNING_RATE = 5e-3  # at 2e-2 roundings of f32 grow to 1e-5 of the loss


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


def sft_rows():
    """Rows of a noisy walk over the vocabulary, of which a part at the end is learned: ids, and the
    first position of each that is."""
    generator = torch.Generator().manual_seed(3)
    rows = NUM_STEPS * BATCH
    ids = torch.zeros(rows, NUM_TOKENS, dtype=torch.long)
    ids[:, 0] = torch.randint(VOCAB, (rows,), generator=generator)
    for t in range(1, NUM_TOKENS):
        ids[:, t] = (3 * ids[:, t - 1] + 1 + torch.randint(3, (rows,), generator=generator)) % VOCAB
    return ids, torch.randint(1, NUM_TOKENS - 1, (rows,), generator=generator)


def train(model, ids, first, learning_rate=LEARNING_RATE):
    """Losses and gradient norms of trl's SFTTrainer."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from torch.utils.data import SequentialSampler
    from transformers import PreTrainedTokenizerFast
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer

    labels = torch.where(torch.arange(NUM_TOKENS) >= first[:, None], ids, -100)
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
        learning_rate=learning_rate, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=CLIP, optim="adamw_torch",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, packing=False, max_length=None, completion_only_loss=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_drop_last=True, disable_tqdm=True, dataloader_pin_memory=False)
    dataset = Dataset(InMemoryTable.from_pydict(
        {"input_ids": ids.tolist(), "labels": labels.tolist()}), fingerprint="sft")
    words = PreTrainedTokenizerFast(tokenizer_object=Words(WordLevel({"<pad>": 0, "<eos>": 1}, "<pad>")),
                                    pad_token="<pad>", eos_token="<eos>")
    trainer = Trainer(model=model, args=config, train_dataset=dataset, processing_class=words)
    trainer.train()
    assert len(losses) == NUM_STEPS
    return losses, norms


def write_run(folder, modules, entries):
    versions = {m.__name__: m.__version__ for m in modules}
    (folder / "run.json").write_text(
        "{" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}"
                         for k, v in ({"versions": versions} | entries).items()) + "}\n")


def make_sft():
    import peft
    import transformers
    import trl

    folder = HERE / "lora" / "sft"
    shutil.rmtree(folder, ignore_errors=True)
    ids, first = sft_rows()
    torch.manual_seed(5)
    model = base_model("qwen3")
    peft_config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear",
                             task_type="CAUSAL_LM")
    model = get_peft_model(model, peft_config)
    save(model, folder)
    losses, norms = train(model, ids, first)
    write_run(folder, (torch, transformers, peft, trl), {
        "lr": LEARNING_RATE, "clip": CLIP, "batch": BATCH, "num_tokens": NUM_TOKENS, "loss": losses,
        "grad_norm": norms, "ids": ids.flatten().tolist(), "first": first.tolist()})
    print(f"sft: loss {losses[0]:.6f} -> {losses[-1]:.6f}, norms {norms[0]:.4f} -> {norms[-1]:.4f}")


# Linear layers whose weights are one tensor here.
PACKED = [("self_attn", ("q", "k", "v")), ("self_attn", ("o",)), ("mlp", ("gate", "up")),
          ("mlp", ("down",))]


def share_scales(layers, weights):
    """bitsandbytes' layers get the scales of one tensor that is all of their weights, one below the
    other: its double quantisation by make_nf4's rules."""
    from bitsandbytes import functional
    packed = torch.cat(weights)
    codes, state = functional.quantize_4bit(packed, blocksize=64, quant_type="nf4")
    assert torch.equal(codes.flatten(), torch.cat([layer.weight.data.flatten() for layer in layers]))
    mean = state.absmax.double().mean().float()
    dynamic = functional.create_dynamic_map()
    scale_codes, nested = torch.ops.bitsandbytes.quantize_blockwise(
        (state.absmax - mean).double(), dynamic, 256)
    absmax = torch.ops.bitsandbytes.dequantize_blockwise(
        scale_codes, nested.float(), dynamic, 256, torch.float32) + mean
    parts = absmax.split([weight.numel() // 64 for weight in weights])
    for layer, part in zip(layers, parts, strict=True):
        state = layer.weight.quant_state
        state.absmax, state.nested, state.offset, state.state2 = part.clone(), False, None, None


def qlora_base():
    """Of width 64: dequantizing on the CPU, bitsandbytes 0.50 takes the first scale for all rows that are
    shorter than a block."""
    config = Qwen3Config(vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         max_position_embeddings=32, tie_word_embeddings=False)
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = (1 + 0.1 * noise if parameter.dim() == 1 else 0.1 * noise).bfloat16()
    return model


def make_qlora():
    """The same rows with linear layers of the base that are bitsandbytes' NF4 with double quantisation.
    As it loads them each layer has a mean and nested scales of its own; ours are those of the packed
    weights, of queries, keys and values, and of gate and up. "own_scales" has the losses of the former."""
    import bitsandbytes
    import peft
    import transformers
    import trl
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    folder = HERE / "lora" / "qlora"
    shutil.rmtree(folder, ignore_errors=True)
    base = folder / "base"
    qlora_base().save_pretrained(base)
    (base / "generation_config.json").unlink(missing_ok=True)

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)

    torch.manual_seed(6)
    save(get_peft_model(load(), LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules="all-linear",
                                           task_type="CAUSAL_LM")), folder)
    ids, first = sft_rows()
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                   bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    runs = {}
    for name in ("whole", "own_scales", "packed"):
        model = load(**{} if name == "whole" else
                     {"quantization_config": four_bits, "device_map": {"": "cpu"}})
        if name == "packed":
            for block, values in zip(model.model.layers, load().model.layers, strict=True):
                for owner, names in PACKED:
                    layers, plain = ([getattr(getattr(of, owner), f"{n}_proj") for n in names]
                                     for of in (block, values))
                    assert all(isinstance(layer, bitsandbytes.nn.Linear4bit) for layer in layers)
                    share_scales(layers, [layer.weight.data for layer in plain])
        if name != "whole":
            model.is_loaded_in_4bit = False  # of what is, trl makes the adapters bf16
        model = PeftModel.from_pretrained(model, folder, is_trainable=True)
        assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
        runs[name] = train(model, ids, first, QLORA_LEARNING_RATE)
    losses, norms = runs["packed"]
    write_run(folder, (torch, transformers, peft, trl, bitsandbytes),
              {"lr": QLORA_LEARNING_RATE, "loss": losses, "grad_norm": norms, "own_scales": runs["own_scales"][0]})

    def largest(name):
        return max(abs(a / b - 1) for a, b in zip(runs[name][0], losses))

    print(f"qlora: loss {losses[0]:.6f} -> {losses[-1]:.6f}, norms {norms[0]:.4f} -> {norms[-1]:.4f}; from these "
          f"differ by {largest('own_scales'):.1e} those with scales of each layer's own, by "
          f"{largest('whole'):.1e} those of the whole weights")


for family, options in FAMILIES.items():
    if not sys.argv[1:] or family in sys.argv[1:]:
        make_family(family, options)
if not sys.argv[1:] or "sft" in sys.argv[1:]:
    make_sft()
if not sys.argv[1:] or "qlora" in sys.argv[1:]:
    make_qlora()
