#!/usr/bin/env bash
# From a fresh clone to a model that answers: installs what is missing, builds, and makes of the King
# James Bible, on two ranks, a tokenizer of its own, a model that has read it (configs/chat/pretrain.toml)
# and of that one a model that was asked for verses ("What does Genesis 1:1 say?",
# configs/chat/tune.toml). Then some of these questions, drawn by a seed, are asked through tessera-chat
# and have to be answered word for word; the last line is "answered 3 of 3".
#   bash apps/chat.sh [--seed=1] [--ask=3]
# A second time it goes on where it was, and asks only where all is made. To talk to the model:
#   build/apps/tessera-chat --checkpoint out/chat/tuned
# For tests: --programs=DIR has the programs, nothing is set up; --verses=FILE is what `bible -f` printed;
# --out=DIR, --chats=N, --pretrain=OPTION, --tune=OPTION (of the trainer, several times).
set -euo pipefail
cd "$(dirname "$0")/.."
source apps/mpirun.sh

seed=1 ask=3 chats=300 out=out/chat programs="" verses="" pretrain=() tune=()
for option in "$@"; do
  value=${option#*=}
  case $option in
    --seed=*) seed=$value ;;
    --ask=*) ask=$value ;;
    --chats=*) chats=$value ;;
    --out=*) out=$value ;;
    --programs=*) programs=$value ;;
    --verses=*) verses=$value ;;
    --pretrain=*) pretrain+=("$value") ;;
    --tune=*) tune+=("$value") ;;
    *)
      echo "chat: $option, expected --seed=N or --ask=N" >&2
      exit 2
      ;;
  esac
done

if [ -z "$programs" ]; then
  bash apps/setup.sh
  programs=build/apps
  ninja -C build apps/tessera-{train,tokenize,checkpoint,chat}
fi
mkdir -p "$out"
if [ -z "$verses" ]; then
  bible=$(command -v bible || echo /usr/games/bible)
  if [ ! -x "$bible" ]; then
    echo "chat: the package bible-kjv is not to be had, which has the text" >&2
    exit 1
  fi
  verses=$out/verses.txt
  COLUMNS=100000 "$bible" -f 'gen1:1-rev22:21' </dev/null >"$verses"
fi
python3 apps/verses.py write "$verses" "$out" --chats="$chats"

if [ ! -s "$out/tokenizer/tokenizer.json" ]; then
  echo "chat: a tokenizer in $out/tokenizer"
  "$programs/tessera-tokenize" train "$out/text.txt" --out="$out/tokenizer" --vocab=4096 \
    --special='<|end|>' --special='<|system|>' --special='<|user|>' --special='<|assistant|>'
fi
echo "chat: a model that reads the text, in $out/read"
run_mpi 2 "$programs/tessera-train" configs/chat/pretrain.toml --data.text="$out/text.txt" \
  --data.tokenizer="$out/tokenizer" --output.dir="$out/read" --resume=auto "${pretrain[@]}"
if [ ! -s "$out/base/tessera_export.json" ]; then
  "$programs/tessera-checkpoint" export "$out/read" "$out/base"
fi
echo "chat: a model that answers, in $out/tuned"
run_mpi 2 "$programs/tessera-train" configs/chat/tune.toml --model.from="$out/base" \
  --data.chat="$out/chats.jsonl" --data.chat_template=configs/chat/template.jinja \
  --output.dir="$out/tuned" --resume=auto "${tune[@]}"

# Each question begins a conversation.
python3 apps/verses.py draw "$out" --seed="$seed" --count="$ask"
sed 's|$|\n/reset|' "$out/questions.txt" |
  "$programs/tessera-chat" --checkpoint "$out/tuned" --temperature 0 >"$out/said.txt"
mapfile -t questions <"$out/questions.txt"
mapfile -t answers <"$out/answers.txt"
mapfile -t said <"$out/said.txt"
right=0
for i in "${!questions[@]}"; do
  echo "> ${questions[i]}"
  echo "${said[i]-}"
  if [ "${said[i]-}" = "${answers[i]}" ]; then
    right=$((right + 1))
  else
    echo "  expected: ${answers[i]}"
  fi
done
[ ${#said[@]} = ${#questions[@]} ] || right=0
echo "answered $right of ${#questions[@]}"
[ "$right" = ${#questions[@]} ]
