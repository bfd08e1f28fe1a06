#!/usr/bin/env bash
# Packs what a machine with one GPU and nothing but CUDA needs to run test/gpu/run.sh: the programs,
# built for compute capability 9.0 and any x86-64-v3 processor, and the shared libraries they need.
# Usage: bundle.sh OUT.tar.gz [options of meson setup]   (TESSERA_BUILD: the build directory)
# There: tar xzf OUT.tar.gz && bash tessera-gpu/run.sh
set -euo pipefail
out=$(realpath -m "${1:?usage: bundle.sh OUT.tar.gz [options of meson setup]}")
shift
cd "$(dirname "$0")/../.."
build=${TESSERA_BUILD:-build-gpu}
max_mib=60
programs=(test/cuda/tessera-test-cuda test/cuda/tessera-test-ops test/cuda/tessera-test-ptx
  apps/tessera-bench-kernels apps/tessera-bench-train)

# Libraries are looked for beside the programs first, those of libraries as well.
settings=(-Dmpi=disabled -Dcuda=enabled -Dgpu_arch=90 -Dsimd=portable
  '-Dcpp_link_args=-Wl,-rpath,$ORIGIN/../lib,--disable-new-dtags' "$@")
if [ -f "$build/build.ninja" ]; then
  meson configure "$build" "${settings[@]}"
else
  meson setup "$build" "${settings[@]}"
fi
ninja -C "$build" "${programs[@]}"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/tessera-gpu
mkdir -p "$root/bin" "$root/lib"
for program in "${programs[@]}"; do
  strip -o "$root/bin/$(basename "$program")" "$build/$program"
done
cp test/gpu/run.sh "$root/"
# All but the C library and the driver, which are the machine's.
ldd "$root"/bin/* | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  grep -v -E '^(libc|libm|libdl|librt|libpthread|libresolv|libcuda)\.so' |
  while read -r name path; do
    strip -o "$root/lib/$name" "$(realpath "$path")"
  done
tar -C "$stage" -czf "$out" tessera-gpu
size=$(stat -c %s "$out")
(cd "$root" && du -k -- bin/* lib/* | sort -rn)
echo "$out: $((size >> 20)) MiB"
if [ "$size" -gt $((max_mib << 20)) ]; then
  echo "bundle.sh: $out has $size bytes, expected at most $max_mib MiB" >&2
  exit 1
fi
