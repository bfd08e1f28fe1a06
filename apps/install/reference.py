"""The API reference: what public headers say, as HTML. reference.py ROOT LIST VERSION DOXYGEN OUT

Copies the public headers as they are installed into OUT/include, brings their comments into the
shape that Doxygen reads (a label such as "Shapes" begins a paragraph of its own, indented lines are
formulas, a comment of a free function is that of those that follow it without a blank line) and has
it write OUT/html. Each of its warnings is a failure with the header's own line. So is a class, an
enumeration, a free function or a member function with arguments that nothing is said of; values
and queries say by their names what they are; constructors, operators and the structs inside of a class are
said with it.
"""

import pathlib
import re
import subprocess
import sys

import headers

LABEL = re.compile(r"(Shapes|Dtypes|Saves|Grads|Streams|Errors|Memory|States?|Sums|Threads|Sharded|"
                   r"Random|Bits|Values|Strides) {2,}(\S.*)$")
# An enumeration of one line is said behind it, which Doxygen does not take.
ENUM_LINE = re.compile(r"(\s*)(enum class .*\};)\s+///< (.*)$")
DOC = re.compile(r"(\s*)///( (.*))?$")
NOT_DOCUMENTED = re.compile(r"warning: (Compound|Member) (.*?)(?: \((\w[\w ]*)\) of (\w+) (.+))? is not documented")


def as_doxygen(comment):
    """Lines of a comment (without ///), and the index of the line that each comes from."""
    out, is_label, is_formula = [], False, False

    def add(i, line):
        out.append((i, line))

    for i, line in enumerate(comment):
        label = LABEL.match(line)
        is_indented = line.startswith("  ")
        if is_formula and not (is_indented and not label):
            add(i, "@endcode")
            is_formula = False
        if label:
            add(i, "@par " + label.group(1))
            add(i, label.group(2))
            is_label = True
        elif is_indented and is_label:
            add(i, line.strip())
        elif is_indented:
            if not is_formula:
                add(i, "@code{.unparsed}")
            is_formula = True
            add(i, re.sub(r"/\*.*?\*/", "", line))  # of which Doxygen takes the end for its own
        else:
            if is_label and line:
                add(i, "@par")  # what follows is of all of it again
            is_label = False
            note = re.match(r"\[(Note: [^\]]*)\]$", line)
            add(i, "@par " + note.group(1) if note else line)
    if is_formula:
        add(len(comment) - 1, "@endcode")
    return out


def prepare(text):
    """A header for Doxygen, and the line of the header that each of its lines comes from."""
    lines, out, i = text.split("\n"), [], 0
    while i < len(lines):
        doc, enum = DOC.match(lines[i]), ENUM_LINE.match(lines[i])
        if enum:
            out += [(i, enum.group(1) + "/// " + enum.group(3)), (i, enum.group(1) + enum.group(2))]
            i += 1
            continue
        if doc is None:
            out.append((i, lines[i]))
            i += 1
            continue
        begin, indent = i, doc.group(1)
        comment = []
        while i < len(lines) and (doc := DOC.match(lines[i])):
            comment.append(doc.group(3) or "")
            i += 1
        end = i  # of the declarations without a blank line or a comment between them
        while end < len(lines) and lines[end].strip() and not DOC.match(lines[end]):
            end += 1
        declared = "\n".join(lines[i:end])
        is_group = (indent == "" and declared.count(";\n") + declared.endswith(";") > 1 and
                    not re.match(r"(class|struct|enum|template|namespace|inline|constexpr|#)\b", declared))
        if is_group:
            out += [(begin, "/// @{"), (begin, "")]
        out += [(begin + at, indent + "/// " + line) for at, line in as_doxygen(comment)]
        if is_group:
            out += [(at, lines[at]) for at in range(i, end)]
            out.append((end - 1, "/// @}"))
            i = end
    return "\n".join(line for _, line in out), [at for at, _ in out]


def may_be_silent(match):
    """Whether the thing needs no comment: its name, or its class, says what it is."""
    what, name, kind, of, owner = match.groups()
    if what == "Compound":
        return (name.startswith("fmt::") or "::detail::" in name or
                name.split("::")[-2:-1][0][:1].isupper())  # a part of a class
    if "::detail" in owner or kind == "friend":
        return True
    if kind != "function":
        return of != "namespace" and kind in ("variable", "typedef")
    function, arguments = name.split("(", 1)
    bare = function.split("<")[0]
    if bare.startswith("operator") or bare == "enum_names":  # which core/enum_names.h says
        return True
    if of == "namespace":
        return False
    return (arguments.startswith(")") or bare == re.sub(r"<.*", "", owner).split("::")[-1] or
            bare == "forward" or owner.startswith("fmt::") or
            " override" in arguments)


def main():
    root, listing, version, doxygen, out = (pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]),
                                            *sys.argv[3:5], pathlib.Path(sys.argv[5]))
    if doxygen == "":
        print("skipped: doxygen is not installed")
        return 77
    here = pathlib.Path(__file__).resolve().parent
    public = headers.public_headers(listing)
    texts = headers.closure(root, public)
    include, origins = out / "include/tessera", {}
    for name in public:
        path = include / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text, origins[str(path.resolve())] = prepare(texts[name])
        path.write_text(headers.INCLUDE.sub(r"\1<tessera/\2>", text), encoding="utf-8")
    settings = (here / "Doxyfile").read_text(encoding="utf-8") + f"""
PROJECT_NUMBER = {version}
INPUT = "{here / 'reference.md'}" {' '.join('"%s"' % (include / name) for name in public)}
USE_MDFILE_AS_MAINPAGE = "{here / 'reference.md'}"
OUTPUT_DIRECTORY = "{out}"
STRIP_FROM_PATH = "{out / 'include'}"
STRIP_FROM_INC_PATH = "{out / 'include'}"
"""
    done = subprocess.run([doxygen, "-"], input=settings, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    warnings = set()
    for line in done.stdout.splitlines():
        silent = NOT_DOCUMENTED.search(line)
        if not line.strip() or silent and may_be_silent(silent):
            continue
        if "Internal inconsistency: scope for class fmt::" in line:  # fmt is not of the reference
            continue
        at = re.match(r"(\S+?):(\d+): (.*)", line)
        origin = at and origins.get(str(pathlib.Path(at.group(1)).resolve()))
        if origin:
            header = pathlib.Path(at.group(1)).resolve().relative_to(include.resolve())
            line = "%s:%d: %s" % (header, origin[int(at.group(2)) - 1] + 1, at.group(3))
        warnings.add(line)
    for warning in sorted(warnings):
        print(warning)
    pages = len(list((out / "html").glob("*.html"))) if (out / "html").is_dir() else 0
    print("%d headers, %d pages, %d warnings" % (len(public), pages, len(warnings)))
    return 1 if warnings or done.returncode != 0 or pages < len(public) else 0


if __name__ == "__main__":
    sys.exit(main())
