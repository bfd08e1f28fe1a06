#!/bin/bash
# libfuzzer.sh ROOT TARGET [LIBFUZZER_OPTION...]: builds one target (safetensors, manifest, hf_config,
# token_shard, tokenizer, merges, ranks, run, config, parquet, json_line, jinja, chat) with clang's libFuzzer, AddressSanitizer and UBSan, and runs it from the corpus in
# test/fuzz/corpus with the target's dictionary. For example: test/fuzz/libfuzzer.sh . manifest -max_total_time=600
set -euo pipefail
root=$(cd "$1" && pwd)
target=$2
shift 2
build=${TESSERA_FUZZ_BUILD:-/tmp/tessera-fuzz}
mkdir -p "$build/corpus-$target" "$build/seeds-$target"
sources=(test/fuzz/libfuzzer.cc test/fuzz/targets.cc test/fuzz/data_targets.cc test/fuzz/chat_targets.cc core/formats/parquet/*.cc
  apps/data/byte_stream.cc apps/data/json_line.cc apps/data/parquet_files.cc apps/data/row_assembler.cc core/utf8.cc
  apps/packed_samples.cc apps/data/documents.cc apps/data/packing.cc apps/data/permutation.cc apps/data/text_files.cc
  apps/config.cc apps/config_parse.cc apps/config_table.cc core/settings.cc apps/data.cc apps/model_from.cc
  apps/encode_documents.cc apps/parameter_groups.cc apps/run_dir.cc apps/text/*.cc apps/text/jinja/*.cc apps/chats.cc core/fatal_signals.cc core/runtime/allocator.cc
  dist/checkpoint/hf_files.cc dist/checkpoint/huggingface.cc
  core/check.cc core/dtype.cc core/fault_guard.cc core/files.cc core/log.cc core/random.cc
  core/shape.cc core/text.cc
  core/formats/durable_file.cc core/formats/parameters.cc core/formats/safetensors.cc core/formats/strict_json.cc
  dist/checkpoint/manifest.cc nn/family.cc nn/hf/config.cc nn/hf/keys.cc nn/hf/parameters.cc)
cd "$root"
families=
for file in nn/*/family.cc; do
  sources+=("$file")
  families+=" F($(basename "$(dirname "$file")"))"
done
# What the parsers do not call of their neighbours, such as models, is not there.
clang++ -std=c++20 -g -O1 -march=x86-64-v3 -fsanitize=fuzzer,address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -no-pie \
  -I. "-DTESSERA_FAMILIES(F)=$families" -DTESSERA_FUZZ_TARGET="\"$target\"" "${sources[@]}" $(pkg-config --cflags --libs tomlplusplus) -Wl,--unresolved-symbols=ignore-all -lfmt -lxxhash -lz -lzstd -lsnappy -llz4 -lpcre2-8 \
  -o "$build/$target"
TESSERA_FUZZ_DICTIONARY="$build/$target.dict" TESSERA_FUZZ_SEEDS="$build/seeds-$target" "$build/$target"
seeds="test/fuzz/corpus/$target"
exec "$build/$target" "$build/corpus-$target" "$build/seeds-$target" $([ -d "$seeds" ] && echo "$seeds") -max_len=20000 -dict="$build/$target.dict" \
  -timeout=10 -malloc_limit_mb=64 "$@"
