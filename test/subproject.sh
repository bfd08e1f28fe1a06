#!/usr/bin/env bash
# A project that has this one as a subproject: configured, its program compiled against
# dependency('tessera'), and, where nvcc is, one CUDA source: include paths are this project's.
# Usage: subproject.sh SOURCE_ROOT CUDA(enabled|disabled)
set -euo pipefail
root=$1 cuda=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/subprojects"
ln -s "$root" "$dir/subprojects/tessera"
cat >"$dir/meson.build" <<'END'
project('outer', 'cpp', default_options: ['cpp_std=c++20', 'warning_level=3', 'werror=true'])
executable('outer', 'outer.cc', dependencies: dependency('tessera', fallback: 'tessera'))
END
mkdir "$dir/core"  # of its own
echo 'struct Tensor { int own = 0; };' >"$dir/core/tensor.h"
cat >"$dir/outer.cc" <<'END'
#include <tessera/core/autograd.h>
#include <tessera/dist/fsdp/fully_shard.h>
#include <tessera/kernels/pointwise/pointwise.h>
#include "core/tensor.h"
int main() {
  const auto x = tessera::full({2}, 3).set_requires_grad(true);
  tessera::backward(x * x / 2, tessera::full({2}, 1));
  return x.grad().item() == 3 ? Tensor{}.own : 1;
}
END
unset NINJA_STATUS
meson setup "$dir/build" "$dir" -Dtessera:cuda="$cuda" -Dtessera:gpu_arch=90 \
  -Dtessera:simd=portable >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }
ninja -C "$dir/build" outer.p/outer.cc.o
# What it includes is made for it in the build.
ninja -C "$dir/build" -t deps outer.p/outer.cc.o >"$dir/deps"  # a pipe that grep closes would fail it
grep -q "tessera/core/autograd.h" "$dir/deps" ||
  { echo "subproject: the program does not depend on <tessera/core/autograd.h>" >&2; exit 1; }
if ninja -C "$dir/build" -t targets all | grep -E "tessera-train|tessera_testing"; then
  echo "subproject: the programs and tests of the subproject are built by the outer project" >&2
  exit 1
fi
[ "$cuda" = enabled ] || { echo "without nvcc: no CUDA source was compiled"; exit 0; }
ninja -C "$dir/build" subprojects/tessera/core/elementary_cuda.o
