"""Small Parquet files of one table, in every codec and version of data pages, and its rows as JSON,
for core/formats/parquet: pip install pyarrow; python3 make_parquet.py (written with pyarrow 26.0.1).

Columns: each encoding of byte arrays, required and with nulls, and nested ones."""

import json
import pathlib
import random

import pyarrow
import pyarrow.parquet

ROWS = 37
WORDS = ["", "a", "tessera", "caf\u00e9", "\u20ac\U0001f600", "line\nbreak", '"quoted" \\', "\x01", "z" * 300]


def text(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 4)))


def messages(rng):
    return [{"role": rng.choice(["user", "assistant"]),
             "content": None if rng.random() < 0.1 else text(rng)} for _ in range(rng.randint(0, 3))]


def make_rows():
    rng = random.Random(12)
    maybe = lambda value: None if rng.random() < 0.3 else value
    rows = []
    for i in range(ROWS):
        row = {name: text(rng) for name in ("plain", "dict", "delta_length")}
        row["delta"] = "prefix/" + "deep/" * (i % 4) + text(rng)
        for name in list(row):
            row[name + "_null"] = maybe(row[name])
        row["nothing"] = None
        row["messages"] = maybe(messages(rng))
        row["tags"] = maybe([maybe(text(rng)) for _ in range(rng.randint(0, 3))])
        row["nested"] = [[text(rng) for _ in range(rng.randint(0, 2))] for _ in range(rng.randint(0, 2))]
        row["meta"] = maybe({"source": maybe(text(rng)), "title": text(rng)})
        rows.append(row)
    return rows


STRING = pyarrow.string()
REQUIRED = ("plain", "dict", "delta_length", "delta")
SCHEMA = pyarrow.schema(
    [pyarrow.field(n, STRING, nullable=False) for n in REQUIRED]
    + [pyarrow.field(n + "_null", STRING) for n in REQUIRED]
    + [pyarrow.field("nothing", STRING),
       pyarrow.field("messages", pyarrow.list_(pyarrow.struct(
           [pyarrow.field("role", STRING, nullable=False), pyarrow.field("content", STRING)]))),
       pyarrow.field("tags", pyarrow.list_(STRING)),
       pyarrow.field("nested", pyarrow.list_(pyarrow.list_(STRING))),
       pyarrow.field("meta", pyarrow.struct([pyarrow.field("source", STRING),
                                             pyarrow.field("title", STRING, nullable=False)]))])
ENCODINGS = {"plain": "PLAIN", "delta_length": "DELTA_LENGTH_BYTE_ARRAY", "delta": "DELTA_BYTE_ARRAY"}


def write_chats(folder):
    """Conversations as lists of structs, with tools, in two row groups; the same as JSON lines."""
    rows = []
    for i in range(9):
        turns = [{"role": role, "content": f"{role} {i}.{k} caf\u00e9 \"q\""}
                 for k in range(1 + i % 3) for role in ("user", "assistant")]
        tools = [{"name": "add", "description": f"adds {i}"}] if i % 2 else None
        rows.append({"id": i, "messages": turns, "tools": tools})
    lines = [json.dumps(row) for row in rows]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "chats.parquet",
                                compression="zstd", row_group_size=5)


def main():
    folder = pathlib.Path(__file__).parent / "parquet"
    folder.mkdir(exist_ok=True)
    rows = make_rows()
    table = pyarrow.Table.from_pylist(rows, schema=SCHEMA)
    (folder / "rows.json").write_text(json.dumps(rows, indent=0) + "\n")
    encodings = {name + end: e for name, e in ENCODINGS.items() for end in ("", "_null")}
    for codec in ("none", "snappy", "gzip", "zstd", "lz4"):
        for version in ("1.0", "2.0"):
            pyarrow.parquet.write_table(
                table, folder / f"{codec}_v{version[0]}.parquet", compression=codec,
                data_page_version=version, row_group_size=16, data_page_size=600, write_batch_size=4,
                use_dictionary=["dict", "dict_null", "messages.list.element.role"],
                column_encoding=encodings, write_page_checksum=version == "2.0",
                write_statistics=False)
    # As pyarrow writes it, with a column that is no text beside it.
    table = pyarrow.table({"id": list(range(ROWS)), "text": [row["plain"] for row in rows]})
    pyarrow.parquet.write_table(table, folder / "defaults.parquet")
    write_chats(folder)
    # Small ones for test/fuzz.
    corpus = pathlib.Path(__file__).parent.parent / "fuzz" / "corpus" / "parquet"
    corpus.mkdir(exist_ok=True)
    few = pyarrow.Table.from_pylist(rows[:3], schema=SCHEMA)
    for name, columns, codec, version in (
            ("flat", ["plain", "dict_null", "delta_length", "delta_null"], "none", "1.0"),
            ("packed", ["dict", "plain_null"], "snappy", "2.0"),
            ("nested", ["messages", "nested"], "zstd", "1.0"),
            ("struct", ["meta", "tags"], "gzip", "2.0"),
            ("lz4", ["delta_length_null", "nothing"], "lz4", "1.0")):
        table = few.select(columns).replace_schema_metadata(None)
        pyarrow.parquet.write_table(
            table, corpus / f"{name}.parquet", compression=codec, data_page_version=version,
            use_dictionary=[c for c in columns if c.startswith("dict")], store_schema=False,
            column_encoding={c: e for c, e in encodings.items() if c in columns} or None,
            write_statistics=False)


if __name__ == "__main__":
    main()
