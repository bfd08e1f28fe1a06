"""The layer rule: core <- kernels <- {nn, optim} <- dist <- apps. A lower layer never includes a
higher one, nn and optim do not see each other, and every include between own files names a file
from the root. And what CUDA sources must not contain, so that one source serves nvcc and the
emulator. Usage: layers.py ROOT
"""

import pathlib
import re
import sys

BELOW = {
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "nn": {"core", "kernels", "nn"},
    "optim": {"core", "kernels", "optim"},
    "dist": {"core", "kernels", "nn", "optim", "dist"},
    "apps": {"core", "kernels", "nn", "optim", "dist", "apps"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# What, where it may be, what to use instead.
CUDA_RULES = [
    (re.compile(r"<<<"), "", "launch()"),
    (re.compile(r"\b__shared__\b"), "core/runtime/cuda/launch.cuh", "dynamic_smem()"),
    (re.compile(r"\basm\b"), "core/runtime/cuda/ptx.cuh", "a wrapper in ptx.cuh"),
    (re.compile(r"\bprintf\b"), "", "an error of the launcher"),
    (re.compile(r"\batomic(Add|Sub)\s*\(\s*\(?\s*(float|double)\b"), "", "a two-stage reduction"),
]


def cuda_violations(path, text):
    """Which rules a .cu or .cuh file breaks."""
    code = COMMENT.sub("", text)
    for pattern, exception, instead in CUDA_RULES:
        if path != exception and (match := pattern.search(code)):
            yield f'{path}: contains "{match[0]}": use {instead}'


def violations(path, text, exists):
    """What is wrong with the includes of the file `path` (relative to the root)."""
    layer = path.split("/")[0]
    if path.startswith("apps/examples/"):  # what others write, of the installed headers
        for include in INCLUDE.findall(text):
            if not exists("apps/examples/" + include):
                yield f'{path}: includes "{include}", which is not beside it'
        return
    for include in INCLUDE.findall(text):
        target = include.split("/")[0]
        if target not in BELOW.get(layer, set()):
            yield f'{path}: includes "{include}", but {layer} may see only {sorted(BELOW[layer])}'
        elif not exists(include):
            yield f'{path}: includes "{include}", which is no file from the root'


def check_the_check():
    """Planted faults are found, and what is allowed is not."""
    def found(path, include, exists=True):
        return bool(list(violations(path, f'  #  include "{include}"\n', lambda _: exists)))

    for path, include in [("core/a.h", "kernels/b.h"), ("kernels/n/a.cc", "nn/b.h"),
                          ("nn/a.h", "optim/b.h"), ("optim/a.h", "nn/b.h"),
                          ("optim/a.h", "dist/b.h"), ("dist/a/b.h", "apps/b.h"),
                          ("core/a.h", "b.h"), ("core/a.h", "test/b.h")]:
        assert found(path, include), (path, include)
    for path, include in [("apps/a.h", "dist/b.h"), ("dist/a.h", "optim/b.h"),
                          ("nn/a.h", "core/x/b.h")]:
        assert not found(path, include), (path, include)
    assert found("nn/a.h", "nn/b.h", exists=False)
    assert found("apps/examples/a.cc", "core/tensor.h", exists=False)
    assert not found("apps/examples/a.cc", "flags.h")

    for code in ("k<<<1, 32>>>();", "__shared__ float s[2];", 'asm("nop");', 'printf("x");',
                 "atomicAdd((float*)p, v);"):
        assert list(cuda_violations("kernels/norm/cuda.cu", code)), code
    for path, code in [("core/runtime/cuda/ptx.cuh", 'asm("nop");'),
                       ("kernels/norm/cuda.cu", "// asm\natomicAdd(&count, 1); /* <<< */"),
                       ("core/runtime/cuda/launch.cuh", "extern __shared__ char bytes[];")]:
        assert not list(cuda_violations(path, code)), code


def main():
    check_the_check()
    root = pathlib.Path(sys.argv[1])
    faults, num_files = [], 0
    for layer in BELOW:
        for file in sorted((root / layer).rglob("*")):
            if file.suffix not in (".h", ".cc", ".cu", ".cuh"):
                continue
            num_files += 1
            path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
            # The build makes some from a template beside them.
            faults += violations(path, text, lambda include: any(
                (root / name).is_file() for name in (include, include + ".in")))
            if file.suffix in (".cu", ".cuh"):
                faults += cuda_violations(path, text)
    print(*faults, sep="\n")
    print(f"{num_files} files, {len(faults)} faults")
    return 1 if faults or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
