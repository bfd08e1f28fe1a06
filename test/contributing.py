#!/usr/bin/env python3
"""Paths in CONTRIBUTING.md exist, and the walks find what they look for: contributing.py ROOT"""
import os
import re
import sys


def main():
    root = sys.argv[1]
    text = open(os.path.join(root, "CONTRIBUTING.md"), encoding="utf-8").read()
    failures = []
    paths = set(re.findall(r"`((?:apps|core|dist|kernels|nn|optim|test)/[\w./]*)", text))
    for path in sorted(paths):
        if not os.path.exists(os.path.join(root, path)):
            failures.append("there is no %s" % path)
    walks = re.findall(r"^\|[^|]*\| `([\w./]+)` \| `([^`]+)` \|$", text, re.MULTILINE)
    for path, symbol in walks:
        full = os.path.join(root, path)
        if os.path.exists(full) and symbol not in open(full, encoding="utf-8").read():
            failures.append("%s has no %s" % (path, symbol))
    if len(paths) < 30 or len(walks) < 10:
        failures.append("%d paths and %d steps of walks, expected at least 30 and 10" %
                        (len(paths), len(walks)))
    with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
        num_lines = len(file.readlines())
    if num_lines > 150:
        failures.append("README.md: %d lines, expected at most 150 of a front page" % num_lines)
    for failure in failures:
        print(failure)
    print("%d paths, %d steps, %d failures" % (len(paths), len(walks), len(failures)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
