#!/bin/sh
# tessera-bench-kernels --ask: a kernel is timed again as often as asked, a wrong line is an error.
#   kernels_ask.sh tessera-bench-kernels
set -eu
bench() {
  "$1" --shapes=tiny --runs=1 --json --ask --filter=gelu_fwd --device=cpu 2>&1
}

# f32 three times, bf16 once.
lines=$(printf 'again 2\nagain 1\nnext\nnext\n' | bench "$1")
[ "$(echo "$lines" | grep -c gelu_fwd/f32)" = 3 ] || { echo "expected 3 of f32: $lines"; exit 1; }
[ "$(echo "$lines" | grep -c gelu_fwd/bf16)" = 1 ] || { echo "expected 1 of bf16: $lines"; exit 1; }

# Without input all kernels come once.
[ "$(bench "$1" </dev/null | grep -c gelu_fwd)" = 2 ] || { echo 'expected 2 lines'; exit 1; }

for line in 'again' 'again 0' 'repeat'; do
  status=0
  text=$(echo "$line" | bench "$1") || status=$?
  [ "$status" = 2 ] || { echo "$line: expected status 2, got $status"; exit 1; }
  case $text in
    *"--ask: expected \`again RUNS\` or \`next\`, got \`$line\`"*) ;;
    *) echo "$line: expected an error that shows it, got: $text"; exit 1 ;;
  esac
done
