#!/bin/bash
# faults.sh MPIRUN_SCRIPT TESSERA_TRAIN [NUM_KILLS]: trainings that are preempted, ended or killed
# from outside, and whose disk is full. Whatever happens, --resume=auto goes on to the bits of the
# run that nothing happened to. NUM_KILLS: how often a random rank is killed at a random moment.
set -u
mpirun=$1
train=$2
num_kills=${3:-5}
failures=0
steps=900  # a fast machine takes 4 ms each; signals must find it at work
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
seq 3000 >"$dir/text"
RANDOM=${SEED:-7}
common=(--data.text="$dir/text" --train.steps="$steps" --train.micro_batch=2 --train.global_batch=24
  --model.width=32 --model.layers=2 --model.heads=2 --model.context=32 --train.threads=1
  --train.log_every=1000 --optim.warmup_steps=2)

report() {  # NAME PROBLEM LOG
  if [ -n "$2" ]; then
    echo "FAILED $1: $2"
    tail -20 "$3"
    failures=$((failures + 1))
  else
    echo "ok $1"
  fi
}

# start NUM_RANKS OUT [OPTION...]: the run in the background; $launcher is its process.
start() {
  local num_ranks=$1 out=$2
  shift 2
  bash "$mpirun" "$num_ranks" "$train" "${common[@]}" --output.dir="$out" --dist.timeout=20 \
    "$@" >"$out.log" 2>&1 &
  launcher=$!
}

# guard LAUNCHER: ends an mpirun that stays although its ranks are gone. Open MPI 4.1 can hang so when
# a rank is killed while it connects.
guard() {
  local idle=0
  while sleep 5; do
    if pgrep -P "$1" >/dev/null; then idle=0; else idle=$((idle + 1)); fi
    [ "$idle" -lt 6 ] || exec kill -KILL "$1"
  done
}

ranks_of() {  # OUT: the processes of its ranks, in order
  pgrep -P "$launcher" -f -- "--output.dir=$1 " | sort -n
}

state() {
  sed -n 's/.*"state":"\([a-z]*\)".*/\1/p' "$1/status.json"
}

# same NAME OUT: the finished run has the losses and parameters of the whole one.
same() {
  local problem=""
  [ "$(state "$2")" = finished ] || problem="status $(cat "$2/status.json")"
  cmp -s "$dir/whole/model.safetensors" "$2/model.safetensors" || problem="$problem, other parameters"
  cmp -s <(sed 's/,"tokens_per_second.*//' "$dir/whole/metrics.jsonl") \
    <(sed 's/,"tokens_per_second.*//' "$2/metrics.jsonl") || problem="$problem, other losses"
  report "$1" "$problem" "$2.log"
}

wait_for_step() {  # OUT STEP
  local i
  for i in $(seq 300); do
    [ -f "$1/metrics.jsonl" ] && [ "$(wc -l <"$1/metrics.jsonl")" -ge "$2" ] && return
    sleep 0.02
  done
}

start 2 "$dir/whole"
wait "$launcher" || { echo "FAILED the whole run"; cat "$dir/whole.log"; exit 1; }

# signal NAME TARGET SIGNAL EXPECTED_STATUS EXPECTED_STATE ...: in the middle of a step, then on.
signal() {
  local name=$1 target=$2 number=$3 expected=$4 states=$5 times=${6:-1}
  local out problem="" status
  out="$dir/signal-$target-$number-$times"
  start 2 "$out" --checkpoint.every=7
  wait_for_step "$out" $((5 + RANDOM % 60))
  local victim=$launcher ranks
  mapfile -t ranks < <(ranks_of "$out")
  [ "$target" = mpirun ] || victim=${ranks[$target]}
  if [ "$times" = 2 ]; then  # a step that does not end in between
    local other=1
    [ "$target" != 1 ] || other=0
    kill -STOP "${ranks[$other]}"
    sleep 0.2
    kill "-$number" "$victim"
    sleep 0.3
  fi
  kill "-$number" "$victim"
  wait "$launcher"
  status=$?
  if [ "$expected" = 0 ]; then
    [ "$status" = 0 ] || problem="status $status"
  else
    [ "$status" != 0 ] || problem="status 0"
  fi
  [[ " $states " == *" $(state "$out") "* ]] || problem="$problem, state $(state "$out")"
  report "$name" "$problem" "$out.log"
  start 2 "$out" --checkpoint.every=7 --resume=auto
  wait "$launcher"
  same "$name, resumed" "$out"
}
signal "F28: SIGTERM to rank 0" 0 TERM 0 preempted
signal "F28: SIGTERM to rank 1" 1 TERM 0 preempted
signal "F28: SIGUSR1 to mpirun" mpirun USR1 0 preempted
# About a second is left: the end of the step may be reached or not.
signal "F28: SIGTERM to mpirun" mpirun TERM any "failed preempted"
signal "F28: Ctrl-C to mpirun" mpirun INT any "failed preempted"
signal "F29: SIGTERM to a rank, twice" 1 TERM any "failed" 2
signal "F29: SIGUSR1 to mpirun, twice" mpirun USR1 any "failed" 2

# A random rank is killed at a random moment of a run that saves every few steps.
out="$dir/kills"
start 3 "$dir/whole3" --train.micro_batch=1  # three ranks add in another order than two
wait "$launcher"
mv "$dir/whole" "$dir/whole2" && mv "$dir/whole3" "$dir/whole"
kills=0 lives=0
while :; do
  if [ "$lives" -gt $((10 * num_kills + 10)) ]; then
    report "kill -9 of a random rank at a random moment" "no end after $lives lives" "$out.log"
    break
  fi
  start 3 "$out" --checkpoint.every=3 --checkpoint.keep=2 --resume=auto --train.micro_batch=1
  lives=$((lives + 1))
  # From the start of the processes to some way into the training.
  [ "$kills" -ge "$num_kills" ] || sleep "$(awk -v r=$RANDOM 'BEGIN { print 0.3 + r / 32768 * 1.5 }')"
  mapfile -t ranks < <(ranks_of "$out")
  if [ "$kills" -lt "$num_kills" ] && [ "${#ranks[@]}" = 3 ] &&
    kill -KILL "${ranks[$((RANDOM % 3))]}" 2>/dev/null; then
    kills=$((kills + 1))
  fi
  guard "$launcher" >/dev/null 2>&1 &
  guard=$!
  wait "$launcher"
  # Not by SIGTERM: a subshell that is so new that it still has our EXIT trap would remove the files.
  kill -KILL "$guard" 2>/dev/null
  wait "$guard" 2>/dev/null
  grep -h "passed over" "$out.log" &&
    report "kill -9, life $lives" "a checkpoint was not whole" "$out.log"
  if [ -f "$out/status.json" ] && [ "$(state "$out")" = finished ]; then
    same "kill -9 of a random rank at a random moment: $kills kills in $lives lives" "$out"
    [ "$kills" -lt "$num_kills" ] || break
    rm -rf "$out"
  fi
done
rm -rf "$dir/whole" && mv "$dir/whole2" "$dir/whole"

# Rank 1 runs out of memory. Its message has the numbers and what helps; the checkpoint of both stays,
# and goes on with the batch that it was made with.
out="$dir/memory"
seq 1000000 >"$dir/large"
start 2 "$out" --checkpoint.every=7
wait_for_step "$out" 20
kill -TERM "$(ranks_of "$out" | head -1)"
wait "$launcher"
cat >"$dir/limited" <<'EOF'
#!/bin/bash
# What rank 1 may have: 2 GiB of addresses.
[ "$OMPI_COMM_WORLD_RANK" != 1 ] || ulimit -v 2097152
exec "$@"
EOF
bash "$mpirun" 2 bash "$dir/limited" "$train" "${common[@]}" --output.dir="$out" --dist.timeout=60 \
  --checkpoint.every=7 --resume=auto --resume.override --data.text="$dir/large" \
  --train.micro_batch=24576 --train.global_batch=49152 >"$out.log" 2>&1
status=$?
problem=""
[ "$status" != 0 ] || problem="status 0"
numbers="requested [0-9.]+ [KMG]iB, allocated [0-9.]+ [KMG]iB, limit none, free [0-9.]+ [KMG]?i?B"
grep -qE "\[rank 1\].*out of memory on cpu: $numbers" "$out.log" ||
  problem="$problem, no message of rank 1 with what was requested and free"
grep -q "train.micro_batch" "$out.log" || problem="$problem, no key that helps"
[ "$(state "$out")" = failed ] || problem="$problem, state $(state "$out")"
grep -q '"why":"out of memory on cpu: requested' "$out/status.json" ||
  problem="$problem, another reason in $(cat "$out/status.json")"
report "F42: out of memory on one rank (ulimit -v)" "$problem" "$out.log"
start 2 "$out" --checkpoint.every=7 --resume=auto
wait "$launcher"
same "F42: on from the checkpoint of before" "$out"

# Mounts of one's own, where that is allowed: a directory that cannot be written, and a small disk
# that fills up in the middle of a save.
if unshare -rm true 2>/dev/null; then
  out="$dir/read-only"
  mkdir -p "$dir/disk"
  unshare -rm bash -c '
    mount -t tmpfs -o ro tmpfs "$1"
    disk=$1
    shift
    "$@" --checkpoint.dir="$disk"
    echo "exit $?"
  ' _ "$dir/disk" \
    bash "$mpirun" 2 "$train" "${common[@]}" --output.dir="$out" --checkpoint.every=7 \
    >"$out.log" 2>&1
  problem=""
  grep -q "exit 2" "$out.log" || problem="$(grep exit "$out.log")"
  grep -q "Read-only file system, expected a directory that can be written" "$out.log" ||
    problem="$problem, not named"
  [ ! -s "$out/metrics.jsonl" ] || problem="$problem, it trained"
  report "F33: a directory that cannot be written" "$problem" "$out.log"
  for policy in warn stop; do
    out="$dir/run-$policy"
    mkdir -p "$dir/disk"
    unshare -rm bash -c '
      mount -t tmpfs -o size=1m tmpfs "$1"
      disk=$1 copy=$2
      shift 2
      "$@" --checkpoint.dir="$disk"
      echo "exit $?"
      cp -r "$disk" "$copy"
    ' _ "$dir/disk" "$dir/copy-$policy" \
      bash "$mpirun" 2 "$train" "${common[@]}" --output.dir="$out" --checkpoint.every=7 \
      --checkpoint.keep=10 --checkpoint.on_error="$policy" >"$out.log" 2>&1
    problem=""
    grep -q "No space left on device ([0-9]* bytes needed, [0-9]* free)" "$out.log" ||
      problem="no bytes needed and free"
    if [ "$policy" = stop ]; then
      grep -q "exit 7" "$out.log" || problem="$problem, $(grep exit "$out.log")"
      [ "$(state "$out")" = failed ] || problem="$problem, not failed"
    else
      grep -q "training goes on" "$out.log" || problem="$problem, it did not go on"
      [ "$(wc -l <"$out/metrics.jsonl")" = "$steps" ] || problem="$problem, not all steps"
    fi
    report "F31: disk full, checkpoint.on_error = $policy" "$problem" "$out.log"
    rm -f "$out/model.safetensors"
    start 2 "$out" --checkpoint.every=7 --checkpoint.dir="$dir/copy-$policy" --resume=auto
    wait "$launcher"
    same "F31: on from the last whole one, $policy" "$out"
  done
else
  echo "skipped: read-only directory, disk full (no mounts of one's own here)"
fi
echo "$failures failures"
exit "$((failures > 0))"
