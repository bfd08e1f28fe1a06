#!/bin/bash
# cases.sh DIR: every test that the tables in DIR/README.md name exists, in the file it names (also
# ../apps/FILE), and every case has a row.
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
    [ -f "$file" ] || file=${file}_test.cc
    if [ ! -f "$file" ]; then
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
for case in 1 2 4 5 6 8 9 {10..14} 16 19 20 22 {24..27} 30 32 {34..38} 40 \
  F{1,2,3,4,5,7,8,9,10,11,12,14,15,16,17,18,19,20,24} F{26..35} F37 F38 F{41..43}; do
  grep -qE "^\| ([^|]*, )?$case(,[^|]*)? \|" README.md || {
    echo "case $case has no row"
    failures=$((failures + 1))
  }
done
echo "$count tests named, $failures missing"
[ "$count" -gt 130 ] && [ "$failures" = 0 ]
