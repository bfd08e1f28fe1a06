#!/usr/bin/env bash
# The executables as a user meets them: what goes wrong gives one line that names it and the right
# exit status, on one rank and on two. Usage: exit_status.sh TRAIN GENERATE ROOT [MPIRUN]
set -uo pipefail
train=$1 generate=$2 root=$3 mpirun=${4:-}
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failures=0

expect() {  # status, text, command ...
  local status=$1 text=$2 actual
  shift 2
  output=$("${launch[@]}" "$@" 2>&1)
  actual=$?
  if [ "$actual" != "$status" ]; then
    echo "exit status $actual instead of $status: ${launch[*]} $*"
    echo "$output" | tail -5
    failures=$((failures + 1))
  fi
  if [ "$(grep -cF -- "$text" <<<"$output")" != 1 ]; then
    echo "expected exactly one line with '$text': ${launch[*]} $*"
    echo "$output" | tail -5
    failures=$((failures + 1))
  fi
}

for i in $(seq 200); do echo "line $i of a text"; done >"$dir/text"
mkfifo "$dir/fifo"
printf '[model]\nlayer = 3\n' >"$dir/bad.toml"
head -c 1500 /dev/zero >"$dir/zeros.bin"
config=$root/configs/llama_tiny.toml
common=(--device=cpu --output.dir="$dir/out" --output.overwrite --train.steps=2 --train.micro_batch=2)

launches=("")
[ -n "$mpirun" ] && launches+=("$mpirun --oversubscribe --bind-to none -n 2")
for words in "${launches[@]}"; do
  read -r -a launch <<<"$words"
  expect 2 "unknown key model.layer, expected a known one (nearest: model.layers)" \
    "$train" "$dir/bad.toml" --data.text="$dir/text"
  expect 2 "No such file or directory, expected a file" "$train" "$dir/none.toml"
  expect 2 "fifo: a FIFO, expected a regular file" "$train" "$dir/fifo" --data.text="$dir/text"
  expect 3 "fifo: a FIFO, expected a regular file" \
    "$train" "$config" "${common[@]}" --data.text="$dir/fifo"
  expect 2 "train.steps = 0, expected an integer >= 1" "$train" "$config" --train.steps=0
  expect 2 "model.width = 100, expected a multiple of heads = 3" \
    "$train" "$config" --data.text="$dir/text" --model.width=100 --model.heads=3
  expect 2 "no data given" "$train" "$config"
  expect 3 "No such file or directory, expected a file" \
    "$train" "$config" "${common[@]}" --data.text="$dir/none"
  expect 3 "magic 0, expected 20240520" \
    "$train" "$config" "${common[@]}" --data.tokens="$dir/zeros.bin" --model.vocab=100
  expect 3 "expected at least one shard of model.context + 1 = 100001" \
    "$train" "$config" "${common[@]}" --data.text="$dir/text" --model.context=100000
  expect 2 "expected a directory that can be" \
    "$train" "$config" "${common[@]}" --data.text="$dir/text" --output.dir="$dir/text"
  expect 0 "step 2/2" "$train" "$config" "${common[@]}" --data.text="$dir/text"
  # Without a driver: cuda is one clear error, auto says why it takes the CPU.
  if [ ! -e /proc/driver/nvidia ] && [ ! -e /dev/dxg ]; then
    no_cuda='device: "cuda" is not available: '
    expect 2 "$no_cuda" "$train" "$config" "${common[@]}" --data.text="$dir/text" --device=cuda
    expect 2 "$no_cuda" "$generate" --checkpoint "$dir/none" --device cuda
    auto_says="step 2/2"  # a build without CUDA has nothing to say
    said=$("$train" "$config" "${common[@]}" --data.text="$dir/text" --device=cuda 2>&1)
    grep -q "this build has no CUDA" <<<"$said" || auto_says="device: cpu, since "
    expect 0 "$auto_says" "$train" "$config" "${common[@]}" --data.text="$dir/text" --device=auto
  fi
  # What is given and does nothing, and what is not said elsewhere, is said once.
  expect 0 "keys without effect: optim.momentum = 0.5 (needs optim.name = sgd); fsdp.wrap_every = 3" \
    "$train" "$config" "${common[@]}" --data.text="$dir/text" --optim.momentum=0.5 \
    --fsdp.wrap_every=3 --optim.warmup_steps=0
  expect 0 "validation: the last 5 % of the data" \
    "$train" "$config" "${common[@]}" --data.text="$dir/text"
  expect 0 "defaults: optim.final_lr = 1e-06 (a tenth of optim.lr)" \
    "$train" "${common[@]}" --data.text="$dir/text" --model.width=16 --optim.lr=1e-5
  # On from there: a changed schedule is said, a forgotten setting and another model are refused.
  resume=(--device=cpu --output.dir="$dir/out" --train.micro_batch=2 --data.text="$dir/text"
    --model.width=16 --resume=auto)
  expect 0 "resume: optim.lr 1e-05 there, 0.0001 here" \
    "$train" "${resume[@]}" --train.steps=3 --optim.lr=1e-4
  expect 2 "optim.lr 0.0001 there, 0.001 here (the default, since it is not given)" \
    "$train" "${resume[@]}" --train.steps=4
  expect 2 "model.rope_theta 10000.0 there, 500.0 here; expected the same, or --resume.override" \
    "$train" "${resume[@]}" --train.steps=4 --optim.lr=1e-4 --model.rope_theta=500
  expect 0 "resume, overridden: model.rope_theta 10000.0 there, 500.0 here" \
    "$train" "${resume[@]}" --train.steps=4 --optim.lr=1e-4 --model.rope_theta=500 --resume.override
  expect 2 "fsdp.reshard_after_forward: 64, expected true, false or a divisor" \
    "$train" "$config" "${common[@]}" --data.text="$dir/text" --fsdp.reshard_after_forward=64
  expect 2 "--resume without a value, expected auto, none or the path of a checkpoint" \
    "$train" "$config" "${common[@]}" --data.text="$dir/text" --resume --train.seed=2
  expect 0 "line" "$generate" --checkpoint "$dir/out" --prompt line --tokens 0
  expect 2 "--temperature: nan is not a number" \
    "$generate" --checkpoint "$dir/out" --temperature nan
  expect 2 "--checkpoint is required" "$generate"
  expect 4 "none: no complete checkpoint, and no model.safetensors" "$generate" --checkpoint "$dir/none"
  expect 0 "tessera-train [CONFIG.toml] [--section.key=value ...]" "$train" --help
  expect 0 "--optim.lr " "$train" --help optim
  expect 2 "--help learning_rate, expected a section (" "$train" --help learning_rate
done

launch=()
# What a model says does not act on a terminal; a file gets it as it is.
say=("$generate" --checkpoint "$dir/out" --prompt $'a\e[2Jb' --tokens 0)
"${say[@]}" 2>/dev/null >"$dir/said"
grep -q $'^a\e\[2Jb' "$dir/said" || { echo "a file gets other text"; failures=$((failures + 1)); }
said=$(python3 -c 'import pty, sys; pty.spawn(sys.argv[1:])' "${say[@]}" 2>&1 | cat -v)
[[ $said == *'a\x1b[2Jb'* && $said != *'^[[2J'* ]] ||
  { echo "on a terminal: $said"; failures=$((failures + 1)); }
# Names as deep as no stack, in the configuration that is stored with a model.
cp -r "$dir/out" "$dir/deep"
rm -r "$dir"/deep/step-*
(printf 'a'; printf '.a%.0s' $(seq 100000); echo ' = 1') >"$dir/deep/config.toml"
expect 2 "deep/config.toml:1: a key of more than 9 names, expected section.key" \
  "$generate" --checkpoint "$dir/deep" --prompt line --tokens 0
expect 2 "deep/config.toml:1: a key of more than 9 names, expected section.key" \
  "$train" "$dir/deep/config.toml" --data.text="$dir/text"

# A text that is cut while a run reads it: when the run has begun, its next samples are gone.
seq 20000 >"$dir/long"
mkdir "$dir/cut"
"$train" "$config" --device=cpu --data.text="$dir/long" --output.dir="$dir/cut" \
  --train.steps=1000000000 --train.micro_batch=2 --train.log_every=1 >"$dir/log" 2>&1 &
pid=$!
while ! grep -q "^step  *2/" "$dir/log" && kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
truncate -s 4096 "$dir/long"
wait "$pid"
actual=$?
if [ "$actual" != 3 ] || ! grep -q "^error: .*long: cut to 4096 bytes while it was read" "$dir/log" ||
  ! grep -q '"failed".*cut to 4096 bytes' "$dir/cut/status.json"; then
  echo "a text that is cut: exit status $actual, $(cat "$dir/cut/status.json")"
  tail -3 "$dir/log"
  failures=$((failures + 1))
fi
if [ -e /dev/full ]; then
  full() { "$@" >/dev/full; }
  expect 7 "standard output: cannot be written: No space left on device" \
    full "$generate" --checkpoint "$dir/out" --prompt line --tokens 1
fi

# Every configuration that we ship is accepted and trains.
for i in {1..40}; do
  echo "{\"prompt\": \"q$i\", \"completion\": \"a$i\"}" >>"$dir/chats.jsonl"
  echo "{\"prompt\": \"q$i\", \"chosen\": \"a$i\", \"rejected\": \"b\"}" >>"$dir/pairs.jsonl"
done
echo '{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ "assistant: " if add_generation_prompt }}' \
  >"$dir/chat.jinja"
for file in "$root"/configs/*.toml; do
  case $file in
    */sft.toml | */dpo.toml)  # an epoch of conversations, or of pairs
      data=(--data.chat="$dir/chats.jsonl" --train.global_batch_tokens=256)
      [[ $file = */dpo.toml ]] && data=(--data.preference="$dir/pairs.jsonl" --train.global_batch=4)
      expect 0 "out/model.safetensors" "$train" "$file" "${data[@]}" --data.chat_template="$dir/chat.jinja" \
        --device=cpu --output.dir="$dir/out" --output.overwrite --data.val_fraction=0.2 --model.layers=1 \
        --model.width=24 --model.context=64
      continue
      ;;
  esac
  data=(--data.text="$dir/text")
  small=(--model.layers=1 --model.width=24 --model.context=16 --train.global_batch=0)
  grep -q '^vocab' "$file" && small+=(--model.vocab=300)
  expect 0 "step 2/2" "$train" "$file" "${data[@]}" "${common[@]}" "${small[@]}" \
    --train.eval_every=0 --optim.warmup_steps=1 --sample.tokens=3
  if grep "without effect" <<<"$output"; then
    echo "$file: keys that do nothing"
    failures=$((failures + 1))
  fi
  head -2 "$file" | grep -vq '^# ' && { echo "$file: no two lines of comment"; failures=$((failures + 1)); }
done
# The presets of FSDP on two ranks, with sizes that a test has time for.
if [ -n "$mpirun" ]; then
  read -r -a launch <<<"$mpirun --oversubscribe --bind-to none -n 2"
  for file in "$root"/configs/fsdp_*.toml; do
    expect 0 "step 4/4" "$train" "$file" --device=cpu --data.text="$dir/text" \
      --output.dir="$dir/out" --output.overwrite --train.steps=4 --train.micro_batch=2 --train.eval_every=0 \
      --optim.warmup_steps=1 --model.layers=4 --model.width=48 --model.context=16 \
      --debug.poison=true --debug.order_check=true
  done
fi
echo "$failures failures"
[ "$failures" = 0 ]
