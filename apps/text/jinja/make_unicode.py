"""Writes unicode_tables.inc: the classes and cases that Python's str has. Usage: make_unicode.py
> unicode_tables.inc
"""

import sys
import unicodedata

IS_ALPHA, IS_DECIMAL, IS_DIGIT, IS_NUMERIC, IS_SPACE, IS_PRINTABLE = 1, 2, 4, 8, 16, 32
IS_UPPER, IS_LOWER, IS_TITLE, IS_CASED, IS_IGNORABLE, IS_START, IS_CONTINUE = (
    64, 128, 256, 512, 1024, 2048, 4096)
SURROGATES = range(0xD800, 0xE000)


def properties(c):
    """The bits of unicode.h."""
    bits = 0
    for bit, holds in [
            (IS_ALPHA, c.isalpha()), (IS_DECIMAL, c.isdecimal()), (IS_DIGIT, c.isdigit()),
            (IS_NUMERIC, c.isnumeric()), (IS_SPACE, c.isspace()),
            (IS_PRINTABLE, c.isprintable()), (IS_UPPER, c.isupper()), (IS_LOWER, c.islower()),
            (IS_TITLE, unicodedata.category(c) == "Lt"),
            (IS_START, c.isidentifier()), (IS_CONTINUE, ("a" + c).isidentifier())]:
        bits |= bit if holds else 0
    if bits & (IS_UPPER | IS_LOWER | IS_TITLE):
        bits |= IS_CASED
    # Ignored beside a sigma: seen in how Python lowers one before it.
    if ("\u03b1\u03a3" + c).lower()[1] == "\u03c2" and (
            "\u03b1\u03a3" + c + "\u03b1").lower()[1] == "\u03c3":
        bits |= IS_IGNORABLE
    return bits


def runs_of(values):
    """(first, value) where the value changes."""
    previous = None
    for code, value in enumerate(values):
        if value != previous:
            yield code, value
            previous = value


def case_runs(function):
    """([(first, last, stride, delta)], {code: text}) of a mapping of characters."""
    runs, special = [], {}
    for code in range(0x110000):
        if code in SURROGATES or function(chr(code)) == chr(code):
            continue
        mapped = function(chr(code))
        if len(mapped) > 1:
            special[code] = mapped
            continue
        delta = ord(mapped) - code
        if runs and runs[-1][3] == delta:
            first, last, stride, _ = runs[-1]
            step = code - last
            if step <= 2 and stride in (0, step):
                runs[-1] = (first, code, step, delta)
                continue
        runs.append((code, code, 0, delta))
    return [(a, b, s or 1, d) for a, b, s, d in runs], special


def write(name, kind, items):
    """An array of `items`, many in a line."""
    print(f"constexpr {kind} {name}[] = {{")
    line = ""
    for item in items:
        if len(line) + len(item) > 118:
            print(line)
            line = ""
        line += item + ","
    print(line + "};")


def main():
    print(f"// Made by make_unicode.py: Unicode {unicodedata.unidata_version}, as the str of Python "
          f"{sys.version_info.major}.{sys.version_info.minor} has it.")
    values = [0 if code in SURROGATES else properties(chr(code)) for code in range(0x110000)]
    write("kPropertyRuns", "PropertyRun", [f"{{{a},{v}}}" for a, v in runs_of(values)])
    zeros = [code for code in range(0x110000)
             if code not in SURROGATES and unicodedata.decimal(chr(code), None) == 0]
    write("kDecimalZeros", "char32_t", [str(code) for code in zeros])
    for name, function in [("Upper", str.upper), ("Lower", str.lower), ("Title", str.title),
                           ("Fold", str.casefold)]:
        runs, special = case_runs(function)
        write(f"k{name}Runs", "CaseRun", [f"{{{a},{b},{s},{d}}}" for a, b, s, d in runs])
        write(f"k{name}Special", "CaseSpecial",
              [f"{{{a},U\"" + "".join(f"\\U{ord(c):08x}" for c in t) + '"}'
               for a, t in special.items()])


if __name__ == "__main__":
    main()
