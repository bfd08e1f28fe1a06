#!/usr/bin/env python3
"""Each key of the settings does something: set to another value, it is seen in what a run does.

    settings_effects.py APPS_DIR [--only TEXT] [--mpirun PATH] [--simt PATH]

For every row of `tessera-train --help` there is a row here: a run that it is added to, a value and
what must be seen of it in losses, in the tasks of the streams (the timeline), in memory, files or
exit status; the resolved configuration does not count. Keys of CUDA act in the trainer of the emulated
device: with --simt they are tried, and only they. Where a key may not change numbers, losses
and norms must be the same bits. A key without a row, or a row without its key, fails.
"""
import argparse
import collections
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

TIMEOUT = 240


class Result:
    """What one run did."""

    def __init__(self, directory, status, text, seconds, num_threads, cpus):
        self.dir, self.status, self.text, self.seconds = directory, status, text, seconds
        self.num_threads, self.cpus = num_threads, cpus
        self.steps = self.read_steps(os.path.join(directory, "out"))
        self.streams = self.read_trace(os.path.join(directory, "trace.json"))

    @staticmethod
    def read_steps(out):
        try:
            with open(os.path.join(out, "metrics.jsonl")) as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []

    @staticmethod
    def read_trace(path):
        """Names of the tasks of each stream, in order; none of one that had none."""
        streams = collections.defaultdict(list)
        try:
            with open(path) as file:
                events = json.load(file)
        except FileNotFoundError:
            return streams
        events = [e for e in events if e["pid"] == 0]  # of the first rank
        names = {e["tid"]: e["args"]["name"] for e in events
                 if e["ph"] == "M" and e["name"] == "thread_name"}
        for event in events:
            if event["ph"] == "X":
                streams[names[event["tid"]]].append(event["name"])
        return streams

    def numbers(self):
        return [(repr(s["loss"]), repr(s["grad_norm"])) for s in self.steps]

    def values(self, name):
        return [s.get(name) for s in self.steps]

    def count(self, task):
        return sum(names.count(task) for names in self.streams.values())

    def tree(self):
        """The module tree and the summary of the units: from the model, not the configuration."""
        lines = [line for line in self.text.splitlines() if re.match(r" *\(", line) or
                 " parameters" in line or "units, " in line or "data: " in line]
        return "\n".join(lines)

    def files(self):
        found = set()
        for folder, _, names in os.walk(self.dir):
            found |= {os.path.relpath(os.path.join(folder, name), self.dir) for name in names}
        return found

    def read(self, name):
        with open(os.path.join(self.dir, name)) as file:
            return file.read()

    def saved_steps(self):
        return sorted(int(m[1]) for f in self.files()
                      if (m := re.fullmatch(r"out/step-(\d+)/manifest\.json", f)))

    def sample(self):
        return self.text.split("sample:\n", 1)[1] if "sample:\n" in self.text else None


class Runs:
    def __init__(self, options):
        self.options = options
        self.apps = os.path.abspath(options.apps)
        self.dir = tempfile.mkdtemp(prefix="tessera-settings-")
        self.results = {}
        self.text = self.write("text.txt", "".join(
            f"line {i * i} of a text that is easy to learn\n" for i in range(80)))
        self.other_text = self.write("other.txt", "".join(
            f"{i % 7} another text, which has nothing of the first\n" for i in range(80)))
        self.shard("a.bin", [i * i % 61 for i in range(3000)])
        self.shard("b.bin", [i * 7 % 61 for i in range(900)])
        self.shard("same.bin", [5] * 3000)
        lines = self.write("lines.jsonl", "".join(json.dumps(
            {"text": f"line {i * i} of a text", "body": f"{i} another"}) + "\n" for i in range(60)))
        broken = self.path("broken.jsonl")
        with open(broken, "wb") as file:
            file.write(open(lines, "rb").read().replace(b"line 4 ", b"line \xff ", 1))
        tokenizer = self.write("tokenizer.json", json.dumps(
            {"type": "char", "chars": sorted(set(open(self.text).read()), reverse=True)}))
        vocab = ["?", "</s>", *sorted(set(open(lines).read()))]
        ending = self.write("ending.json", json.dumps(
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
             "model": {"type": "WordLevel", "unk_token": "?", "vocab": {c: i for i, c in enumerate(vocab)}}}))
        chats = [[f"{i}", f"{i * i}", "x" * (i % 5 + 1), "long " * 6 if i % 5 == 0 else f"{i % 7}"]
                 for i in range(60)]
        turn = "{% for m in messages %}%s{{ m.content }}{{ '!' if m.role == 'user' else '$' }}{% endfor %}"
        pairs = [{"prompt": f"{i}", "chosen": f"{i * i}" + ("long" * 6 if i % 5 == 0 else ""), "rejected": "no"}
                 for i in range(60)]
        self.paths = {"PAIRS": self.write("pairs.jsonl", "".join(json.dumps(p) + "\n" for p in pairs)),
                      "CLASSES": self.classes("classes.jsonl", 60), "OTHER_CLASSES": self.classes("other_c.jsonl", 30),
                      "TASK": self.task("task.jsonl", range(8)), "OTHER_TASK": self.task("other_t.jsonl", range(9, 12)),
                      "SHORT_TASK": self.write("short.jsonl", json.dumps({"text": "of a"}) + "\n"),
                      "ANSWERS": self.write("answers.jsonl", json.dumps({"prompt": "line ", "answer": "4"}) + "\n"),
                      "OTHER_PAIRS": self.write("other_pairs.jsonl", "".join(
                          json.dumps(p) + "\n" for p in pairs[30:])),
                      "CHATS": self.chats("chats.jsonl", chats),
                      "OTHER_CHATS": self.chats("other.jsonl", chats[30:]),
                      "CHAT_TEMPLATE": self.write("chat.jinja", turn.replace("%s", "")),
                      "OTHER_TEMPLATE": self.write("other.jinja", turn.replace("%s", ":")),
                      "LINES": lines, "BROKEN": broken, "TOKENIZER": tokenizer, "ENDING": ending,
                      "TEXT": self.text, "OTHER": self.other_text, "A": self.path("a.bin"),
                      "B": self.path("b.bin"), "SAME": self.path("same.bin"), "HF": self.path("hf"),
                      "HF_GPT2": self.path("hf_gpt2"), "HF_PAIRS": self.path("hf_pairs"),
                      "SOURCE": self.path("source"), "ADAPTER": self.path("adapter")}
        os.makedirs(self.path("source"))
        self.write("source/tokenizer.json", "{}")
        self.write("source/tokenizer_config.json", "{}")

    def path(self, name):
        return os.path.join(self.dir, name)

    def write(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)
        return self.path(name)

    def chats(self, name, chats):
        roles = ["user", "assistant"] * 2
        return self.write(name, "".join(json.dumps({"messages": [
            {"role": role, "content": text} for role, text in zip(roles, chat)]}) + "\n"
            for chat in chats))

    def classes(self, name, count):
        return self.write(name, "".join(json.dumps(
            {"text": f"{i * i}" + ("long" * 6 if i % 5 == 0 else ""), "label": ["no", "yes"][i % 2],
             "other": i % 3}) + "\n" for i in range(count)))

    def task(self, name, numbers):
        return self.write(name, "".join(json.dumps({"text": f"line {i * i} of a text"}) + "\n" for i in numbers))

    def shard(self, name, tokens):
        with open(self.path(name), "wb") as file:
            file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
            file.write(struct.pack(f"<{len(tokens)}H", *tokens))

    def run(self, keys, ranks=1, watch=False, stop=False):
        """The run of these keys, made once."""
        name = json.dumps([sorted((k, str(v)) for k, v in keys.items()), ranks, watch, stop])
        if name not in self.results:
            directory = self.path(f"run{len(self.results)}")
            os.makedirs(directory)
            self.results[name] = self.start(dict(keys), ranks, directory, watch, stop)
        return self.results[name]

    def start(self, keys, ranks, directory, watch, stop, variables=None):
        keys.setdefault("output.dir", os.path.join(directory, "out"))
        keys.setdefault("profile.trace", os.path.join(directory, "trace.json"))
        is_simt = keys.get("device") == "cuda" and self.options.simt
        command = [self.options.simt if is_simt else os.path.join(self.apps, "tessera-train")]
        for key, value in keys.items():
            value = re.sub(r"@(\w+)@", lambda m: self.paths[m[1]], str(value))
            value = value.replace("@DIR", directory)
            if value != "UNSET":
                command.append(f"--{key}={value}")
        if ranks > 1:
            command = [self.options.mpirun, "--oversubscribe", "--bind-to", "none", "-n",
                       str(ranks)] + command
        env = dict(os.environ, OMP_WAIT_POLICY="passive", OMPI_ALLOW_RUN_AS_ROOT="1",
                   OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", ASAN_OPTIONS="detect_leaks=0",
                   **(variables or {}))
        log = os.path.join(directory, "log")
        start = time.monotonic()
        # Apart, or a warning may stand in the middle of a line.
        with open(log, "w") as output, open(log + ".errors", "w") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors, env=env)
        num_threads, cpus, seen, nbytes = 0, set(), [], 0  # seen: when steps were written
        metrics = os.path.join(directory, "out/metrics.jsonl")
        while process.poll() is None and time.monotonic() - start < TIMEOUT:
            if watch:
                try:
                    tasks = os.listdir(f"/proc/{process.pid}/task")
                    num_threads = max(num_threads, len(tasks))
                    for task in tasks:
                        with open(f"/proc/{process.pid}/task/{task}/status") as file:
                            cpus.add(re.search(r"Cpus_allowed_list:\s*(\S+)", file.read())[1])
                    if os.path.getsize(metrics) > nbytes:
                        nbytes = os.path.getsize(metrics)
                        seen.append(time.monotonic())
                except (OSError, TypeError):
                    pass
            if stop:
                found = subprocess.run(["pgrep", "-P", str(process.pid), "tessera-train"],
                                       capture_output=True, text=True).stdout.split()
                if len(found) == ranks and os.path.exists(metrics):
                    os.kill(int(found[-1]), signal.SIGSTOP)
                    stop = False
            time.sleep(0.002 if watch else 0.01)
        if process.poll() is None:
            process.kill()
            process.wait()
        text = ""
        for name in (log + ".errors", log):
            with open(name, errors="replace") as file:
                text += file.read()
        result = Result(directory, process.returncode, text, time.monotonic() - start, num_threads, cpus)
        result.step_seconds = seen[-1] - seen[0] if seen else 0
        return result

    def tool(self, name, *arguments):
        return subprocess.run([os.path.join(self.apps, name), *arguments], capture_output=True,
                              text=True, timeout=TIMEOUT)


# The run that rows add to. Its first run is run0.
BASE = {"device": "cpu", "data.text": "@TEXT@", "model.layers": 2, "model.heads": 2,
        "model.width": 16, "model.context": 8, "train.steps": 4, "train.micro_batch": 2,
        "train.threads": 1, "optim.lr": 0.01, "optim.schedule": "constant", "optim.final_lr": 0.01,
        "profile.steps": "2..3"}
GPT2 = {"model.kind": "gpt2"}
BERT = {"model.kind": "bert", "data.mask_token": 0}
SOURCES = {"data.text": "UNSET", "data.sources": "@A@", "data.separator": 32, "model.vocab": 61}
CHATS = {"data.text": "UNSET", "data.chat": "@CHATS@", "data.chat_template": "@CHAT_TEMPLATE@",
         "model.context": 24}
PAIRS = {"data.text": "UNSET", "data.preference": "@PAIRS@", "data.chat_template": "@CHAT_TEMPLATE@",
         "model.context": 24, "model.kind": "llama"}
CLASSES = {"data.text": "UNSET", "data.classify": "@CLASSES@", "model.context": 24}
EVAL = {"eval.tasks": "lambada=@TASK@", "model.context": 64}
TOKENS = {"data.text": "UNSET", "data.tokens": "@A@", "model.vocab": 61}
BF16 = {"precision.param_dtype": "bf16"}
F16 = {"precision.param_dtype": "f16", "guard.max_skips": 100}
SAMPLE = {"sample.tokens": 12, "sample.prompt": "line "}
FROM = TOKENS | {"model.from": "@HF@", "model.layers": "UNSET", "model.heads": "UNSET",
                 "model.width": "UNSET", "model.vocab": "UNSET"}
LORA = {"lora.targets": "all-linear"}
FROM_GPT2 = FROM | {"model.from": "@HF_GPT2@", "model.kind": "UNSET"}
LOSS_SCALE = {"precision.loss_scale_init": 4.0, "precision.loss_scale_interval": 2}
NAN = {"debug.nan_step": 3, "guard.max_skips": 1}
SPIKE = {"guard.spike": "skip", "guard.spike_window": 2, "guard.spike_z": 1e-3,
         "train.steps": 12, "optim.lr": 1.0, "optim.final_lr": 1.0, "guard.max_spikes": 100}
SAVES = {"checkpoint.every": 1, "train.steps": 6, "checkpoint.best": "false"}
SIMT = {"device": "cuda", "model.layers": 1, "train.steps": 2, "profile.steps": "UNSET",
        "precision.param_dtype": "f32"}
SCALED = {"model.rope_scaling": "llama3", "model.rope_factor": 8.0,
          "model.rope_original_context": 16}


# What is seen, of the run without the key (a) and with it (b).
def other_numbers(a, b):
    return a.numbers() != b.numbers() and len(b.numbers()) > 0


def other_last(a, b):
    """The first step is the same."""
    return a.numbers()[0] == b.numbers()[0] and a.numbers()[-1] != b.numbers()[-1]


def other_later(a, b):
    """The first loss is the same."""
    return a.values("loss")[0] == b.values("loss")[0] and a.numbers()[-1] != b.numbers()[-1]


def other_tree(a, b):
    return a.tree() != b.tree() and b.status == 0


def other_tasks(stream):
    """Which they are, not when: the timeline begins and ends in the middle of gathers, and who waits
    is a matter of time."""
    def seen(a, b):
        return set(a.streams[stream]) != set(b.streams[stream]) and b.status == 0
    return seen


def both(*checks):
    return lambda a, b: all(check(a, b) for check in checks)


def has_event_file(a, b):
    """One, whose records have the losses of the log."""
    found = [f for f in b.files() if "tfevents" in f]
    if len(found) != 1 or any("tfevents" in f for f in a.files()):
        return False
    with open(os.path.join(b.dir, found[0]), "rb") as file:
        content = file.read()
    return all(b"loss/train\x15" + struct.pack("<f", loss) in content for loss in b.values("loss"))


def norms_of_units(a, b):
    return not any("unit_norms" in s for s in a.steps) and all(
        len(s["unit_norms"]) > 2 and
        abs(sum(n * n for n in s["unit_norms"].values()) ** 0.5 / s["grad_norm"] - 1) < 1e-5 for s in b.steps)


def exits_with(status):
    return lambda a, b: b.status == status


def more(task, times):
    return lambda a, b: b.count(task) == times * a.count(task) > 0


def tokens_per_step(n):
    return lambda a, b: b.values("tokens")[0] == n != a.values("tokens")[0]


def lrs(*expected):
    return lambda a, b: all(abs(x - y) <= 1e-6 * abs(y) + 1e-12
                            for x, y in zip(b.values("lr"), expected, strict=True))


def val_steps(*expected):
    return lambda a, b: [s["step"] for s in b.steps if "val_loss" in s] == list(expected)


def rounds(*expected):
    return lambda a, b: [s["step"] for s in b.steps if any(key.startswith("eval.") for key in s)] == list(expected)


def other_perplexity(a, b):
    x, y = (run.values("eval.lambada.perplexity")[-1] for run in (a, b))
    return None not in (x, y) and x != y


def reduces(n):
    """Tasks that reduce a block, in two steps of the timeline."""
    return lambda a, b: b.streams["reduce_scatter"].count("reduce_scatter blocks.0") == n


def gathers(n):
    return lambda a, b: b.streams["all_gather"].count("all_gather blocks.0") == n


def export_has(name, value):
    def seen(a, b):
        folder = os.path.join(b.dir, "hf")
        done = RUNS.tool("tessera-checkpoint", "export", os.path.join(b.dir, "out"), folder)
        if done.returncode != 0:
            print(done.stderr)
            return False
        with open(os.path.join(folder, "config.json")) as file:
            return json.load(file)[name] == value
    return seen


def export_has_file(name):
    def seen(a, b):
        folder = os.path.join(b.dir, "hf")
        done = RUNS.tool("tessera-checkpoint", "export", os.path.join(b.dir, "out"), folder)
        return done.returncode == 0 and os.path.exists(os.path.join(folder, name))
    return seen


def flops_per_token(layers, width, ffn, context, vocab):
    """Forward and backward of the tied Llama of BASE: 6 a weight of a matrix, and for attention 12 C T
    a layer (Chowdhery et al. 2022, appendix B), of which a causal mask leaves half."""
    matrices = layers * (4 * width * width + 3 * width * ffn) + vocab * width
    return 6 * matrices + 6 * layers * width * context


def mfu_is_right(a, b):
    flops = flops_per_token(2, 16, 64, 8, 256)
    return all(abs(s["mfu"] - s["tokens_per_second"] * flops / 1e9) <= 1e-6 * s["mfu"]
               for s in b.steps)


def peak_is_right(a, b):
    """A limit at the peak that was said is enough, and one well below is not: segments are 2 MiB."""
    peak = max(a.values("peak_bytes"))
    enough = RUNS.run(BASE | WIDE | {"memory.limit": f"{peak + (8 << 20)}B"})
    return enough.status == 0 and b.status == 1 and "out of memory" in b.text


WIDE = {"model.width": 256, "model.layers": 4}


class Row:
    def __init__(self, key, value, sees, base=None, ranks=1, same=False, **how):
        self.key, self.value, self.sees, self.base = key, value, sees, base or {}
        self.ranks, self.same, self.how = ranks, same, how


ROWS = [
    Row("device", "cuda", lambda a, b: b.status != 0 or "cuda" in b.text),
    Row("model.from", "@HF@", other_numbers, {k: v for k, v in FROM.items() if k != "model.from"}),
    Row("model.kind", "bloom", both(other_numbers, lambda a, b: b.count("layer_norm_fwd") > 0)),
    Row("model.source", "@SOURCE@", export_has_file("tokenizer_config.json"), TOKENS),
    Row("model.classes", "yes,no", both(other_numbers, export_has("label2id", {"yes": 0, "no": 1})), CLASSES),
    Row("model.pooling", "mean", other_numbers, CLASSES),
    Row("model.frozen", "blocks.0.*", lambda a, b: a.steps[0]["loss"] == b.steps[0]["loss"] and
        a.steps[0]["grad_norm"] > b.steps[0]["grad_norm"] > 0),
    Row("model.quantize", "nf4", both(other_numbers, lambda a, b: b.count("nf4_dequantize") > 0),
        {"model.frozen": "blocks.*.weight"}),
    Row("model.layers", 3, lambda a, b: b.count("attention_fwd") * 2 == a.count("attention_fwd") * 3),
    Row("model.heads", 4, both(other_numbers, lambda a, b: "(4 heads of 4" in b.tree())),
    Row("model.kv_heads", 1, both(other_numbers, other_tree)),
    Row("model.head_width", 16, both(other_numbers, lambda a, b: "(2 heads of 16" in b.tree())),
    Row("model.width", 32, both(other_numbers, other_tree)),
    Row("model.ffn", 96, both(other_numbers, lambda a, b: "Linear(96 -> 16" in b.tree())),
    Row("model.context", 12, tokens_per_step(24)),
    Row("model.max_positions", 32, both(lambda a, b: "[32, 16]" in b.tree(),
                                        export_has("n_positions", 32)), GPT2),
    Row("model.vocab", 300, lambda a, b: "[300, 16]" in b.tree()),
    Row("model.tied", "false", both(other_numbers, lambda a, b: "tied)" not in b.tree())),
    Row("model.bias", "false", other_tree, GPT2),
    Row("model.qkv_bias", "true", both(other_numbers, other_tree)),
    Row("model.qk_norm", "true", both(other_numbers, other_tree)),
    Row("model.window", 3, both(other_numbers, lambda a, b: ", window 3" in b.tree())),
    Row("model.window_layers", "fw", both(other_numbers, lambda a, b: b.tree().count("window 3") == 1),
        {"model.window": 3}),
    Row("model.types", 3, other_tree, BERT),
    Row("model.position_offset", 2, both(other_numbers, other_tree), BERT),
    Row("model.attn_softcap", 0.01, both(other_numbers, lambda a, b: "softcap 0.01" in b.tree())),
    Row("model.logit_softcap", 1.5, both(other_numbers, lambda a, b: "softcap 1.5" in b.tree())),
    Row("model.gelu", "exact", other_numbers, GPT2),
    Row("model.rope_theta", 3.0, other_numbers),
    Row("model.rope_scaling", "linear", other_numbers, {"model.rope_factor": 4.0}),
    Row("model.rope_scaling", "llama3", other_numbers,
        {k: v for k, v in SCALED.items() if k != "model.rope_scaling"}),
    Row("model.rope_factor", 8.0, other_numbers, {"model.rope_scaling": "linear"}),
    Row("model.rope_low_freq_factor", 3.0, other_numbers, SCALED),
    Row("model.rope_high_freq_factor", 16.0, other_numbers, SCALED),
    Row("model.rope_original_context", 64, other_numbers, SCALED),
    Row("model.norm_eps", 0.1, other_numbers),
    Row("model.bos_ids", "7", export_has("bos_token_id", 7)),
    Row("model.eos_ids", "8,9", export_has("eos_token_id", [8, 9])),
    Row("model.pad_ids", "10", export_has("pad_token_id", 10)),
    Row("model.dropout", 0.5, both(other_numbers, lambda a, b: b.count("dropout") > 0), GPT2),
    Row("model.dropout", 0.5, both(other_numbers, lambda a, b: b.count("dropout") > 0),
        {"model.kind": "bloom"}),
    Row("lora.targets", "q_proj,mlp.down", both(
        other_later, lambda a, b: b.tree().count("(lora): Lora(rank 8") > a.tree().count("Lora("))),
    Row("lora.rank", 4, both(other_later, lambda a, b: "(lora): Lora(rank 4" in b.tree()), LORA),
    Row("lora.alpha", 64.0, other_later, LORA),
    Row("lora.rslora", "true", other_later, LORA),
    Row("lora.dropout", 0.5, both(other_later, lambda a, b: b.count("dropout") > 0), LORA),
    Row("lora.modules_to_save", "norm1", both(
        other_later, lambda a, b: b.values("grad_norm")[0] > a.values("grad_norm")[0]), LORA),
    Row("lora.from", "@ADAPTER@", both(
        other_numbers, lambda a, b: "(lora): Lora(rank 3" in b.tree()), FROM),
    Row("data.text", "@OTHER@", other_numbers),
    Row("data.tokens", "@B@", other_numbers, TOKENS),
    Row("data.sources", "@A@: 1, @B@: 3", other_numbers, SOURCES),
    Row("data.chat", "@OTHER_CHATS@", other_numbers, CHATS),
    Row("data.chat_template", "@OTHER_TEMPLATE@", other_numbers, CHATS),
    Row("data.train_on", "all", other_numbers, CHATS),
    Row("data.train_on", "last", other_numbers, CHATS),
    Row("data.long_chats", "drop", other_numbers, CHATS),
    Row("data.preference", "@OTHER_PAIRS@", other_numbers, PAIRS),
    Row("data.chat_template", "@OTHER_TEMPLATE@", other_numbers, PAIRS),
    Row("data.long_chats", "drop", other_numbers, PAIRS),
    Row("data.classify", "@OTHER_CLASSES@", other_numbers, CLASSES),
    Row("data.classify", "@OTHER_CLASSES@", other_numbers, CLASSES | {"model.kind": "bert"}),
    Row("data.label_field", "other", both(other_numbers, export_has("label2id", {"0": 0, "1": 1, "2": 2})),
        CLASSES),
    Row("data.field", "label", other_numbers, CLASSES),
    Row("data.long_chats", "drop", other_numbers, CLASSES),
    Row("dpo.beta", 0.5, other_numbers, PAIRS),
    Row("dpo.loss", "ipo", other_numbers, PAIRS),
    Row("dpo.label_smoothing", 0.2, other_numbers, PAIRS),
    # Of other weights, whatever they are: as training starts, nothing is preferred.
    Row("dpo.reference", "@HF_PAIRS@", lambda a, b: a.values("chosen")[0] == 0 != b.values("chosen")[0],
        PAIRS),
    Row("data.val_tokens", "@B@", lambda a, b: a.values("val_loss")[-1] != b.values("val_loss")[-1],
        TOKENS),
    Row("data.tokenizer", "char", lambda a, b: b.numbers()[0] != a.numbers()[0]),
    Row("data.tokenizer", "@TOKENIZER@", lambda a, b: b.numbers()[0] != a.numbers()[0]),
    Row("data.field", "body", other_numbers, {"data.text": "@LINES@"}),
    Row("data.invalid", "replace", lambda a, b: a.status == 3 and b.status == 0 and len(b.steps) == 4,
        {"data.text": "@BROKEN@"}),
    Row("data.val_fraction", 0.5, lambda a, b: a.tree() != b.tree() and other_numbers(a, b)),
    Row("data.val_split", "interleave", lambda a, b: a.values("val_loss")[-1] !=
        b.values("val_loss")[-1]),
    Row("data.separator", 32, other_numbers),
    Row("data.separator", 32, other_numbers, {"data.restart_positions": "true"}),
    # ALiBi knows distances alone: what is seen is the mask.
    Row("data.separator", 32, other_numbers, {"model.kind": "bloom"}),
    Row("data.document_tokens", "none", other_numbers,
        {"data.text": "@LINES@", "data.tokenizer": "@ENDING@"}),
    Row("data.mask_token", 1, other_numbers, BERT),
    Row("data.mask_probability", 0.4, other_numbers, BERT),
    Row("data.separator", 32, other_numbers, {"model.kind": "bloom", "data.restart_positions": "true"}),
    Row("data.separator", 32, other_numbers, GPT2 | {"data.restart_positions": "true"}),
    Row("data.read_ahead", 4, lambda a, b: b.values("step_ms")[-1] < a.values("step_ms")[-1] / 2,
        {"debug.slow_data_ms": 100, "train.steps": 12}, same=True),
    Row("data.restart_positions", "true", other_numbers, GPT2 | {"data.separator": 32}),
    Row("train.z_loss", 0.01, other_numbers),
    Row("train.label_smoothing", 0.1, other_numbers),
    Row("train.steps", 6, lambda a, b: b.values("step") == [1, 2, 3, 4, 5, 6]),
    Row("train.micro_batch", 3, tokens_per_step(24)),
    Row("train.grad_accum_steps", 3, both(tokens_per_step(48), more("attention_fwd", 3))),
    Row("train.epochs", 0.02, lambda a, b: len(b.steps) == 4, {"train.steps": "UNSET"}, skip_base=True),
    Row("train.tokens", 96, lambda a, b: len(b.steps) == 6, {"train.steps": "UNSET"}, skip_base=True),
    Row("train.global_batch_tokens", 64, both(tokens_per_step(64), more("attention_fwd", 4))),
    Row("train.global_batch", 8, both(tokens_per_step(64), more("attention_fwd", 4))),
    # One seed for many things, each where nothing else of it is seen.
    Row("train.seed", 2, other_numbers, TOKENS | {"data.tokens": "@SAME@"}),  # initial values
    Row("train.seed", 2, other_numbers, FROM),  # the order of the data
    Row("train.seed", 2, other_numbers, FROM_GPT2 | {"data.tokens": "@SAME@", "model.dropout": 0.5}),
    Row("train.seed", 2, both(lambda a, b: a.steps[0]["loss"] == b.steps[0]["loss"], other_last),
        FROM | BF16 | {"data.tokens": "@SAME@", "optim.stochastic_rounding": "true"}),
    Row("train.seed", 2, lambda a, b: a.sample() != b.sample() and None not in (a.sample(), b.sample()),
        SAMPLE | {"checkpoint.resume": "auto", "checkpoint.resume_override": "true", "train.steps": 3},
        resume=True),  # of a run that is over
    Row("train.eval_every", 2, val_steps(2, 4), same=True),
    Row("train.evals_per_epoch", 91, val_steps(3, 4), same=True),
    Row("train.eval_batches", 1, lambda a, b: a.values("val_loss")[-1] != b.values("val_loss")[-1],
        same=True),
    Row("eval.tasks", "lambada=@TASK@", rounds(4), {"model.context": 64}, same=True),
    Row("eval.tokenizer", "@TOKENIZER@", other_perplexity, EVAL, same=True),
    Row("eval.every", 2, rounds(2, 4), EVAL, same=True),
    # Of windows of 8 tokens, as train.evals_per_epoch above.
    Row("eval.per_epoch", 91, rounds(3, 4), {"eval.tasks": "lambada=@SHORT_TASK@"}, same=True),
    Row("eval.fewshot", 1, other_perplexity, EVAL, same=True),
    Row("eval.fewshot_file", "@OTHER_TASK@", other_perplexity, EVAL | {"eval.fewshot": 1}, same=True),
    Row("eval.fewshot_seed", 7, other_perplexity, EVAL | {"eval.fewshot": 1}, same=True),
    Row("eval.limit", 3, other_perplexity, EVAL, same=True),
    Row("eval.max_tokens", 1, lambda a, b: len(a.streams["compute"]) > len(b.streams["compute"]),
        {"eval.tasks": "generate=@ANSWERS@", "eval.every": 1, "model.context": 64, "eval.max_tokens": 9}, same=True),
    Row("train.log_every", 3, lambda a, b: b.text.count("\nstep ") < a.text.count("\nstep ") == 4,
        same=True),
    Row("train.threads", 7, lambda a, b: b.num_threads >= a.num_threads + 4,
        WIDE | {"train.steps": 8}, same=True, watch=True),
    Row("train.pin_threads", "false", lambda a, b: len(b.cpus) < len(a.cpus),
        WIDE | {"train.threads": 0}, same=True, watch=True),
    Row("train.reproducible", "true", other_tree, {"train.global_batch": 8}, ranks=2),
    Row("train.max_minutes", 0.002, lambda a, b: b.status == 0 and 0 < len(b.steps) < 100000,
        {"train.steps": 100000, "profile.steps": "UNSET"}, skip_base=True),
    Row("sample.tokens", 5, lambda a, b: a.sample() is None and len(b.sample()) == len("line ") + 5 + 1,
        {"data.tokenizer": "char", "sample.prompt": "line "}, same=True),
    Row("sample.prompt", "easy", lambda a, b: b.sample().startswith("easy"), SAMPLE, same=True),
    Row("sample.temperature", 3.0, lambda a, b: a.sample() != b.sample(), SAMPLE, same=True),
    Row("sample.top_k", 1, lambda a, b: a.sample() != b.sample() == greedy(), SAMPLE, same=True),
    Row("sample.top_p", 1e-9, lambda a, b: a.sample() != b.sample() == greedy(), SAMPLE, same=True),
    Row("optim.name", "sgd", other_last),
    Row("optim.name", "lion", other_last),
    Row("optim.name", "adamw_8bit", other_last, {"model.width": 96}),
    Row("optim.name", "adafactor", other_last),
    Row("optim.name", "muon", other_last),
    Row("optim.muon_momentum", 0.5, other_last, {"optim.name": "muon"}),
    Row("optim.muon_nesterov", "false", other_last, {"optim.name": "muon"}),
    Row("optim.muon_coefficients", "polar_express", other_last, {"optim.name": "muon"}),
    Row("optim.muon_scale", "original", other_last, {"optim.name": "muon"}),
    Row("optim.muon_blocks", "heads", other_last, {"optim.name": "muon"}),
    Row("optim.groups", "*.weight: lr_scale=0.5", other_last),
    Row("optim.lr", 0.02, both(other_last, lrs(0.02, 0.02, 0.02, 0.02)), {"optim.final_lr": 0.01}),
    Row("optim.final_lr", 0.001, both(other_last, lambda a, b: b.values("lr")[-1] < 0.0011),
        {"optim.schedule": "linear"}),
    Row("optim.warmup_ratio", 0.9, both(other_last, lrs(0.0025, 0.005, 0.0075, 0.01))),
    Row("optim.warmup_steps", 4, both(other_last, lrs(0.0025, 0.005, 0.0075, 0.01))),
    Row("optim.decay_steps", 2, both(other_last, lrs(0.01, 0.01, 0.0055, 0.001)),
        {"optim.schedule": "wsd", "optim.final_lr": 0.001}),
    Row("optim.schedule", "linear", both(other_last, lrs(0.01, 0.007, 0.004, 0.001)),
        {"optim.final_lr": 0.001}),
    Row("optim.schedule", "cosine", both(other_last, lrs(0.01, 0.00775, 0.00325, 0.001)),
        {"optim.final_lr": 0.001}),
    Row("optim.schedule", "wsd", both(other_last, lrs(*[0.01] * 8, 0.0055, 0.001)),  # a fifth of the steps
        {"optim.final_lr": 0.001, "train.steps": 10, "optim.schedule": "linear"}),
    Row("optim.schedule", "range_test", both(other_last, lrs(1e-7, 4.6415888e-6, 2.1544347e-4, 0.01)),
        {"optim.schedule": "linear"}),
    Row("optim.first_lr", 1e-5, both(other_later, lrs(1e-5, 1e-4, 1e-3, 0.01)), {"optim.schedule": "range_test"}),
    Row("optim.beta1", 0.5, other_last),
    Row("optim.beta2", 0.5, other_last),
    Row("optim.eps", 0.01, other_last),
    Row("optim.momentum", 0.1, other_last, {"optim.name": "sgd"}),
    Row("optim.nesterov", "true", other_last, {"optim.name": "sgd", "optim.momentum": 0.9}),
    Row("optim.weight_decay", 1.0, other_last),
    Row("optim.weight_decay", 1.0, other_last, {"optim.name": "sgd"}),
    Row("optim.beta1", 0.5, other_last, {"optim.name": "lion"}),
    Row("optim.beta2", 0.5, other_last, {"optim.name": "lion"}),
    Row("optim.stochastic_rounding", "true", other_last, BF16),
    Row("optim.stochastic_rounding", "true", other_last, BF16 | {"optim.name": "lion"}),
    Row("optim.stochastic_rounding", "true", other_last, BF16 | {"optim.name": "sgd"}),
    Row("optim.clip", 0.01, lambda a, b: a.numbers()[0] == b.numbers()[0] and
        a.numbers()[1] != b.numbers()[1], {"optim.name": "sgd"}),
    Row("optim.clip_p", "inf", lambda a, b: a.steps[0]["loss"] == b.steps[0]["loss"] and
        b.steps[0]["grad_norm"] < a.steps[0]["grad_norm"]),
    Row("fsdp.strategy", "no_shard", both(gathers(0), lambda a, b: gathers(4)(b, a)), ranks=2, same=True),
    Row("fsdp.shard_size", 2, both(other_tasks("all_reduce"), other_tree), {"fsdp.strategy": "hybrid_shard"},
        ranks=4, same=True),
    Row("fsdp.wrap", "whole_model", both(other_tasks("all_gather"), other_tree), ranks=2),
    Row("fsdp.wrap_every", 3, both(other_tasks("all_gather"), other_tree),
        {"fsdp.wrap": "every_n_blocks", "model.layers": 6}, ranks=2),
    Row("fsdp.min_num_params", 100, both(other_tasks("all_gather"), other_tree),
        {"fsdp.wrap": "min_num_params"}, ranks=2),
    Row("fsdp.wrap_class", "Attention,SwiGlu", both(other_tasks("all_gather"), other_tree),
        {"fsdp.wrap": "class", "fsdp.wrap_class": "LlamaBlock"}, ranks=2),
    Row("fsdp.sync_every_micro_batch", "false", both(reduces(2), lambda a, b: reduces(6)(b, a)),
        {"train.grad_accum_steps": 3}, ranks=2),
    # A quarter of the group's part stays on each rank: copied once a step and unit, in a buffer.
    Row("fsdp.reshard_after_forward", "2", both(other_tree, lambda a, b: b.count("copy") > a.count("copy")),
        ranks=4, same=True),
    Row("fsdp.reshard_after_forward", "false", exits_with(2), ranks=2),  # full_shard does
    Row("fsdp.reshard_after_forward", "true", exits_with(2), {"fsdp.strategy": "shard_grad_op"}, ranks=2),
    Row("fsdp.gradient_pieces", "true", lambda a, b: a.count("reduce_scatter embedding") == 2 and
        b.count("reduce_scatter embedding") > 8, TOKENS | {"model.vocab": 2000}, ranks=2, same=True),
    Row("fsdp.gradient_pieces", "true", lambda a, b: a.count("reduce_scatter head") == 2 and
        b.count("reduce_scatter head") > 8, TOKENS | {"model.vocab": 2000, "model.tied": "false"}, ranks=2,
        same=True),
    Row("fsdp.prefetch_forward", 3, other_tree, {"model.layers": 6}, ranks=2, same=True),
    Row("fsdp.prefetch_backward", 3, other_tree, {"model.layers": 6}, ranks=2, same=True),
    Row("fsdp.offload", "params_and_optimizer", lambda a, b: set(b.streams) > set(a.streams), ranks=2,
        same=True),
    Row("fsdp.communicators", 1, lambda a, b: "reduce_scatter blocks.0" in a.streams["reduce_scatter"] and
        "reduce_scatter blocks.0" in b.streams["all_gather"], ranks=2, same=True),
    Row("fsdp.ignored", "blocks.0.*", lambda a, b: a.steps[0]["loss"] == b.steps[0]["loss"] and
        a.steps[0]["grad_norm"] > b.steps[0]["grad_norm"] > 0 and
        a.count("all_gather blocks.0") > b.count("all_gather blocks.0") == 0, ranks=2),
    Row("fsdp.wire_dtype", "bf16", other_numbers, ranks=2),
    Row("precision.param_dtype", "bf16", both(other_numbers, lambda a, b: " bf16, " in b.tree())),
    Row("precision.reduce_dtype", "bf16", other_numbers, BF16, ranks=2),
    Row("precision.output_dtype", "bf16", lambda a, b: a.sample() != b.sample(), {"sample.tokens": 200},
        same=True),
    Row("precision.buffer_dtype", "bf16", other_numbers, BF16 | {"model.kind": "bloom", "model.heads": 16,
                                                              "model.width": 32}),
    # The embedding, ignored, stays in f32, and so does what comes from it.
    Row("precision.cast_forward_inputs", "false", lambda a, b: a.status == 0 and b.status != 0 and
        "error: rms_norm: w must have x's dtype (f32) or f32, got bf16" in b.text,
        BF16 | {"fsdp.ignored": "embed.*", "model.tied": "false"}),
    Row("precision.norm_fp32", "true", both(other_last, lambda a, b: "weight [16] f32" in b.tree()),
        BF16),
    Row("precision.loss_scale", "static", lambda a, b: b.values("loss_scale") == [4, 4, 4, 4],
        BF16 | LOSS_SCALE),
    Row("precision.loss_scale", "dynamic", lambda a, b: b.values("loss_scale") == [4, 4, 8, 8],
        BF16 | LOSS_SCALE),
    Row("precision.loss_scale_init", 2.0, lambda a, b: b.steps[0]["loss_scale"] == 2.0, F16),
    Row("precision.loss_scale_interval", 2, lambda a, b: b.values("loss_scale") == [4, 4, 8, 8],
        F16 | {"precision.loss_scale_init": 4.0}),
    Row("recompute.policy", "full", more("attention_fwd", 2), same=True),
    Row("recompute.policy", "selective", both(more("attention_fwd", 1), lambda a, b: b.count("swiglu_fwd") >
                                              a.count("swiglu_fwd")), same=True),
    Row("recompute.policy", "every_n", lambda a, b: a.count("attention_fwd") < b.count(
        "attention_fwd") < 2 * a.count("attention_fwd"), same=True),
    Row("recompute.every_n", 3, lambda a, b: a.count("attention_fwd") - b.count("attention_fwd") == 2,
        {"recompute.policy": "every_n", "model.layers": 6}, same=True),
    # Two steps of two blocks; the last one's input has not left when its backward begins.
    Row("recompute.offload", "true", lambda a, b: "d2h" not in a.streams and
        b.streams["d2h"].count("offload_checkpoint") == 4 and b.streams["h2d"].count("fetch_checkpoint") == 2,
        {"recompute.policy": "full"}, same=True),
    # 16 tokens in two tiles, forward and again.
    Row("recompute.mlp_tile", 8, both(more("swiglu_fwd", 4), lambda a, b: all(
        abs(x - y) <= 1e-5 * x for x, y in zip(a.values("loss"), b.values("loss"), strict=True)))),
    Row("memory.limit", "4MiB", peak_is_right, WIDE),
    # The logits' block, free behind the loss, is given away whole instead of being cut.
    Row("memory.split", "64MiB", lambda a, b: b.steps[-1]["reserved_bytes"] >
        a.steps[-1]["reserved_bytes"], {"model.vocab": 5000, "model.width": 320, "model.heads": 4,
                                        "model.ffn": 512, "model.layers": 1, "model.context": 64,
                                        "train.micro_batch": 16}, same=True),
    Row("memory.empty_cache_every", 1, lambda a, b: a.steps[-1]["reserved_bytes"] >
        b.steps[-1]["reserved_bytes"], {"model.width": 128, "model.context": 200,
                                        "train.micro_batch": 4}, same=True),
    # The library has a workspace and adds in another order.
    Row("kernels.gemm", "own", lambda a, b: a.status == b.status == 0 and
        (a.values("peak_bytes") > b.values("peak_bytes") or other_numbers(a, b)), SIMT),
    Row("kernels.gemm_tf32", "true", other_numbers, SIMT),
    # A key and its choice a line, under the device's name.
    Row("kernels.tuning_file", "@DIR/tuning.txt", lambda a, b: a.status == b.status == 0 and
        "\n[Fake device (9.0); cuBLASLt " in b.read("tuning.txt") and
        re.search(r"\ngemm .* -> fused ", b.read("tuning.txt")), SIMT),
    Row("kernels.attention", "cudnn", lambda a, b: a.status == 0 and b.status == 2 and
        "kernels.attention = cudnn, but " in b.text, SIMT, env={"TESSERA_CUDNN": "/nowhere/lib.so"}),
    Row("output.dir", "@DIR/elsewhere", lambda a, b: "elsewhere/metrics.jsonl" in b.files()),
    Row("output.overwrite", "true", lambda a, b: a.status == 2 and b.values("step") == [1, 2, 3, 4],
        resume=True),
    Row("output.tensorboard", "true", has_event_file, same=True),
    Row("output.unit_norms", "true", norms_of_units, ranks=2, same=True),
    Row("output.peak_tflops", 0.001, mfu_is_right, same=True),
    Row("checkpoint.per_epoch", 91, lambda a, b: b.saved_steps() == [3],
        {"checkpoint.last": "false", "checkpoint.best": "false"}, same=True),
    Row("checkpoint.every", 2, lambda a, b: b.saved_steps() == [2, 4], same=True),
    Row("checkpoint.every_minutes", 1e-5, lambda a, b: len(b.saved_steps()) > len(a.saved_steps()) == 1,
        same=True),
    Row("checkpoint.last", "false", lambda a, b: a.saved_steps() == [4] and not b.saved_steps(),
        same=True),
    Row("checkpoint.keep", 2, lambda a, b: a.saved_steps() == [4, 5, 6] and
        b.saved_steps() == [5, 6], SAVES, same=True),
    Row("checkpoint.best", "true", lambda a, b: b.saved_steps() == [1, 4] and a.saved_steps() == [4],
        SAVES | {"train.steps": 4} | {"checkpoint.keep": 1, "optim.lr": 1.0, "optim.final_lr": 1.0,
                 "train.eval_every": 1}, same=True),
    Row("checkpoint.dir", "@DIR/there", lambda a, b: "there/step-00000004/manifest.json" in b.files(),
        {"checkpoint.every": 2}, same=True),
    Row("checkpoint.on_error", "stop", exits_with(7), {"checkpoint.every": 2,
                                                       "checkpoint.dir": "@DIR/blocked"}, block=True),
    Row("checkpoint.max_errors", 1, exits_with(7), {"checkpoint.every": 2,
                                                    "checkpoint.dir": "@DIR/blocked"}, block=True),
    Row("checkpoint.resume", "auto", lambda a, b: b.values("step")[-1] == 6, SAVES, resume=True),
    Row("checkpoint.resume_override", "true", lambda a, b: a.status == 2 and b.status == 0,
        SAVES | {"checkpoint.resume": "auto", "train.seed": 77}, resume=True),
    Row("checkpoint.resume_skip_unreadable", "true", lambda a, b: a.status == 4 and b.status == 0,
        SAVES | {"checkpoint.resume": "auto"}, resume=True, unreadable=True),
    Row("guard.replica_every", 1, lambda a, b: a.status == 0 and b.status == 5,
        {"fsdp.strategy": "no_shard", "debug.flip_step": 2, "debug.flip_rank": 1}, ranks=2),
    Row("guard.state_checksum", "true", lambda a, b: a.status == 0 and b.status == 5,
        {"debug.flip_step": 3}),
    Row("guard.max_skips", 1, lambda a, b: a.status == 5 and b.status == 0, {"debug.nan_step": 3}),
    Row("guard.spike", "skip", lambda a, b: (b.values("skipped")[-1] or 0) > 0,
        {k: v for k, v in SPIKE.items() if k != "guard.spike"}),
    Row("guard.spike_z", 1e9, lambda a, b: not b.values("skipped")[-1] and a.values("skipped")[-1],
        SPIKE),
    Row("guard.spike_window", 1000, lambda a, b: not b.values("skipped")[-1] and
        a.values("skipped")[-1], SPIKE),
    Row("guard.max_spikes", 0, exits_with(5), SPIKE),
    Row("guard.snapshot_every", 1, lambda a, b: a.text.count("back to step") > 0 and
        re.findall("back to step (.*),", a.text) != re.findall("back to step (.*),", b.text),
        SPIKE | {"guard.spike": "rewind"}),
    Row("guard.first_steps", 4, lambda a, b: "the first 4 steps: updates do not change" in b.text and
        "steps: updates" not in a.text, {"optim.lr": 0, "optim.final_lr": 0}),
    Row("dist.timeout", 2, lambda a, b: b.status != 0 and b.seconds < 60,
        {"train.steps": 100000, "profile.steps": "UNSET"}, ranks=2, stop=True, skip_base=True),
    Row("dist.single_process", "true", lambda a, b: a.status == 2 and b.status == 0,
        env={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}),
    Row("debug.flip_step", 3, exits_with(5), {"guard.state_checksum": "true"}),
    Row("debug.flip_rank", 1, lambda a, b: b.status == 5 and "rank 1" in b.text,
        {"guard.state_checksum": "true", "debug.flip_step": 3}, ranks=2),
    Row("debug.slow_ms", 30, lambda a, b: min(b.values("step_ms")) >= 30, same=True),
    Row("debug.slow_rank", 1, lambda a, b: b.values("slowest_rank")[-1] == 1,
        {"debug.slow_ms": 40, "train.steps": 12}, ranks=2, same=True),
    Row("debug.poison", "true", lambda a, b: b.count("poison") > 0, same=True),
    Row("debug.order_check", "true", lambda a, b: "order check: no conflict in 4 steps" in b.text,
        same=True),
    Row("debug.dist", "true", lambda a, b: b.text.count("all_gather") > 5 > a.text.count("all_gather"),
        ranks=2, same=True),
    Row("profile.steps", "4..8", lambda a, b: b.count("attention_fwd") > a.count("attention_fwd") == 4
        and "limited by" in b.text, {"train.steps": 8, "train.eval_every": 4}, same=True),
    Row("profile.trace", "@DIR/there.json", lambda a, b: "there.json" in b.files(), same=True),
    Row("debug.slow_link_us", 2000, lambda a, b: min(b.values("step_ms")) >= 20, ranks=2, same=True),
    Row("debug.slow_data_ms", 40, lambda a, b: min(b.values("step_ms")) >= 40, same=True),
    Row("debug.exposed_units", 2, lambda a, b: len(b.steps[0].get("exposed_units", [])) == 2, ranks=2,
        same=True),
    Row("debug.nan", "on", lambda a, b: b.count("mark_nonfinite") > a.count("mark_nonfinite") == 0,
        same=True),
    Row("debug.nan_step", 2, lambda a, b: b.values("skipped")[-1] == 1, {"guard.max_skips": 1}),
    Row("debug.nan_rank", 1, lambda a, b: "not finite: rank 1" in b.text and
        "not finite: rank 0" in a.text, NAN, ranks=2),
]

# Keys whose effect cannot be seen by a run of these programs on this machine: the file of the test
# that sees it, and its name.
ELSEWHERE = {
    "model.ignore_keys": ("apps/model_from_test.cc",
                          "keys that are to be ignored give no warning, and hide no error"),
    "dist.nccl_reduce": ("apps/trainer_test.cc", "the keys of NCCL reach the options of the Context"),
    "dist.nccl_max_ctas": ("apps/trainer_test.cc", "the keys of NCCL reach the options of the Context"),
}


def greedy():
    return RUNS.run(BASE | SAMPLE | {"sample.temperature": 0}).sample()


def run_row(row):
    base = BASE | row.base
    how = {k: v for k, v in row.how.items() if k in ("watch", "stop")}
    changed = base | {row.key: row.value}
    if row.how.get("resume"):
        first = RUNS.run(BASE | SAVES | {"train.steps": 3})
        if "checkpoint.every" in base:
            changed["train.steps"] = base["train.steps"] = 6
        results = []
        for keys in (base, changed):
            directory = RUNS.path(f"resumed{len(os.listdir(RUNS.dir))}")
            shutil.copytree(os.path.join(first.dir, "out"), os.path.join(directory, "out"))
            if row.how.get("unreadable"):
                os.remove(os.path.join(directory, "out/step-00000003/rank-00000.safetensors"))
            results.append(RUNS.start(dict(keys), 1, directory, False, False))
        return results
    if row.how.get("env"):
        results = []
        for keys in (base, changed):
            directory = RUNS.path(f"variables{len(os.listdir(RUNS.dir))}")
            os.makedirs(directory)
            results.append(RUNS.start(dict(keys), 1, directory, False, False, row.how["env"]))
        return results
    if row.how.get("block"):
        results = []
        for keys in (base, changed):
            directory = RUNS.path(f"blocked{len(os.listdir(RUNS.dir))}")
            os.makedirs(os.path.join(directory, "blocked"))
            for step in (2, 4):  # a file where the checkpoint's directory shall be
                with open(os.path.join(directory, f"blocked/step-{step:08}"), "w"):
                    pass
            results.append(RUNS.start(dict(keys), 1, directory, False, False))
        return results
    after = RUNS.run(changed, row.ranks, **how)
    before = after if row.how.get("skip_base") else RUNS.run(base, row.ranks, **how)
    return before, after


def metrics_of_time():
    """What a line of the metrics says of time and tokens, against the clock."""
    run = RUNS.run(BASE | {"train.steps": 400, "train.micro_batch": 8}, watch=True)
    # step_ms is the mean of the last 16 steps.
    total = sum(16 * step["step_ms"] for step in run.steps[31::16]) / 1e3
    if not run.step_seconds / 2 < total < run.step_seconds * 2 + 0.05:
        yield f"steps take {total} s by the metrics, {run.step_seconds} s by the clock"
    passes = RUNS.run(BASE | {"train.grad_accum_steps": 3}, ranks=2)
    for run, per_step in ((run, 64), (passes, 2 * 3 * 2 * 8)):
        for step in run.steps:
            if abs(step["tokens_per_second"] * step["step_ms"] / 1e3 - per_step) > 1e-3:
                yield f"tokens_per_second x step_ms is not the step's {per_step} tokens: {step}"
                break
        expected = [per_step * step for step in run.values("step")]
        if run.values("tokens") != expected:
            yield f"tokens: {run.values('tokens')[:4]} ..., expected {expected[:4]} ..."
    ranks = RUNS.run(BASE | {"output.peak_tflops": 0.001}, ranks=2)
    for step in ranks.steps:
        flops = step["tokens_per_second"] * flops_per_token(2, 16, 64, 8, 256)
        if abs(step["mfu"] - flops / 2e9) > 1e-6 * step["mfu"]:
            yield f"mfu {step['mfu']} on 2 ranks of 1 GFLOP/s that do {flops} FLOP/s"


def metrics_of_memory():
    small, large = RUNS.run(BASE), RUNS.run(BASE | WIDE)
    more_bytes = max(large.values("peak_bytes")) - max(small.values("peak_bytes"))
    matrices = 4 * (4 * 256 * 256 + 3 * 256 * 704) + 256 * 256
    if not 16 * matrices < more_bytes < 40 * matrices:
        yield f"peak_bytes grow by {more_bytes} for {matrices} more parameters in f32"
    for step in large.steps:
        if step["peak_bytes"] >= step["reserved_bytes"]:
            yield f"peak_bytes are not below reserved_bytes, where nothing was given back: {step}"


def metrics_of_waits():
    """Without prefetch each gather is waited for, and what a step waits for is its share."""
    keys = {"fsdp.prefetch_forward": 0, "fsdp.prefetch_backward": 0, "train.steps": 20}
    run = RUNS.run(BASE | keys, ranks=2)
    gathers = sum(step["exposed_gather_ms"] > 0 for step in run.steps)
    if gathers < 10:
        yield f"a gather is exposed in {gathers} of 20 steps without prefetch"
    reduces = run.values("exposed_reduce_ms")
    if not sum(reduces) > 0:
        yield "no reduce of 20 steps is exposed"
    shares = re.findall(r"^step .*  exposed ([0-9.]+)%", run.text, re.M)
    if len(shares) != 20:
        yield f"{len(shares)} of 20 lines say what was exposed"
        return
    for i in range(20):
        last = run.steps[max(0, i - 15):i + 1]
        waited = sum(s["exposed_gather_ms"] + s["exposed_reduce_ms"] for s in last)
        share = min(1, waited / (len(last) * run.steps[i]["step_ms"])) * 100
        if abs(share - float(shares[i])) > 0.06:
            yield f"step {i + 1}: exposed {shares[i]} %, expected {share}"


def dropout_masks():
    """A sample's mask is that of its place in the step, whoever computes it and in which pass; each
    step has others."""
    keys = GPT2 | {"model.dropout": 0.5, "optim.lr": 0, "optim.final_lr": 0, "train.micro_batch": 4}
    whole = RUNS.run(BASE | keys)
    for ranks, micro_batch, passes in ((1, 1, 4), (2, 2, 1), (2, 1, 2)):
        parts = RUNS.run(BASE | keys | {"train.micro_batch": micro_batch,
                                        "train.grad_accum_steps": passes}, ranks=ranks)
        for a, b in zip(whole.values("loss"), parts.values("loss"), strict=True):
            if abs(a - b) > 1e-5 * a:
                yield f"{ranks} ranks x {passes} passes x {micro_batch}: loss {b}, expected {a}"
                break
    losses = RUNS.run(BASE | keys | TOKENS | {"data.tokens": "@SAME@"}).values("loss")
    if len(set(losses)) != 4:
        yield f"with one sample and no update the losses of four steps are {losses}, expected four"


def document_masks():
    """Rotary attention knows distances alone: where documents are masked it does not matter whether
    positions restart."""
    plain, masked, restarted = (RUNS.run(BASE | {"train.micro_batch": 8} | keys).values("loss") for keys in (
        {}, {"data.separator": 32}, {"data.separator": 32, "data.restart_positions": "true"}))
    if abs(masked[0] - restarted[0]) > 1e-5 * masked[0]:
        yield f"loss {restarted[0]} where positions restart, expected {masked[0]}"
    if abs(plain[0] - masked[0]) < 1e-4 * plain[0]:
        yield f"loss {masked[0]} with documents, and {plain[0]} without"


def generate_options():
    """Each option of tessera-generate, by the text. A character is a token."""
    out = os.path.join(RUNS.run(BASE | {"data.tokenizer": "char"}).dir, "out")

    def text(**given):
        options = {"prompt": "line "} | given
        done = RUNS.tool("tessera-generate", "--checkpoint", out, "--device", "cpu", *(
            f"--{name.replace('_', '-')}={value}" for name, value in options.items()))
        return done.stdout if done.returncode == 0 else done.stderr
    plain, greedy = text(), text(temperature=0)
    for what, holds in {
            "the same text twice": text() == plain,
            "200 tokens behind the prompt": plain.startswith("line ") and len(plain) == 5 + 200 + 1,
            "--tokens=7": text(tokens=7) == plain[:5 + 7] + "\n",
            "--tokens=0": text(tokens=0) == "line \n",
            "--prompt=easy": text(prompt="easy").startswith("easy") and len(text(prompt="easy")) == 205,
            "--seed=2": text(seed=2)[:5] == "line " and text(seed=2) != plain,
            "--temperature=0 is greedy": greedy != plain,
            "--temperature=3": len(text(temperature=3)) == 206 and text(temperature=3) != plain,
            "--top-k=1 is greedy": text(top_k=1) == greedy,
            "--top-p=1e-9 is greedy": text(top_p=1e-9) == greedy,
            "--min-p=1 is greedy": text(min_p=1) == greedy,
            "--repetition-penalty": text(temperature=0, repetition_penalty=1.5) != greedy,
            "--stop": text(stop=plain[30:33]) == plain[:plain.index(plain[30:33], 5)] + "\n",
            "--dtype=bf16": len(text(dtype="bf16")) == 206,
            "--threads=3": text(threads=3) == plain}.items():
        if not holds:
            yield f"{what}: not seen in what tessera-generate prints"


# What a run says that is of no single key.
CHECKS = {"metrics of time": metrics_of_time, "metrics of memory": metrics_of_memory,
          "metrics of waits": metrics_of_waits, "dropout masks": dropout_masks,
          "generate options": generate_options, "document masks": document_masks}


def main():
    global RUNS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("apps", help="the directory of the programs")
    parser.add_argument("--only", default="", help="keys and checks that contain this text")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--simt", help="tessera-train-simt: rows of CUDA alone")
    options = parser.parse_args()
    RUNS = Runs(options)
    failures = num_tried = 0
    try:
        base = RUNS.run(BASE)
        if base.status != 0:
            print(base.text)
            return 1
        for name, keys in (("hf", TOKENS), ("hf_gpt2", TOKENS | GPT2), ("hf_pairs", PAIRS),
                           ("adapter", TOKENS | LORA | {"lora.rank": 3})):
            out = os.path.join(RUNS.run(BASE | keys).dir, "out")
            done = RUNS.tool("tessera-checkpoint", "export", out, RUNS.path(name))
            if done.returncode != 0:
                print(done.stderr)
                return 1
        text = RUNS.tool("tessera-train", "--help").stdout
        keys = re.findall(r"^  --([a-z_.0-9]+) ", text, re.M)
        rows = {row.key for row in ROWS}
        for key in keys:
            if key not in rows and key not in ELSEWHERE:
                print(f"FAILED {key}: a key without a row: nothing says that it has an effect")
                failures += 1
        tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        for key, (path, name) in ELSEWHERE.items():
            with open(os.path.join(tests, path)) as file:
                if name not in file.read():
                    print(f"FAILED {key}: no test '{name}' in test/{path}")
                    failures += 1
        for key in sorted((rows | set(ELSEWHERE)) - set(keys)):
            print(f"FAILED {key}: a row without a key")
            failures += 1
        for row in ROWS:
            if options.only not in row.key or (row.base is SIMT) != bool(options.simt):
                continue
            problem = ""
            num_tried += 1
            before, after = run_row(row)
            try:
                if not row.sees(before, after):
                    problem = f"its effect is not seen (status {before.status}, {after.status})"
                elif row.same and before.numbers() != after.numbers():
                    problem = "it changes numbers, which it may not"
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                problem = f"{type(error).__name__}: {error} (status {before.status}, {after.status})"
            if problem:
                failures += 1
                print(f"FAILED {row.key} = {row.value}: {problem}", flush=True)
                print("  " + "\n  ".join(after.text.splitlines()[-3:]))
        for name, check in CHECKS.items():
            if options.only not in name or options.simt:
                continue
            num_tried += 1
            for problem in check():
                failures += 1
                print(f"FAILED {name}: {problem}", flush=True)
    finally:
        shutil.rmtree(RUNS.dir, ignore_errors=True)
    print(f"{num_tried} rows and checks, {failures} failures")
    return 1 if failures or num_tried == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
