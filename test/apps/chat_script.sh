#!/usr/bin/env bash
# apps/chat.sh at a small size: all of its parts, what it says of right and wrong answers, a second start.
# Usage: chat_script.sh ROOT PROGRAMS
set -uo pipefail
root=$1 programs=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export MPIRUN_FLAGS=--oversubscribe
failures=0
fail() {
  echo "$1"
  failures=$((failures + 1))
}

python3 - >"$dir/verses" <<'PY'
import random
draw = random.Random(3)
words = "lord god land king son light day water hand house people earth word heart name sea".split()
for chapter in range(1, 9):
    for verse in range(1, 8):
        print(f"Ge{chapter}:{verse} And the {' '.join(draw.choices(words, k=draw.randrange(3, 9)))}.")
print("1Jn5:1 \"The words are short, and \\ stands twice in them: \\.\"")
PY
run() {  # status, output; the arguments go to the script
  output=$(bash "$root/apps/chat.sh" --programs="$programs" --verses="$dir/verses" --chats=6 \
    --pretrain=--device=cpu --pretrain=--model.layers=1 --pretrain=--model.heads=2 \
    --pretrain=--model.width=64 --pretrain=--train.epochs=0 --pretrain=--train.steps=10 \
    --pretrain=--train.micro_batch=1 --tune=--device=cpu --tune=--train.micro_batch=2 --tune=--train.epochs=0 \
    --tune=--optim.lr=5e-3 "$@" 2>"$dir/err")
  status=$?
}
last() { tail -1 <<<"$output"; }

run --out="$dir/out" --tune=--train.steps=120
[ $status = 0 ] && [ "$(last)" = "answered 3 of 3" ] ||
  fail "first start: status $status: $(tail -9 <<<"$output") $(tail -3 "$dir/err")"
[ "$(grep -c '^> What does Genesis [0-9]:[0-9] say?$' <<<"$output")" = 3 ] || fail "questions: $(tail -7 <<<"$output")"
# Other questions of what is there: no step is trained.
run --out="$dir/out" --tune=--train.steps=120 --seed=2 --ask=6
[ $status = 0 ] && [ "$(last)" = "answered 6 of 6" ] ||
  fail "second start: status $status: $(tail -13 <<<"$output") $(tail -3 "$dir/err")"
grep -q "^step  *[0-9]" <<<"$output" && fail "the second start trains: $(grep "^step  *[0-9]" <<<"$output")"
[ "$(sort "$dir/out/answers.txt" | uniq | wc -l)" = 6 ] || fail "six questions are not six verses"
# A model that has not learned them is found out.
mkdir "$dir/new"
cp -r "$dir/out/tokenizer" "$dir/out/read" "$dir/out/base" "$dir/new"
run --out="$dir/new" --tune=--train.steps=1
[ $status = 1 ] && [ "$(last)" = "answered 0 of 3" ] && [ "$(grep -c '^  expected: And the ' <<<"$output")" = 3 ] ||
  fail "a model that has not learned: status $status: $(tail -10 <<<"$output") $(tail -3 "$dir/err")"

run --out="$dir/out" --nothing
[ $status = 2 ] && grep -q "^chat: --nothing, expected --seed=N or --ask=N" "$dir/err" ||
  fail "--nothing: status $status: $(cat "$dir/err")"
run --out="$dir/out" --ask=7 --tune=--train.steps=120
[ $status = 1 ] && grep -q "^verses: --count 7, expected at most the 6 verses" "$dir/err" ||
  fail "--ask=7: status $status: $(tail -3 "$dir/err")"
run --out="$dir/out" --chats=60
[ $status = 1 ] && grep -q "^verses: --chats 60, expected at most 5[0-9]: as many verses" "$dir/err" ||
  fail "--chats=60: status $status: $(cat "$dir/err")"
echo "Genesis 1:1 no" >>"$dir/verses"
run --out="$dir/out"
[ $status = 1 ] && grep -q "^verses: $dir/verses:58: 'Genesis 1:1 no', expected a verse such as" "$dir/err" ||
  fail "no verse: status $status: $(cat "$dir/err")"
echo "$failures failures"
[ "$failures" = 0 ]
