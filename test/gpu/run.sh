#!/usr/bin/env bash
# All that is to be known from a machine with one GPU, in at most 8 minutes: tests of the kernels,
# compute-sanitizer, times of kernels and of training steps on synthetic tokens. Of a bundle
# (bundle.sh) it needs nothing else but CUDA; the last lines, 40 at most, are a summary.
# Usage: run.sh [OUT] with OUT a directory for logs (./gpu-report). TESSERA_BIN: the programs' place.
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

if command -v nvidia-smi >/dev/null; then
  device=$(timeout 20 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader \
    2>/dev/null | head -n 1)
fi
note device "${device:-none}"

tests=$out/tests.log
: >"$tests"
phase "emulated and real PTX" 30 "$tests" "$bin/tessera-test-ptx"
phase "ops, training" 60 "$tests" "$bin/tessera-test-ops"
phase "kernels against cpu" 110 "$tests" "$bin/tessera-test-cuda"
has_device=$([ $? = 77 ] && echo no || echo yes)

# One shape of each kernel, in f32 and bf16; those of libraries are not ours to check.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
checked=$out/sanitizer.log
: >"$checked"
sanitize() {  # tool, limit, filter, shapes
  local name="$1 ${3:-all} $4"
  if [ "$has_device" = no ]; then
    note "$name" "skipped: no device"
  elif ! [ -x "$sanitizer" ]; then
    note "$name" "skipped: no compute-sanitizer"
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
  phase "kernel bench" 100 "$kernels" "$bin/tessera-bench-kernels" --device=cuda --shapes=large \
    --filter=/bf16/ --runs=10 --json
  train() {  # name, limit, options
    local name=$1 limit=$2
    shift 2
    phase "$name" "$limit" "$train" "$bin/tessera-bench-train" --device=cuda --model=gpt2 \
      --dtype=bf16 --context=1024 --steps=10 --json "$@"
  }
  train "train 124M" 45 --micro-batch=64 --gemm-sequence
  train "train 124M cudnn" 40 --micro-batch=64 --attention=cudnn
  train "train 1558M" 60 --layers=48 --heads=25 --width=1600 --micro-batch=16
fi

# ---- summary

# One field of a JSON line, for awk.
field='function field(k) {
  if (!match($0, "\"" k "\":\"?[^,\"}]*")) return ""
  value = substr($0, RSTART + length(k) + 3, RLENGTH - length(k) - 3)
  sub(/^"/, "", value)
  return value
}'
# Lines of the kernel bench whose name begins so, with the field that matters.
of_kernels() {  # name, field, unit, goal
  awk -v name="$1" -v key="$2" -v unit="$3" -v goal="$4" "$field"'
    index(field("bench"), name "/") == 1 {
      printf "%-52s %9.4f ms %8.1f %s%s\n", field("bench"), field("ms"), field(key), unit, goal
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
  echo "==== summary: ${device:-no device}, $((SECONDS - start)) s"
  grep -v '^device ' "$out/phases.txt"
  grep -h -E 'test cases:|All tests passed|ERROR SUMMARY|RACECHECK SUMMARY' "$tests" "$checked" |
    sort | uniq -c | head -n 5
  awk "$field"'field("bench") == "roofline" {
    printf "copy %.0f GB/s, bf16 products %.0f TFLOP/s\n", field("gbytes_per_s"), field("bf16_tflops")
  }' "$kernels"
  of_kernels adamw_step percent_of_roofline "% of the copy" "  (goal 80)"
  of_kernels layer_norm_fwd percent_of_roofline "% of the copy" "  (goal 80)"
  of_kernels rms_norm_fwd percent_of_roofline "% of the copy" "  (goal 80)"
  of_kernels layer_norm_bwd percent_of_roofline "% of the copy" "  (goal 70)"
  of_kernels rms_norm_bwd percent_of_roofline "% of the copy" "  (goal 70)"
  of_kernels cross_entropy_fused percent_of_roofline "% of the copy" "  (goal 70)"
  of_kernels attention_fwd tflops TFLOP/s "  (goal 330)"
  of_kernels attention_fwd_cudnn tflops TFLOP/s ""
  both_ways "" "  (goal 260)"
  both_ways _cudnn ""
  of_kernels linear_fwd tflops TFLOP/s "" | head -n 2
  of_kernels linear_fwd_cublaslt tflops TFLOP/s "" | head -n 2
  awk "$field"'field("bench") == "train" {
    printf "gpt2 %.0fM: %.0f tokens/s, %.1f ms a step, MFU %.1f %%; peak GiB (expected): ",
      field("parameters") / 1e6, field("tokens_per_s"), field("step_ms"), field("mfu_percent")
    printf "states %.2f (%.2f), activations %.2f (%.2f), allocator %.2f\n", field("states_gib"),
      field("expected_states_gib"), field("activations_gib"), field("expected_activations_gib"),
      field("allocator_peak_gib")
    if (field("gemm_sequence_ms") == "") next
    printf "  %d products of cuBLASLt alone %.1f ms, other kernels %.1f ms, overhead %.1f %%  (goal 5)\n",
      field("num_gemms"), field("gemm_sequence_ms"), field("other_kernels_ms"),
      field("overhead_percent")
  }' "$train"
  if [ "$has_device" = yes ]; then
    echo "goals: 124M 458000 tokens/s, then 560000; 1558M 48500, then 57000"
  fi
} | head -n 40 | tee "$out/summary.txt"
[ "$has_device" = no ] && [ "$failed" = 0 ] && exit 77
exit "$failed"
