"""A family of models is one folder of nn/ and one word in the list of nn/meson.build: no other file of
the product has its name. Programs that measure known models (apps/bench/) may, examples, which are
what others write (apps/examples/), and tokenizers, which formats of files call after models (apps/text/,
apps/tokenize*). Usage: families.py ROOT
"""

import pathlib
import re
import sys


def patterns(family):
    """Of the name in identifiers and words: llama, Llama, LLAMA, but not llama3, a scaling of rope, nor
    llama.cpp, a program."""
    forms = "|".join({family, family.capitalize(), family.upper()})
    return re.compile(rf"(?<![a-z0-9])(?:{forms})(?![a-z0-9]|\.cpp)|(?<=[a-z])(?:{family.capitalize()})(?![a-z0-9])")


def check_the_check():
    for text in ("llama", "nn::Llama", "LlamaConfig", "is_llama", "LLAMA", '"llama"', "makeLlama"):
        assert patterns("llama").search(text), text
    for text in ("kLlama3", "llama3", "llamas", "collama", "llama.cpp"):
        assert not patterns("llama").search(text), text


def families_of(root):
    text = (root / "nn/meson.build").read_text()
    return re.findall(r"'(\w+)'", re.search(r"model_families = \[([^\]]*)\]", text)[1])


def main():
    check_the_check()
    root = pathlib.Path(sys.argv[1])
    names = families_of(root)
    folders = {path.parent.name for path in root.glob("nn/*/family.cc")}
    assert set(names) == folders, (names, folders)
    faults = []
    num_files = 0
    for layer in ("core", "kernels", "nn", "optim", "dist", "apps"):
        for path in sorted((root / layer).rglob("*")):
            if path.suffix not in (".cc", ".h", ".cu", ".cuh") and path.name != "meson.build":
                continue
            relative = path.relative_to(root).as_posix()
            is_other = relative.startswith(("apps/bench/", "apps/examples/", "apps/text/", "apps/tokenize"))
            num_files += 1
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if relative == "nn/meson.build" and line.startswith("model_families = "):
                    continue
                for name in names:
                    if not is_other and not relative.startswith(f"nn/{name}/") and patterns(name).search(line):
                        faults.append(f"{relative}:{number}: {name}: {line.strip()}")
    print("\n".join(faults))
    print(f"{len(names)} families, {num_files} files, {len(faults)} faults")
    sys.exit(bool(faults) or num_files < 200)


main()
