#!/bin/bash
# cases.sh DIR: every test that the table in DIR/README.md names exists, in the file it names.
set -u
cd "$1" || exit 1
failures=0
count=0
# "fsdp_cases `a` , `b`; comm_local `c`": a file holds for the names up to the next one.
while IFS='|' read -r _ case _ tests _; do
  [[ $case =~ [0-9] ]] || continue
  while read -r entry; do
    file=${entry%%\`*}
    file=${file%% *}
    file=${file%;}
    [ -n "$file" ] || continue
    [ -e "$file" ] || file=${file}_test.cc
    if [ ! -e "$file" ]; then
      echo "case$case: no file $file"
      failures=$((failures + 1))
      continue
    fi
    while read -r name; do
      count=$((count + 1))
      grep -qF -- "$name" "$file" || {
        echo "case$case: $file has no test $name"
        failures=$((failures + 1))
      }
    done < <(grep -oE '`[^`]+`' <<<"$entry" | tr -d '`')
  done < <(tr ';' '\n' <<<"$tests")
done <README.md
echo "$count tests named, $failures missing"
[ "$count" -gt 40 ] && [ "$failures" = 0 ]
