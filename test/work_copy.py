"""A copy of the tree with a build of its own, in which many changes are built at once and tried one by
one: each is a branch that only the environment variable TESSERA_CHANGE takes.

Used by mutate.py and planted.py. A test counts as failed by a change only if it passes without it.
"""
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

# In front of each changed file, on four lines.
PRELUDE = """#ifndef TESSERA_CHANGE_H
#define TESSERA_CHANGE_H
#include <cstdlib>
namespace tessera_change { inline const int chosen = std::getenv("TESSERA_CHANGE") != nullptr ? std::atoi(std::getenv("TESSERA_CHANGE")) : 0; }
#endif
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wparentheses"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
"""


def run(command, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, errors="replace", **kwargs)


class Change:
    """In a file, from `begin` to `end`, `new` in the place of `old`: an expression, or statements if they
    end with a semicolon (none: left out)."""

    def __init__(self, file, text, begin, end, new):
        self.file, self.begin, self.end, self.old, self.new = file, begin, end, text[begin:end], new
        self.line = text.count("\n", 0, begin) + 1
        self.last_line = text.count("\n", 0, end) + 1
        self.number = 0

    def overlaps(self, other):
        return (self.file == other.file and (self.begin, self.end) != (other.begin, other.end) and
                self.begin < other.end and other.begin < self.end)


def with_switches(text, changes):
    """The file's text with all of its changes as branches."""
    spans = {}
    for change in changes:
        spans.setdefault((change.begin, change.end), []).append(change)
    for (begin, end), alternatives in sorted(spans.items(), reverse=True):
        old = text[begin:end]
        if old.rstrip().endswith(";"):
            new = "".join(f"if (::tessera_change::chosen == {c.number}) {{ {c.new.strip()} }} else "
                          for c in alternatives)
            new = f"{{ {new}{{ {old} }} }}"
        else:
            new = "".join(f"::tessera_change::chosen == {c.number} ? ({c.new}) : " for c in alternatives)
            new = f"({new}({old}))"
        text = text[:begin] + new + text[end:]
    return PRELUDE + text


class Test:
    """One test of the suite: what it runs, and what has to be built for it."""

    def __init__(self, listed, targets):
        self.name = listed["name"]
        self.command, self.env = listed["cmd"], listed["env"]
        self.timeout, self.workdir = listed["timeout"], listed["workdir"]
        self.targets = sorted(f for t in listed["depends"] for f in targets[t]["files"])
        self.sources = sorted(s for t in listed["depends"] for s in targets[t]["sources"])
        self.is_program = len(self.command) == 1  # of Catch2: takes filters


class WorkCopy:
    def __init__(self, root, directory, jobs=1):
        self.root, self.dir, self.jobs = root, directory, jobs
        self.build_dir = os.path.join(directory, "build")
        self.changes, self.built = [], set()
        self.times = {}  # of what passes without a change, seconds
        self.rejected = set()  # fails without one
        self.lock = threading.RLock()  # of builds and of what is known of a test

    def files_of_tree(self):
        listed = run(["git", "ls-files", "-co", "--exclude-standard"], cwd=self.root).stdout.split("\n")
        return {f for f in listed if f and os.path.isfile(os.path.join(self.root, f))}

    def sync(self, changes):
        """The files of the tree as they are now, with `changes`; what is the same keeps its time."""
        os.makedirs(self.dir, exist_ok=True)
        files = self.files_of_tree()
        of_file = {}
        for change in changes:
            of_file.setdefault(change.file, []).append(change)
        for name in sorted(files):
            source, target = os.path.join(self.root, name), os.path.join(self.dir, name)
            with open(source, "rb") as file:
                content = file.read()
            if name in of_file:
                content = with_switches(content.decode(), of_file[name]).encode()
            if os.path.exists(target):
                with open(target, "rb") as file:
                    if file.read() == content:
                        continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(content)
            shutil.copymode(source, target)
        marker = os.path.join(self.dir, "copied-files")
        if os.path.exists(marker):
            with open(marker) as file:
                for name in set(file.read().split("\n")) - files - {""}:
                    if os.path.exists(os.path.join(self.dir, name)):
                        os.remove(os.path.join(self.dir, name))
        with open(marker, "w") as file:
            file.write("\n".join(sorted(files)))

    def set_up(self, setup):
        done = run(["bash", "apps/setup.sh", "--unity=off", *setup], cwd=self.dir)
        if done.returncode != 0:
            raise SystemExit(f"{self.dir}: setup failed: {done.stdout[-500:]}{done.stderr[-500:]}")
        # A build that was there before knows the tests of an older tree.
        run(["ninja", "-C", "build", "build.ninja"], cwd=self.dir)
        self.read_tests()

    def read_tests(self):
        def introspect(what):
            return json.loads(run(["meson", "introspect", what, "build"], cwd=self.dir).stdout)
        targets, self.libraries = {}, []
        for target in introspect("--targets"):
            sources = [s for part in target["target_sources"] for s in part.get("sources", [])]
            targets[target["id"]] = {
                "files": [os.path.relpath(f, self.build_dir) for f in target["filename"]],
                "sources": [os.path.relpath(s, self.dir) for s in sources]}
            if target["type"] == "static library" and not target["defined_in"].startswith(
                    os.path.join(self.dir, "test")):
                self.libraries += targets[target["id"]]["files"]
        self.tests = {t["name"]: Test(t, targets) for t in introspect("--tests")}

    def ninja(self, targets, *options):
        done = run(["ninja", "-j", str(self.jobs), "-C", "build", *options, *targets],
                   cwd=self.dir)
        self.build_output = done.stdout
        return done.returncode == 0

    def plant(self, changes, setup=()):
        """Builds the libraries; returns the changes that do not compile, which are left out."""
        for number, change in enumerate(changes, 1):
            change.number = number
        refused = []
        self.sync(changes)
        self.set_up(setup)
        while True:
            if self.ninja(self.libraries, "-k", "0"):
                break
            wrong = self.blamed(changes)
            if not wrong:
                raise SystemExit(f"{self.dir} does not build:\n{self.build_output[-3000:]}")
            refused += wrong
            changes = [c for c in changes if c not in wrong]
            self.sync(changes)
        self.changes = changes
        return refused

    def blamed(self, changes):
        """Changes that an error names by their lines, or stands nearest to: a warning that is an error
        may be about what becomes of a value later."""
        wrong = set()
        for part in re.split(r"^FAILED: ", self.build_output, flags=re.M)[1:]:
            part = part.split("\n[")[0]
            for pattern in (r"\.\./(\S+?):(\d+):(?:\d+:)? error", r"\.\./(\S+?):(\d+)"):
                named = [(match[1], int(match[2]) - PRELUDE.count("\n"))
                         for match in re.finditer(pattern, part)]
                found = {c for c in changes for file, line in named
                         if c.file == file and c.line <= line <= c.last_line}
                if found:
                    break
            distances = {c: min((abs(c.line - line) for file, line in named if c.file == file),
                                default=None) for c in changes}
            near = [c for c in changes if distances[c] is not None]
            wrong |= found or set(sorted(near, key=lambda c: distances[c])[:1])
        return wrong

    def build(self, test):
        """What a test runs, with all changes; whether that works."""
        with self.lock:
            if test.name not in self.built and self.ninja(test.targets):
                self.built.add(test.name)
            return test.name in self.built

    def try_test(self, test, arguments=(), number=0, limit=None):
        """With the change of that number, in `limit` seconds or its own limit: (whether it passes, whether
        its time was over, seconds). Several may run at once."""
        env = dict(os.environ, **test.env)
        env["TESSERA_CHANGE"] = str(number)
        start = time.monotonic()
        with tempfile.TemporaryFile(mode="w+", errors="replace") as output:
            process = subprocess.Popen([*test.command, *arguments], env=env,
                                       cwd=test.workdir or self.build_dir, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(limit or test.timeout)
            except subprocess.TimeoutExpired:
                status = None
            try:  # whatever it has left behind is of its session
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            output.seek(0)
            # Catch2 ends well when a filter matches nothing.
            has_run = not re.search(r"No test cases matched|No tests ran", output.read())
        return status in (0, 77) and has_run, status is None, time.monotonic() - start

    def passes_clean(self, test, arguments=()):
        """Without a change. Tried once."""
        key = " ".join([test.name, *arguments])
        if key in self.times:
            return True
        with self.lock:
            if key not in self.times and key not in self.rejected:
                passes, _, seconds = self.build(test) and self.try_test(test, arguments) or (False, 0, 0)
                if passes:
                    self.times[key] = seconds
                else:
                    self.rejected.add(key)
            return key in self.times

    def fails_with(self, change, test, arguments=()):
        """Whether the test passes without the change and fails, or takes far longer, with it: "", or how
        it fails."""
        if not self.passes_clean(test, arguments):
            return ""
        limit = min(test.timeout, 60 + 8 * self.times[" ".join([test.name, *arguments])])
        passes, is_over_time, _ = self.try_test(test, arguments, change.number, limit)
        return "" if passes else "time-out" if is_over_time else "failure"


def in_turn(try_one, things, at_once):
    """`(thing, try_one(thing))` in the order of `things`, several tried at once."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=at_once) as pool:
        yield from zip(things, pool.map(try_one, things))
