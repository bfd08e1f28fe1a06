"""An installed library as others use it: install.py SOURCE BUILD MPIRUN MESON...

Installs into a temporary prefix and checks there that
  - headers compile alone, with nothing but -I PREFIX/include, in a project that has a core/tensor.h
    and a nn/module.h of its own; their macros and the libraries' symbols are of this project;
  - the projects of apps/examples build by Meson, by CMake and by one line with pkg-config, with the
    shared and with the static library, and what they build runs, alone and on two ranks;
  - a training of a program's own parts (own_trainer: model, data, loss, optimizer and callback, in a
    main of at most 40 lines) is killed and resumed: the same bits.
What must fail is tried too: an older standard, and a version that is not there.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HEADER_FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
# What a short run of each example is given, by the number of ranks.
EXAMPLES = {
    "adapter": lambda ranks: ["--steps=20"],
    "custom_op": lambda ranks: ["--device=cpu"],
    "gated_block": lambda ranks: ["--steps=60"],
    "mlp": lambda ranks: ["--widths=100,50,20,10", "--steps=21"],
    "own_data": lambda ranks: ["--output.dir=own_data_%d" % ranks],
    "own_loop": lambda ranks: ["--dir=own_loop", "--steps=%d" % (10 * ranks)],  # goes on with two
    "own_trainer": lambda ranks: ["--train.steps=20", "--output.dir=own_trainer_%d" % ranks],
    "vision": lambda ranks: ["--train.steps=40", "--output.dir=vision_%d" % ranks],
}


sys.path.insert(0, str(pathlib.Path(sys.argv[1]) / "apps/install"))
sys.dont_write_bytecode = True
from headers import closure, public_headers  # noqa: E402


class Failed(Exception):
    pass


def run(command, cwd=None, env=None, status=0, text=None):
    """Its output; Failed if it ends otherwise."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, text=True, input=text,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if (done.returncode == 0) != (status == 0):
        raise Failed("%s\n%s\nstatus %d" % (" ".join(map(str, command)), done.stdout, done.returncode))
    return done.stdout


def expect(condition, what):
    if not condition:
        raise Failed(what)


class Install:
    def __init__(self, source, build, meson, work):
        self.source, self.work = pathlib.Path(source), pathlib.Path(work)
        dest = self.work / "dest"
        run(meson + ["install", "-C", build, "--no-rebuild", "--quiet", "--tags", "runtime,devel",
                     "--destdir", str(dest)])
        programs = run(meson + ["install", "-C", build, "--no-rebuild", "--dry-run", "--tags", "bin",
                                "--destdir", str(dest)])
        for name in ("train", "generate", "chat", "eval", "checkpoint", "tokenize", "bench-kernels"):
            expect(re.search(r"/tessera-%s to .*/bin$" % name, programs, re.MULTILINE),
                   "tessera-%s is not installed:\n%s" % (name, programs))
        (self.pc,) = dest.rglob("tessera.pc")
        self.libdir = self.pc.parent.parent
        (include,) = dest.rglob("tessera/version.h")
        self.include = include.parent.parent
        # Another place than it was made for.
        self.prefix = self.work / "prefix"
        os.rename(self.include.parent, self.prefix)
        self.libdir = self.prefix / self.libdir.relative_to(self.include.parent)
        self.include = self.prefix / "include"
        self.env = {"PKG_CONFIG_PATH": str(self.libdir / "pkgconfig"),
                    "LD_LIBRARY_PATH": str(self.libdir)}

    def pkg_config(self, *arguments):
        return run(["pkg-config", *arguments], env=self.env).split()


def check_headers(install, pool):
    listing = public_headers(install.source / "apps/install/public_headers.txt")
    public = [name for name in listing if name.endswith(".h")]
    expect(len(public) > 50, "only %d public headers" % len(public))
    own = install.work / "own"
    for name in ("core/tensor.h", "nn/module.h"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("#pragma once\nstruct OwnTensor { int rank = 2; };\n" if "core" in name
                                else '#pragma once\n#include "core/tensor.h"\n')

    # What a header includes anyway may be compiled before: then it is compiled once for all of them.
    bases = ["dist/fsdp/fully_shard.h", "core/tensor.h"]
    base_of = {name: next((base for base in bases if base in closure(install.source, [name])
                           and base != name), None) for name in public}
    flags = [*HEADER_FLAGS, "-I", own, "-I", install.include]

    def compile_base(base):
        path = install.work / base.replace("/", "_")
        path.write_text("#include <tessera/%s>\n" % base)
        run(["g++", *flags, "-x", "c++-header", path, "-o", str(path) + ".gch"],
            cwd=install.work)
        return ["-Winvalid-pch", "-include", path]

    def alone(name, base):
        run(["g++", *flags, "-fsyntax-only", *(base.result() if base else []), "-x", "c++", "-"], cwd=install.work,
            text='#include <tessera/%s>\n#include "nn/module.h"\nOwnTensor own;\n' % name)

    compiled = {base: pool.submit(compile_base, base) for base in bases}
    jobs = [pool.submit(alone, name, compiled.get(base_of[name])) for name in public]
    old = run(["g++", "-std=c++17", "-fsyntax-only", "-I", install.include, "-x", "c++", "-"],
              text="#include <tessera/tessera.h>\n", status=1)
    expect("tessera needs C++20: compile with -std=c++20" in old, "C++17 is not refused:\n" + old)
    headers = list(install.include.rglob("*.h")) + list(install.include.rglob("*.cuh"))
    for header in headers:
        code = header.read_text()
        for macro in re.findall(r"^\s*#\s*define\s+(\w+)", code, re.MULTILINE):
            expect(macro.startswith("TESSERA_"), "%s defines %s" % (header, macro))
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', code, re.MULTILINE):
            raise Failed('%s includes "%s"' % (header, name))
        is_internal = "// Internal: " in code
        name = header.relative_to(install.include / "tessera").as_posix()
        expect(is_internal == (name not in listing) or name in ("version.h", "tessera.h"),
               "%s: does not say whether it is public" % name)
    for job in jobs:
        job.result()
    print("%d headers compile alone, %d are installed" % (len(public), len(headers)))


def check_symbols(install):
    """Strong symbols: instances of templates of other libraries are weak, and each has them."""
    exported = run(["nm", "-D", "--defined-only", install.libdir / "libtessera.so"]).splitlines()
    static = [line for line in
              run(["nm", "--defined-only", "--extern-only", install.libdir / "libtessera.a"]).splitlines()
              if re.match(r"[0-9a-f]+ [TDBRCA] ", line)]
    expect(len(exported) > 1000 and len(static) > 1000, "no symbols")
    for line in exported + static:
        symbol = line.split()[-1]
        expect("7tessera" in symbol, "a symbol outside namespace tessera: " + line)
    print("%d symbols are exported" % len(exported))


def check_flags(install):
    flags = install.pkg_config("--cflags", "tessera")
    expect(flags[0] == "-I%s" % install.include or
           os.path.realpath(flags[0][2:]) == str(install.include), "--cflags: %s" % flags)
    expect(not [flag for flag in flags if not flag.startswith("-I") and flag != "-DFMT_SHARED"],
           "--cflags: %s, expected include paths alone" % flags)
    run(["pkg-config", "--exists", "tessera >= 0.1"], env=install.env)
    run(["pkg-config", "--exists", "tessera >= 99"], env=install.env, status=1)


def build_by_line(install, name, out):
    """`g++ -std=c++20 NAME.cc $(pkg-config --cflags --libs tessera)`"""
    source = install.work / "examples" / (name + ".cc")
    objects = out / (name + ".o")
    run(["g++", "-std=c++20", "-c", source, "-o", objects, *install.pkg_config("--cflags", "tessera")])
    for package, program in (("tessera", name), ("tessera-static", name + "_static")):
        run(["g++", "-s", objects, "-o", out / program, *install.pkg_config("--libs", package)])


class Runner:
    """Runs programs that were built, alone or on ranks."""

    def __init__(self, install, mpirun):
        self.launch = [mpirun, "--oversubscribe", "--bind-to", "none"] if mpirun else None
        self.cwd = install.work
        self.env = {**install.env, "OMP_WAIT_POLICY": "passive"}
        if os.getuid() == 0:
            self.env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def command(self, num_ranks, command):
        command = [str(part) for part in command]
        return command if num_ranks == 1 else self.launch + ["-n", str(num_ranks)] + command

    def run(self, num_ranks, command):
        return run(self.command(num_ranks, command), cwd=self.cwd, env=self.env)

    def run_killed(self, num_ranks, command, out, num_steps):
        """Until `num_steps` are in its metrics and a checkpoint is complete; then kill -9 of rank 0."""
        with subprocess.Popen(self.command(num_ranks, command), cwd=self.cwd,
                              env={**os.environ, **self.env}, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as process:
            metrics = out / "metrics.jsonl"
            while (not metrics.is_file() or len(metrics.read_text().splitlines()) < num_steps or
                   not list(out.glob("step-*/manifest.json"))):
                expect(process.poll() is None, "the run ended before it was killed")
                time.sleep(0.02)
            os.kill(json.loads((out / "status.json").read_text())["pid"], signal.SIGKILL)
            expect(process.wait() != 0, "a run whose rank was killed ended with status 0")


def run_examples(install, folders, mpirun):
    """The library is the same in all: one program of each kind runs, on one rank and on two."""
    runner = Runner(install, mpirun)
    max_ranks = 2 if mpirun else 1
    for name, arguments in EXAMPLES.items():
        for folder in folders:
            for program in (name, name + "_static"):
                needed = run(["ldd", folder / program], env=install.env)
                expect(("libtessera" in needed) == (not program.endswith("_static")), needed)
        runner.run(1, [folders[0] / name, *arguments(1)])
        if max_ranks == 1:
            continue
        text = runner.run(2, [folders[-1] / (name + "_static"), *arguments(2)])
        print("%s: %s" % (name, text.strip().splitlines()[-1]))
        expect(name != "own_loop" or "on from step 10" in text, text)
    check_resume(runner, folders[1] / "own_trainer", max_ranks)


def check_own_main(source):
    """All of a program's own parts are in it, and its main is short."""
    code = source.read_text()
    body = code[code.index("int main("):]
    for part in ("make_model<", "set_samples(", "set_loss(", "set_optimizer(", "add_callback("):
        expect(part in body, "%s: main does not call %s" % (source.name, part))
    for base in ("nn::Module", "optim::Optimizer", "apps::Callback"):
        expect(re.search(r"(class|struct) \w+ (final )?: (public )?%s" % base, code),
               "%s: no %s of its own" % (source.name, base))
    num_lines = len(body[:body.index("\n}\n") + 2].splitlines())
    expect(num_lines <= 40, "%s: main has %d lines, expected at most 40" % (source.name, num_lines))
    print("%s: main has %d lines" % (source.name, num_lines))


def check_resume(runner, program, num_ranks):
    """A run that is killed and resumed has the bits of one that is not."""
    def arguments(out):
        return [program, "--output.dir=%s" % out, "--train.steps=60", "--checkpoint.every=10",
                "--train.eval_every=30"]

    whole, killed = runner.cwd / "whole", runner.cwd / "killed"
    runner.run(num_ranks, arguments(whole))
    runner.run_killed(num_ranks, arguments(killed) + ["--debug.slow_ms=30"], killed, 25)
    text = runner.run(num_ranks, arguments(killed) + ["--resume=auto"])
    expect(re.search(r"resum.*step-000000[12345]0", text), "not resumed:\n" + text)

    def numbers(out):
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [(m["step"], m["loss"], m["grad_norm"], m["lr"], m.get("val_loss")) for m in steps]

    expect(len(numbers(whole)) == 60 and numbers(whole) == numbers(killed),
           "losses differ:\n%s\n%s" % (numbers(whole), numbers(killed)))
    expect((whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes(),
           "the models differ")
    print("killed and resumed on %d ranks: the same bits after 60 steps" % num_ranks)


def main():
    source, build, mpirun, meson = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    with tempfile.TemporaryDirectory() as work, \
            concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        install = Install(source, build, meson, work)
        shutil.copytree(install.source / "apps/examples", install.work / "examples")
        check_own_main(install.source / "apps/examples/own_trainer.cc")
        check_symbols(install)
        check_flags(install)
        by_meson, by_cmake, by_line = (install.work / name for name in ("meson", "cmake", "line"))
        by_line.mkdir()
        examples = install.work / "examples"

        def build_by_meson():
            run(meson + ["setup", by_meson, examples, "-Dbuildtype=plain", "-Dwerror=true",
                         "-Dcpp_link_args=-s"], env=install.env)
            run(["ninja", "-C", by_meson, "-j1"], env=install.env)

        def build_by_cmake():
            run(["cmake", "-B", by_cmake, "-S", examples, "-DCMAKE_PREFIX_PATH=%s" % install.prefix,
                 "-DCMAKE_EXE_LINKER_FLAGS=-s", "-G", "Ninja"], env=install.env)
            run(["cmake", "--build", by_cmake, "-j1"], env=install.env)

        jobs = [pool.submit(build_by_meson), pool.submit(build_by_cmake)]
        jobs += [pool.submit(build_by_line, install, name, by_line) for name in EXAMPLES]
        check_headers(install, pool)
        for job in jobs:
            job.result()
        run_examples(install, [by_meson, by_cmake, by_line], mpirun)


if __name__ == "__main__":
    try:
        main()
    except Failed as failed:
        print(failed)
        sys.exit(1)
