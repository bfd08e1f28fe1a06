#!/usr/bin/env bash
# The bench of checkpoints leaves a directory that was there as it was: what it removes is what it
# made. Usage: checkpoint.sh BENCH
set -uo pipefail
bench=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failures=0
fail() {
  echo "FAILED $1"
  failures=$((failures + 1))
}
small=(--device cpu --layers 1 --width 16 --tokens 16 --saves 1)

home="$dir/the user's"  # a quote, which no shell may see
mkdir -p "$home/step-00000001"
echo precious >"$home/step-00000001/precious"
echo precious >"$home/dd.0"
before=$(cd "$home" && find . | sort)
output=$("$bench" --dir "$home" "${small[@]}" 2>&1)
status=$?
# Too slow, on a loaded machine, is status 1 after the figures.
[ "$status" -le 1 ] || fail "exit status $status: $output"
grep -q '"bench": "checkpoint"' <<<"$output" || fail "no figures: $output"
[ "$(cd "$home" && find . | sort)" = "$before" ] || fail "other files than before: $(find "$home")"
[ "$(cat "$home/step-00000001/precious" "$home/dd.0")" = "precious
precious" ] || fail "other bytes than before"

output=$("$bench" --dir "$home/dd.0" "${small[@]}" 2>&1)
status=$?
[ "$status" = 7 ] || fail "exit status $status instead of 7: $output"
grep -qF -- "--dir $home/dd.0: Not a directory, expected a directory that can be written" <<<"$output" ||
  fail "not named: $output"
[ -f "$home/dd.0" ] || fail "the file in the way is gone"
echo "$failures failures"
[ "$failures" = 0 ]
