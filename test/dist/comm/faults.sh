#!/bin/bash
# faults.sh MPIRUN_SCRIPT COMM_FAULT: each way to fail ends all ranks, in time, with the right
# status and text.
set -u
mpirun=$1
program=$2
failures=0

# check CASE NUM_RANKS STATUS MAX_SECONDS [TEXT...]: every TEXT is in the output. STATUS "any" means
# any but 0.
check() {
  local name=$1 num_ranks=$2 status=$3 max_seconds=$4
  shift 4
  local begin=$SECONDS output actual
  output=$(timeout 60 bash "$mpirun" "$num_ranks" "$program" "$name" 2>&1)
  actual=$?
  local took=$((SECONDS - begin)) problem=""
  if [ "$status" = any ]; then
    [ "$actual" != 0 ] || problem="status 0"
  elif [ "$actual" != "$status" ]; then
    problem="status $actual instead of $status"
  fi
  [ "$took" -le "$max_seconds" ] || problem="$problem took $took s instead of $max_seconds"
  local text
  for text in "$@"; do
    grep -qF -- "$text" <<<"$output" || problem="$problem, no text: $text"
  done
  local num_messages
  num_messages=$(grep -cF "checksum differs" <<<"$output")
  if [ "$name" = verdict ] && [ "$num_messages" != 1 ]; then
    problem="$problem, $num_messages messages instead of 1"
  fi
  if [ -n "$problem" ]; then
    echo "FAILED $name on $num_ranks ranks: $problem"
    echo "$output"
    failures=$((failures + 1))
  else
    echo "ok $name on $num_ranks ranks ($took s)"
  fi
}

gather="all_gather of block3 (forward, step 1, 32 bytes, sequence 1)"
check fine 2 0 10
check throw 3 3 10 "[rank 2] error: tokens.bin: bad magic"
check throw 1 3 10 "error: tokens.bin: bad magic"
check unwind 3 3 10 "[rank 2] error: tokens.bin: bad magic"
check early 2 6 10 "end of the run: the ranks disagree: rank 0 calls end of the run (1 bytes), rank 1 calls control verdict (4 bytes)"
TESSERA_RANKS_PER_NODE=1 check early 2 6 10 \
  "the ranks disagree: rank " "rank 1 calls control verdict" "rank 0 calls end of the run"
check verdict 3 4 10 "[rank 2] error: shard 1: checksum differs"
check stop 2 6 8 "rank 0: $gather has not finished in 3 s" "rank 0: the last collectives:" \
  "all_gather of block3 (forward, step 0, 32 bytes, sequence 0): took" "$gather: in flight for" \
  "$gather: entered by rank 0; rank 1 does not answer: stopped or gone"
check skip 3 6 8 "rank 0: $gather has not finished in 3 s" "rank 1: $gather has not finished in 3 s" \
  "$gather: entered by ranks 0, 1; rank 2 has not entered it" "  rank 2: in no collective; the last that ended, "
check pair 4 6 8 "rank 2: all_gather of block5 (forward, step 2, 32 bytes, sequence 0) has not finished in 3 s" \
  "): entered by ranks 0, 1; ranks 2, 3 have not entered it" \
  "  rank 2: in all_gather of block5 (forward, step 2, 32 bytes, sequence 0)" \
  "  rank 3: in no collective; the last that ended, "
check other 2 6 3 "all_gather: the ranks disagree: rank " "rank 0 calls all_gather of block3, forward" \
  "rank 1 calls all_gather of block4, forward"
check other 3 6 3 "rank 2 calls all_gather of block4, forward"
check kill 2 any 5 "[rank 0] error: rank 0: terminated while $gather was in flight"
check exit 2 any 5
check threads 2 0 10 "fewer than its 4096 threads; start with mpirun --bind-to none"
if [ "$(nproc)" -ge 2 ]; then  # one rank bound to one of several processors, as mpirun likes to
  TESSERA_TEST_BIND_TO=core check threads 1 0 10 "warning: this rank may use only 1 of "
fi
exit "$((failures > 0))"
