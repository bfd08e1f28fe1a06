#!/bin/bash
# libfuzzer.sh ROOT TARGET [LIBFUZZER_OPTION...]: builds one target (safetensors, manifest, hf_config,
# token_shard) with clang's libFuzzer, AddressSanitizer and UBSan, and runs it from the corpus in
# test/fuzz/corpus. For example: test/fuzz/libfuzzer.sh . manifest -max_total_time=600
set -euo pipefail
root=$(cd "$1" && pwd)
target=$2
shift 2
build=${TESSERA_FUZZ_BUILD:-/tmp/tessera-fuzz}
mkdir -p "$build/corpus-$target"
sources=(test/fuzz/libfuzzer.cc test/fuzz/targets.cc apps/data.cc apps/tokenizer.cc
  core/check.cc core/dtype.cc core/fault_guard.cc core/files.cc core/log.cc core/random.cc
  core/shape.cc core/text.cc
  dist/checkpoint/durable_file.cc dist/checkpoint/hf_config.cc dist/checkpoint/manifest.cc dist/checkpoint/safetensors.cc
  dist/checkpoint/strict_json.cc)
cd "$root"
# What the parsers do not call of their neighbours (models are made in the same file) is not there.
clang++ -std=c++20 -g -O1 -mf16c -fsanitize=fuzzer,address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -no-pie \
  -I. -DTESSERA_FUZZ_TARGET="\"$target\"" "${sources[@]}" -Wl,--unresolved-symbols=ignore-all -lfmt -lxxhash \
  -o "$build/$target"
seeds="test/fuzz/corpus/$target"
exec "$build/$target" "$build/corpus-$target" $([ -d "$seeds" ] && echo "$seeds") -max_len=20000 \
  -timeout=10 -malloc_limit_mb=64 "$@"
