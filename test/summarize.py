"""Counts what `meson test` ran: summarize.py testlog.json

A Catch2 program counts by its test cases, any other test as one. The last line printed is
"N passed, N failed"; the exit status is 0 only if something passed and nothing failed.
"""

import json
import re
import sys

ALL_PASSED = re.compile(r"All tests passed \(.* in (\d+) test cases?\)")
TEST_CASES = re.compile(r"test cases: *(\d+)((?: *\| *\d+ [a-z ]+)*)")
NO_TESTS = "No tests ran"


def count(test):
    """(passed, failed, skipped) test cases of one entry of the log."""
    output = test.get("stdout") or ""
    good = test["result"] in ("OK", "EXPECTEDFAIL")
    passed = failed = skipped = 0
    # Several ranks of one launch print the same summary: the first one counts.
    if match := ALL_PASSED.search(output):
        passed = int(match[1])
    elif match := TEST_CASES.search(output):
        kinds = {kind.strip(): int(number)
                 for number, kind in re.findall(r"(\d+) ([a-z ]+)", match[2])}
        failed = kinds.get("failed", 0)
        skipped = kinds.get("skipped", 0)
        passed = kinds.get("passed", int(match[1]) - failed - skipped)
    elif test["result"] == "SKIP":
        skipped = 1
    elif good and NO_TESTS not in output:
        passed = 1
    # A crash, a time-out or a failing rank is a failure whatever was printed before.
    if test["result"] != "SKIP" and not good and failed == 0:
        failed = 1
    return passed, failed, skipped


def main():
    total = [0, 0, 0]
    try:
        with open(sys.argv[1], encoding="utf-8") as log:
            tests = [json.loads(line) for line in log if line.strip()]
    except OSError as error:
        print(f"summarize: {error}")
        tests = []
    for test in tests:
        counts = count(test)
        total = [a + b for a, b in zip(total, counts)]
        if counts[1]:
            print(f"failed: {test['name']} ({test['result']})")
        if counts[2]:
            print(f"skipped: {test['name']}")
    if total[2]:
        print(f"{total[2]} skipped")
    print(f"{total[0]} passed, {total[1]} failed")
    return 0 if total[0] > 0 and total[1] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
