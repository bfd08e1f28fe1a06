#!/usr/bin/env bash
# From a fresh clone to a language model: installs what is missing, builds, prepares real English
# text, trains a small Llama-style model on two ranks with fully sharded parameters, and prints text
# that the model writes. Further arguments go to the trainer (--train.steps=100). A second time it
# leaves what it has trained, unless --output.overwrite is one of them. For tests: with
# --programs=DIR, the first of them, nothing is set up or built.
set -euo pipefail
cd "$(dirname "$0")/.."
source apps/mpirun.sh

programs=build/apps
if [[ ${1:-} == --programs=* ]]; then
  programs=${1#*=}
  shift
else
  bash apps/setup.sh
  ninja -C build apps/tessera-train apps/tessera-generate
fi

text=out/data/kjv.txt
bible=$(command -v bible || echo /usr/games/bible)
if [ ! -s $text ]; then
  mkdir -p out/data
  if [ -x "$bible" ]; then
    echo "quickstart: preparing the King James Bible in $text"
    # One verse a line; the reference in front of each goes, a new chapter begins with a blank line.
    COLUMNS=100000 "$bible" -f 'gen1:1-rev22:21' </dev/null |
      sed -E -e 's/^[^ ]*[A-Za-z][0-9]+:1 /\n/' -e 's/^[^ ]*[A-Za-z][0-9]+:[0-9]+ //' >$text.new
    mv $text.new $text
  else
    text=out/data/sources.txt
    echo "quickstart: the package bible-kjv is not to be had; training on this project's sources"
    find core kernels nn optim dist apps test -name '*.h' -o -name '*.cc' -o -name '*.cu' |
      LC_ALL=C sort | xargs cat >$text.new
    mv $text.new $text
  fi
fi

run_mpi 2 "$programs/tessera-train" configs/quickstart.toml --data.text="$text" "$@"
