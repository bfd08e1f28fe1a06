"""Texts to compare encoders on, cut out of the files under some folders: texts.py OUT FOLDER...

prose.txt (11 MB of documentation), mixed.txt (100 MB: half source files, a sixth catalogs of translations
in many languages, the rest documentation), warm.txt (200 kB that neither of them has). The files come in
an order drawn by a seed, each once and 200 kB of it at most."""

import gettext
import hashlib
import pathlib
import random
import sys

PROSE = {".rst", ".txt", ".html", ".md"}
CODE = {".py", ".pyi", ".h", ".hpp", ".c", ".cc", ".js", ".json", ".pl", ".pm", ".sh", ".vim", ".cuh"}
MAX_NBYTES = 200_000


def text_of(path):
    """The file as UTF-8 bytes; b"" if it is none."""
    try:
        if path.suffix == ".mo":
            with open(path, "rb") as file:
                catalog = gettext.GNUTranslations(file)
            data = "\n".join(v for v in catalog._catalog.values() if isinstance(v, str)).encode()
        else:
            data = path.read_bytes()
        data = data[:MAX_NBYTES]
        while data and data[-1] & 0xC0 == 0x80:
            data = data[:-1]
        data = data[:-1] if data and data[-1] >= 0x80 else data
        data.decode()
    except (OSError, ValueError, AttributeError, LookupError):
        return b""
    return data + b"\n" if data else b""


class Source:
    """Contents of the files in an order of their own, none twice."""

    seen = set()

    def __init__(self, files):
        self.files = files

    def take(self, nbytes):
        parts, total = [], 0
        while total < nbytes:
            if not self.files:
                raise SystemExit(f"texts.py: {total} bytes in the folders, expected {nbytes}")
            data = text_of(self.files.pop())
            key = hashlib.sha256(data).digest()
            if data and key not in self.seen:
                self.seen.add(key)
                parts.append(data)
                total += len(data)
        return parts


def main():
    out = pathlib.Path(sys.argv[1])
    files = [p for folder in sys.argv[2:] for p in sorted(pathlib.Path(folder).rglob("*"))
             if p.suffix in PROSE | CODE | {".mo"} and p.is_file() and not p.is_symlink()]
    rng = random.Random(20261130)
    rng.shuffle(files)
    prose = Source([p for p in files if p.suffix in PROSE])
    code = Source([p for p in files if p.suffix in CODE])
    catalogs = Source([p for p in files if p.suffix == ".mo"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "warm.txt").write_bytes(b"".join(prose.take(100_000) + code.take(100_000))[:200_000]
                                   .decode(errors="ignore").encode())
    (out / "prose.txt").write_bytes(b"".join(prose.take(11_000_000)))
    catalog = catalogs.take(100_000_000 // 6)
    source = code.take(50_000_000)
    parts = catalog + source + prose.take(100_000_000 - sum(map(len, catalog + source)))
    rng.shuffle(parts)
    (out / "mixed.txt").write_bytes(b"".join(parts))
    for path in sorted(out.glob("*.txt")):
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
