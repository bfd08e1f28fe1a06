"""Every chat template of the installed package `trl` on conversations drawn at random: our text, and
what generation blocks mark, beside those of jinja2 in the environment of transformers; an error
exactly where jinja2 has one, with the text of raise_exception.
Usage: chat_templates.py PROGRAM [--count 200] [--seed 1] [--templates FOLDER]
PROGRAM is build/test/apps_text_render. Needs jinja2, and trl for its templates (read where they are).
"""

import argparse
import importlib.util
import json
import pathlib
import random
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"))
import huggingface_jinja  # noqa: E402

TEXTS = ["", " ", "Hi", "  two  words \n", "Gr\u00fc\u00dfe \U0001f600 \u03a3", "a\nb\n\nc", "<think>\nhm\n</think>\n\nyes",
         "<think>open", "no</think>yes", "<|im_end|>", "{{ x }}", "'q' \"r\" \\ &amp; <b>", "\u2028\u00a0\x01",
         '{"a": 1}', "[INST] x [/INST]", "\t", "<tool_call>", "json", "<|channel|>final"]
ROLES = ["user", "assistant"] * 6 + ["system", "tool", "developer", "function", "model", "ipython", "",
                                     "critic"]
NAMES = ["f", "get_weather", "a.b", "", "\u00e9"]
TYPES = ["string", "integer", "object", "array", "boolean", "number", ["string", "null"], None]


class Draw:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def chance(self, p):
        return self.random.random() < p

    def pick(self, items):
        return self.random.choice(items)

    def text(self):
        return self.pick(TEXTS) + (self.pick(TEXTS) if self.chance(0.3) else "")

    def value(self, depth=0):
        kind = self.random.randrange(9 if depth < 3 else 6)
        if kind == 0:
            return self.pick([0, 1, -3, 2**53 + 1, 12345678901])
        if kind == 1:
            return self.pick([0.5, 1e20, 1e-7, -2.0, 1.0])
        if kind < 6:
            return self.pick([self.text(), self.text(), True, False, None])
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(3))]
        return {self.pick(["x", "y", "name", "type", "items", self.text()]): self.value(depth + 1)
                for _ in range(self.random.randrange(4))}

    def schema(self, depth=0):
        schema = {"type": self.pick(TYPES)}
        if self.chance(0.5):
            schema["description"] = self.text()
        if self.chance(0.3):
            schema["enum"] = [self.text(), self.pick([1, None, "b"])]
        if self.chance(0.2):
            schema["default"] = self.value(2)
        if self.chance(0.2):
            schema["nullable"] = self.pick([True, False])
        if depth < 3 and self.chance(0.5):
            schema["properties"] = {self.pick(["a", "b", "c d", "type"]): self.schema(depth + 1)
                                    for _ in range(self.random.randrange(3))}
            schema["required"] = self.pick([[], ["a"], ["a", "b"]])
        if depth < 3 and self.chance(0.3):
            schema["items"] = self.schema(depth + 1)
        if depth < 2 and self.chance(0.1):
            schema["anyOf"] = [self.schema(depth + 1), self.schema(depth + 1)]
        return schema

    def tool(self):
        function = {"name": self.pick(NAMES), "description": self.text(),
                    "parameters": self.schema() | {"type": "object"}}
        if self.chance(0.1):
            del function[self.pick(list(function))]
        if self.chance(0.1):
            function["return"] = self.schema()
        return self.pick([{"type": "function", "function": function}] * 4 + [function])

    def tool_call(self):
        arguments = {self.pick(["x", "y z", "n"]): self.value(1)
                     for _ in range(self.random.randrange(3))}
        function = {"name": self.pick(NAMES),
                    "arguments": arguments if self.chance(0.8) else json.dumps(arguments)}
        call = self.pick([{"type": "function", "function": function}] * 3 + [function])
        if self.chance(0.5):
            call = dict(call, id=self.pick(["abc123456", "x", "", 5]))
        return call

    def part(self):
        return self.pick([{"type": "text", "text": self.text()}] * 4 + [
            {"type": "image"}, {"type": "image_url", "image_url": {"url": "u"}}, {"type": "video"},
            {"text": self.text()}, {"type": "audio"}, self.text(), {"type": "other"}])

    def content(self):
        kind = self.random.random()
        if kind < 0.75:
            return self.text()
        if kind < 0.95:
            return [self.part() for _ in range(self.random.randrange(3))]
        return self.value()

    def message(self, role):
        message = {"role": role, "content": self.content()}
        if role in ("assistant", "model"):
            if self.chance(0.3):
                message["tool_calls"] = [self.tool_call() for _ in range(self.random.randrange(3))]
            if self.chance(0.2):
                message[self.pick(["reasoning_content", "thinking", "reasoning"])] = self.text()
        if role == "tool":
            if self.chance(0.6):
                message["name"] = self.pick(NAMES)
            if self.chance(0.6):
                message["tool_call_id"] = self.pick(["abc123456", "x"])
        if self.chance(0.03):
            del message[self.pick(list(message))]
        if self.chance(0.02):
            message[self.pick(["prefix", "weight", "name"])] = self.value()
        return message

    def roles(self):
        count = self.random.randrange(1, 7)
        if self.chance(0.25):
            return [self.pick(ROLES) for _ in range(count)]
        roles = ["user", "assistant"] * 4
        roles = roles[:count]
        if self.chance(0.3):
            at = self.random.randrange(len(roles) + 1)
            roles[at:at] = ["assistant", "tool"] if self.chance(0.5) else ["tool"]
        return (["system"] if self.chance(0.4) else []) + roles

    def variables(self):
        variables = {
            "messages": [self.message(role) for role in self.roles()],
            "tools": [self.tool() for _ in range(self.random.randrange(1, 3))] if self.chance(0.4)
            else None,
            "documents": [{"title": self.text(), "text": self.text()}] if self.chance(0.1) else None,
            "add_generation_prompt": self.chance(0.4),
        }
        if self.chance(0.02):
            variables["messages"] = []
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            if self.chance(0.8):
                variables[name] = f"<{name[:3]}>"
        for name, values in [("enable_thinking", [True, False, None]), ("thinking", [True, False]),
                             ("reasoning_effort", ["high", "low", 3]), ("xml_tools", [True, False]),
                             ("date_string", ["1 Jan 2020"]), ("builtin_tools", [["python"], []]),
                             ("preserve_thinking", [True, False]), ("model_identity", ["I"]),
                             ("add_vision_id", [True, False]), ("custom_tools", [[self.tool()]]),
                             ("tools_in_user_message", [True, False])]:
            if self.chance(0.15):
                variables[name] = self.pick(values)
        return variables


ADDRESS = re.compile(r"<(generator|built-in method|function|bound method)[^>]*>")


def agree(ours, theirs):
    if "error" in ours or "error" in theirs:
        return "error" in ours and "error" in theirs and ours["raised"] == theirs["raised"]
    return (ADDRESS.sub("", ours["text"]) == ADDRESS.sub("", theirs["text"])
            and [tuple(s) for s in ours["spans"]] == [tuple(s) for s in theirs["spans"]])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--templates")
    args = parser.parse_args()
    folder = args.templates
    if folder is None:
        spec = importlib.util.find_spec("trl")
        if spec is None:
            sys.exit("chat_templates.py: expected the package trl, or --templates FOLDER")
        folder = pathlib.Path(spec.origin).parent / "chat_templates"
    paths = sorted(pathlib.Path(folder).glob("*.jinja"))
    process = subprocess.Popen([args.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True, encoding="utf-8")
    num_cases = num_errors = num_raised = num_spans = num_faults = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        for i in range(args.count):
            variables = Draw(f"{args.seed}/{i}").variables()
            process.stdin.write(json.dumps({"template": source, "variables": variables}) + "\n")
            process.stdin.flush()
            ours = json.loads(process.stdout.readline())
            theirs = huggingface_jinja.render(source, variables)
            num_cases += 1
            num_errors += "error" in theirs
            num_raised += theirs.get("raised") is not None
            num_spans += len(theirs.get("spans", []))
            if not agree(ours, theirs):
                num_faults += 1
                if num_faults <= 20:
                    print(f"{path.name}: conversation {i}\n  {json.dumps(variables)[:1500]}\n"
                          f"  ours   {json.dumps(ours)[:1500]}\n  theirs {json.dumps(theirs)[:1500]}")
    process.stdin.close()
    process.wait()
    print(f"{len(paths)} templates x {args.count} conversations: {num_cases} cases, {num_errors} errors "
          f"of jinja2 ({num_raised} by raise_exception), {num_spans} generation spans, "
          f"{num_faults} differ")
    sys.exit(1 if num_faults or not num_cases else 0)


if __name__ == "__main__":
    main()
