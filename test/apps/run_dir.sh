#!/usr/bin/env bash
# run_dir.sh TRAIN GENERATE CHECKPOINT: a run in a directory that is in use, was left by kill -9, or
# whose disk is full. Nothing that was there is lost, and every program says what it finds.
set -uo pipefail
train=$1 generate=$2 checkpoint=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failures=0
declare -A parts
seq 3000 >"$dir/text"
common=(--device=cpu --data.text="$dir/text" --train.micro_batch=2 --train.threads=1 --model.layers=1
  --model.heads=1 --model.width=8 --model.context=8 --train.log_every=100000 --train.eval_batches=1
  --checkpoint.keep=1 --optim.schedule=constant --optim.warmup_steps=0)

# expect STATUS TEXT COMMAND...: ends so, with the text in exactly one line.
expect() {
  local status=$1 text=$2 output actual
  shift 2
  output=$("$@" 2>&1)
  actual=$?
  if [ "$actual" != "$status" ] || [ "$(grep -cE -- "$text" <<<"$output")" != 1 ]; then
    echo "FAILED exit status $actual, expected $status and one line '$text': $*"
    echo "$output" | tail -5
    failures=$((failures + 1))
  fi
}
check() {  # WHAT COMMAND...
  local what=$1
  shift
  "$@" || { echo "FAILED $what"; failures=$((failures + 1)); }
}
json() {  # every line of FILE is whole
  ! grep -qvE '^\{.*\}$' "$1" && [ "$(tail -c 1 "$1" | od -An -c | tr -d ' ')" = '\n' ]
}

limited() {  # COMMAND...: its files may be no longer than 32 KiB
  (ulimit -f 32 && "$@")
}

# A run that goes on until it is killed, in small steps that leave time for others; beside it, nobody
# gets into its directory.
in_use() {
  out=$dir/out
  "$train" "${common[@]}" --output.dir="$out" --train.steps=100000000 --checkpoint.every=20 \
    --debug.slow_ms=5 >"$dir/log" 2>&1 &
  run=$!
  for _ in $(seq 600); do
    [ -f "$out/step-00000020/manifest.json" ] && break
    sleep 0.1
  done
  for resume in none auto "$out/step-00000020"; do
    expect 2 "output.dir = $out is in use by process $run on " \
      "$train" "${common[@]}" --output.dir="$out" --train.steps=2 --resume="$resume"
  done
  expect 2 "checkpoint.dir = $out is in use by process $run on " \
    "$train" "${common[@]}" --output.dir="$dir/other" --checkpoint.dir="$out" --train.steps=2
  expect 2 "$out: the directory of a run that is at step [0-9]+ \(process $run on " \
    "$checkpoint" export "$out" "$out"
  expect 0 "$out: the run is at step [0-9]+ \(process $run on " "$checkpoint" inspect "$out"
  check "status.json has the process" grep -q "\"pid\":$run}" "$out/status.json"
  check "status.json has a step" grep -qE '"state":"running","step":[1-9]' "$out/status.json"
  check "status.json has the loss" grep -qE '"loss":[0-9]' "$out/status.json"
  kill -KILL "$run"
  wait "$run" 2>/dev/null
  died="died at step [0-9]+ \(process $run on "
  expect 0 "the run $died" "$checkpoint" inspect "$out"
  expect 0 "parameters of step [0-9]+ of $out/step-.*, of a run that $died" \
    "$generate" --checkpoint "$out" --prompt 1 --tokens 0
  expect 2 "output.dir = $out has a run that $died" \
    "$train" "${common[@]}" --output.dir="$out" --train.steps=2
  step=$(sed -n 's/.*"step":\([0-9]*\).*/\1/p' "$out/status.json")
  expect 0 "resumed from $out/step-" \
    "$train" "${common[@]}" --output.dir="$out" --train.steps=$((step + 300)) --resume=auto
  check "the metrics are whole" json "$out/metrics.jsonl"
  check "every step is there once" \
    [ "$(wc -l <"$out/metrics.jsonl")" = $((step + 300)) ]
}

# A status that cannot be written any more is an error, though the checkpoint is there.
no_status() {
  out=$dir/status
  "$train" "${common[@]}" --output.dir="$out" --train.steps=100000000 --debug.slow_ms=5 \
    >"$dir/status.log" 2>&1 &
  run=$!
  for _ in $(seq 600); do
    [ -s "$out/metrics.jsonl" ] && break
    sleep 0.1
  done
  while ! mkdir "$out/status.json.tmp" 2>/dev/null; do sleep 0.01; done  # between two writes
  kill -USR1 "$run"
  wait "$run"
  check "status 7" [ $? = 7 ]
  check "it is named" grep -q "error: .*$out/status.json: cannot be written: Is a directory" \
    "$dir/status.log"
  expect 0 "$out: the run died at step " "$checkpoint" verify "$out"
}

# With a limit of file sizes the metrics of some hundred steps do not fit, the states do.
small_files() {
  expect 0 "model: $dir/whole/model.safetensors" "$train" "${common[@]}" --output.dir="$dir/whole" --train.steps=300 \
    --data.tokenizer=char
  out=$dir/limited
  options=(--output.dir="$out" --train.steps=300 --data.tokenizer=char)
  expect 7 "error: .*$out/metrics.jsonl: cannot be written: File too large" \
    limited "$train" "${common[@]}" "${options[@]}"
  check "it failed" grep -q '"state":"failed".*File too large' "$out/status.json"
  check "the metrics are whole" json "$out/metrics.jsonl"
  check "the state was saved" test -n "$(find "$out" -name manifest.json)"
  expect 0 "model: $out/model.safetensors" "$train" "${common[@]}" "${options[@]}" --resume=auto
  check "on to the same model" cmp -s "$out/model.safetensors" "$dir/whole/model.safetensors"
}

# The model does not fit; a checkpoint would not either, and only warns.
large_model() {
  out=$dir/large
  expect 7 "error: .*$out/model.safetensors: cannot be written: File too large" \
    limited "$train" "${common[@]}" --output.dir="$out" --train.steps=3 --model.width=64
  check "it failed" grep -q '"state":"failed".*model.safetensors' "$out/status.json"
  check "no half of a model" test -z "$(find "$out" -name 'model.safetensors*')"
}

# A disk of its own that fills up, where mounts are allowed.
full_disk() {
  if unshare -rm true 2>/dev/null; then
    out=$dir/disk
    mkdir "$out"
    full() {
      unshare -rm bash -c 'mount -t tmpfs -o size=100k tmpfs "$1" && shift && "$@"; s=$?
        cp -r "$0" "$0.copy"; exit "$s"' "$out" "$out" "$@"
    }
    expect 7 "error: .*$out/(metrics.jsonl|model.safetensors): cannot be written: No space left" \
      full "$train" "${common[@]}" --output.dir="$out" --train.steps=500 --data.tokenizer=char
    check "the metrics are whole" json "$out.copy/metrics.jsonl"
    check "it failed" grep -q '"state":"failed".*No space left' "$out.copy/status.json"
    check "and says nothing else" [ "$(wc -l <"$out.copy/status.json")" = 1 ]
    # It dies when there is room for nothing any more.
    rm -r "$out.copy"
    unshare -rm bash -c 'mount -t tmpfs -o size=1m tmpfs "$1" && out=$1 && shift
      ulimit -c 0
      "$@" --output.dir="$out" --train.steps=100000000 --debug.slow_ms=5 >"$0.log" 2>&1 &
      for _ in $(seq 600); do
        [ -s "$out/metrics.jsonl" ] && break
        sleep 0.1
      done
      kill -STOP $! && head -c 2m /dev/zero >"$out/filler"
      kill -SEGV $! && kill -CONT $!
      wait $!
      rm "$out/filler" && cp -r "$out" "$0.copy"' "$out" "$out" "$train" "${common[@]}" 2>/dev/null
    check "it failed by SIGSEGV" grep -qE '^\{"state":"failed",.*SIGSEGV.*\}$' "$out.copy/status.json"
    check "and says nothing else then" [ "$(wc -l <"$out.copy/status.json")" = 1 ]
  else
    echo "skipped: full disk (no mounts of one's own here)"
  fi
}

# None of them has to wait for another.
for part in in_use no_status small_files large_model full_disk; do
  (
    "$part"
    exit "$failures"
  ) >"$dir/$part.said" 2>&1 &
  parts[$!]=$part
done
failures=0
for pid in "${!parts[@]}"; do
  wait "$pid" || failures=$((failures + $?))
  cat "$dir/${parts[$pid]}.said"
done
echo "$failures failures"
[ "$failures" = 0 ]
