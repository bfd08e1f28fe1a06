#!/usr/bin/env bash
# Makes this machine ready to build: names and installs the Debian/Ubuntu packages that are missing
# (as root, or through sudo; asks nothing) and configures build/. With all packages in place it
# needs neither network nor root.
#   bash apps/setup.sh [meson option ...]        for example -Dsimd=portable
# Sources of a library are compiled eight at once, which a whole build needs a third of the time for;
# who changes them all day takes --unity=off.
set -euo pipefail
cd "$(dirname "$0")/.."

# Package and what tells that it is there, so that other ways of installing it count as well.
required=(
  "g++|command -v g++"
  "python3|command -v python3"
  "meson|command -v meson"
  "ninja-build|command -v ninja"
  "pkg-config|command -v pkg-config"
  "cmake|command -v cmake"
  "libfmt-dev|pkg-config --exists fmt"
  "libtomlplusplus-dev|pkg-config --exists tomlplusplus"
  "libcli11-dev|test -e /usr/include/CLI/CLI.hpp || pkg-config --exists CLI11"
  "nlohmann-json3-dev|pkg-config --exists nlohmann_json"
  "libpcre2-dev|pkg-config --exists libpcre2-8"
  "libxxhash-dev|pkg-config --exists libxxhash"
  "zlib1g-dev|pkg-config --exists zlib"
  "libzstd-dev|pkg-config --exists libzstd"
  "liblz4-dev|pkg-config --exists liblz4"
  "libsnappy-dev|test -e /usr/include/snappy.h"
  "catch2|pkg-config --exists catch2-with-main || pkg-config --exists catch2"
  "libdnnl-dev|echo '#include <dnnl.hpp>' | g++ -fsyntax-only -x c++ -"
  "libopenmpi-dev|command -v mpicxx"
  "openmpi-bin|command -v mpirun"
)
# What a step can do without: the sample text, and the tests of formatting and of the API reference.
optional=(
  "bible-kjv|command -v bible || test -x /usr/games/bible"
  "clang-format-14|command -v clang-format-14"
  "doxygen|command -v doxygen"
)

find_missing() {  # prints the package of each "package|check" whose check fails
  local entry
  for entry in "$@"; do
    bash -c "${entry#*|}" >/dev/null 2>&1 || echo "${entry%%|*}"
  done
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

updated=0
install_packages() {
  if [ "$updated" = 0 ]; then
    as_root apt-get -qq update || echo "setup: apt-get update failed; trying what is cached" >&2
    updated=1
  fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

mapfile -t missing < <(find_missing "${required[@]}")
mapfile -t wished < <(find_missing "${optional[@]}")
if [ ${#missing[@]} -gt 0 ] || [ ${#wished[@]} -gt 0 ]; then
  all="${missing[*]} ${wished[*]}"
  if ! command -v apt-get >/dev/null; then
    echo "setup: not a Debian or Ubuntu system; missing (by their Debian names): $all" >&2
  elif [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    echo "setup: missing packages; run: sudo apt-get install $all" >&2
  else
    echo "setup: installing missing packages: $all"
    if [ ${#missing[@]} -gt 0 ] && ! install_packages "${missing[@]}"; then
      echo "setup: could not install: ${missing[*]}" >&2
    fi
    for package in "${wished[@]}"; do
      install_packages "$package" || echo "setup: could not install $package; going on without" >&2
    done
  fi
fi
mapfile -t missing < <(find_missing "${required[@]}")
if [ ${#missing[@]} -gt 0 ]; then
  echo "setup: still missing: ${missing[*]}" >&2
  exit 1
fi

# A build directory that was moved with its checkout is of no use: its paths are absolute.
root_file=build/source-root
if [ -f build/build.ninja ] && [ "$(cat $root_file 2>/dev/null)" != "$PWD" ]; then
  echo "setup: build/ belongs to another source tree; configuring it again"
  rm -rf build
fi
if [ ! -f build/build.ninja ]; then
  if ! meson setup build --unity=on --unity-size=8 "$@"; then
    rm -f build/build.ninja
    exit 1
  fi
  echo "$PWD" >$root_file
elif [ $# -gt 0 ]; then
  meson configure build "$@"
fi
