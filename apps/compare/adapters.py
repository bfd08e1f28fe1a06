#!/usr/bin/env python3
"""Whether adapters that Tessera trained and exported are those of peft: trains a small model, then
adapters beside it, exports both and the merged model, and compares in PyTorch

    base model + adapters by peft  =  the merged export by transformers

and that peft writes again the tensors that it has read.

    python3 apps/compare/adapters.py build/apps [--kind llama] [--targets q_proj,v_proj]

Needs the packages torch, transformers and peft.
"""

import argparse
import os
import subprocess
import tempfile

KINDS = {"llama": ["--model.kv_heads=2", "--model.qk_norm=true", "--model.tied=false"],
         "gpt2": ["--model.bias=true"], "bloom": []}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("apps")
    parser.add_argument("--kind", choices=sorted(KINDS), default="llama")
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--modules_to_save", default="")
    args = parser.parse_args()
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        def run(program, *arguments):
            subprocess.run([os.path.join(args.apps, program), *arguments], check=True,
                           stdout=subprocess.DEVNULL)

        text = os.path.join(folder, "text.txt")
        with open(text, "w") as file:
            file.write("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
        common = [f"--data.text={text}", "--device=cpu", "--model.context=32",
                  "--train.micro_batch=8"]
        sizes = ["--model.layers=2", "--model.heads=4", "--model.width=32"]
        run("tessera-train", *common, *sizes, f"--model.kind={args.kind}", *KINDS[args.kind],
            "--train.steps=20", f"--output.dir={folder}/base_run", "--optim.lr=1e-2")
        run("tessera-checkpoint", "export", f"{folder}/base_run", f"{folder}/base")
        run("tessera-train", *common, f"--model.from={folder}/base", f"--lora.targets={args.targets}",
            "--lora.rank=4", "--lora.alpha=8", "--train.steps=20", "--optim.lr=1e-2",
            f"--lora.modules_to_save={args.modules_to_save}", f"--output.dir={folder}/run")
        run("tessera-checkpoint", "export", f"{folder}/run", f"{folder}/adapter")
        run("tessera-checkpoint", "export", f"{folder}/run", f"{folder}/merged", "--merge")

        ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32).eval()
            plain = base(ids).logits
            model = PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
            logits = model(ids).logits
            merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged",
                                                          dtype=torch.float32).eval()(ids).logits
        change = (logits - plain).abs().max().item()
        error = (logits - merged).abs().max().item()
        print(f"{args.kind}: adapters change logits by {change:.2e}, merged differ by {error:.2e}")
        assert change > 1e-3 and error < 1e-5 * max(1, logits.abs().max().item())
        model.save_pretrained(f"{folder}/again")
        ours = load_file(f"{folder}/adapter/adapter_model.safetensors")
        theirs = load_file(f"{folder}/again/adapter_model.safetensors")
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
        print(f"{len(ours)} tensors, the same bits when peft writes them again")


if __name__ == "__main__":
    main()
