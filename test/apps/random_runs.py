#!/usr/bin/env python3
"""Random runs of the real programs: configurations x strategies x launchers x ends x resumes x exports.

    random_runs.py APPS_DIR [--seconds 60] [--seed 1] [--case N] [--keep] [--mpirun PATH]

Case N is drawn from its number alone, so a failure is repeated by `--case N`. Each case trains the
same problem twice: once as `no_shard` without interruption, once under drawn settings that must not
change a bit, through lives that end in drawn ways (by signals, by kill -9, with damage done to the
checkpoints in between) and are resumed until the run is finished. Invariants:

  * exit status and `status.json` are those that this end of a run has;
  * losses and gradient norms of all steps are those of the reference, bit by bit;
  * every file that the run says is there can be read: checkpoints verify, exports and samples work;
  * what is not ours in the directory is untouched; nothing stays in shared memory; no process stays.

Prints a line for each failure, with the command lines, and at the end how many cases ran.

What it does not look at, and which tests do instead: benchmarks (apps/bench/checkpoint), imports and
exports of others' files (apps/model_from, dist/checkpoint/hf), files that change or break while they are
mapped, pipes and devices in place of files, full disks (apps/faults, core/files), tokens of a damaged
text, guards that skip or go back (apps/trainer, dist/fsdp/guards), other launchers than mpirun
(apps/launch), checkpoints of other versions and other models or rates at a resume
(dist/checkpoint/manifest, apps/resume_keys), what memory is said to be needed (dist/fsdp/peak), keys that
change nothing in numbers (settings_effects.py), limits of a control group (core/runtime/cpu/quota), and
sizes that nobody trains with (fuzz, apps/config). Faults that it finds are planted by planted.py, each
with the number of a case that does.
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

TIMEOUT = 240  # seconds a life; a machine may be busy
STRATEGIES = ["full_shard", "shard_grad_op", "shard_optim", "no_shard", "hybrid_shard",
              "hybrid_shard_zero2"]


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


class Draw(random.Random):
    """Draws; `maybe` says yes with a probability."""

    def maybe(self, p=0.5):
        return self.random() < p


def shared_memory():
    try:
        return {name for name in os.listdir("/dev/shm") if name.startswith("tessera")}
    except OSError:
        return set()


def write_shard(path, tokens, wide):
    header = [0] * 256
    header[:3] = [20240801, 7, len(tokens)] if wide else [20240520, 1, len(tokens)]
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", *header))
        file.write(struct.pack(f"<{len(tokens)}{'I' if wide else 'H'}", *tokens))


class Case:
    def __init__(self, options, number):
        self.options = options
        self.number = number
        self.draw = Draw(number)
        self.dir = tempfile.mkdtemp(prefix="tessera-random-")
        self.log = []  # command lines
        self.before = shared_memory()
        self.problem = self.draw_problem()
        self.free = self.draw_free()

    # What is trained: the same in the reference.
    def draw_problem(self):
        d = self.draw
        self.ranks = d.choice([1, 1, 2, 2, 3, 4])
        keys = {"device": "cpu", "train.threads": 1, "train.log_every": 100000,
                "dist.timeout": 120}
        kind = d.choice(["llama", "gpt2", "bloom"])
        heads = d.choice([1, 2, 4])
        keys |= {"model.kind": kind, "model.heads": heads,
                 "model.width": heads * d.choice([4, 8, 12]), "model.layers": d.randint(1, 5),
                 "model.context": d.choice([4, 8, 15]), "model.tied": str(d.maybe(0.7)).lower()}
        if kind == "llama":
            if heads > 1 and d.maybe(0.3):
                keys["model.kv_heads"] = 1
            if d.maybe(0.3):
                keys["model.qk_norm"] = "true"
            if d.maybe(0.3):
                keys |= {"model.window": d.choice([1, 3, 7]),
                         "model.window_layers": d.choice(["w", "wf"])}
            if d.maybe(0.2):
                keys |= {"model.attn_softcap": 2.0, "model.logit_softcap": 5.0}
            if d.maybe(0.3):
                keys["model.rope_theta"] = 500.0
        elif d.maybe(0.3):
            keys["model.dropout"] = 0.1
        self.steps = d.randint(4, 16)
        keys |= {"train.steps": self.steps, "train.seed": d.randint(1, 10**6),
                 "train.micro_batch": d.choice([1, 2, 3])}
        self.accum = d.choice([1, 1, 2, 3])
        keys["train.grad_accum_steps"] = self.accum
        self.is_text = d.maybe(0.5)
        if self.is_text:
            words = ["alpha", "beta", "gamma", "delta\n", "one", "two", "three.\n"]
            path = os.path.join(self.dir, "text.txt")
            with open(path, "w") as file:
                file.write(" ".join(d.choice(words) for _ in range(800)))
            keys["data.text"] = path
            if d.maybe(0.4):
                keys["data.tokenizer"] = "char"
            elif d.maybe(0.4):
                keys |= self.documents(d, words)
        else:
            vocab = d.choice([17, 256, 1031])
            wide = d.maybe(0.3)
            for i in range(d.randint(1, 3)):
                write_shard(os.path.join(self.dir, f"data_{i}.bin"),
                            [d.randrange(vocab) for _ in range(d.randint(900, 2500))], wide)
            keys |= {"data.tokens": os.path.join(self.dir, "data_*.bin"), "model.vocab": vocab}
            if d.maybe(0.3):
                keys["data.separator"] = d.randrange(vocab)
                if d.maybe():
                    keys["data.restart_positions"] = "true"
        keys["data.val_fraction"] = d.choice([0.1, 0.3])
        if d.maybe(0.5):
            keys["train.eval_every"] = d.randint(1, 5)
        keys["optim.schedule"] = "constant"  # so that a longer run begins with the shorter one
        keys["optim.lr"] = keys["optim.final_lr"] = d.choice([0.001, 0.01, 0.03])
        if d.maybe(0.3):
            keys |= d.choice([{"optim.name": "sgd", "optim.momentum": d.choice([0.0, 0.9])},
                              {"optim.name": "lion"}])
        if d.maybe(0.3):
            keys["optim.warmup_steps"] = d.randint(1, 3)
        if d.maybe(0.3):
            keys["optim.clip"] = d.choice([0.05, 0.5])
        precision = d.choice(["f32", "f32", "bf16", "f16"])
        keys["precision.param_dtype"] = precision
        if precision != "f32":
            keys["guard.max_skips"] = 1000
            if d.maybe(0.3):
                keys["precision.norm_fp32"] = "true"
            if d.maybe(0.3):
                keys["precision.reduce_dtype"] = precision
            if precision == "bf16" and d.maybe(0.3):
                keys["optim.stochastic_rounding"] = "true"
        if d.maybe(0.2):
            keys["recompute.mlp_tile"] = d.choice([1, 5, 16])
        more = self.tuning(keys)
        if "data.chat_template" in more:
            self.is_text = True
            for name in ("data.text", "data.tokens", "model.vocab"):
                keys.pop(name, None)
        keys |= more
        # Sums are the same under every strategy where gradients travel at the same times; what
        # shards nothing on one rank leaves that choice to itself.
        self.sync = d.choice(["true", "false"])
        keys["fsdp.sync_every_micro_batch"] = self.sync
        if self.ranks in (1, 2, 4) and self.sync == "true" and d.maybe(0.2):
            keys["train.reproducible"] = "true"
            keys["train.global_batch"] = keys["train.micro_batch"] * 4 * self.accum
            del keys["train.grad_accum_steps"]
        return keys

    def tuning(self, keys):
        """Adapters on a frozen base, 4-bit or not, other optimizers, and data that fine-tuning has. Drawn
        apart, so that a number keeps what it had before there were these."""
        d = Draw(f"tuning {self.number}")
        more = {}
        if d.maybe(0.25):
            more |= {"lora.targets": d.choice(["all-linear", "q_proj,v_proj"] if
                                              keys["model.kind"] == "llama" else ["all-linear"]),
                     "lora.rank": d.choice([1, 2, 5]), "lora.alpha": 4.0,
                     "lora.rslora": str(d.maybe()).lower()}
            if d.maybe(0.3):
                more["lora.dropout"] = 0.2
            if d.maybe(0.5):
                more["model.quantize"] = "nf4"
        if d.maybe(0.25):
            more["optim.name"] = d.choice(["adamw_8bit", "adafactor", "muon"])
        if d.maybe(0.25) and "data.separator" not in keys:
            more |= self.chats(d, d.maybe())
        return more

    def chats(self, d, are_pairs):
        """Conversations, or pairs of answers, in bytes; replaces the texts."""
        def words(n):
            return " ".join(d.choice(["yes", "no", "so", "it", "is"]) for _ in range(d.randint(1, n)))
        path = os.path.join(self.dir, "chats.jsonl")
        with open(path, "w") as file:
            for _ in range(d.randint(120, 180)):
                row = {"prompt": [{"role": "user", "content": words(2)}]}
                names = ["chosen", "rejected"] if are_pairs else ["completion"]
                row |= {name: [{"role": "assistant", "content": words(3) + mark}]
                        for name, mark in zip(names, (".", "!"))}
                file.write(json.dumps(row) + "\n")
        template = os.path.join(self.dir, "chat.jinja")
        with open(template, "w") as file:
            file.write("{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}"
                       "{{ m.content }}~{% endgeneration %}{% else %}{{ m.content }}~{% endif %}"
                       "{% endfor %}{% if add_generation_prompt %}a{% endif %}")
        return {"data.preference" if are_pairs else "data.chat": path, "data.chat_template": template,
                "model.context": 40, "data.tokenizer": "byte"}

    def documents(self, d, words):
        """Texts in several files, as documents, some with a tokenizer of Hugging Face's kind."""
        for i in range(d.randint(1, 3)):
            with open(os.path.join(self.dir, f"documents_{i}.jsonl"), "w") as file:
                for _ in range(d.randint(20, 60)):
                    text = " ".join(d.choice(words) for _ in range(d.randint(1, 40)))
                    file.write(json.dumps({"text": text}) + "\n")
        keys = {"data.text": os.path.join(self.dir, "documents_*.jsonl")}
        if d.maybe(0.6):
            path = os.path.join(self.dir, "tokenizer.json")
            with open(path, "w") as file:
                json.dump({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"},
                                             "behavior": "Isolated", "invert": False},
                           "decoder": {"type": "Fuse"},
                           "model": {"type": "WordLevel", "unk_token": "?", "vocab": {
                               c: i for i, c in enumerate("?" + "".join(sorted(
                                   set(" ".join(words)))))}}}, file)
            keys["data.tokenizer"] = path
        return keys

    # What must not change a bit.
    def draw_free(self):
        d = self.draw
        keys = {}
        strategies = [s for s in STRATEGIES if self.fits(s)]
        keys["fsdp.strategy"] = strategy = d.choice(strategies)
        if strategy.startswith("hybrid"):
            keys["fsdp.shard_size"] = 2
        elif strategy == "shard_optim":
            keys["fsdp.sync_every_micro_batch"] = "false"  # at one pass a step the same
        keys["fsdp.prefetch_forward"] = d.choice([0, 1, 2, 5])
        keys["fsdp.prefetch_backward"] = d.choice([0, 1, 2, 5])
        keys["fsdp.communicators"] = d.choice([1, 2])
        keys["fsdp.gradient_pieces"] = d.choice(["false", "true"])
        keys["fsdp.offload"] = d.choice(["none", "none", "optimizer", "params_and_optimizer"])
        keys["recompute.policy"] = d.choice(["none", "full", "every_n", "selective"])
        if keys["recompute.policy"] == "every_n":
            keys["recompute.every_n"] = d.choice([2, 3])
        if keys["recompute.policy"] in ("full", "every_n"):
            keys["recompute.offload"] = str(d.maybe(0.5)).lower()
        keys["debug.order_check"] = str(d.maybe(0.5)).lower()
        keys["debug.poison"] = str(d.maybe(0.5)).lower()
        if d.maybe(0.7):
            keys["checkpoint.every"] = d.randint(1, 4)
            keys["checkpoint.keep"] = d.choice([1, 2, 5])
            keys["checkpoint.best"] = str(d.maybe()).lower()
        return keys

    def fits(self, strategy):
        if strategy.startswith("hybrid"):
            return self.ranks == 4 and self.sync == "true"
        if strategy == "shard_optim":
            # A gradient of low precision is summed in another place where full ones are kept.
            return self.sync == "false" or self.accum == 1 and \
                "train.global_batch" not in self.problem and \
                self.problem["precision.param_dtype"] == "f32"
        return True

    # Running.
    def launch(self, keys, ranks=None, extra_env=None, closed=()):
        ranks = ranks or self.ranks
        command = [os.path.join(self.options.apps, "tessera-train")]
        command += [f"--{k}={v}" for k, v in keys.items()]
        if ranks > 1:
            command = self.mpirun(ranks) + command
        self.log.append(" ".join(command))
        env = dict(os.environ, OMP_WAIT_POLICY="passive", OMPI_ALLOW_RUN_AS_ROOT="1",
                   OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **(extra_env or {}))
        if closed:
            redirections = " ".join(f"{fd}>&-" for fd in closed)
            command = ["bash", "-c", f'exec "$@" {redirections}', "_"] + command
        self.output = open(os.path.join(self.dir, f"life{len(self.log)}.log"), "w+")
        return subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=env,
                                start_new_session=True)

    def mpirun(self, ranks):
        return [self.options.mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]

    def finish(self, process):
        try:
            status = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            # Open MPI 4.1 waits for ever if a rank is killed while it is being started.
            is_launcher = self.ranks > 1 and not any(map(self.is_alive, self.ranks_of(process)))
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            if is_launcher:
                self.log.append("# mpirun did not end although all its ranks had")
                return status
            raise Failure(f"no end after {TIMEOUT} s: {self.text()[-2000:]}")
        return status

    def text(self):
        self.output.flush()
        with open(self.output.name, errors="replace") as file:
            return file.read()

    def tool(self, name, *arguments):
        command = [os.path.join(self.options.apps, name), *arguments]
        self.log.append(" ".join(command))
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              timeout=TIMEOUT, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr

    @staticmethod
    def metrics(path):
        steps = {}
        try:
            with open(os.path.join(path, "metrics.jsonl")) as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            return steps
        for line in lines:
            step = json.loads(line)
            steps[step["step"]] = (repr(step["loss"]), repr(step["grad_norm"]),
                                   repr(step.get("val_loss")))
        return steps

    @staticmethod
    def status(path):
        try:
            with open(os.path.join(path, "status.json")) as file:
                return json.load(file)
        except FileNotFoundError:
            return {"state": "none"}

    def checkpoints(self, path):
        return sorted(name for name in os.listdir(path) if name.startswith("step-")
                      and os.path.exists(os.path.join(path, name, "manifest.json")))

    def ranks_of(self, process):
        """Process ids of the ranks that have started."""
        try:
            if self.ranks == 1:
                return [process.pid]
            found = subprocess.run(["pgrep", "-P", str(process.pid), "tessera-train"],
                                   capture_output=True, text=True)
            return [int(pid) for pid in found.stdout.split()]
        except OSError:
            return []

    @staticmethod
    def is_alive(pid):
        """Whether the process runs; one that has ended and waits to be asked for its status does not."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def wait_for(self, process, out, steps):
        """Until the run has shown that many steps more than it had; False if it ended before."""
        while process.poll() is None:
            if self.num_lines(out) >= self.lines_before + steps:
                return True
            time.sleep(0.005)
        return False

    @staticmethod
    def num_lines(out):
        try:
            with open(os.path.join(out, "metrics.jsonl")) as file:
                return file.read().count("\n")
        except FileNotFoundError:
            return 0

    # Ends of a life. Each returns the states and whether status 0 is one of those that may follow.
    def end_plainly(self, process, out):
        return {"finished"}, "zero"

    def end_by_request(self, process, out):
        """A signal that asks for a checkpoint and an end."""
        how = self.draw.choice(["rank", "rank", "launcher"])
        number = self.draw.choice([signal.SIGTERM, signal.SIGUSR1])
        if not self.wait_for(process, out, self.draw.randint(1, 3)):
            return {"finished"}, "zero"
        if how == "launcher" and self.ranks > 1:
            self.send(process.pid, signal.SIGUSR1)
        else:
            pids = self.ranks_of(process)
            if pids:
                self.send(self.draw.choice(pids), number)
        return {"finished", "preempted"}, "zero"

    def end_by_interrupt(self, process, out):
        """What a terminal sends to all of its foreground processes."""
        if not self.wait_for(process, out, self.draw.randint(1, 3)):
            return {"finished"}, "zero"
        number = self.draw.choice([signal.SIGINT, signal.SIGHUP] if self.ranks == 1 else
                                  [signal.SIGINT])
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        # mpirun leaves its ranks about a second.
        return {"finished", "preempted", "failed"}, "zero" if self.ranks == 1 else "any"

    def end_by_kill(self, process, out):
        """kill -9 to a rank or the launcher at any moment, from before the first step on."""
        time.sleep(self.draw.uniform(0, 1.5))
        pids = self.ranks_of(process)
        victim = self.draw.choice(pids + [process.pid])
        self.send(victim, signal.SIGKILL)
        return {"finished", "failed", "running", "none", "preempted"}, "any"

    @staticmethod
    def send(pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    # What happens between two lives.
    def damage(self, out):
        """One byte of a file of the newest of several checkpoints, or where it says to go on."""
        whole = self.checkpoints(out)
        if len(whole) < 2:
            return
        folder = os.path.join(out, whole[-1])
        if self.draw.maybe(0.3):
            path = os.path.join(folder, "manifest.json")
            with open(path) as file:
                text = file.read()
            found = re.search(r'"next_sample": *(\d+)', text)
            place = self.draw.randrange(*found.span(1))
            digit = self.draw.choice([c for c in "123456789" if c != text[place]])
            with open(path, "w") as file:
                file.write(text[:place] + digit + text[place + 1:])
            self.log.append(f"# another digit at byte {place} of {path}")
            return
        path = os.path.join(folder, self.draw.choice(sorted(os.listdir(folder))))
        with open(path, "r+b") as file:
            size = os.path.getsize(path)
            place = self.draw.randrange(size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << self.draw.randrange(8))]))
        self.log.append(f"# flipped a bit of byte {place} of {path}")

    def second_run(self, keys):
        """Another run into the same directory, with other settings and no wish to resume."""
        other = dict(keys)
        other.pop("checkpoint.resume", None)
        other |= {"train.seed": keys["train.seed"] + 1, "train.steps": 2}
        before = self.files(keys["output.dir"])
        status = self.finish(self.launch(other, ranks=1))
        check(status == 2, f"a second run into the directory: status {status}: {self.text()[-500:]}")
        changed = {name for name, data in self.files(keys["output.dir"]).items()
                   if before.get(name) != data and not name.endswith(".lock")}
        check(not changed, f"a second run into the directory changed {sorted(changed)}")

    def intruder(self, process, keys, out):
        """The same command again while the run is alive."""
        if not self.wait_for(process, out, 1):
            return
        command = [os.path.join(self.options.apps, "tessera-train")]
        command += [f"--{k}={v}" for k, v in keys.items()]
        if self.ranks > 1:
            command = self.mpirun(self.ranks) + command
        self.log.append("# while it runs: " + " ".join(command))
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT,
                              env=dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1",
                                       OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"))
        # One that came after the end has found all steps done.
        check(done.returncode == 2 or process.poll() is not None,
              f"a run into a directory in use: status {done.returncode}: {done.stderr[-800:]}")

    @staticmethod
    def files(path):
        contents = {}
        for folder, _, names in os.walk(path):
            for name in names:
                full = os.path.join(folder, name)
                try:
                    with open(full, "rb") as file:
                        contents[os.path.relpath(full, path)] = file.read()
                except OSError:
                    pass
        return contents

    def plant_foreign(self, out):
        """Files of the user in the directory of the run, with names that could be ours."""
        os.makedirs(os.path.join(out, "step-00000003.mine"), exist_ok=True)
        os.makedirs(os.path.join(out, "step-0000000"), exist_ok=True)
        foreign = {"notes.txt": b"precious", "step-00000003.mine/a": b"mine",
                   "step-0000000/b": b"mine too", "model.safetensors.old": b"old"}
        for name, data in foreign.items():
            with open(os.path.join(out, name), "wb") as file:
                file.write(data)
        return foreign

    # Runs of a case.
    def reference(self):
        keys = self.problem | {"fsdp.strategy": "no_shard",
                               "output.dir": os.path.join(self.dir, "reference")}
        process = self.launch(keys)
        status = self.finish(process)
        check(status == 0, f"reference: status {status}: {self.text()[-2000:]}")
        steps = self.metrics(keys["output.dir"])
        check(len(steps) == self.steps, f"reference: {len(steps)} steps of {self.steps}")
        return steps

    def compare(self, steps, expected, what):
        for step, values in sorted(steps.items()):
            # A run that ends or goes on at a step may evaluate there, and the reference not.
            compared = 3 if values[2] != "None" and expected[step][2] != "None" else 2
            check(values[:compared] == expected[step][:compared],
                  f"{what}: step {step} has loss, norm, val_loss {values}, the reference "
                  f"{expected[step]}")

    def lives(self, expected):
        d = self.draw
        out = os.path.join(self.dir, "out")
        keys = self.problem | self.free | {"output.dir": out, "checkpoint.resume": "auto"}
        foreign = {}
        if d.maybe(0.3):
            os.makedirs(out)
            foreign = self.plant_foreign(out)
        ends = [d.choice([self.end_by_request, self.end_by_request, self.end_by_interrupt,
                          self.end_by_kill]) for _ in range(d.choice([0, 1, 1, 2]))]
        closed = d.choice([(), (), (1,), (2,), (0, 1, 2)]) if self.ranks == 1 else ()
        for life, end in enumerate(ends + [self.end_plainly]):
            self.lines_before = self.num_lines(out)
            process = self.launch(keys, closed=closed)
            if d.maybe(0.15):
                self.intruder(process, keys, out)
            states, zero = end(process, out)
            status = self.finish(process)
            state = self.status(out)["state"]
            where = f"after {end.__name__}: status {status}, state {state}"
            check(zero != "zero" or status == 0, f"{where}: {self.text()[-2000:]}")
            check(state in states, f"{where}, expected one of {sorted(states)}: {self.text()[-1500:]}")
            self.compare(self.metrics(out), expected, where)
            if end == self.end_by_kill:
                subprocess.run(["pkill", "-KILL", "-f", out], check=False)
            elif life < len(ends) and d.maybe(0.3):
                self.damage(out)
        steps = self.metrics(out)
        check(sorted(steps) == list(range(1, self.steps + 1)), f"the run has steps {sorted(steps)}")
        if d.maybe(0.3):
            self.second_run(keys)
        for name, data in foreign.items():
            check(self.files(out).get(name) == data, f"{name}, which is the user's, has changed")
        return keys

    def has_no_hf_name(self):
        """Soft-caps, and windows in some layers of a model that is not Qwen's."""
        m = self.problem
        has_both = m.get("model.window_layers") == "wf" and m["model.layers"] > 1
        return "model.attn_softcap" in m or (has_both and "model.qk_norm" not in m)

    def tools(self, out):
        code, text = self.tool("tessera-checkpoint", "verify", out)
        check(code == 0, f"verify: status {code}: {text[-800:]}")
        code, text = self.tool("tessera-checkpoint", "inspect", out)
        check(code == 0, f"inspect: status {code}: {text[-800:]}")
        for form in ("hf", "tessera"):
            target = os.path.join(self.dir, form)
            arguments = ["export", out, target] + (["--format=tessera"] if form == "tessera" else [])
            weights = "model.safetensors"
            if form == "hf" and "lora.targets" in self.problem:
                if self.draw.maybe():
                    arguments.append("--merge")
                else:
                    weights = "adapter_model.safetensors"
            code, text = self.tool("tessera-checkpoint", *arguments)
            if form == "hf" and weights == "model.safetensors" and self.has_no_hf_name():
                check(code == 2 and "error: export: " in text,
                      f"export as hf, expected to be refused: status {code}: {text[-800:]}")
                continue
            check(code == 0, f"export as {form}: status {code}: {text[-800:]}")
            check(os.path.exists(os.path.join(target, weights)), f"export as {form}: no {weights}")
        if self.is_text:
            prompt = "al"
            code, text = self.tool("tessera-generate", "--checkpoint", out, "--prompt", prompt,
                                   "--tokens", "5", "--temperature", "0")
            check(code == 0, f"generate: status {code}: {text[-800:]}")

    def wrong(self, keys):
        """A run that must be refused, with its status and a text; nothing is written over."""
        d = self.draw
        out = os.path.join(self.dir, "wrong")
        keys = dict(keys) | {"output.dir": out}
        keys.pop("checkpoint.resume")
        kind = d.choice(["ranks", "token", "data", "key"])
        if kind == "ranks" and self.ranks > 1:
            key, value = d.choice([("optim.lr", 0.5), ("train.seed", 99), ("optim.beta2", 0.5),
                                   ("guard.max_spikes", 7), ("model.norm_eps", 0.1)])
            program = [os.path.join(self.options.apps, "tessera-train")]
            program += [f"--{k}={v}" for k, v in keys.items()]
            command = self.mpirun(1) + program + [":", "-n", str(self.ranks - 1)] + program
            command.append(f"--{key}={value}")
            self.log.append(" ".join(command))
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT,
                                  env=dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1",
                                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"))
            check(done.returncode == 2 and key in done.stderr,
                  f"ranks with another {key}: status {done.returncode}: {done.stderr[-800:]}")
        elif kind == "token" and not self.is_text:
            path = os.path.join(self.dir, "data_0.bin")
            with open(path, "r+b") as file:
                file.seek(-2 if os.path.getsize(path) % 4 else -4, os.SEEK_END)
                file.write(b"\xff\x7f")
            status = self.finish(self.launch(keys))
            check(status == 3, f"a token outside the vocabulary: status {status}")
            check(not self.metrics(out), "a token outside the vocabulary: steps were made")
        elif kind == "data":
            name = next(k for k in ("data.text", "data.tokens", "data.chat", "data.preference") if k in keys)
            status = self.finish(self.launch(keys | {name: os.path.join(self.dir, "absent")}))
            check(status == 3, f"absent data: status {status}")
        else:
            status = self.finish(self.launch(keys | {"optim.lrr": 0.1}))
            check(status == 2 and "optim.lr" in self.text(), f"an unknown key: status {status}")

    def longer(self, keys):
        """More steps than it was begun with: on from the end, never from the start."""
        more = 3
        reference = self.problem | {"fsdp.strategy": "no_shard", "train.steps": self.steps + more,
                                    "output.dir": os.path.join(self.dir, "longer-reference")}
        status = self.finish(self.launch(reference))
        check(status == 0, f"longer reference: status {status}")
        expected = self.metrics(reference["output.dir"])
        status = self.finish(self.launch(keys | {"train.steps": self.steps + more}))
        check(status == 0, f"a longer run: status {status}: {self.text()[-1500:]}")
        steps = self.metrics(keys["output.dir"])
        check(len(steps) == self.steps + more, f"a longer run has {len(steps)} steps")
        self.compare(steps, expected, "a longer run")

    def run(self):
        expected = self.reference()
        keys = self.lives(expected)
        if self.draw.maybe(0.5):
            self.tools(keys["output.dir"])
        if self.draw.maybe(0.25):
            self.longer(keys)
        if self.draw.maybe(0.4):
            self.wrong(keys)
        deadline = time.monotonic() + 5  # of ranks that were killed
        while shared_memory() - self.before and time.monotonic() < deadline:
            time.sleep(0.1)
        left = shared_memory() - self.before
        check(not left, f"in shared memory: {sorted(left)}")
        stray = subprocess.run(["pgrep", "-f", self.dir], capture_output=True, text=True).stdout
        check(not stray.split(), f"processes that stay: {stray.split()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("apps", help="the directory of the programs")
    parser.add_argument("--seconds", type=float, default=60, help="begin no case after so long")
    parser.add_argument("--seed", type=int, default=1, help="the number of the first case")
    parser.add_argument("--case", type=int, help="this case only")
    parser.add_argument("--keep", action="store_true", help="keep the files of failed cases")
    parser.add_argument("--mpirun", default="mpirun")
    options = parser.parse_args()
    options.apps = os.path.abspath(options.apps)
    start, number, failures = time.monotonic(), options.case or options.seed, 0
    first = number
    while number == first or (options.case is None and
                              time.monotonic() - start < options.seconds):
        case = Case(options, number)
        try:
            case.run()
        except (Failure, subprocess.TimeoutExpired, json.JSONDecodeError) as failure:
            failures += 1
            print(f"FAILED case {number}: {failure}", flush=True)
            for line in case.log:
                print(f"  {line}")
            if options.keep:
                print(f"  files: {case.dir}")
        if not (failures and options.keep):
            shutil.rmtree(case.dir, ignore_errors=True)
        number += 1
    print(f"{number - first} cases from {first} on, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
