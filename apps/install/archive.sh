#!/bin/sh
# One archive of the objects of several, which may be thin: archive.sh AR OUT IN...
set -e
ar=$1 out=$2
shift 2
{
  echo "CREATE $out"
  for archive; do echo "ADDLIB $archive"; done
  echo SAVE
} | "$ar" -M
