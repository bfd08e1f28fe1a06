#!/usr/bin/env python3
"""Mutants of the product: does a test fail when a line is wrong?

    mutate.py [--count 120] [--seed 1] [--jobs 1] [--work DIR] [--folder apps ...] [--list]

Draws places in apps, core, kernels, nn, optim and dist (at least a third of them in apps), changes one
operator, number, constant or statement at each, builds in a copy of the tree and runs the tests: first
those that lie nearest to the file, then all others, until one fails. Prints a line a mutant: `caught`
with the test, `does not build` (drawn again), or `SURVIVED` with the change, for a person to add a
test or say why it changes nothing. Takes minutes a mutant; made for a free machine, not for CI.
"""
import argparse
import concurrent.futures
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys

FOLDERS = ["apps", "core", "kernels", "nn", "optim", "dist"]
LEFT_OUT = re.compile(r"(^apps/(compare|bench)|cuda|simt|cublaslt|cudnn|nccl|staged|\.cuh?$)")

# What is written and what it becomes, each with a name. Only one match of a line is changed.
OPERATORS = [
    ("comparison", r" < ", " <= "), ("comparison", r" <= ", " < "), ("comparison", r" > ", " >= "),
    ("comparison", r" >= ", " > "), ("comparison", r" == ", " != "), ("comparison", r" != ", " == "),
    ("arithmetic", r" \+ ", " - "), ("arithmetic", r" - ", " + "), ("arithmetic", r" \* ", " + "),
    ("arithmetic", r" / ", " * "), ("arithmetic", r" % ", " / "), ("arithmetic", r" \+= ", " = "),
    ("logic", r" && ", " || "), ("logic", r" \|\| ", " && "), ("logic", r"!(?=[a-z])", ""),
    ("constant", r"\btrue\b", "false"), ("constant", r"\bfalse\b", "true"),
    ("constant", r"(?<![\w.\"])0(?![\w.])", "1"), ("constant", r"(?<![\w.\"])1(?![\w.])", "2"),
    ("constant", r"(?<![\w.\"])2(?![\w.])", "3"),
    ("extremum", r"std::max\b", "std::min"), ("extremum", r"std::min\b", "std::max"),
]
# Whole statements that are left out.
STATEMENT = re.compile(r"^ +(?:[a-z_]+(?:\.|->))?[a-z_.>\-]+(?:<[\w:]+>)?\(.*\);$|^ +[\w.\->\[\]]+ [+\-*|&]?= .*;$")


def run(command, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, errors="replace", **kwargs)


def code_lines(path):
    """Numbers of lines that can be changed: no comments, messages, includes, declarations alone."""
    with open(path) as file:
        lines = file.read().split("\n")
    for number, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith(("//", "#", "///", "static_assert", "using ", "template",
                                        "TESSERA_CHECK", "TESSERA_DCHECK", "throw ", "log_")):
            continue
        yield number, line


def draw_mutant(rng, root, files):
    """A file, the number of a line, its text and the changed text."""
    while True:
        path = rng.choice(files)
        lines = list(code_lines(os.path.join(root, path)))
        if not lines:
            continue
        number, line = rng.choice(lines)
        code, comment = (line.split("  //", 1) + [""])[:2]
        choices = []
        for name, pattern, into in OPERATORS:
            choices += [(name, m.start(), m.end(), into) for m in re.finditer(pattern, code)
                        if code[:m.start()].count('"') % 2 == 0]
        if STATEMENT.match(code) and "return" not in code:
            choices.append(("left out", 0, len(code), ""))
        if choices:
            name, begin, end, into = rng.choice(choices)
            changed = code[:begin] + into + code[end:] + ("  //" + comment if comment else "")
            return {"file": path, "line": number, "kind": name, "old": line, "new": changed}


def nearest_first(mutant, tests):
    """Tests ordered by how much their name has in common with the changed file."""
    folder, _, name = mutant["file"].rpartition("/")
    stem = os.path.splitext(name)[0]
    top = mutant["file"].split("/")[0]

    def distance(test):
        same_stem = stem in test or difflib.SequenceMatcher(None, stem, test).ratio() > 0.6
        return (not same_stem, not test.startswith(top), "mpi" in test or "faults" in test)
    return sorted(tests, key=distance)


class Worker:
    """A copy of the tree with a build of its own."""

    def __init__(self, root, work, number, setup):
        self.dir = os.path.join(work, f"copy{number}")
        if not os.path.exists(self.dir):
            run(["git", "clone", "-q", root, self.dir], check=True)
        done = run(["bash", "apps/setup.sh", *setup], cwd=self.dir)
        if done.returncode != 0 or run(["ninja", "-C", "build"], cwd=self.dir).returncode != 0:
            sys.exit(f"{self.dir} does not build: {done.stderr[-500:]}")
        listed = json.loads(run(["meson", "introspect", "--tests", "build"], cwd=self.dir).stdout)
        self.tests = [test["name"] for test in listed]

    def try_mutant(self, mutant):
        path = os.path.join(self.dir, mutant["file"])
        with open(path) as file:
            text = file.read()
        lines = text.split("\n")
        lines[mutant["line"]] = mutant["new"]
        try:
            with open(path, "w") as file:
                file.write("\n".join(lines))
            if run(["ninja", "-C", "build"], cwd=self.dir).returncode != 0:
                return "does not build"
            order = nearest_first(mutant, self.tests)
            for begin, end in ((0, 4), (4, 16), (16, None)):
                failed = self.first_failure(order[begin:end])
                if failed:
                    return f"caught by {failed}"
            return "SURVIVED"
        finally:
            with open(path, "w") as file:
                file.write(text)

    def first_failure(self, tests):
        if not tests:
            return None
        log = os.path.join(self.dir, "build/meson-logs/testlog.json")
        if os.path.exists(log):
            os.remove(log)
        try:
            run(["meson", "test", "-C", "build", "--no-rebuild", "--maxfail", "1", *tests],
                cwd=self.dir, timeout=1800)
        except subprocess.TimeoutExpired:
            return "a time-out"
        with open(log) as file:
            for line in file:
                result = json.loads(line)
                if result["result"] not in ("OK", "SKIP", "EXPECTEDFAIL"):
                    return result["name"]
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree at work")
    parser.add_argument("--work", default="/tmp/tessera-mutants", help="where the copies are")
    parser.add_argument("--folder", nargs="+", default=FOLDERS)
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("setup", nargs="*", help="options of meson setup, behind --")
    options = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = [f for f in run(["git", "ls-files", *options.folder], cwd=root).stdout.split()
             if f.endswith((".cc", ".h")) and not LEFT_OUT.search(f)]
    rng = random.Random(options.seed)

    def draw(index):
        folder = "apps" if index % 3 == 0 and "apps" in options.folder else rng.choice(options.folder)
        return draw_mutant(rng, root, [f for f in files if f.startswith(folder)])
    if options.list:
        for index in range(options.count):
            m = draw(index)
            print(f"{m['file']}:{m['line'] + 1}: {m['old'].strip()} -> {m['new'].strip()}")
        return 0
    os.makedirs(options.work, exist_ok=True)
    workers = [Worker(root, options.work, i, options.setup) for i in range(options.jobs)]
    counts = {"caught": 0, "SURVIVED": 0, "does": 0}
    mutants = [draw(index) for index in range(2 * options.count)]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        def attempt(mutant):
            if counts["caught"] + counts["SURVIVED"] >= options.count:
                return
            worker = workers.pop()
            verdict = worker.try_mutant(mutant)
            workers.append(worker)
            counts[verdict.split()[0]] += 1
            print(f"{verdict}: {mutant['file']}:{mutant['line'] + 1}: {mutant['old'].strip()} -> "
                  f"{mutant['new'].strip() or '(left out)'}", flush=True)
        list(pool.map(attempt, mutants))
    print(f"{counts['caught']} caught, {counts['SURVIVED']} survived, "
          f"{counts['does']} did not build")
    return 1 if counts["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())
