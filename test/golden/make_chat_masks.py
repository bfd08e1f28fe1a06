"""Writes chat_masks.json: the ids of conversations and which of them the assistant wrote, as
apply_chat_template(return_assistant_tokens_mask=True) of transformers has them, for small tokenizers
and templates with generation blocks. Usage: make_chat_masks.py [> chat_masks.json]
Needs transformers and tokenizers.
"""

import json

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        trainers)
from transformers import PreTrainedTokenizerFast

TEXT = ["Hello there, how are you today? The assistant answers the user in a few words.",
        "user assistant system tool think question answer: yes and no. Gr\u00fc\u00dfe aus K\u00f6ln!",
        "Call the function with arguments {\"x\": 1}; it gives 42 and more numbers, 1234567."] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>"]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def special():
    return [AddedToken(token, normalized=False, special=True) for token in SPECIAL]


def byte_level(pre_tokenizer, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=370, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(special())
    return tokenizer


def metaspace():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=450, show_progress=False,
        special_tokens=["<unk>"] + SPECIAL + [f"<0x{i:02X}>" for i in range(256)])
    tokenizer.train_from_iterator(TEXT, trainer)
    tokens = json.loads(tokenizer.to_str())
    tokens["added_tokens"] = [t for t in tokens["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(tokens))
    tokenizer.add_special_tokens(special())
    return tokenizer


TOKENIZERS = {
    "gpt2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "qwen": byte_level(pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), normalizers.NFC()),
    "llama2": metaspace(),
}

TEMPLATES = {
    # The end of turn is part of the answer.
    "im": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
          "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
          "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # The same token ends an answer and pads.
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content|trim }} "
            "[/INST]{% elif m.role == 'assistant' %}{%- generation -%} {{ ' ' ~ m.content|trim }}"
            "{{ eos_token }}{% endgeneration %}{% else %}<<{{ m.content }}>>{% endif %}{% endfor %}",
    # The block begins inside of a word of the tokenizer, behind its space.
    "plain": "{% for m in messages %}{% if m.role == 'assistant' %}answer: {% generation %}"
             "{{ m.content }}</s>{% endgeneration %}\n{% else %}{{ m.role }}: {{ m.content }}\n"
             "{% endif %}{% endfor %}",
    # Two blocks in a turn, text between them; reasoning of the last turn alone.
    "header": "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|header|>\n\n"
              "{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}"
              "{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}\n"
              "{% endif %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
              "{{ c.function|tojson }}{% endfor %}<|eot|>{% endgeneration %}{% else %}"
              "{{ m.content|trim }}<|eot|>{% endif %}{% endfor %}",
}

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": "\u00e9"}}}
CONVERSATIONS = [
    [("user", "Hello there"), ("assistant", "How are you?")],
    [("system", "In a few words."), ("user", "yes or no?"), ("assistant", "yes"),
     ("user", "and then"), ("assistant", "no.\n\nThe function gives 42 numbers")],
    [("user", "Gr\u00fc\u00dfe \U0001f600"), ("assistant", "K\u00f6ln \u4f60\u597d!"), ("user", "?"),
     ("assistant", "\u00fc x")],
    # Characters that NFC composes, on both sides.
    [("user", "Gru\u0308\u00dfe"), ("assistant", "Ko\u0308ln e\u0301 \u1100\u1161 e")],
    [("user", " two  spaces "), ("assistant", "  in   front\n")],
    [("assistant", "First"), ("user", "the <|im_end|> token"), ("assistant", "1234567 a <s> b")],
    [("user", "call"), ("assistant", "now", {"tool_calls": [CALL], "reasoning_content": "hm"}),
     ("tool", "42"), ("assistant", "It gives 42", {"reasoning_content": "think of it"})],
    [("user", "x"), ("assistant", "y")] * 4,
]


def messages_of(conversation):
    return [{"role": turn[0], "content": turn[1], **(turn[2] if len(turn) > 2 else {})}
            for turn in conversation]


def main():
    golden = {"tokenizers": {}, "templates": TEMPLATES, "cases": []}
    golden["conversations"] = [messages_of(c) for c in CONVERSATIONS]
    for name, tokenizer in TOKENIZERS.items():
        golden["tokenizers"][name] = tokenizer.to_str()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                       pad_token="</s>")
        for template, source in TEMPLATES.items():
            for number, conversation in enumerate(golden["conversations"]):
                made = fast.apply_chat_template(conversation, chat_template=source, tokenize=True,
                                                return_dict=True, return_assistant_tokens_mask=True)
                golden["cases"].append([name, template, number, made["input_ids"],
                                        "".join(map(str, made["assistant_masks"]))])
    rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in golden.pop("cases"))
    print(json.dumps(golden, indent=1)[:-2] + f',\n "cases": [\n  {rows}\n ]\n}}')


main()
