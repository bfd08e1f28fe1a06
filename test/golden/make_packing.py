"""How many windows trl packs documents into, for apps/data/packing: pip install trl datasets pyarrow;
python3 make_packing.py (written with trl 1.16.0, strategy bfd_split). Lengths are a formula, so that
none are stored: see `lengths` here and in test/apps/data/packing_test.cc."""

import json
import pathlib

import pyarrow
import trl
from trl.data_utils import _pack_bfd

CASES = [(20000, 2048, 5000), (20000, 512, 900), (5000, 4096, 300), (7000, 100, 400), (3000, 1024, 1024)]


def lengths(count, longest):
    """Many short ones, few long ones."""
    x, out = 12345, []
    for _ in range(count):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        u = (x >> 33) % 1000
        out.append(1 + u * u * u // 1000 * (longest - 1) // (999 * 999 * 999 // 1000))
    return out


def windows(lengths, context, batch_size):
    """What trl.pack_dataset does with batches of documents, without a Dataset around them."""
    total = 0
    for i in range(0, len(lengths), batch_size):
        batch = pyarrow.table({"input_ids": [[0] * n for n in lengths[i:i + batch_size]]})
        total += len(_pack_bfd(batch, context, "split"))
    return total


def main():
    cases = []
    for count, context, longest in CASES:
        numels = lengths(count, longest)
        cases.append({"documents": count, "context": context, "longest": longest,
                      "tokens": sum(numels), "windows": windows(numels, context, count),
                      "windows_default": windows(numels, context, 1000)})
    path = pathlib.Path(__file__).parent / "packing.json"
    path.write_text(json.dumps({"trl": trl.__version__, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
