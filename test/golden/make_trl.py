"""Losses of 30 steps of trl's SFTTrainer and DPOTrainer on a tiny Qwen3, f32 on the CPU: trl.json, and
the model that they start from in trl/. trl gets the batches that our trainer draws, in the same order:

    make_trl.py model
    TESSERA_BATCHES=batches.json BUILD/test/apps_chat_training_test 'trl: batches for the golden'
    make_trl.py train batches.json

Each sequence is a row of its own there, padded on the right, while ours may share a window; a batch is
all sequences of a step. What trl averages over is then seen: SFT over the trained tokens of the step,
DPO over its pairs. trl.json has a checksum of each step's batch as well. Needs torch, transformers,
accelerate, datasets and trl."""

import json
import pathlib
import sys

import pyarrow
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from tokenizers import Tokenizer, models

HERE = pathlib.Path(__file__).parent
PAD = 0
COMMON = dict(max_steps=30, learning_rate=5e-3, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9,
              adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.1, max_grad_norm=1.0,
              optim="adamw_torch", use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
              report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
              remove_unused_columns=False, max_length=None, output_dir="/tmp/trl_out")

DPO = dict(learning_rate=1e-3)  # so that losses stay far from 0


def make_model():
    config = Qwen3Config(vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                         max_position_embeddings=128, tie_word_embeddings=False)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = 1 + 0.1 * noise if parameter.dim() == 1 else 0.15 * noise
    model.save_pretrained(HERE / "trl")
    (HERE / "trl/generation_config.json").unlink(missing_ok=True)


def checksum(batch):
    total = 0
    for ids, trained in batch:
        for token, is_trained in zip(ids, trained, strict=True):
            total = (total * 1000003 + 2 * token + is_trained) % 2 ** 32
    return total


def tokenizer():
    base = Tokenizer(models.WordLevel({str(i): i for i in range(256)}, "0"))
    return PreTrainedTokenizerFast(tokenizer_object=base, pad_token="0", eos_token="1")


def load_model():
    return AutoModelForCausalLM.from_pretrained(HERE / "trl", dtype=torch.float32)


def fixed_batches(trainer_class):
    """The trainer, on given batches, with what a training step returns before it is rounded."""
    class Fixed(trainer_class):
        groups = None

        def __init__(self, *args, **kwargs):
            self.losses = []
            super().__init__(*args, **kwargs)

        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=self.groups,
                                               collate_fn=self.data_collator)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

    return Fixed


def run(trainer_class, config, rows, groups):
    # With a name of its own, which from_list would make by pickling.
    dataset = Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="golden")
    trainer = fixed_batches(trainer_class)(model=load_model(), args=config, train_dataset=dataset,
                                           processing_class=tokenizer())
    trainer.groups = groups
    trainer.train()
    assert len(trainer.losses) == len(groups)
    return trainer


def grouped(steps):
    groups, count = [], 0
    for step in steps:
        groups.append(list(range(count, count + len(step))))
        count += len(step)
    return groups


def train_sft(steps):
    from trl import SFTConfig, SFTTrainer
    rows = [{"input_ids": ids, "labels": [t if m else -100 for t, m in zip(ids, trained)]}
            for step in steps for ids, trained in step]
    config = SFTConfig(**COMMON, dataset_kwargs={"skip_prepare_dataset": True})
    trainer = run(SFTTrainer, config, rows, grouped(steps))
    return {"losses": trainer.losses, "batches": [checksum(step) for step in steps]}


def train_dpo(steps, **options):
    from trl import DPOConfig, DPOTrainer
    rows = []
    for step in steps:
        assert len(step) % 2 == 0
        for (chosen, chosen_mask), (rejected, rejected_mask) in zip(step[::2], step[1::2]):
            prompt = chosen_mask.index(1)
            assert rejected_mask.index(1) == prompt and chosen[:prompt] == rejected[:prompt]
            assert all(chosen_mask[prompt:]) and all(rejected_mask[prompt:])
            rows.append({"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:],
                         "rejected_ids": rejected[prompt:]})
    pairs = [step[::2] for step in steps]
    trainer = run(DPOTrainer, DPOConfig(**COMMON | DPO, **options), rows, grouped(pairs))
    logs = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
    result = {"losses": trainer.losses, "batches": [checksum(step) for step in steps]}
    for ours, theirs in (("chosen", "rewards/chosen"), ("rejected", "rewards/rejected"),
                         ("margin", "rewards/margins"), ("accuracy", "rewards/accuracies")):
        result[ours] = [entry[theirs] for entry in logs]
    return result


def main():
    if sys.argv[1:] == ["model"]:
        return make_model()
    batches = json.loads(pathlib.Path(sys.argv[2]).read_text())
    import trl
    golden = {"trl": trl.__version__, "sft": train_sft(batches["sft"]),
              "sigmoid": train_dpo(batches["dpo"], beta=0.2, loss_type="sigmoid"),
              "ipo": train_dpo(batches["dpo"], beta=0.2, loss_type="ipo")}
    (HERE / "trl.json").write_text(json.dumps(golden) + "\n")
    for name in ("sft", "sigmoid", "ipo"):
        print(name, golden[name]["losses"][0], golden[name]["losses"][-1])


if __name__ == "__main__":
    main()
