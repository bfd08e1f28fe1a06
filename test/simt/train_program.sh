#!/usr/bin/env bash
# The trainer itself on the emulated device: alone, and with two ranks whose collectives go through
# host memory and MPI. Its losses are those of the CPU, and nothing leaks.
# Usage: train_program.sh TRAIN_SIMT ROOT [MPIRUN]
set -uo pipefail
train=$1 root=$2 mpirun=${3:-}
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# MPI keeps memory of its own until the end.
export ASAN_OPTIONS=detect_leaks=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failures=0
for i in $(seq 200); do echo "line $i of a text"; done >"$dir/text"

losses() {  # device, command ...
  local device=$1
  shift
  "$@" "$train" "$root/configs/llama_tiny.toml" --device="$device" --data.text="$dir/text" \
    --output.dir="$dir/out" --output.overwrite --train.steps=3 --train.micro_batch=2 --train.global_batch=4 \
    --train.eval_every=0 --train.log_every=1 --train.threads=1 --optim.warmup_steps=1 --model.layers=1 \
    --model.width=24 --model.heads=2 --model.kv_heads=1 --model.ffn=32 --model.context=16 \
    --sample.tokens=2 --precision.param_dtype=f32 --debug.poison=true \
    --debug.order_check=true >"$dir/log" 2>&1
  local status=$?
  if [ "$status" != 0 ]; then
    echo "exit status $status on $device: $*"
    tail -20 "$dir/log"
    failures=$((failures + 1))
  fi
  grep -o 'step [0-9]/3  loss [0-9.]*' "$dir/log"
}

launches=("")
[ -n "$mpirun" ] && launches+=("$mpirun --oversubscribe --bind-to none -n 2")
for words in "${launches[@]}"; do
  read -r -a launch <<<"$words"
  expected=$(losses cpu "${launch[@]}")
  actual=$(losses cuda "${launch[@]}")
  # Four decimals of a loss: the last may round the other way.
  if ! paste <(echo "$expected") <(echo "$actual") | awk '
      { d = $4 - $8; n++; if (d > 0.00015 || d < -0.00015) bad = 1 }
      END { exit bad || n != 3 }'; then
    printf '%s ranks: on cpu\n%s\non cuda\n%s\n' "${launch[*]:-1}" "$expected" "$actual"
    failures=$((failures + 1))
  fi
done

# A library that a key asks for and that is not there is one line, before anything else.
refuses() {  # variable, key, value
  local status=0 line
  env "$1=/nowhere/lib.so" "$train" "$root/configs/llama_tiny.toml" --device=cuda \
    --data.text="$dir/text" --output.dir="$dir/refused" "--$2=$3" >"$dir/log" 2>&1 || status=$?
  line="command line: $2 = $3, but /nowhere/lib.so cannot be loaded (install it, or name its file in $1), expected the library or one of own, auto"
  if [ "$status" != 2 ] || ! grep -qF "$line" "$dir/log" || [ -e "$dir/refused" ]; then
    echo "$2=$3 without its library: exit status $status, expected 2 and: $line"
    cat "$dir/log"
    failures=$((failures + 1))
  fi
}
refuses TESSERA_CUDNN kernels.attention cudnn
refuses TESSERA_CUBLASLT kernels.gemm cublaslt
[ "$failures" = 0 ]
