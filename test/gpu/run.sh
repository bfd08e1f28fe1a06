#!/usr/bin/env bash
# All that is to be known from a machine with one GPU, in at most 8 minutes: tests of the kernels,
# compute-sanitizer, times of kernels and of training steps on synthetic tokens. Of a bundle
# (bundle.sh) it needs nothing else but CUDA's libraries, which it looks for where the loader, the
# toolkit, conda and Python's wheels put them; the last lines, 48 at most, are a summary, in which
# each measured figure stands beside what was predicted of it and its goal.
# Usage: run.sh [OUT] with OUT a directory for logs (./gpu-report).
#   TESSERA_BIN      the programs' place
#   TESSERA_PREFIX   a directory to look for libraries in before all others
#   TESSERA_REHEARSE set: the smallest shapes, for a run over fakes (rehearse.sh)
# Exit status 0, or 1 if something failed, or 77 if there is no device.
set -uo pipefail
bin=${TESSERA_BIN:-$(cd "$(dirname "$0")" && pwd)/bin}
out=${1:-gpu-report}
mkdir -p "$out" || exit 1
start=$SECONDS
budget_s=470
export OMP_WAIT_POLICY=passive
failed=0
: >"$out/phases.txt"

# A phase: name, limit in seconds, log, command. What a phase may take ends with the budget.
phase() {
  local name=$1 limit=$2 log=$3 status left began=$SECONDS
  shift 3
  [ -z "${TESSERA_REHEARSE:-}" ] || limit=$((limit * 5))  # an emulator on a busy machine
  left=$((budget_s - (SECONDS - start)))
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    note "$name" "skipped: no time left"
    return 1
  fi
  echo "== $name: $*" >>"$log"
  timeout -k 5 "$limit" "$@" >>"$log" 2>&1
  status=$?
  case $status in
    0) note "$name" "ok, $((SECONDS - began)) s" ;;
    77) note "$name" "skipped: $(sed -n 's/.*skipped: //p' "$log" | tail -n 1)" ;;
    124 | 137)
      note "$name" "FAILED: not done within $limit s"
      failed=1
      ;;
    *)
      note "$name" "FAILED: exit status $status, $((SECONDS - began)) s"
      failed=1
      ;;
  esac
  return $status
}
note() {
  printf '%-25s %s\n' "$1" "$2" | tee -a "$out/phases.txt"
}

# ---- who computes

# Directories in which libraries of CUDA are found, the likeliest first.
library_dirs() {
  local root
  [ -z "${TESSERA_PREFIX:-}" ] || printf '%s\n' "$TESSERA_PREFIX" "$TESSERA_PREFIX"/lib{,64}
  tr : '\n' <<<"${LD_LIBRARY_PATH:-}"
  [ -z "${CONDA_PREFIX:-}" ] || echo "$CONDA_PREFIX/lib"
  for root in ${TESSERA_PREFIX:-} ${VIRTUAL_ENV:-} ${CONDA_PREFIX:-} "$HOME/.local" /usr/local /usr \
    /opt/* /root/.pyenv/versions/*; do
    printf '%s\n' "$root"/lib/python3*/{site,dist}-packages/nvidia/*/lib
  done
  printf '%s\n' /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib /usr/lib/x86_64-linux-gnu
}
# The newest file of that name in the first of these directories that has one.
find_library() {  # pattern of the file's name
  local dir
  library_dirs | while read -r dir; do
    [ -n "$dir" ] && [ -d "$dir" ] || continue
    find -L "$dir" -maxdepth 1 -name "$1" 2>/dev/null | sort -V | tail -n 1 | grep . && break
  done
}
# Names a library's file to the programs, unless the caller has, and says which it is.
locate() {  # what it computes, variable, pattern
  local file=${!2:-}
  if [ -z "$file" ]; then
    file=$(find_library "$3")
    [ -z "$file" ] || export "$2=$file"
  fi
  note "$1" "${file:-no $3 found: own kernels, unless the loader knows better}"
}
locate "GEMM: cuBLASLt" TESSERA_CUBLASLT 'libcublasLt.so.[0-9][0-9]'
locate "attention: cuDNN" TESSERA_CUDNN 'libcudnn.so.9'
locate "collectives: NCCL" TESSERA_NCCL 'libnccl.so.2'

if command -v nvidia-smi >/dev/null; then
  device=$(timeout 20 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader \
    2>/dev/null | head -n 1)
fi
note device "${device:-not named, since there is no nvidia-smi that runs}"

tests=$out/tests.log
: >"$tests"
phase "emulated and real PTX" 30 "$tests" "$bin/tessera-test-ptx"
phase "ops, training" 60 "$tests" "$bin/tessera-test-ops"
phase "kernels against cpu" 110 "$tests" "$bin/tessera-test-cuda"
has_device=$([ $? = 77 ] && echo no || echo yes)

# One shape of each kernel, in f32 and bf16; those of libraries are not ours to check. The tool is
# often not there, and may not attach to a device that others share: then all else goes on.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
checked=$out/sanitizer.log
: >"$checked"
no_sanitizer=""
if [ "$has_device" = yes ]; then
  if ! [ -x "$sanitizer" ]; then
    no_sanitizer="no compute-sanitizer"
  elif ! timeout -k 5 40 "$sanitizer" --tool memcheck --error-exitcode 9 "$bin/tessera-test-ptx" \
    >"$out/sanitizer-probe.log" 2>&1 && ! grep -q 'ERROR SUMMARY: [1-9]' "$out/sanitizer-probe.log"; then
    no_sanitizer="compute-sanitizer does not run here: $(grep -v '^$' "$out/sanitizer-probe.log" |
      tail -n 1 | cut -c 1-80)"
  fi
fi
sanitize() {  # tool, limit, filter, shapes
  local name="$1 ${3:-all} $4"
  if [ "$has_device" = no ]; then
    note "$name" "skipped: no device"
  elif [ -n "$no_sanitizer" ]; then
    note "$name" "skipped: $no_sanitizer"
  else
    phase "$name" "$2" "$checked" "$sanitizer" --tool "$1" --error-exitcode 9 \
      "$bin/tessera-bench-kernels" --device=cuda --shapes="$4" --runs=1 --json \
      --attention=own --gemm=own --filter="$3"
  fi
}
sanitize memcheck 60 "" odd
sanitize memcheck 15 attention gpt2
sanitize racecheck 25 attention odd
sanitize racecheck 20 attention gpt2
sanitize racecheck 25 norm odd
sanitize racecheck 15 sum odd

kernels=$out/kernels.jsonl
train=$out/train.jsonl
: >"$kernels"
: >"$train"
if [ "$has_device" = no ]; then
  for name in "kernel bench" "train 124M" "train 124M cudnn" "train 1558M"; do
    note "$name" "skipped: no device"
  done
else
  shapes=(--shapes=large --filter=/bf16/ --runs=10)
  [ -z "${TESSERA_REHEARSE:-}" ] || shapes=(--shapes=tiny --filter=norm --runs=1)
  phase "kernel bench" 100 "$kernels" "$bin/tessera-bench-kernels" --device=cuda "${shapes[@]}" --json
  train() {  # name, limit, sizes, more options
    local name=$1 limit=$2 sizes
    read -r -a sizes <<<"--context=1024 --steps=10 $3"
    [ -z "${TESSERA_REHEARSE:-}" ] || sizes=(--layers=1 --width=32 --heads=2 --context=16 --vocab=64
      --micro-batch=1 --steps=1)
    shift 3
    phase "$name" "$limit" "$train" "$bin/tessera-bench-train" --device=cuda --model=gpt2 \
      --dtype=bf16 --json "${sizes[@]}" "$@"
  }
  # What compares with the library's bare sequence needs the library; the figure of the model does not.
  if [ -n "${TESSERA_CUBLASLT:-}" ]; then
    train "train 124M" 45 --micro-batch=64 --gemm-sequence ||
      train "train 124M alone" 40 --micro-batch=64
  else
    train "train 124M" 45 --micro-batch=64
  fi
  if [ -n "${TESSERA_CUDNN:-}" ]; then
    train "train 124M cudnn" 40 --micro-batch=64 --attention=cudnn
  else
    note "train 124M cudnn" "skipped: no cuDNN"
  fi
  train "train 1558M" 60 "--layers=48 --heads=25 --width=1600 --micro-batch=16"
fi

# ---- summary

# One field of a JSON line, for awk.
field='function field(k) {
  if (!match($0, "\"" k "\":\"?[^,\"}]*")) return ""
  value = substr($0, RSTART + length(k) + 3, RLENGTH - length(k) - 3)
  sub(/^"/, "", value)
  return value
}'
# Lines of the kernel bench whose name begins so: time, the figure that matters, what was predicted
# of it without a device, and the goal. "memory": percent of the 4.8 TB/s that an H200's memory is
# specified to have.
of_kernels() {  # name, field or "memory", unit, prediction, goal
  awk -v name="$1" -v key="$2" -v unit="$3" -v prediction="$4" -v goal="$5" "$field"'
    index(field("bench"), name "/") == 1 {
      figure = key == "memory" ? field("gbytes_per_s") / 48 : field(key)
      beside = prediction == "" ? "" : "  (predicted " prediction
      beside = goal == "" ? beside : (beside == "" ? "  (" : beside ", ") "goal " goal
      if (beside != "") beside = beside ")"
      printf "%-52s %9.4f ms %8.1f %s%s\n", field("bench"), field("ms"), figure, unit, beside
    }' "$kernels"
}
# Forward and backward of attention together.
both_ways() {  # suffix, goal
  awk -v suffix="$1" -v goal="$2" "$field"'
    field("bench") ~ "^attention_(fwd|bwd)" suffix "/" {
      ms += field("ms"); flops += field("ms") * field("tflops"); ++count
    }
    END {
      name = "attention_fwd + bwd" suffix
      if (count == 2) printf "%-52s %9.4f ms %8.1f TFLOP/s%s\n", name, ms, flops / ms, goal
    }' "$kernels"
}
{
  [ "$has_device" = yes ] || device="no device"
  echo "==== summary: ${device:-a device without a name}, $((SECONDS - start)) s"
  grep -v '^device ' "$out/phases.txt"
  grep -h -E 'test cases:|All tests passed|ERROR SUMMARY|RACECHECK SUMMARY' "$tests" "$checked" |
    sort | uniq -c | head -n 5
  awk "$field"'field("bench") == "roofline" {
    printf "copy %.0f GB/s, bf16 GEMM %.0f TFLOP/s\n", field("gbytes_per_s"), field("bf16_tflops")
  }' "$kernels"
  of_kernels adamw_step memory "% of 4.8 TB/s" "76-84" 80
  of_kernels layer_norm_fwd memory "% of 4.8 TB/s" "62-72" 80
  of_kernels rms_norm_fwd memory "% of 4.8 TB/s" "70-80" 80
  of_kernels layer_norm_bwd memory "% of 4.8 TB/s" "50-62" 70
  of_kernels rms_norm_bwd memory "% of 4.8 TB/s" "58-68" 70
  of_kernels cross_entropy_fused memory "% of 4.8 TB/s" "60-68" 70
  of_kernels attention_fwd tflops TFLOP/s "310-345" 330
  of_kernels attention_fwd_cudnn tflops TFLOP/s "644" ""
  both_ways "" "  (predicted 205-235, goal 260)"
  both_ways _cudnn "  (predicted 541)"
  of_kernels linear_fwd tflops TFLOP/s "400-450" "" | head -n 2
  of_kernels linear_fwd_cublaslt tflops TFLOP/s "620-788" "" | head -n 2
  awk "$field"'field("bench") == "train" {
    printf "gpt2 %.0fM: %.0f tokens/s, %.1f ms a step, MFU %.1f %%; peak GiB (expected): ",
      field("parameters") / 1e6, field("tokens_per_s"), field("step_ms"), field("mfu_percent")
    printf "states %.2f (%.2f), activations %.2f (%.2f), allocator %.2f", field("states_gib"),
      field("expected_states_gib"), field("activations_gib"), field("expected_activations_gib"),
      field("allocator_peak_gib")
    millions = int(field("parameters") / 1e6 + 0.5)
    if (millions >= 120 && millions <= 130)
      printf "  (predicted 490000-545000 tokens/s, with cuDNN 520000-590000, goal 560000)"
    if (millions > 1500 && millions < 1600)
      printf "  (predicted 46000-54000 tokens/s, goal 57000)"
    printf "\n"
    if (field("gemm_sequence_ms") == "") next
    printf "  %d GEMMs of cuBLASLt alone %.1f ms, other kernels %.1f ms, overhead %.1f %%  (goal 5)\n",
      field("num_gemms"), field("gemm_sequence_ms"), field("other_kernels_ms"),
      field("overhead_percent")
  }' "$train"
} | head -n 48 | tee "$out/summary.txt"
[ "$has_device" = no ] && [ "$failed" = 0 ] && exit 77
exit "$failed"
