#!/bin/bash
# flags.sh BUILD: no command of this build lets a compiler assume that numbers are finite, whatever
# the optimization: what is not finite is found by its bits, and must be there to be found.
set -u
flags='-(ffast-math|ffinite-math-only|Ofast|funsafe-math-optimizations)|--?use_fast_math'
[ -s "$1/build.ninja" ] || { echo "$1/build.ninja: missing, expected the commands of the build"; exit 1; }
grep -qE -- '-O[23s]' "$1/build.ninja" || { echo "no command that optimizes: a release is not tested"; exit 1; }
found=$(grep -oE -- "$flags" "$1/build.ninja" | sort | uniq -c)
[ -z "$found" ] || { echo "flags that assume finite numbers: $found"; exit 1; }
echo "no flag assumes finite numbers"
