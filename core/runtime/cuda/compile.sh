#!/bin/sh
# Runs a compiler of CUDA sources and keeps what ptxas says about registers, shared memory and
# spills in a file; everything else it says is shown. Usage: compile.sh REPORT COMMAND...
report=$1
shift
"$@" 2>"$report"
status=$?
grep -v -e '^ptxas info' -e ' bytes stack frame, ' -e '^$' "$report" >&2
exit $status
