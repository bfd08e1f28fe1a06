"""Parquet files for tessera-bench-parquet: about 120 MB of documents cut out of the text files of a
folder, as nanochat's shards are (one column, row groups of 1024, no dictionary) in each codec, and as
Hugging Face's exports are (defaults of pyarrow: SNAPPY, a dictionary).
pip install pyarrow; python3 parquet.py FOLDER OUT; tessera-bench-parquet OUT/*.parquet"""

import pathlib
import random
import sys

import pyarrow
import pyarrow.parquet

SUFFIXES = (".cc", ".h", ".md", ".py", ".cu", ".cuh", ".txt")


def main():
    folder, out = map(pathlib.Path, sys.argv[1:3])
    text = "".join(p.read_text(errors="replace") for p in sorted(folder.rglob("*")) if p.suffix in SUFFIXES)
    rng = random.Random(1)
    documents, total = [], 0
    while total < 120_000_000:
        length = min(60000, max(50, int(rng.lognormvariate(7.6, 1.0))))
        begin = rng.randrange(len(text) - length)
        documents.append(text[begin:begin + length])
        total += length
    table = pyarrow.table({"text": documents})
    for codec in ("zstd", "snappy", "gzip", "none"):
        pyarrow.parquet.write_table(
            table, out / f"{codec}.parquet", compression=codec, row_group_size=1024, use_dictionary=False,
            compression_level=3 if codec == "zstd" else None, write_statistics=False)
    pyarrow.parquet.write_table(table, out / "defaults.parquet", row_group_size=1000)


if __name__ == "__main__":
    main()
