#!/usr/bin/env bash
# run.sh from its first line to its last where there is no device: in a bare root, which has a shell,
# the tools that the script calls and what these need, the programs over the fakes of test/simt (of
# tests a few that are quick), and CUDA's libraries where a Python wheel and a prefix put them; cuDNN
# and compute-sanitizer are not there.
# Usage: rehearse.sh RUN_SH LIBRARY EMULATOR_TEST NORM_TEST OPS_TEST BENCH_KERNELS BENCH_TRAIN
#   LIBRARY: any that can be opened
set -euo pipefail
if ! unshare -rm true 2>/dev/null; then
  echo "skipped: this machine gives no root of one's own (unshare)"
  exit 77
fi
run=$1 library=$2
shift 2
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
fail() {
  echo "rehearse.sh: $1"
  cat "$root/log" "$root"/report/*.log "$root"/report/*.jsonl 2>/dev/null
  exit 1
}
place() {  # file, where
  mkdir -p "$root$(dirname "$2")"
  cp -lL "$1" "$root$2" 2>/dev/null || cp -L "$1" "$root$2"
}

tools=(awk bash cat cut date dirname env find grep head mkdir sed sh sort tail tee timeout tr uniq wc)
for tool in "${tools[@]}"; do place "$(command -v "$tool")" "/usr/bin/$tool"; done
ln -s usr/bin "$root/bin"
stand_in() {  # name in the bundle, program, its arguments
  local file=$root/tessera-gpu/bin/$1
  place "$2" "/tessera-gpu/lib/$1"
  mkdir -p "$root/tessera-gpu/bin"
  printf '#!/bin/sh\nexec /tessera-gpu/lib/%s "%s"\n' "$1" "$3" >"$file"
  chmod +x "$file"
}
stand_in tessera-test-ptx "$1" "emulator: ldmatrix*"
stand_in tessera-test-cuda "$2" "simt norm: no rows*"
stand_in tessera-test-ops "$3" "device: products*"
place "$4" /tessera-gpu/bin/tessera-bench-kernels
place "$5" /tessera-gpu/bin/tessera-bench-train
place "$run" /tessera-gpu/run.sh
{ ldd "$root"/usr/bin/* "$root"/tessera-gpu/*/* 2>/dev/null || true; } | grep -o '/[^ :)]*\.so[^ :)]*' | sort -u |
  while read -r file; do place "$file" "$file"; done
wheel=/opt/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13
place "$library" "$wheel"
place "$library" /prefix/lib/libnccl.so.2
mkdir "$root/proc" "$root/dev" "$root/tmp"
touch "$root/dev/null"

# Sanitizers read /proc.
status=0
unshare -rm bash -c '
  mount --rbind /proc "$1/proc" && mount --bind /dev/null "$1/dev/null" &&
    exec "$(command -v chroot)" "$1" /usr/bin/env -i PATH=/usr/bin HOME=/root TESSERA_REHEARSE=1 \
      TESSERA_PREFIX=/prefix ASAN_OPTIONS=detect_leaks=0 bash /tessera-gpu/run.sh /report' \
  - "$root" >"$root/log" 2>&1 || status=$?
[ "$status" = 0 ] || fail "exit status $status, expected 0"
while read -r line; do
  grep -q -E -- "$line" "$root/report/summary.txt" || fail "no line '$line' in the summary"
done <<END
^==== summary: a device without a name, [0-9]+ s
^GEMM: cuBLASLt +$wheel
^attention: cuDNN +no libcudnn.so.9 found: own kernels
^collectives: NCCL +/prefix/lib/libnccl.so.2
^emulated and real PTX +ok,
^ops, training +ok,
^kernels against cpu +ok,
^memcheck all odd +skipped: no compute-sanitizer
^kernel bench +ok,
^train 124M +ok,
^train 124M cudnn +skipped: no cuDNN
^train 1558M +ok,
All tests passed
^copy [0-9]+ GB/s, bf16 GEMM [0-9]+ TFLOP/s
^layer_norm_fwd/bf16/64x64 +[0-9.]+ ms +[0-9.]+ % of 4.8 TB/s  \(predicted 62-72, goal 80\)
^rms_norm_bwd/bf16/64x64 +[0-9.]+ ms +[0-9.]+ % of 4.8 TB/s  \(predicted 58-68, goal 70\)
^gpt2 0M: [0-9]+ tokens/s, [0-9.]+ ms a step
^ +[1-9][0-9]* GEMMs of cuBLASLt alone
END
echo "$(wc -l <"$root/report/summary.txt") lines of summary in a bare root"
