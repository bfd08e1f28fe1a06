"""Makes the include root of an installed library: OUT/tessera with the public headers, all that they
include, version.h and tessera.h, which includes the public ones.
Usage: headers.py ROOT LIST VERSION OUT [DEPFILE]

In the tree headers name each other from its root ("core/tensor.h"); there they say
<tessera/core/tensor.h>, so that one -I is enough and a project may have a core/tensor.h of its own.
A file that has not changed keeps its time.
"""

import os
import pathlib
import re
import sys

INCLUDE = re.compile(r'^(\s*#\s*include\s*)"([^"]+)"', re.MULTILINE)

VERSION = """#pragma once

#define TESSERA_VERSION_MAJOR {}
#define TESSERA_VERSION_MINOR {}
#define TESSERA_VERSION_PATCH {}

#if !defined(__CUDACC__) && __cplusplus < 202002L
#error "tessera needs C++20: compile with -std=c++20"
#endif
"""


def public_headers(path):
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def closure(root, headers):
    """Their texts, and those of all that they include of this project."""
    texts, todo = {}, list(headers)
    while todo:
        name = todo.pop()
        if name not in texts:
            texts[name] = (root / name).read_text(encoding="utf-8")
            todo += [include for _, include in INCLUDE.findall(texts[name])]
    return texts


def installed(text, is_public):
    head, rest = text.split("#pragma once\n", 1)
    note = "" if is_public else "// Internal: may change with any version.\n"
    text = head + "#pragma once\n" + note + "#include <tessera/version.h>\n" + rest
    return INCLUDE.sub(r"\1<tessera/\2>", text)


def main():
    root, listing, version, out = (pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]),
                                   sys.argv[3], pathlib.Path(sys.argv[4]) / "tessera")
    public = public_headers(listing)
    texts = closure(root, public)
    files = {name: installed(text, name in public) for name, text in texts.items()}
    files["version.h"] = VERSION.format(*version.split("."))
    files["tessera.h"] = "#pragma once\n\n// All that is public, but for CUDA sources.\n" + "".join(
        f"#include <tessera/{name}>\n" for name in public if name.endswith(".h"))
    for name, text in files.items():
        path = out / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in sorted(out.rglob("*")):  # of headers that are gone
        if path.is_file() and path.relative_to(out).as_posix() not in files:
            path.unlink()
    os.utime(out)
    if len(sys.argv) > 5:
        sources = " ".join(str(root / name).replace(" ", r"\ ") for name in sorted(texts))
        pathlib.Path(sys.argv[5]).write_text(f"{sys.argv[4]}/tessera: {sources}\n", encoding="utf-8")
    else:
        print(*sorted(texts), sep="\n")


if __name__ == "__main__":
    main()
