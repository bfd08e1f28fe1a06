#!/usr/bin/env bash
# Runs all tests: set-up, build, meson test. The last line is "N passed, N failed" (test cases); the
# exit status is 0 only if something ran and nothing failed. Arguments are options of meson setup.
set -uo pipefail
cd "$(dirname "$0")/.."

finish() {  # passed failed
  echo "$1 passed, $2 failed"
  [ "$1" -gt 0 ] && [ "$2" = 0 ]
  exit
}
# Whoever installed it may have left the tests out.
bash apps/setup.sh -Dtests=true "$@" || finish 0 1
ninja -C build || finish 0 1

if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
rm -f build/meson-logs/testlog.json
# Tests send SIGHUP, which is ignored under nohup.
env --default-signal=HUP meson test -C build --no-rebuild --print-errorlogs
python3 test/summarize.py build/meson-logs/testlog.json
