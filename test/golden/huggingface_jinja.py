"""The environment in which transformers renders chat templates, from jinja2 alone: what the tag
`generation` marks, tojson without escapes, and a clock that stands still. Used by scripts that make
or check figures; nothing here is needed by a build.
"""

import datetime
import json

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

NOW = datetime.datetime(2026, 3, 4, 5, 6, 7, 890)


class Generation(jinja2.ext.Extension):
    """Collects where the text of generation blocks lies, in characters."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, caller):
        text = caller()
        begin = sum(map(len, self.environment.parts))
        self.environment.spans.append((begin, begin + len(text)))
        return text


class Namespace(jinja2.utils.Namespace):
    """Without attributes that begin with an underscore."""

    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(name)


class Raised(jinja2.exceptions.TemplateError):
    """raise_exception of a template."""


def environment():
    def raise_exception(message):
        raise Raised(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    class MakeDict:
        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args, **kwargs):
            return dict.fromkeys(*args, **kwargs)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.parts, made.spans = [], []
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = NOW.strftime
    made.globals["dict"] = MakeDict()
    made.globals["namespace"] = Namespace
    return made


_templates = {}


def render(source, variables):
    """{"text", "spans" in bytes} or {"error", "raised": the text of raise_exception or None}."""
    try:
        if source not in _templates:
            _templates[source] = environment().from_string(source)
        template = _templates[source]
        parts, spans = template.environment.parts, template.environment.spans
        parts.clear()
        spans.clear()
        for part in template.generate(**variables):
            parts.append(part)
        text = "".join(parts)
        text.encode()
    except Raised as error:
        return {"error": "raised", "raised": str(error)}
    except Exception as error:  # whatever Python raises
        return {"error": f"{type(error).__name__}: {error}", "raised": None}
    to_byte = [0]
    for c in text:
        to_byte.append(to_byte[-1] + len(c.encode()))
    return {"text": text, "spans": [[to_byte[a], to_byte[b]] for a, b in spans if a < b]}
