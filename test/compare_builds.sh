#!/usr/bin/env bash
# Do two builds train to the same bits? For a change that must not change a number:
#   bash test/compare_builds.sh OLD NEW [PATTERN]
# OLD and NEW are programs tessera-train, or build directories that have one; PATTERN (an extended
# regular expression) picks runs by name. Trains each run of the list below with both and compares
# metrics.jsonl (but for times and bytes) and the values of the last checkpoint's tensors (whatever
# their names, and however they are cut into slices and files). Ends with "N the same, N differ" and
# status 1 if any differs. Takes a few seconds a run; no test of the suite. Ranks are MPI processes,
# and threads where both are build directories in which `ninja test/train_threads` was run.
set -uo pipefail
if [ "$#" -lt 2 ]; then
  sed -n '2,10p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/../apps/mpirun.sh"
export MPIRUN_FLAGS="--oversubscribe ${MPIRUN_FLAGS:-}" OMP_WAIT_POLICY=passive
program_in() {
  if [ -d "$1" ]; then echo "$1/apps/tessera-train"; else echo "$1"; fi
}
old=$(program_in "$1") new=$(program_in "$2") pattern=${3:-.}
old_threads=$1/test/train_threads new_threads=$2/test/train_threads
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
num_same=0 num_different=0

# A text without any chance in it.
for i in $(seq 1 3000); do
  echo "line $i: $((i * i % 9973)) tiles of $((i * 7919 % 104729)) make the floor of room $((i % 89))"
done >"$work/text"

# Tokens of a vocabulary of 40, for imported models: a shard in the .bin format of llm.c.
python3 - "$work/tokens.bin" <<'PYTHON'
import struct
import sys

tokens = [(i * i // 7 + i) % 40 for i in range(20000)]
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
    file.write(struct.pack(f"<{len(tokens)}H", *tokens))
PYTHON

cat >"$work/compare.py" <<'PYTHON'
"""compare.py OLD NEW: says what differs between two output directories, nothing if nothing does."""
import glob
import hashlib
import json
import os
import re
import struct
import sys

TIMES = {"tokens_per_second", "peak_bytes", "reserved_bytes", "step_ms", "mfu", "exposed_gather_ms",
         "exposed_reduce_ms", "exposed_units", "slowest_rank", "slowest_behind_ms", "memory",
         "memory_over_step"}


def metrics(directory):
    with open(os.path.join(directory, "metrics.jsonl")) as file:
        return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in file]


def tensors(directory):
    """Type and hash of each whole tensor of the newest checkpoint."""
    steps = sorted(glob.glob(os.path.join(directory, "step-*[0-9]")))
    if not steps:
        sys.exit("no checkpoint in " + directory)
    slices = {}
    for path in glob.glob(os.path.join(steps[-1], "*.safetensors")):
        with open(path, "rb") as file:
            data = file.read()
        (size,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8:8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensor, first = re.fullmatch(r"(.*)\[(\d+):\d+\]", name).groups()
            slices.setdefault((tensor, entry["dtype"]), []).append((int(first), data[begin:end]))
    whole = []
    for (_, dtype), parts in slices.items():
        values = b"".join(part for _, part in sorted(parts))
        whole.append((dtype, len(values), hashlib.sha256(values).hexdigest()))
    return sorted(whole)


old, new = sys.argv[1:]
lines = list(zip(metrics(old), metrics(new)))
if not lines or len(metrics(old)) != len(metrics(new)):
    print(f"{len(metrics(old))} and {len(metrics(new))} lines of metrics")
for a, b in lines:
    if a != b:
        print(f"metrics of step {a.get('step')}: {a} and {b}")
        break
if tensors(old) != tensors(new):
    print(f"tensors of the checkpoint: {len(set(tensors(old)) ^ set(tensors(new)))} differ")
PYTHON

train() {  # program, directory, ranks, option ...
  local program=$1 dir=$2 ranks=$3
  shift 3
  local -a all=(--train.steps 4 --train.micro_batch 2 --train.log_every 1 --train.eval_batches 2
    --train.threads 1 --precision.param_dtype f32 --checkpoint.every_minutes 0 --output.dir "$dir")
  if [[ " $* " == *" --model.from "* ]]; then
    all+=(--data.tokens "$work/tokens.bin")
  else
    all+=(--model.kind llama --model.layers 4 --model.heads 4 --model.kv_heads 2 --model.width 32
      --model.context 32 --data.text "$work/text")
  fi
  all+=("$@")
  if [ "$(basename "$program")" = train_threads ]; then
    "$program" "$ranks" "${all[@]}" >"$dir.log" 2>&1
  elif [ "$ranks" = 1 ]; then
    "$program" "${all[@]}" >"$dir.log" 2>&1
  else
    run_mpi "$ranks" "$program" "${all[@]}" >"$dir.log" 2>&1
  fi
}

report() {  # name, text of what differs
  if [ -z "$2" ]; then
    echo "same    $1"
    num_same=$((num_same + 1))
  else
    echo "DIFFERS $1: $2"
    num_different=$((num_different + 1))
  fi
}

run() {  # name, ranks, option ...
  local name=$1 ranks=$2 build what=
  shift 2
  grep -qE -- "$pattern" <<<"$name" || return 0
  for build in old new; do
    if ! train "${!build}" "$work/$name.$build" "$ranks" "$@"; then
      what="the $build build ends with an error: $(tail -1 "$work/$name.$build.log")"
      break
    fi
  done
  [ -n "$what" ] || what=$(python3 "$work/compare.py" "$work/$name.old" "$work/$name.new" 2>&1)
  report "$name" "$what"
}

run_threads() {  # the same on ranks that are threads
  local old=$old_threads new=$new_threads
  if [ -x "$old" ] && [ -x "$new" ]; then
    run "$@"
  elif grep -qE -- "$pattern" <<<"$1"; then
    echo "not run $1: no test/train_threads in both builds"
  fi
}

accumulate="--train.grad_accum_steps 3"
bf16="--precision.param_dtype bf16"
f16="--precision.param_dtype f16 --precision.reduce_dtype f16 --precision.loss_scale_interval 2"
gpt2="--model.kind gpt2 --model.kv_heads 0"
# shellcheck disable=SC2086  # groups of options
{
  # strategies
  run one_rank 1
  run full_shard 4
  run full_shard_3 3
  run shard_grad_op 4 --fsdp.strategy shard_grad_op
  run shard_optim 4 --fsdp.strategy shard_optim
  run no_shard 4 --fsdp.strategy no_shard
  run hybrid_shard 4 --fsdp.strategy hybrid_shard --fsdp.shard_size 2
  run hybrid_shard_zero2 4 --fsdp.strategy hybrid_shard_zero2 --fsdp.shard_size 2
  run groups_of_2 4 --fsdp.reshard_after_forward 2
  # wraps and the depth of the ring
  run wrap_every_2 2 --fsdp.wrap every_n_blocks --fsdp.wrap_every 2 --fsdp.prefetch_forward 0
  run wrap_min_num_params 2 --fsdp.wrap min_num_params --fsdp.min_num_params 500
  run wrap_whole_model 2 --fsdp.wrap whole_model
  run prefetch_3_one_communicator 3 --fsdp.prefetch_forward 3 --fsdp.prefetch_backward 0 \
    --fsdp.communicators 1
  # accumulation
  run accumulate_true 2 $accumulate --fsdp.sync_every_micro_batch true
  run accumulate_false 2 $accumulate --fsdp.sync_every_micro_batch false
  run accumulate_hybrid_shard 4 $accumulate --fsdp.strategy hybrid_shard --fsdp.shard_size 2
  run accumulate_hybrid_true 4 $accumulate --fsdp.strategy hybrid_shard --fsdp.shard_size 2 \
    --fsdp.sync_every_micro_batch true
  run accumulate_one_rank 1 $accumulate
  # offload
  run offload_optimizer 2 --fsdp.offload optimizer
  run offload_all 2 $accumulate --fsdp.offload params_and_optimizer
  run offload_all_hybrid 4 --fsdp.strategy hybrid_shard --fsdp.shard_size 2 \
    --fsdp.offload params_and_optimizer
  run offload_all_one_rank 1 --fsdp.offload params_and_optimizer
  # recompute
  run recompute_full 2 --recompute.policy full
  run recompute_every_n 2 --recompute.policy every_n --recompute.every_n 2
  run recompute_selective 1 --recompute.policy selective
  # precision
  run bf16 2 $bf16
  run bf16_low_reduce 4 $bf16 --precision.reduce_dtype bf16 --precision.norm_fp32 true
  run bf16_wire 2 $bf16 --fsdp.wire_dtype bf16 --optim.stochastic_rounding true
  run f16_loss_scale 3 $f16 --precision.loss_scale_init 1048576
  run f32_low_wire 2 --precision.reduce_dtype bf16
  # models
  run gpt2_dropout 2 $gpt2 --model.dropout 0.1
  run gpt2_dropout_recompute_accumulate 2 $gpt2 $accumulate --model.dropout 0.1 \
    --recompute.policy full
  run untied 2 --model.tied false
  run untied_shard_optim 2 --model.tied false --fsdp.strategy shard_optim
  run ignored 2 --fsdp.ignored '*norm*'
  run bloom 2 --model.kind bloom --model.kv_heads 0
  # what else a step does
  run reproducible_1 1 --train.reproducible true --train.global_batch 8
  run reproducible_4 4 $bf16 --train.reproducible true --train.global_batch 16
  run checksums 4 --guard.state_checksum true --guard.replica_every 1 --fsdp.strategy hybrid_shard \
    --fsdp.shard_size 2
  run clip_inf 2 --optim.clip 0.05 --optim.clip_p inf
  # imported models
  run import_llama 2 --model.from "$here/golden/hf/llama2"
  run import_gpt2_one_rank 1 --model.from "$here/golden/hf/gpt2"
  run import_qwen3_bf16 4 $bf16 --model.from "$here/golden/hf/qwen3" --fsdp.strategy shard_grad_op
  # ranks that are threads
  run_threads threads_one_rank 1
  run_threads threads_full_shard 3
  run_threads threads_hybrid 4 $accumulate --fsdp.strategy hybrid_shard --fsdp.shard_size 2
  run_threads threads_shard_optim_bf16 2 $bf16 --fsdp.strategy shard_optim
  run_threads threads_offload_recompute 2 --fsdp.offload params_and_optimizer \
    --recompute.policy full
  run_threads threads_reproducible 4 --train.reproducible true --train.global_batch 16
}

# A new build goes on from what an old one has saved, on another number of ranks.
resume() {  # name, ranks before, ranks after, option ...
  local name=$1 before=$2 after=$3 build what=
  shift 3
  grep -qE -- "$pattern" <<<"$name" || return 0
  local -a global=(--train.micro_batch 1 --train.global_batch 8)
  train "$old" "$work/$name.first" "$before" "${global[@]}" "$@" ||
    what="the first part ends with an error: $(tail -1 "$work/$name.first.log")"
  for build in old new; do
    [ -z "$what" ] || break
    cp -r "$work/$name.first" "$work/$name.$build"
    train "${!build}" "$work/$name.$build" "$after" "${global[@]}" "$@" --train.steps 6 \
      --checkpoint.resume auto --checkpoint.resume_override true ||
      what="the $build build ends with an error: $(tail -1 "$work/$name.$build.log")"
  done
  [ -n "$what" ] || what=$(python3 "$work/compare.py" "$work/$name.old" "$work/$name.new" 2>&1)
  report "$name" "$what"
}
resume resume_4_on_2 4 2
resume resume_2_on_4_bf16 2 4 --precision.param_dtype bf16

echo "$num_same the same, $num_different differ"
[ "$num_different" = 0 ] && [ "$num_same" -gt 0 ]
