#!/bin/bash
# assertions.sh TEST_DIR: tests take Catch2 through test/testing.h alone, whose assertions may be
# used on any thread ([Note: Assertions on several threads]), and use none of the macros that it
# does not make again.
set -u
cd "$1" || exit 1
failures=0
fail() {
  echo "$1"
  failures=1
}
for file in $(grep -rlE '#include <catch2/' --include='*.cc' --include='*.h' .); do
  case $file in
  ./testing.h | ./main.cc | ./cuda/main.cc) ;;
  *) fail "$file includes Catch2 itself, expected \"test/testing.h\"" ;;
  esac
done
made=$(sed -n 's/^#define \([A-Z_]*\)(.*/\1/p' testing.h | grep -vE '^TESSERA_')
for macro in $(grep -rhoE '\b(CHECK|REQUIRE|INFO|UNSCOPED_INFO|CAPTURE|FAIL|WARN|SUCCEED)(_[A-Z_]+)?\(' \
  --include='*.cc' --include='*.h' . | tr -d '(' | sort -u); do
  grep -qx "$macro" <<<"$made" || fail "$macro is not made again in testing.h"
done
exit $failures
