#!/usr/bin/env python3
"""Mutants of the product: does a test fail when a line is wrong?

    mutate.py [--count 120] [--seed 1] [--per-file 4] [--jobs N] [--at-once N] [--work DIR]
              [--folder apps ...] [--leave-out PATH ...] [--minutes 10] [--results FILE] [--list]
              [-- meson option ...]

Draws files of apps, core, kernels, nn, optim and dist (every other one of apps) and in each some
places, and changes one operator, number, constant or statement at each. All of them are built at once
into a copy of the tree (work_copy.py) and tried, --at-once of them beside each other, with the nearest
tests first, until one fails that passes without the change. Prints a line a mutant: `caught` with the test, or `SURVIVED` with
the number of tests and the change, for a person to add a test or say why it changes nothing. What
--results has is not tried again. For a free machine, not for CI.
"""
import argparse
import json
import os
import random
import re
import sys
import time

from work_copy import Change, WorkCopy, in_turn, run

FOLDERS = ["apps", "core", "kernels", "nn", "optim", "dist"]
LEFT_OUT = re.compile(r"(^apps/(compare|bench|(train|generate|checkpoint)\.cc)|cuda|simt|cublaslt|cudnn|nccl|staged|\.cuh?$)")
MOST_USERS = 8  # of a header: others are compiled into much of the tree

# What is written and what it becomes, each with a name.
OPERATORS = [(name, re.compile(pattern), into) for name, pattern, into in [
    ("comparison", r" < ", " <= "), ("comparison", r" <= ", " < "), ("comparison", r" > ", " >= "),
    ("comparison", r" >= ", " > "), ("comparison", r" == ", " != "), ("comparison", r" != ", " == "),
    ("arithmetic", r" \+ ", " - "), ("arithmetic", r" - ", " + "), ("arithmetic", r" \* ", " + "),
    ("arithmetic", r" / ", " * "), ("arithmetic", r" % ", " / "),
    ("logic", r" && ", " || "), ("logic", r" \|\| ", " && "), ("logic", r"!(?=[a-z])", ""),
    ("constant", r"\btrue\b", "false"), ("constant", r"\bfalse\b", "true"),
    ("constant", r"(?<![\w.\"])0(?![\w.])", "1"), ("constant", r"(?<![\w.\"])1(?![\w.])", "2"),
    ("constant", r"(?<![\w.\"])2(?![\w.])", "3"),
    ("extremum", r"std::max\b", "std::min"), ("extremum", r"std::min\b", "std::max"),
    ("update", r" \+= ", " = "), ("update", r" -= ", " = "), ("update", r"\+\+", ""),
]]
# Whole statements that are left out: calls and assignments.
STATEMENT = re.compile(r"(?<=[;{}\n])(?P<indent>\n? +)(?P<text>(?!return|if|for|while|else|case|using|throw|delete|"
                       r"TESSERA_CHECK|TESSERA_DCHECK|log_)[\w.:\->\[\]]+(?:\([^;{}]*\)| [+\-*|&]?= [^;{}]*);)(?=\n)")
# Messages, checks of arguments and what only declares.
NOT_CHANGED = re.compile(r"(TESSERA_\w*CHECK\w*|fmt::format|throw \w+|log_\w+|static_assert|template|"
                         r"#include|using )[^;]*;?")


def masked(text):
    """Comments and strings as blanks of the same length."""
    def blank(match):
        return re.sub(r"[^\n]", "_" if match[0].startswith('"') else " ", match[0])
    return re.sub(r'//[^\n]*|/\*.*?\*/|R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text,
                  flags=re.S)


def expression_around(code, at):
    """The expression that position `at` lies in: to the next comma, semicolon, assignment or bracket that
    is not its own."""
    begin, depth = at, 0
    while begin > 0:
        c = code[begin - 1]
        if c in ")]}":
            depth += 1
        elif c in "([{":
            if depth == 0:
                break
            depth -= 1
        elif depth == 0 and c in ",;":
            break
        elif depth == 0 and c == "=" and code[begin - 2] in " +-*|&" and code[begin] == " ":
            break
        elif depth == 0 and re.search(r"\breturn$", code[max(0, begin - 8):begin]):
            break
        begin -= 1
    end, depth = at, 0
    while end < len(code):
        c = code[end]
        if c in "([{":
            depth += 1
        elif c in ")]}":
            if depth == 0:
                break
            depth -= 1
        elif depth == 0 and c in ",;":
            break
        end += 1
    while code[begin] in " \n":
        begin += 1
    while code[end - 1] in " \n":
        end -= 1
    return begin, end


def mutants_of(path, text):
    """All changes of a file that can be made."""
    code = masked(text)
    skipped = [match.span() for match in NOT_CHANGED.finditer(code)]

    def is_open(begin, end):
        line = code.count("\n", 0, begin)
        return line > 3 and not any(begin < b and a < end for a, b in skipped)
    found = []
    for kind, pattern, into in OPERATORS:
        for match in pattern.finditer(code):
            if not is_open(*match.span()) or (kind == "constant" and path.endswith(".h")):
                continue  # in headers they are mostly initial values that are never read
            begin, end = expression_around(code, match.start() + (1 if match[0][0] == " " else 0))
            if kind == "update":  # the statement
                while code[begin - 1] not in ";{}()\n":
                    begin -= 1
                begin += len(code[begin:]) - len(code[begin:].lstrip(" "))
                if code[end:end + 1] != ";" or match.start() < begin or match.end() > end:
                    continue
                end += 1
            if not begin <= match.start() < match.end() <= end or end - begin > 400:
                continue
            new = text[begin:match.start()] + into + text[match.end():end]
            found.append(Change(path, text, begin, end, new))
            found[-1].kind, found[-1].at = kind, match.start()
    for match in STATEMENT.finditer(code):
        if is_open(*match.span("text")) and code[:match.start("text")].rstrip()[-1:] in tuple(";{}:)"):
            found.append(Change(path, text, *match.span("text"), ""))
            found[-1].kind, found[-1].at = "left out", match.start("text")
    return found


def describe(change):
    """The lines as they are and as they become, cut to what differs."""
    def words(text):
        return " ".join(text.split())
    old, new = words(change.old), words(change.new)
    return f"{change.file}:{change.line}: {old[:160]} -> {new[:160] or '(left out)'}"


def num_users(root):
    """How many sources are compiled again when a file changes."""
    includes = {}
    for name in run(["git", "ls-files", "*.cc", "*.h"], cwd=root).stdout.split():
        with open(os.path.join(root, name)) as file:
            includes[name] = set(re.findall(r'^#include "(.*)"', file.read(), re.M))
    users = {}
    for name in includes:
        if name.endswith(".cc"):
            seen, to_see = set(), [name]
            while to_see:
                for included in includes.get(to_see.pop(), ()):
                    if included not in seen:
                        seen.add(included)
                        to_see.append(included)
            for included in seen:
                users[included] = users.get(included, 0) + 1
    return users


# Of the text of the sources, of other builds, and of speed: they say nothing about a changed line.
NOT_ASKED = re.compile(r"^(format|layers|assertions|flags|subproject|planted|testing|readme.*|simt/.*|"
                       r"cuda/.*|core/runtime/cuda.*|apps/bench/.*|dist/cases)$")


def nearest_first(mutant, copy):
    """Tests by what they have in common with the changed file; slow ones last in each class."""
    stem, _ = os.path.splitext(mutant.file)
    folder, _, name = stem.rpartition("/")
    header = f'"{stem}.h"'
    layer = folder.split("/")[0]
    includes = {}
    for test in copy.tests.values():
        own = [s for s in test.sources if s.endswith("_test.cc")]
        includes[test.name] = any(header in open(os.path.join(copy.dir, s)).read() for s in own)

    def distance(test):
        words = test.name.split("/")
        if test.name in (stem, folder, f"{layer}/{name}", f"{layer}/{folder.split('/')[-1]}"):
            near = 0
        elif includes[test.name]:
            near = 1
        elif words[0] == layer and ("/".join(words[:-1]) == folder or words[-1] in name or
                                    folder.split("/")[-1] in words[-1] or name in words[-1]):
            near = 2
        elif words[0] == layer:
            near = 3
        else:
            near = 4 + abs(FOLDERS.index(layer) - FOLDERS.index(words[0])
                           if words[0] in FOLDERS else 9)
        seconds = copy.times.get(test.name, test.timeout / 20)
        return near, seconds > 60, not test.is_program, seconds
    return sorted((t for t in copy.tests.values() if not NOT_ASKED.match(t.name)), key=distance)


def try_mutant(copy, mutant, minutes):
    """`caught by TEST` or `SURVIVED n tests`."""
    end = time.monotonic() + 60 * minutes
    num_tried = 0
    for test in nearest_first(mutant, copy):
        if time.monotonic() > end:
            break
        num_tried += 1
        if failure := copy.fails_with(mutant, test):
            return f"caught by {test.name}{' (time-out)' if failure == 'time-out' else ''}"
        num_tried -= test.name in copy.rejected
    return f"SURVIVED {num_tried} tests"


def draw(root, options):
    """Files, every other one of apps, and places in them that do not overlap."""
    files = [f for f in run(["git", "ls-files", *options.folder], cwd=root).stdout.split()
             if f.endswith((".cc", ".h")) and not LEFT_OUT.search(f)
             and not f.startswith(tuple(options.leave_out))]
    users = num_users(root)
    files = [f for f in files if users.get(f, 0) <= MOST_USERS]
    rng = random.Random(options.seed)
    folders = [f for f in options.folder if f != "apps"] or ["apps"]
    mutants = []
    while len(mutants) < options.count and files:
        folder = "apps" if len({m.file for m in mutants}) % 2 == 0 else rng.choice(folders)
        inside = [f for f in files if f.startswith(folder + "/")] or files
        path = rng.choice(inside)
        files.remove(path)
        with open(os.path.join(root, path)) as file:
            possible = mutants_of(path, file.read())
        rng.shuffle(possible)
        chosen = []
        for change in possible:
            if len(chosen) < min(options.per_file, options.count - len(mutants)) and not any(
                    change.overlaps(c) or change.line == c.line for c in chosen):
                chosen.append(change)
        mutants += chosen
    return mutants


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-file", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of a build")
    parser.add_argument("--at-once", type=int, default=1, help="mutants that are tried at once")
    parser.add_argument("--work", default="/tmp/tessera-mutants", help="where the copy is")
    parser.add_argument("--folder", nargs="+", default=FOLDERS)
    parser.add_argument("--leave-out", nargs="+", default=[], help="beginnings of paths")
    parser.add_argument("--minutes", type=float, default=10, help="most of them that a mutant gets")
    parser.add_argument("--results", help="a file of results, which is added to")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("setup", nargs="*", help="options of meson setup, behind --")
    options = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    mutants = draw(root, options)
    if options.list:
        for mutant in mutants:
            print(describe(mutant))
        return 0
    done = {}
    if options.results and os.path.exists(options.results):
        with open(options.results) as file:
            for line in file:
                result = json.loads(line)
                done[result["what"]] = result["verdict"]
    copy = WorkCopy(root, options.work, options.jobs)
    refused = copy.plant(mutants, options.setup)
    counts = {"caught": 0, "SURVIVED": 0}

    def try_one(mutant):
        return done.get(describe(mutant)) or try_mutant(copy, mutant, options.minutes)
    for mutant, verdict in in_turn(try_one, [m for m in mutants if m not in refused], options.at_once):
        what = describe(mutant)
        counts[verdict.split()[0]] += 1
        if options.results and what not in done:
            with open(options.results, "a") as file:
                file.write(json.dumps({"what": what, "verdict": verdict}) + "\n")
        print(f"{verdict}: {what}", flush=True)
    print(f"{len(mutants)} mutants, {len(refused)} of them do not compile, {counts['caught']} caught, "
          f"{counts['SURVIVED']} survived")
    return 1 if counts["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())
