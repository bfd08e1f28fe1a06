"""The layer rule: core <- kernels <- {nn, optim} <- dist <- apps. A lower layer never includes a
higher one, nn and optim do not see each other, and every include between own files names a file
from the root. Usage: layers.py ROOT
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


def violations(path, text, exists):
    """What is wrong with the includes of the file `path` (relative to the root)."""
    layer = path.split("/")[0]
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


def main():
    check_the_check()
    root = pathlib.Path(sys.argv[1])
    faults, num_files = [], 0
    for layer in BELOW:
        for file in sorted((root / layer).rglob("*")):
            if file.suffix not in (".h", ".cc", ".cu", ".cuh"):
                continue
            num_files += 1
            faults += violations(file.relative_to(root).as_posix(),
                                 file.read_text(encoding="utf-8"),
                                 lambda include: (root / include).is_file())
    print(*faults, sep="\n")
    print(f"{num_files} files, {len(faults)} faults")
    return 1 if faults or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
