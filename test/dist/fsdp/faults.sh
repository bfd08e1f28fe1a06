#!/bin/bash
# faults.sh MPIRUN_SCRIPT FSDP_FAULT TESSERA_TRAIN: each way in which one rank of a training can
# fail ends all ranks, in time, with the right status and with rank, unit and phase in the text; a
# trainer that is ended from outside says so in its status.json.
set -u
mpirun=$1
program=$2
train=$3
failures=0

report() {  # NAME PROBLEM TOOK OUTPUT
  if [ -n "$2" ]; then
    echo "FAILED $1: $2"
    echo "$4"
    failures=$((failures + 1))
  else
    echo "ok $1 ($3 s)"
  fi
}

# check CASE NUM_RANKS STATUS MAX_SECONDS [REGEX...]: every REGEX matches a line of the output.
# STATUS "any" means any but 0.
check() {
  local name=$1 num_ranks=$2 status=$3 max_seconds=$4
  shift 4
  local begin=$SECONDS output actual
  output=$(timeout 60 bash "$mpirun" "$num_ranks" "$program" "$name" 2>&1)
  actual=$?
  local took=$((SECONDS - begin)) problem="" regex
  if [ "$status" = any ]; then
    [ "$actual" != 0 ] || problem="status 0"
  elif [ "$actual" != "$status" ]; then
    problem="status $actual instead of $status"
  fi
  [ "$took" -le "$max_seconds" ] || problem="$problem took $took s instead of $max_seconds"
  for regex in "$@"; do
    grep -qE -- "$regex" <<<"$output" || problem="$problem, no line: $regex"
  done
  report "$name on $num_ranks ranks" "$problem" "$took" "$output"
}

# The timeout is 3 s; 5 s more are allowed.
late="of blocks\.[0-9] \(gather_forward, step 2, [0-9]+ bytes, sequence [0-9]+\)"
check fine 3 0 10
check stop 2 6 8 "rank 0: all_gather $late has not finished in 3 s" "rank 0: the last collectives:" \
  "all_gather of blocks\.[0-9] \(gather_backward, step 1, .*took"
check stop 4 6 8 "rank 0: all_gather $late has not finished in 3 s"
check kill 2 any 5 "rank 0: terminated while all_gather $late was in flight"
check kill 4 any 5 "rank 0: terminated while all_gather $late was in flight" \
  "rank 2: terminated while all_gather $late was in flight"
check throw 3 3 8 "\[rank 2\] error: tokens.bin: truncated"
# kill_in_time NUM_RANKS: after kill -9 of the last rank amid a gather, mpirun ends within 5 s, and
# each survivor has printed its line within 0.5 s of its SIGTERM.
kill_in_time() {
  local num_ranks=$1 output status problem="" line rank end_ms killed_ms="" term_ms="" line_ms
  output=$(
    {
      timeout 60 bash "$mpirun" "$num_ranks" "$program" kill 2>&1
      echo "status $?"
    } | while IFS= read -r line; do echo "$((${EPOCHREALTIME/./} / 1000)) $line"; done
  )
  end_ms=$((${EPOCHREALTIME/./} / 1000))
  while read -r line_ms line; do
    case $line in
    *"killed now"*) killed_ms=$line_ms ;;
    *"SIGTERM now"*) [ -n "$term_ms" ] || term_ms=$line_ms ;;
    esac
  done <<<"$output"
  status=$(sed -n 's/.* status //p' <<<"$output")
  [ "$status" != 0 ] || problem="status 0"
  [ $((end_ms - killed_ms)) -le 5000 ] || problem="$problem, ended after $((end_ms - killed_ms)) ms"
  for rank in $(seq 0 $((num_ranks - 2))); do
    line_ms=$(sed -n "s/^\([0-9]*\) .*rank $rank: terminated while .*/\1/p" <<<"$output" | head -1)
    if [ -z "$line_ms" ]; then
      problem="$problem, no line of rank $rank"
    elif [ $((line_ms - term_ms)) -gt 500 ]; then
      problem="$problem, rank $rank took $((line_ms - term_ms)) ms from SIGTERM to its line"
    fi
  done
  report "kill -9, lines of survivors in time, on $num_ranks ranks" "$problem" \
    "$(((end_ms - killed_ms) / 1000))" "$output"
}
kill_in_time 2
kill_in_time 4
# Who is about to issue something else is named before anybody hangs.
check swap0 2 6 8 "rank 0 \"gather_[a-z]+ blocks\.[0-9] .*rank 1 \"gather_[a-z]+ blocks\.[0-9]"
check bytes 3 6 8 \
  "in step 0: as number 1, rank 0 \"gather_forward blocks.0 .* rank 2 \"gather_forward blocks.0"
# Later the tags of the collectives say it, or the programs at the end of the step.
names="gather_(forward|backward)"
check swap2 2 6 8 "(the ranks disagree|in step 2): .*rank 0 .*($names|reduce).*rank 1 .*($names|reduce)|(the ranks disagree|in step 2): .*rank 1 .*($names|reduce).*rank 0 .*($names|reduce)"

# trainer NAME NUM_RANKS VICTIM SIGNAL STATUS REASON LIMIT_MS: a run whose rank VICTIM gets SIGNAL
# ends in time with STATUS ("any": any but 0) and REASON in its status.json.
trainer() {
  local name=$1 num_ranks=$2 victim=$3 signal=$4 expected=$5 reason=$6 limit_ms=$7
  local dir begin_ns output="" problem="" status took
  dir=$(mktemp -d)
  seq 2000 >"$dir/text"
  bash "$mpirun" "$num_ranks" "$train" --output.dir="$dir/out" --data.text="$dir/text" --train.steps=100000 \
    --model.width=32 --model.layers=2 --model.heads=2 --model.context=32 --train.threads=1 \
    --dist.timeout=2 --train.grad_accum_steps=8 --train.eval_every=0 --train.log_every=1000 >"$dir/log" 2>&1 &
  local launcher=$!
  local i
  for i in $(seq 100); do
    [ -s "$dir/out/metrics.jsonl" ] && break
    sleep 0.1
  done
  local ranks  # children of the launcher, in order
  mapfile -t ranks < <(pgrep -P "$launcher" -f -- "--output.dir=$dir/out" | sort -n)
  kill "-$signal" "${ranks[$victim]}"
  begin_ns=$(date +%s%N)
  wait "$launcher"
  status=$?
  took=$((($(date +%s%N) - begin_ns) / 1000000))
  if [ "$expected" = any ]; then
    [ "$status" != 0 ] || problem="status 0"
  else
    [ "$status" = "$expected" ] || problem="status $status instead of $expected"
  fi
  # A rank that is gone is noticed at once, one that hangs after dist.timeout.
  [ "$took" -le "$limit_ms" ] || problem="$problem, took $took ms instead of $limit_ms"
  grep -q '"state":"failed"' "$dir/out/status.json" || problem="$problem, not failed"
  grep -q -- "$reason" "$dir/out/status.json" || problem="$problem, no reason"
  output=$(cat "$dir/log" "$dir/out/status.json")
  report "trainer, $name" "$problem" "$((took / 1000))" "$output"
  rm -rf "$dir"
}
trainer "kill -9 to rank 1 of 2" 2 1 KILL any SIGTERM 5000
trainer "kill -9 to rank 0 of 3" 3 0 KILL any SIGTERM 5000
trainer "SIGSTOP to one rank, dist.timeout 2 s" 2 1 STOP 6 "rank 0: .* has not finished in 2 s" \
  12000

# slow_rank: the rank that the others wait for is in the metrics.
slow_rank() {
  local dir problem="" begin=$SECONDS
  dir=$(mktemp -d)
  seq 2000 >"$dir/text"
  timeout 120 bash "$mpirun" 3 "$train" --output.dir="$dir/out" --data.text="$dir/text" \
    --train.steps=20 --model.width=32 --model.layers=2 --model.heads=2 --model.context=32 \
    --train.threads=1 --debug.slow_rank=1 --debug.slow_ms=100 >"$dir/log" 2>&1 ||
    problem="status $?"
  tail -1 "$dir/out/metrics.jsonl" | grep -q '"slowest_rank":1,' || problem="$problem, not named"
  report "trainer, a rank that is slow" "$problem" "$((SECONDS - begin))" "$(cat "$dir/log")"
  rm -rf "$dir"
}
slow_rank
exit "$((failures > 0))"
