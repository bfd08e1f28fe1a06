#!/usr/bin/env bash
# run.sh comes to its end where there is no device and says what it skipped; from what programs
# print it makes a summary. Usage: run_test.sh PROGRAM...
set -euo pipefail
run=$(cd "$(dirname "$0")" && pwd)/run.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "run_test.sh: $1"
  cat "$dir/log"
  exit 1
}
expect() {  # text of a line
  grep -q -E -- "$1" "$dir/out/summary.txt" || fail "no line '$1' in the summary"
}

mkdir "$dir/bin"
for program in "$@"; do ln -s "$(realpath "$program")" "$dir/bin/"; done
status=0
CUDA_VISIBLE_DEVICES='' TESSERA_BIN=$dir/bin bash "$run" "$dir/out" >"$dir/log" 2>&1 || status=$?
[ "$status" = 77 ] || fail "exit status $status, expected 77"
expect '^kernels against cpu +skipped: .*(driver|device)'
expect '^memcheck all odd +skipped: no device'
expect '^train 1558M +skipped: no device'

# Programs that print what those on a device would.
rm -r "$dir/bin" "$dir/out"
mkdir "$dir/bin"
program() {  # name, exit status; what it prints is read
  { echo '#!/bin/sh'; echo 'cat <<END'; cat; echo 'END'; echo "exit $2"; } >"$dir/bin/$1"
  chmod +x "$dir/bin/$1"
}
program tessera-test-ptx 0 <<<'All tests passed (24 assertions in 1 test case)'
program tessera-test-ops 1 <<<'test cases: 3 | 2 passed | 1 failed'
program tessera-test-cuda 0 <<<'All tests passed (9 assertions in 4 test cases)'
program tessera-bench-kernels 0 <<'JSON'
{"bench":"roofline","bf16_tflops":790.4,"device":"cuda:0","f32_tflops":50.0,"gbytes_per_s":4300.5}
{"bench":"attention_fwd/bf16/B2","bound":"compute","gbytes_per_s":9.0,"ms":2.0,"percent_of_roofline":44.0,"tflops":400.0}
{"bench":"attention_bwd/bf16/B2","bound":"compute","gbytes_per_s":9.0,"ms":6.0,"percent_of_roofline":44.0,"tflops":200.0}
{"bench":"attention_fwd_cudnn/bf16/B2","bound":"compute","gbytes_per_s":9.0,"ms":1.5,"percent_of_roofline":66.0,"tflops":533.3}
{"bench":"adamw_step/bf16/512","bound":"memory","gbytes_per_s":3600.0,"ms":4.0,"percent_of_roofline":83.7,"tflops":0.1}
JSON
program tessera-bench-train 0 <<'JSON'
{"activations_gib":10.0,"bench":"train","expected_activations_gib":9.9,"expected_states_gib":2.1,"gemm_sequence_ms":90.0,"mfu_percent":45.6,"num_gemms":99,"other_kernels_ms":44.0,"overhead_percent":4.5,"parameters":124000000.0,"states_gib":2.0,"step_ms":140.0,"tokens_per_s":468114.2}
JSON
status=0
TESSERA_BIN=$dir/bin bash "$run" "$dir/out" >"$dir/log" 2>&1 || status=$?
[ "$status" = 1 ] || fail "exit status $status, expected 1"
expect '^ops, training +FAILED: exit status 1'
expect '^copy 430[01] GB/s, bf16 GEMM 790 TFLOP/s'
expect '^attention_fwd/bf16/B2 +2.0000 ms +400.0 TFLOP/s  \(predicted 310-345, goal 330\)'
expect '^attention_fwd \+ bwd +8.0000 ms +250.0 TFLOP/s  \(predicted 205-235, goal 260\)'
expect '^attention_fwd_cudnn/bf16/B2 +1.5000 ms +533.3 TFLOP/s  \(predicted 644\)'
expect '^adamw_step/bf16/512 +4.0000 ms +75.0 % of 4.8 TB/s  \(predicted 76-84, goal 80\)'
expect '^gpt2 124M: 468114 tokens/s, 140.0 ms a step, MFU 45.6 %; .* states 2.00 \(2.10\).*goal 560000\)'
expect '^  99 GEMMs of cuBLASLt alone 90.0 ms, other kernels 44.0 ms, overhead 4.5 %  \(goal 5\)'
[ "$(wc -l <"$dir/out/summary.txt")" -le 48 ] || fail "a summary of more than 48 lines"

# Libraries of wheels and of a prefix are found, and named to the programs; a sanitizer that may not
# attach is no failure; without cuBLASLt the figure of the model is measured all the same.
wheels=$dir/venv/lib/python3.11/site-packages/nvidia
mkdir -p "$wheels/cu13/lib" "$wheels/cudnn/lib" "$dir/prefix/lib"
touch "$wheels/cu13/lib/libcublasLt.so.13" "$wheels/cudnn/lib/libcudnn.so.9" \
  "$dir/prefix/lib/libnccl.so.2"
program tessera-test-ops 0 <<<'All tests passed (3 assertions in 1 test case)'
{
  echo '#!/bin/sh'
  echo 'echo "{\"bench\":\"who\",\"file\":\"$TESSERA_CUBLASLT $TESSERA_CUDNN $TESSERA_NCCL\"}"'
} >"$dir/bin/tessera-bench-train"
{ echo '#!/bin/sh'; echo 'echo "========= Error: unable to attach"; exit 9'; } >"$dir/bin/compute-sanitizer"
chmod +x "$dir/bin/compute-sanitizer"
status=0
VIRTUAL_ENV=$dir/venv TESSERA_PREFIX=$dir/prefix LD_LIBRARY_PATH='' PATH=$dir/bin:$PATH \
  TESSERA_BIN=$dir/bin bash "$run" "$dir/out" >"$dir/log" 2>&1 || status=$?
[ "$status" = 0 ] || fail "exit status $status, expected 0"
expect "^GEMM: cuBLASLt +$wheels/cu13/lib/libcublasLt.so.13"
expect "^attention: cuDNN +$wheels/cudnn/lib/libcudnn.so.9"
expect "^collectives: NCCL +$dir/prefix/lib/libnccl.so.2"
expect '^memcheck all odd +skipped: compute-sanitizer does not run here: .*unable to attach'
grep -q "$wheels/cu13/lib/libcublasLt.so.13 $wheels/cudnn/lib/libcudnn.so.9 $dir/prefix/lib/libnccl.so.2" \
  "$dir/out/train.jsonl" || fail "the programs are not told of the libraries"
