#!/usr/bin/env bash
# Every source file is as .clang-format (version 14) would have it. Usage: format.sh ROOT
# Without that program the test is skipped (exit status 77) and says so.
set -euo pipefail
cd "$1"

tool=""
for candidate in clang-format-14 clang-format; do
  if command -v $candidate >/dev/null && $candidate --version | grep -q 'version 14\.'; then
    tool=$candidate
    break
  fi
done
if [ -z "$tool" ]; then
  echo "skipped: clang-format 14 is not installed"
  exit 77
fi

if printf 'int  x ;\n' | $tool --dry-run -Werror --assume-filename=core/x.cc 2>/dev/null; then
  echo "clang-format does not find a planted fault"
  exit 1
fi
find core kernels nn optim dist apps test \
  \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 $tool --dry-run -Werror
