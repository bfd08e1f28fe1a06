#!/usr/bin/env bash
# A conversation with a model: what tessera-chat is asked, and how it ends.
# Usage: chat.sh TRAIN GENERATE CHAT
set -uo pipefail
train=$1 generate=$2 chat=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failures=0
fail() {
  echo "$1"
  failures=$((failures + 1))
}

# A model that has learned two answers by heart, which end with the token of the template.
python3 - "$dir" <<'PY'
import json, sys
pairs = [("one?", "the first"), ("two?", "a second one")]
with open(sys.argv[1] + "/chats.jsonl", "w") as file:
    for _ in range(40):
        for question, answer in pairs:
            file.write(json.dumps({"prompt": question, "completion": answer}) + "\n")
open(sys.argv[1] + "/template.jinja", "w").write(
    "{% for m in messages %}{% if m.role == 'user' %}Q{{ m.content }}\n"
    "{% elif m.role == 'system' %}S{{ m.content }}\n"
    "{% else %}A{% generation %}{{ m.content }}\x00{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}")
PY
"$train" --device=cpu --data.chat="$dir/chats.jsonl" --data.chat_template="$dir/template.jinja" \
  --data.tokenizer=byte --model.layers=1 --model.heads=2 --model.width=32 --model.context=64 \
  --train.micro_batch=8 --train.steps=150 --optim.lr=1e-2 --optim.warmup_steps=5 \
  --output.dir="$dir/out" --model.eos_ids=0 >"$dir/log" 2>&1 || fail "train: $(tail -3 "$dir/log")"

ask() { "$chat" --checkpoint "$dir/out" --temperature 0 --device cpu "$@" 2>"$dir/err"; }
said=$(printf 'one?\n/reset\ntwo?\n' | ask)
[ "$said" = $'the first\na second one' ] || fail "two questions: $said ($(cat "$dir/err"))"
said=$(printf 'one?\r\n\n/quit\ntwo?\n' | ask)
[ "$said" = "the first" ] || fail "/quit: $said"
said=$(printf 'one?\n' | ask --stop fir)
[ "$said" = "the " ] || fail "--stop: $said"
# What might have been the beginning of a stop string is said when the answer is over.
said=$(printf 'one?\n' | ask --stop firstborn)
[ "$said" = "the first" ] || fail "--stop that does not come: $said"
# The same question again has another answer, each time, and the same ones in another session.
again=$(for _ in 1 2 3; do printf 'one?\n/reset\n'; done |
  "$chat" --checkpoint "$dir/out" --temperature 3 --tokens 8 --device cpu 2>"$dir/err" | sort -u | wc -l)
[ "$again" = 3 ] || fail "three answers: $again of them differ"
said=$(printf '/nothing\n/help\n' | ask)
[[ $said == "/reset "* ]] || fail "/help: $said"
grep -q "/nothing: no such command, expected /reset" "$dir/err" || fail "/nothing: $(cat "$dir/err")"
# More turns than the context holds: the oldest are forgotten, the answers go on.
said=$(for _ in 1 2 3 4 5 6 7 8; do echo 'one?'; done | ask --tokens 12 | wc -l)
[ "$said" = 8 ] || fail "eight questions: $said answers ($(cat "$dir/err"))"
printf '%070d\n' 1 | ask --tokens 8 >/dev/null
status=$?
[ "$status" = 3 ] || fail "a long question: status $status"
grep -q "^error: the question has 73 tokens in the template, expected at most 56: a context of 64" \
  "$dir/err" || fail "a long question: $(cat "$dir/err")"

# The same question of generate, which ends at the same token; without it, it goes on.
said=$("$generate" --checkpoint "$dir/out" --chat --prompt 'two?' --temperature 0 2>/dev/null)
[ "$said" = "a second one" ] || fail "generate --chat: $said"
said=$("$generate" --checkpoint "$dir/out" --prompt $'Qtwo?\nA' --temperature 0 2>/dev/null)
[ "$said" = $'Qtwo?\nAa second one' ] || fail "generate ends: $said"
said=$("$generate" --checkpoint "$dir/out" --prompt $'Qtwo?\nA' --temperature 0 --tokens 20 \
  --ignore-end 2>/dev/null | wc -c)
[ "$said" = 28 ] || fail "--ignore-end: $said bytes"
printf 'Qone?\nQtwo?\n' >"$dir/prompts"
for batch in 1 2; do
  said=$("$generate" --checkpoint "$dir/out" --prompts "$dir/prompts" --batch $batch \
    --temperature 0.5 --seed 3 --tokens 30 2>/dev/null)
  [ "$batch" = 1 ] && first=$said
  [ "$said" = "$first" ] && [ "$(wc -l <<<"$said")" = 2 ] || fail "--prompts, batch $batch: $said"
done
[[ $first == '{"prompt":"Qone?","text":"'* ]] || fail "--prompts: $first"
printf 'a\n\nb\n' >"$dir/prompts"
"$generate" --checkpoint "$dir/out" --prompts "$dir/prompts" 2>"$dir/err"
[ $? = 3 ] && grep -q "prompts: line 2: empty, expected a prompt a line" "$dir/err" ||
  fail "an empty prompt: $(cat "$dir/err")"

# Ctrl-C ends the answer, then the program. An answer may be over before the signal comes, which
# then ends the program at its prompt: another try.
python3 - "$chat" "$dir/out" <<'PY' || failures=$((failures + 1))
import os, pty, signal, sys, time


def start():
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(sys.argv[1], [sys.argv[1], "--checkpoint", sys.argv[2], "--ignore-end", "--tokens", "50",
                               "--temperature", "0", "--device", "cpu", "--threads", "1"])
    return pid, fd


def read_until(fd, what):
    """Byte by byte, so that nothing behind it is taken; False if the program has ended."""
    seen = b""
    while not seen.endswith(what):
        try:
            byte = os.read(fd, 1)
        except OSError:
            byte = b""
        if not byte:
            return False
        seen += byte
    return True


def ends(pid):
    for _ in range(400):
        done, _ = os.waitpid(pid, os.WNOHANG)
        if done:
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


for _ in range(50):
    pid, fd = start()
    if not read_until(fd, b"> "):
        sys.exit("ended before its prompt")
    os.write(fd, b"one?\n")
    if not read_until(fd, b"the"):
        sys.exit("ended before its answer")
    os.kill(pid, signal.SIGINT)
    if read_until(fd, b"> "):
        os.kill(pid, signal.SIGINT)
        sys.exit(None if ends(pid) else "Ctrl-C at the prompt did not end it")
    if not ends(pid):
        sys.exit("it closed the terminal and did not end")
sys.exit("no Ctrl-C of 50 left the program at its prompt")
PY
echo "$failures failures"
[ "$failures" = 0 ]
