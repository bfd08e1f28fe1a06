"""Whether exports for llama.cpp are the models that exports for transformers are:
    check_gguf.py HF_DIR GGUF_DIR [HF_DIR GGUF_DIR ...]

Each pair is one model, exported by `tessera-checkpoint export` with --format=hf and --format=gguf, both
in f32. transformers reads both (its reader of GGUF turns back what llama.cpp has in another order): all
parameters must be equal, the sizes that the file tells those of config.json (which the reader of some
architectures passes over), and where the file has a tokenizer, the ids of some texts. If
llama-cpp-python is installed, 40 greedy tokens too. Needs torch, transformers, accelerate and gguf."""

import pathlib
import sys

import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TEXTS = ["And God said, Let there be light: and there was light.", "x = [1, 22, 333, 4444]  # don't",
         "naïve café 東京\n\n\ttabs  and   spaces"]
NUM_GREEDY = 40


def field(path, key):
    found = GGUFReader(path).fields.get(key)
    return found.contents() if found else None


# What config.json calls a field of the architecture: the first of the names that is there.
SIZES = {
    "vocab_size": ["vocab_size"],
    "context_length": ["max_position_embeddings", "n_positions", "seq_length"],
    "embedding_length": ["hidden_size", "n_embd"],
    "block_count": ["num_hidden_layers", "n_layer"],
    "feed_forward_length": ["intermediate_size", "n_inner"],
    "attention.head_count": ["num_attention_heads", "n_head"],
    "attention.head_count_kv": ["num_key_value_heads", "num_attention_heads", "n_head"],
    "attention.key_length": ["head_dim"],
    "attention.value_length": ["head_dim"],
    "attention.layer_norm_epsilon": ["layer_norm_epsilon"],
    "attention.layer_norm_rms_epsilon": ["rms_norm_eps"],
}


def check_sizes(path, config):
    architecture = field(path, "general.architecture")
    num_checked = 0
    for key, names in SIZES.items():
        found = field(path, f"{architecture}.{key}")
        expected = next((getattr(config, n) for n in names if getattr(config, n, None) is not None), None)
        if found is None or expected is None:
            continue
        assert abs(found - expected) <= 1e-6 * abs(expected), f"{key} is {found}, expected {expected}"
        num_checked += 1
    return num_checked


def check_parameters(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    names = set(ours) | set(theirs)
    differ = [n for n in names if n not in ours or n not in theirs or not torch.equal(ours[n], theirs[n])]
    assert not differ, f"parameters differ: {sorted(differ)[:5]}"
    return len(names)


def check_llama_cpp(path, model, prompt):
    try:
        from llama_cpp import Llama
    except ImportError:
        return "llama.cpp not installed"
    theirs = Llama(str(path), verbose=False, n_ctx=0, logits_all=False)
    ids = list(prompt)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=NUM_GREEDY, do_sample=False,
                              eos_token_id=None, pad_token_id=0)[0, len(ids):].tolist()
    theirs.eval(ids)
    found = []
    for _ in range(len(expected)):
        token = max(range(model.config.vocab_size), key=lambda i: theirs._scores[-1][i])
        found.append(token)
        theirs.eval([token])
    assert found == expected, f"greedy ids of llama.cpp are {found}, expected {expected}"
    return f"{len(found)} greedy ids of llama.cpp equal"


def check(hf, gguf):
    path = gguf / "model.gguf"
    a = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(hf)
    b = AutoModelForCausalLM.from_pretrained(gguf, gguf_file="model.gguf", config=config,
                                             dtype=torch.float32).eval()
    says = [f"{check_parameters(a, b)} parameters and {check_sizes(path, config)} sizes equal"]
    if field(path, "tokenizer.ggml.model") != "none":
        tokenizer = AutoTokenizer.from_pretrained(hf)
        theirs = AutoTokenizer.from_pretrained(gguf, gguf_file="model.gguf")
        for text in TEXTS:
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            found = theirs(text, add_special_tokens=False)["input_ids"]
            assert found == expected, f"ids of {text!r} are {found}, expected {expected}"
        says.append("ids equal")
    says.append(check_llama_cpp(path, a, [7, 3, 11, 5]))
    print(f"{gguf.name}: {', '.join(says)}")


def main():
    if len(sys.argv) < 3 or len(sys.argv) % 2 == 0:
        sys.exit(__doc__)
    for i in range(1, len(sys.argv), 2):
        check(pathlib.Path(sys.argv[i]), pathlib.Path(sys.argv[i + 1]))


if __name__ == "__main__":
    main()
