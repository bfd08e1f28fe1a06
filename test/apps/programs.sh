#!/usr/bin/env bash
# Every program has the same manners: --version and --help end with status 0, what is wrong on the
# command line is one line "error: command line: ..." and status 2. Usage: programs.sh PROGRAM ...
set -uo pipefail
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
failures=0
fail() {
  echo "$1"
  failures=$((failures + 1))
}

expect() {  # status, pattern of one line, command ...
  local status=$1 pattern=$2 output actual
  shift 2
  output=$("$@" 2>&1 </dev/null)
  actual=$?
  [ "$actual" = "$status" ] || fail "status $actual instead of $status: $* ($output)"
  [ "$(grep -cE -- "$pattern" <<<"$output")" = 1 ] ||
    fail "expected one line '$pattern': $* ($(tail -5 <<<"$output"))"
}

for program in "$@"; do
  name=$(basename "$program")
  expect 0 "^$name [0-9]+\.[0-9]+\.[0-9]+( \(commit [0-9a-f]+(-dirty)?\))?$" "$program" --version
  expect 0 "(no MPI|MPI [0-9]).*(no CUDA|CUDA for).*oneDNN" "$program" --version
  expect 0 "^ *-h,--help |^tessera-train --help \[SECTION \| KEY\]$" "$program" --help
  expect 2 "^error: command line: .*(see --help|nearest: )" "$program" --no-such-flag=1
  case $name in
    tessera-train)
      expect 2 "^error: command line: a\.toml and b, expected one configuration file" \
        "$program" a.toml --train.steps=3 b
      ;;
    tessera-checkpoint)
      expect 2 "^error: command line: exprot, expected one of .* \(nearest: export\)" "$program" exprot
      expect 0 "^ *--max-file-bytes " "$program" --help
      ;;
    tessera-tokenize)
      expect 2 "^error: command line: encod, expected one of .* \(nearest: encode\)" "$program" encod
      expect 0 "^ *--shard-tokens " "$program" encode --help
      ;;
    tessera-report)
      expect 3 "^error: extra: not there, expected the directory of a run" "$program" extra word
      expect 0 "^ *--output TEXT=report\.html " "$program" --help
      ;;
    tessera-bench-parquet)
      expect 3 "^error: .*extra.*No such file" "$program" extra
      ;;
    tessera-bench-collectives)
      expect 0 "one rank: nothing travels, so no collective is measured; expected mpirun -n N" \
        "$program" --max=1K --runs=1
      ;;&
    *)
      expect 2 "^error: command line: .*(not expected|not in \{|required)" "$program" extra word
      ;;
  esac
  case $name in
    tessera-bench-*)
      # An option says its default.
      [ "$name" = tessera-bench-fsdp ] ||
        "$program" --help | grep -qE -- "^ *--[a-z-]+ (INT|UINT|TEXT|FLOAT)(:.*)?=[^ ]+" ||
        fail "$name --help has no defaults"
      ;;
  esac
done
echo "$failures failures"
[ "$failures" = 0 ]
