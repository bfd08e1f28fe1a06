#!/usr/bin/env python3
"""Faults planted by hand: for each, a test that is there to find it fails.

    planted.py [--only NAME ...] [--work DIR] [--jobs N] [--at-once N] [-- meson option ...]
    planted.py --check

Each row of PLANTED has a piece of text, wherever it is in a folder, and what it becomes: all of them
are built at once into a copy of the tree (work_copy.py) and tried, --at-once of them beside each other.
A row holds if one of its tests fails that passes without it. Most rows are keys that are parsed and go
nowhere. By hand, some minutes behind the build; `--check`, which is in the suite, sees that each text
still occurs once in its folder and that each test is still there.

What changes is the whole text, or what stands in [[ ]] where the rest only says which place is meant:
an expression, or statements if it ends with a semicolon. A test is `run KEY` (settings_effects.py, the
rows of that key), `random N` (case N of random_runs.py) or `NAME FILTER` (a program of Catch2, and the
start of a test case's name).
"""
import argparse
import glob
import os
import re
import sys

from work_copy import PRELUDE, Change, WorkCopy, in_turn, with_switches

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
APPS, FSDP = "apps", "dist/fsdp"
FAMILY_TABLES = ["nn/family.h"] + sorted(
    os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "nn/*/family.cc")))
PREFETCH = "dist/fsdp/order fsdp order: as many units are gathered ahead"


def text_of(root, name):
    with open(os.path.join(root, name)) as file:
        return file.read()


class Row:
    def __init__(self, name, folder, old, new, *tests):
        self.name, self.folder, self.old, self.new, self.tests = name, folder, old, new, tests

    def places(self, root):
        """Where the text is; how its lines are broken does not matter."""
        def pattern_of(text):
            return r"\s+".join(re.escape(word) for word in text.split())
        before, piece, after = re.fullmatch(r"(.*)\[\[(.*)\]\](.*)", self.old, re.S).groups() \
            if "[[" in self.old else ("", self.old, "")
        pattern = re.compile(pattern_of(before) + r"\s*(?P<piece>" + pattern_of(piece) + r")\s*" +
                             pattern_of(after))
        found = []
        for folder, _, names in os.walk(os.path.join(root, self.folder)):
            for name in sorted(names):
                if not name.endswith((".cc", ".h")):
                    continue
                path = os.path.relpath(os.path.join(folder, name), root)
                text = text_of(root, path)
                for match in pattern.finditer(text):
                    found.append(Change(path, text, *match.span("piece"), self.new))
        return found


# Keys whose value goes nowhere: their row in the table of settings is bound to a copy of the field.
# Each with what sees it.
NOWHERE = [(key, "run " + key) for key in (
    "fsdp.strategy fsdp.shard_size fsdp.wrap fsdp.wrap_every fsdp.min_num_params "
    "fsdp.sync_every_micro_batch fsdp.prefetch_forward fsdp.prefetch_backward "
    "fsdp.communicators fsdp.offload train.reproducible precision.param_dtype "
    "precision.reduce_dtype fsdp.wire_dtype precision.output_dtype precision.buffer_dtype "
    "precision.cast_forward_inputs precision.norm_fp32 precision.loss_scale "
    "precision.loss_scale_init precision.loss_scale_interval recompute.policy "
    "recompute.every_n model.tied model.bias model.dropout model.qkv_bias model.qk_norm "
    "model.window model.window_layers model.attn_softcap model.logit_softcap "
    "model.norm_eps model.gelu model.rope_theta model.rope_scaling "
    "model.rope_low_freq_factor model.rope_factor model.rope_high_freq_factor "
    "model.rope_original_context optim.beta1 optim.beta2 optim.eps optim.weight_decay "
    "optim.momentum optim.nesterov optim.warmup_steps optim.decay_steps sample.tokens "
    "sample.temperature sample.top_k sample.top_p memory.limit memory.split debug.poison train.threads").split()] + [
    ("dist.nccl_reduce", "apps/trainer trainer: the keys of NCCL"),
    ("dist.nccl_max_ctas", "apps/trainer trainer: the keys of NCCL"),
    ("kernels.attention", "apps/trainer trainer: the keys of kernels"),
    ("kernels.gemm", "apps/trainer trainer: the keys of kernels"),
]


def bound_to_a_copy(key, seen_by):
    """Settings of a model stand, by their own names, with its family."""
    tables, folder, name = ["apps/config_table.cc"], APPS, key
    if key.startswith("model."):
        tables, folder, name = FAMILY_TABLES, "nn", key.removeprefix("model.")
    table = "".join(text_of(ROOT, path) for path in tables)
    found = re.search(r'(?:t\.add\(|add_nbytes\(t, )"%s",\s*([\w.]+),' % re.escape(name), table)
    field = found.group(1) if found else "no row"
    return Row(key, folder, '"%s", [[%s]],' % (name, field), "*new auto(%s)" % field, seen_by)


PLANTED = [bound_to_a_copy(*each) for each in NOWHERE] + [
    # Sharding: keys that go nowhere.
    Row("reshard_after_forward: true, false", APPS, 'text == "true" || text == "false") [[return text == "true";]]',
        "return std::nullopt;", "run fsdp.reshard_after_forward"),
    Row("reshard_after_forward: a group size", APPS, "return [[std::stoi(text)]];", "4",
        "run fsdp.reshard_after_forward"),
    Row("ignored", APPS,
        '  options.ignored = matching_parameters(config, "fsdp.ignored", fsdp.ignored, model);\n', "",
        "run fsdp.ignored"),
    Row("frozen", APPS, "chosen.contains(p.name)) p.parameter->tensor.set_requires_grad([[false]])",
        "true", "run model.frozen"),

    # Precision.

    # Recomputation.

    # The model.
    Row("a setting that families share sets the first alone", APPS,
        "for (const nn::ModelSetting& each : rows) [[each]].assign(value);", "rows[0]",
        "run model.dropout"),
    Row("documents not masked", APPS, "if ([[!batch.document_starts.empty()]])", "false",
        "run data.separator"),
    Row("documents not masked where positions restart", APPS, "if ([[!batch.document_starts.empty()]])",
        "!batch.document_starts.empty() && batch.positions.empty()", "run document masks"),
    Row("positions not restarted", APPS, "if ([[!batch.positions.empty()]])", "false",
        "run data.restart_positions"),

    # The optimizer.
    Row("clip", APPS, "clip_grad_norm([[config_.optim.clip]],", "1.0", "run optim.clip"),
    Row("clip_p", APPS, "config_.optim.clip, [[config_.optim.clip_p]],", "2.0", "run optim.clip_p"),
    Row("stochastic_rounding", APPS, "if ([[optim.stochastic_rounding]])", "false",
        "run optim.stochastic_rounding"),
    Row("the seed of stochastic rounding", APPS,
        "rounding_seed = [[static_cast<uint64_t>(config.train.seed)]]", "1",
        "run train.seed"),
    Row("a constant schedule", APPS, '"optim.schedule", [[o.schedule.kind]],', "*new auto(optim::ScheduleKind::kConstant)",
        "run optim.schedule"),
    Row("cosine is linear", "optim", "[[o.kind == ScheduleKind::kCosine]] ?", "false",
        "run optim.schedule"),
    Row("wsd is linear", "optim", "if ([[o.kind == ScheduleKind::kWsd]]) start", "false",
        "run optim.decay_steps"),
    Row("the rate is the peak", APPS, "pending.lr = schedule_->lr(step);",
        "pending.lr = config_.optim.schedule.peak_lr;", "run optim.schedule"),
    Row("the rate is said and not applied", APPS,
        "optimizer_->step(static_cast<float>([[pending.lr]]),", "config_.optim.schedule.peak_lr", "run optim.warmup_steps"),

    # Batches, seeds, evaluation, samples.
    Row("the dropout offset of later passes", APPS, ".sample_offset = [[offset]]};",
        "world_.rank() * B",
        "run dropout masks"),
    Row("the dropout offset of other ranks", APPS, ".sample_offset = [[offset]]};",
        "pass * world_.world_size() * B",
        "run dropout masks"),
    Row("dropout draws the same in each step", APPS, ".step = [[static_cast<uint64_t>(step)]],", "0", "run dropout masks"),
    Row("eval_batches", APPS, "if ([[config.eval_batches > 0]])", "false", "run train.eval_batches"),
    Row("sample.prompt", APPS, "data_.tokenizer->encode([[config_.sample.prompt]]); const", '"line "', "run sample.prompt"),
    Row("the seed of samples", APPS,
        "options.sampling.seed = [[static_cast<uint64_t>(config_.train.seed)]]; options.on_token", "1", "run train.seed"),
    Row("the seed of the data's order", APPS,
        "  options.seed = static_cast<uint64_t>(config.train.seed);\n", "", "run train.seed"),
    Row("the seed of dropout", APPS, "random_state() = {.seed = [[static_cast<uint64_t>(config_.train.seed)]]",
        "1", "run train.seed"),
    Row("the seed of initial values", APPS, "& world) {\n  fsdp.initialize([[static_cast<uint64_t>(config_.train.seed)]])",
        "1", "run train.seed"),

    # The machine.
    Row("memory.empty_cache_every", APPS,
        "config_.memory.empty_cache_every > 0 && step_ % config_.memory.empty_cache_every == 0", "false",
        "run memory.empty_cache_every"),
    Row("dist.timeout", APPS, "  world.watchdog().set_timeout( std::chrono::milliseconds("
        "static_cast<int64_t>(config.dist.timeout * 1e3)));\n", "", "run dist.timeout"),
    Row("debug.dist", APPS, "world.watchdog().set_verbose([[config.debug.dist]]);", "false",
        "run debug.dist"),

    # What is said of speed, memory and waits.
    Row("MFU without the ranks", APPS, "([[config_.output.peak_tflops * 1e12 * world_.world_size()]])",
        "config_.output.peak_tflops * 1e12", "run metrics of time"),
    Row("MFU of another peak", APPS, "([[config_.output.peak_tflops * 1e12 * world_.world_size()]])",
        "1e12 * world_.world_size()",
        "run output.peak_tflops"),
    Row("MFU of the forward alone", "nn", "passes = weight.requires_grad() ? [[6]] : 4;", "2",
        "run output.peak_tflops"),
    Row("tokens/s of one rank", APPS,
        "m.tokens_per_second = [[static_cast<double>(tokens_per_step_)]]",
        "static_cast<double>(tokens_per_step_ / world_.world_size())",
        "run metrics of time"),
    Row("tokens/s of one pass", APPS,
        "m.tokens_per_second = [[static_cast<double>(tokens_per_step_)]]",
        "static_cast<double>(tokens_per_step_ / grad_accum_steps_)",
        "run metrics of time"),
    Row("milliseconds of a step taken for seconds", APPS, "return [[total.count() / static_cast<double>(ends_.size() - 1)]];",
        "total.count() / static_cast<double>(ends_.size() - 1) / 1000", "run metrics of time"),
    Row("tokens counted wrong", APPS,
        "m.tokens = (pending.first_sample + samples_per_step_) * tokens_per_sample_;",
        "m.tokens = pending.first_sample * tokens_per_sample_;", "run metrics of time"),
    Row("peak_bytes are those of the last allocation", "core",
        "if ([[stats.allocated > stats.peak_allocated]]) {", "sign > 0", "run memory.limit",
        "core/runtime/allocator allocator: counts by class"),
    Row("peak_bytes halved", APPS, "m.peak_bytes = memory.peak_allocated;",
        "m.peak_bytes = memory.peak_allocated / 2;", "run memory.limit", "run metrics of memory"),
    Row("peak_bytes are what is reserved", APPS, "m.peak_bytes = memory.peak_allocated;",
        "m.peak_bytes = memory.reserved;", "run memory.limit", "run metrics of memory"),
    Row("no gather is ever exposed", APPS, "m.exposed_gather_ms = pending.exposed->gather_ms();",
        "m.exposed_gather_ms = 0;", "run metrics of waits"),
    Row("no reduce is ever exposed", APPS, "m.exposed_reduce_ms = pending.exposed->reduce_ms();",
        "m.exposed_reduce_ms = 0;", "run metrics of waits"),
    Row("the share exposed is always 0", APPS, "m.exposed = rate_.exposed();", "m.exposed = 0;",
        "run metrics of waits"),
    Row("waits for gathers are taken for those for reduces", FSDP, "&unit_.exposure, [[&ExposedTime::gather_ns]],",
        "&ExposedTime::reduce_ns", "run metrics of waits"),

    # The schedule of a step.
    Row("no forward prefetch", FSDP, "k < [[options_.prefetch_forward]] &&", "0",
        PREFETCH),
    Row("forward prefetch of one at most", FSDP, "k < [[options_.prefetch_forward]] &&",
        "std::min(1, options_.prefetch_forward)", PREFETCH),
    Row("no backward prefetch", FSDP, "k < [[options_.prefetch_backward]] &&", "0",
        PREFETCH),
    Row("backward prefetch of one at most", FSDP, "k < [[options_.prefetch_backward]] &&",
        "std::min(1, options_.prefetch_backward)", PREFETCH),
    Row("the hash of a step's collectives is not compared", FSDP,
        "if (theirs != mine) throw_disagreement();", "(void)theirs;",
        "dist/fsdp/order fsdp order: programs that differ after step 0"),
    Row("no outer sum where the last micro-batch has no backward", FSDP,
        "if (sum_ == Sum::kGroup) sum_over_replicas(g, step);", "",
        "dist/fsdp/order fsdp order: a step whose last micro-batch has no backward"),
    Row("clip does not wait for a gather that nobody used", FSDP,
        "[[wait_for_gather();]] state_ = gathered;", "",
        "dist/fsdp/order fsdp order: the norm waits for gathers"),

    # Faults of use, which random runs find.
    Row("a directory in use is taken", APPS, "if ([[is_held_by_another(error)]]) return nullptr;", "false",
        "random 1"),
    Row("the settings of ranks are not compared", APPS,
        "if ([[std::all_of(hashes.begin(), hashes.end(), [&](uint64_t h) { return h == mine; })]]) return;",
        "true", "random 13"),
    Row("a token outside the vocabulary is met in training", APPS,
        "if ([[largest < options_.vocab_size || bad_file_ >= 0]]) return;", "true", "random 6"),
    Row("no checkpoint after the last step", APPS,
        "if ([[config_.checkpoint.last || checkpoints_.is_due(step_)]]) checkpoints_.save(progress());",
        "false", "random 17"),
    Row("Ctrl-C and a closed terminal end a run unsaved", APPS,
        "if ([[number == SIGHUP && previous[i].sa_handler == SIG_IGN]]) continue;",
        "number == SIGHUP || number == SIGINT", "random 1"),
    Row("standard descriptors stay closed", "core", "if ([[::fcntl(fd, F_GETFD) != -1]]) continue;", "true",
        "random 22"),
    Row("changed bytes of a checkpoint are read", "dist/checkpoint", "if ([[hash == record.hash]]) return;",
        "true", "random 41"),
    Row("a changed manifest is read", "dist/checkpoint",
        "if ([[seal.substr(kSealBegin.size()) == hex(hash_of(body.data(), std::ssize(body)))]]) return true;",
        "true", "random 31"),
]


def check_the_switches():
    """An expression, statements, and two changes of one place become branches."""
    text = "a = f(x + 1, y);\nb = 2;\n"
    changes = [Change("", text, 6, 11, "x"), Change("", text, 6, 11, "0"), Change("", text, 17, 23, "")]
    for number, change in enumerate(changes, 1):
        change.number = number
    expected = ("a = f((::tessera_change::chosen == 1 ? (x) : ::tessera_change::chosen == 2 ? (0) : (x + 1)), "
                "y);\n{ if (::tessera_change::chosen == 3) {  } else { b = 2; } }\n")
    assert with_switches(text, changes) == PRELUDE + expected, with_switches(text, changes)
    assert changes[0].overlaps(Change("", text, 4, 15, "")) and not changes[0].overlaps(changes[1])


def check(root):
    """Rows whose text or test is gone."""
    check_the_switches()
    problems = []
    cases = {}
    for folder, _, names in os.walk(os.path.join(root, "test")):
        for name in names:
            if name.endswith("_test.cc"):
                path = os.path.relpath(os.path.join(folder, name), root)
                cases[path] = re.sub(r'"\s*\n?\s*"', "", text_of(root, path))
    effects = text_of(root, "test/apps/settings_effects.py")
    for row in PLANTED:
        places = row.places(root)
        if len(places) != 1:
            problems.append(f"{row.name}: its text occurs {len(places)} times in {row.folder}, expected "
                            f"once: {row.old.strip()!r} ({', '.join(place.file for place in places)})")
        for test in row.tests:
            name, filter_ = test.split(" ", 1)
            if name == "random":
                continue
            if name == "run":
                if f'"{filter_}"' not in effects:
                    problems.append(f"{row.name}: no row of {filter_} in settings_effects.py")
            elif f'TEST_CASE("{filter_}' not in cases.get(f"test/{name}_test.cc", ""):
                problems.append(f"{row.name}: no test case \"{filter_}...\" in test/{name}_test.cc")
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"{len(PLANTED)} planted faults, {len(problems)} of them stale")
    return 1 if problems else 0


def parse_test(copy, words):
    name, filter_ = words.split(" ", 1)
    if name == "run":
        return copy.tests["apps/settings_effects"], ["--only", filter_]
    if name == "random":
        return copy.tests["apps/random_runs"], ["--case", filter_]
    return copy.tests[name], [filter_ + "*"]


def try_row(copy, row):
    """What has become of it, in words."""
    for words in row.tests:
        test, arguments = parse_test(copy, words)
        if not copy.passes_clean(test, arguments):
            return f"NOT TRIED: `{words}` fails without it"
        if copy.fails_with(row.change, test, arguments):
            return f"caught by `{words}`"
    return "SURVIVED"


def in_batches(rows):
    """So that no two changes of a batch overlap."""
    batches = []
    for row in rows:
        for batch in batches:
            if not any(row.change.overlaps(other.change) for other in batch):
                batch.append(row)
                break
        else:
            batches.append([row])
    return batches


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only look for rows that are stale")
    parser.add_argument("--only", nargs="+", default=[], help="names of rows to try")
    parser.add_argument("--work", default="/tmp/tessera-planted", help="where the copy is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of a build")
    parser.add_argument("--at-once", type=int, default=1, help="rows that are tried at once")
    parser.add_argument("setup", nargs="*", help="options of meson setup, behind --")
    options = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if options.check:
        return check(root)
    if check(root) != 0:
        return 1
    for row in PLANTED:
        row.change, = row.places(root)
    rows = [row for row in PLANTED if not options.only or row.name in options.only]
    copy = WorkCopy(root, options.work, options.jobs)
    bad = 0
    for batch in in_batches(PLANTED):
        if not set(batch) & set(rows):
            continue
        refused = copy.plant([row.change for row in batch], options.setup)


        def try_one(row, refused=refused):
            return "DOES NOT COMPILE" if row.change in refused else try_row(copy, row)
        for row, verdict in in_turn(try_one, [row for row in batch if row in rows], options.at_once):
            bad += not verdict.startswith("caught")
            print(f"{row.name}: {verdict}", flush=True)
        for key in sorted(copy.rejected):
            print(f"FAILS WITHOUT A CHANGE: {key}")
    print(f"{len(rows)} planted, {len(rows) - bad} caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
