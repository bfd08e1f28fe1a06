#!/usr/bin/env bash
# How runs are started, and all the ways in which they are asked to end.
# Usage: launch.sh TRAIN GENERATE CHECKPOINT MPIRUN PROGRAM...   (MPIRUN may be empty)
set -uo pipefail
train=$(realpath "$1") generate=$(realpath "$2") checkpoint=$(realpath "$3") mpirun=$4
shift 4
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failures=0
out=$dir/out
mkdir "$dir/node0" "$dir/node1"
seq 3000 >"$dir/text"
seq 3000 >"$dir/node0/text"
seq 3000 | tac >"$dir/node1/text"
small=("$train" --device=cpu --model.layers=1 --model.heads=2 --model.width=16 --model.context=16
  --train.micro_batch=1 --train.threads=1 --output.dir="$out" --dist.timeout=60)
run=("${small[@]}" --data.text="$dir/text" --train.steps=2)
long=("${small[@]}" --data.text="$dir/text" --train.steps=1000000)

report() {  # NAME PROBLEM
  if [ -n "$2" ]; then
    echo "FAILED $1: $2"
    tail -15 "$dir/log"
    failures=$((failures + 1))
  else
    echo "ok $1"
  fi
}
state() { sed -n 's/.*"state":"\([a-z]*\)".*/\1/p' "$out/status.json"; }
why() { sed -n 's/.*"why":"\([^"]*\)".*/\1/p' "$out/status.json"; }

# refused NAME TEXT COMMAND...: status 2, the text in exactly one line, nothing written.
refused() {
  local name=$1 text=$2 status problem=""
  shift 2
  rm -rf "$out"
  timeout 60 "$@" >"$dir/log" 2>&1
  status=$?
  [ "$status" = 2 ] || problem="status $status instead of 2"
  [ "$(grep -cF -- "$text" "$dir/log")" = 1 ] || problem="$problem, not one line: $text"
  [ ! -e "$out" ] || problem="$problem, something was written"
  report "$name" "$problem"
}

accepted() {  # NAME COMMAND...
  local name=$1 problem=""
  shift
  rm -rf "$out"
  timeout 60 "$@" >"$dir/log" 2>&1 || problem="status $?"
  grep -q "step \([0-9]*\)/\1 " "$dir/log" || problem="$problem, no last step"
  report "$name" "$problem"
}

# Launchers that MPI does not know.
refused "torchrun's variables" "World: WORLD_SIZE = 4 and RANK = 2, but " \
  env WORLD_SIZE=4 RANK=2 "${run[@]}"
refused "srun without PMI" "World: SLURM_STEP_NUM_TASKS = 4 and SLURM_PROCID = 0, but " \
  env SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 SLURM_NTASKS=4 "${run[@]}"
refused "programs without the key" "or, for lone processes, no WORLD_SIZE" \
  env WORLD_SIZE=4 RANK=2 "$generate" --checkpoint "$out"
refused "programs of one process" "WORLD_SIZE = 4 and RANK = 2, expected one process, without" \
  env WORLD_SIZE=4 RANK=2 "$checkpoint" verify "$out"
accepted "a lone process that is meant" \
  env WORLD_SIZE=4 RANK=2 "${run[@]}" --dist.single_process=true
accepted "a program within an allocation" env SLURM_NTASKS=4 SLURM_PROCID=0 "${run[@]}"

if [ -n "$mpirun" ]; then
  mpi=("$mpirun" --oversubscribe --bind-to none)
  refused "dist.single_process under mpirun" "but MPI has 2 ranks (dist.single_process = true)" \
    "${mpi[@]}" -n 2 "${run[@]}" --dist.single_process=true
  # Ranks that were started differently.
  refused "ranks with other settings" \
    "the ranks disagree: model.heads = 2 (command line) on rank 0, 1 (command line) on rank 1; " \
    "${mpi[@]}" -n 1 "${run[@]}" : -n 1 "${run[@]}" --model.heads=1
  refused "ranks with other data" "the ranks disagree: the training data = " \
    "${mpi[@]}" -n 1 -wdir "$dir/node0" "${run[@]}" --data.text=text : \
    -n 1 -wdir "$dir/node1" "${run[@]}" --data.text=text
  for value in 0 two 99999999999; do
    refused "TESSERA_RANKS_PER_NODE=$value" \
      "TESSERA_RANKS_PER_NODE: \"$value\" on rank 0, expected an integer in [1, 1000000]" \
      env TESSERA_RANKS_PER_NODE="$value" "${mpi[@]}" -n 2 "${run[@]}"
  done
  refused "TESSERA_RANKS_PER_NODE on one rank" \
    "TESSERA_RANKS_PER_NODE: not set on rank 0, \"1\" on rank 1, expected the same on all ranks" \
    "${mpi[@]}" -n 1 "${run[@]}" : -n 1 env TESSERA_RANKS_PER_NODE=1 "${run[@]}"
  # One timeline of all ranks.
  for num_ranks in 1 2 3; do
    accepted "a profile of $num_ranks ranks" "${mpi[@]}" -n "$num_ranks" "${run[@]}" \
      --train.steps=5 --train.eval_every=3 --profile.steps=2..4 --profile.trace="$dir/trace"
    problem=$(python3 "$(dirname "$0")/check_trace.py" "$dir/trace" "$num_ranks" 2 4 2>&1) || \
      problem="${problem:-status $?}"
    report "a timeline of $num_ranks ranks is whole" "$problem"
  done
fi

# Descriptors that are closed at the start do not become files of the run.
for fd in 0 1 2 012; do
  rm -rf "$out"
  closing=()
  for ((i = 0; i < ${#fd}; ++i)); do closing+=("exec ${fd:i:1}>&-;"); done
  bash -c "${closing[*]} exec \"\$@\"" _ "${run[@]}" --train.steps=6 --checkpoint.every=2 \
    --debug.dist=true >"$dir/log" 2>&1
  status=$?
  problem=""
  [ "$status" = 0 ] || problem="status $status"
  [ "$(state)" = finished ] || problem="$problem, state $(state)"
  strays=$(grep -rlE "tok/s|sequence [0-9]" "$out")
  [ -z "$strays" ] || problem="$problem, log lines in $strays"
  ! grep -v '^{' "$out/metrics.jsonl" || problem="$problem, other lines in metrics.jsonl"
  report "descriptors $fd closed" "$problem"
done
problem=""
for program in "$train" "$generate" "$checkpoint" "$@"; do
  nm -C "$program" | grep open_standard_descriptors >/dev/null || problem="$problem $program"
done
report "all programs open descriptors" "$problem"

wait_for_steps() {  # the metrics of three
  local i
  for i in $(seq 600); do
    [ -f "$out/metrics.jsonl" ] && [ "$(wc -l <"$out/metrics.jsonl")" -ge 3 ] && return
    sleep 0.05
  done
}

# preempted NAME WHY STATUS: a run that has ended by itself, with a checkpoint.
preempted() {
  local problem=""
  [ "$3" = 0 ] || problem="status $3"
  [ "$(state)" = preempted ] || problem="$problem, state $(state)"
  [[ "$(why)" == "$2"* ]] || problem="$problem, why: $(why)"
  ls "$out"/step-*/manifest.json >/dev/null 2>&1 || problem="$problem, no checkpoint"
  report "$1" "$problem"
}

for signal in INT TERM HUP USR1 XCPU; do
  rm -rf "$out"
  "${long[@]}" >"$dir/log" 2>&1 &
  wait_for_steps
  kill "-$signal" $!
  wait $!
  preempted "SIG$signal to a process alone" "asked to end by SIG$signal" $?
done

rm -rf "$out"
nohup "${long[@]}" >"$dir/log" 2>&1 &
wait_for_steps
kill -HUP $!
sleep 0.2
problem=""
[ "$(state)" = running ] || problem="state $(state)"
kill -TERM $!
wait $!
[ "$?,$(why)" = "0,asked to end by SIGTERM; --resume=auto goes on" ] || problem="$problem, $(why)"
report "nohup" "$problem"

rm -rf "$out"
timeout --signal=TERM 3 "${long[@]}" >"$dir/log" 2>&1  # which sends it twice
[ "$(state)" != "" ] || sleep 1
problem=""
[[ "$(why)" == "asked to end by SIGTERM"* || "$(why)" == "ended before the first step"* ]] ||
  problem="why: $(why)"
report "timeout" "$problem"

rm -rf "$out"
"${long[@]}" 2>"$dir/log" | head -3 >/dev/null
preempted "| head" "asked to end by a closed standard output" "${PIPESTATUS[0]}"

rm -rf "$out"
(ulimit -t 3 && exec "${long[@]}") >"$dir/log" 2>&1
preempted "ulimit -t" "asked to end by SIGXCPU" $?

rm -rf "$out"
(ulimit -f 30 && exec "${long[@]}") >"$dir/log" 2>&1
status=$?
problem=""
[ "$status" = 7 ] || problem="status $status"
[ "$(state)" = failed ] || problem="$problem, state $(state)"
grep -q "metrics.jsonl: cannot be written: File too large" "$dir/log" || problem="$problem, no reason"
[[ "$(why)" == *"File too large"* ]] || problem="$problem, why: $(why)"
report "ulimit -f" "$problem"

rm -rf "$out"
python3 - "$out/metrics.jsonl" "${long[@]}" 2>"$dir/log" <<'PYTHON'
import os, pty, sys, time
metrics, command = sys.argv[1], sys.argv[2:]
pid, terminal = pty.fork()
if pid == 0:
    os.execv(command[0], command)
while not (os.path.exists(metrics) and open(metrics).read().count("\n") >= 3):
    os.read(terminal, 65536)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256)
PYTHON
preempted "a terminal that closes" "asked to end by SIGHUP" $?

# Under mpirun, which leaves its ranks about a second: the end of the step may be reached or not.
ended() {  # NAME
  local problem="" state
  state=$(state)
  [[ "$state" = preempted || "$state" = failed ]] || problem="state $state"
  [ -n "$(why)" ] || problem="$problem, no reason"
  ! pgrep -f -- "--output.dir=$out " >/dev/null || problem="$problem, ranks are left"
  report "$1" "$problem"
}
if [ -n "$mpirun" ]; then
  for signal in HUP XCPU; do
    rm -rf "$out"
    (exec "${mpi[@]}" -n 2 "${long[@]}") >"$dir/log" 2>&1 &
    wait_for_steps
    kill "-$signal" $!
    wait $!
    ended "SIG$signal to mpirun"
  done
  rm -rf "$out"
  (ulimit -c 0 && exec "${mpi[@]}" -n 2 "${long[@]}") 2>"$dir/log" | head -3 >/dev/null
  ended "mpirun | head"
fi

for signal in SEGV BUS ABRT; do
  rm -rf "$out"
  (ulimit -c 0 && exec "${long[@]}") >"$dir/log" 2>&1 &
  wait_for_steps
  kill "-$signal" $!
  wait $! 2>/dev/null
  status=$?
  problem=""
  [ "$status" -gt 128 ] || problem="status $status"
  [ "$(state)" = failed ] || problem="$problem, state $(state)"
  [[ "$(why)" == "ended by SIG$signal ("* ]] || problem="$problem, why: $(why)"
  report "SIG$signal" "$problem"
done
if [ -n "$mpirun" ]; then
  rm -rf "$out"
  (ulimit -c 0 && exec "${mpi[@]}" -n 2 "${long[@]}") >"$dir/log" 2>&1 &
  wait_for_steps
  kill -SEGV "$(pgrep -P $! -f -- "--output.dir=$out " | sort -n | tail -1)"
  wait $!
  status=$?
  problem=""
  [ "$status" != 0 ] || problem="status 0"
  [[ "$(why)" == "rank 1: ended by SIGSEGV ("* ]] || problem="$problem, why: $(why)"
  report "SIGSEGV on rank 1" "$problem"
fi
echo "$failures failures"
[ "$failures" = 0 ]
