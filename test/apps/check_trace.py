#!/usr/bin/env python3
"""Checks a timeline of several ranks: a name for each row, spans that nest in their row, memory, and
collectives that no rank ends before another has begun them.

    check_trace.py FILE NUM_RANKS FIRST_STEP LAST_STEP
"""
import collections
import json
import sys

# Ranks of one machine read one clock; that a rank is told of the other's end takes no time back.
TOLERANCE_US = 50


def check_rows(events, fail):
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events
             if e["ph"] == "M" and e["name"] == "thread_name"}
    rows = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            if event["dur"] < 0 or event["ts"] < 0:
                fail("a span before its begin: %s" % event)
            rows[event["pid"], event["tid"]].append(event)
    for row, spans in rows.items():
        if row not in names:
            fail("row %s has no name" % (row,))
        if len({(e["ts"], e["dur"], e["name"]) for e in spans}) != len(spans):
            fail("a span of row %s is there twice" % names.get(row))
        ends = []
        for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while ends and ends[-1] <= begin + 0.0015:  # a digit of rounding
                ends.pop()
            if ends and end > ends[-1] + 0.0015:
                fail("%s of row %s ends after the span around it" % (event["name"], names.get(row)))
            ends.append(end)
    return {(pid, name): rows[pid, tid] for (pid, tid), name in names.items()}


def check_collectives(rows, num_ranks, fail):
    count = 0
    for stream in ("all_gather", "reduce_scatter"):
        of_rank = []
        for rank in range(num_ranks):
            named = collections.defaultdict(list)
            for event in sorted(rows.get((rank, stream), []), key=lambda e: e["ts"]):
                if event["name"].split()[0] in ("all_gather", "reduce_scatter"):
                    named[event["name"]].append(event)
            of_rank.append(named)
        for name, mine in of_rank[0].items():
            for theirs in (named.get(name, []) for named in of_rank[1:]):
                if len(theirs) != len(mine):
                    fail("%d of %s on rank 0, %d on another" % (len(mine), name, len(theirs)))
                for a, b in zip(mine, theirs):
                    count += 1
                    apart = max(a["ts"] - b["ts"] - b["dur"], b["ts"] - a["ts"] - a["dur"])
                    if apart > TOLERANCE_US:
                        fail("%s of two ranks is %.0f us apart" % (name, apart))
    if num_ranks > 1 and count == 0:
        fail("no collective")


def main():
    path, num_ranks, first, last = sys.argv[1], *map(int, sys.argv[2:5])
    failures = []
    with open(path) as file:
        events = json.load(file)
    if {e["pid"] for e in events} != set(range(num_ranks)):
        failures.append("processes %s" % {e["pid"] for e in events})
    rows = check_rows(events, failures.append)
    check_collectives(rows, num_ranks, failures.append)
    for rank in range(num_ranks):
        for name in ("compute", "host", "steps of compute"):
            if not rows.get((rank, name)):
                failures.append("rank %d has nothing in row %s" % (rank, name))
        steps = [e["name"] for e in rows.get((rank, "steps of compute"), [])]
        expected = ["step %d" % s for s in range(first, last + 1)]
        if sorted(s for s in steps if s.startswith("step ")) != sorted(expected):
            failures.append("rank %d: steps %s" % (rank, steps))
        for phase in ("forward", "backward", "optimizer"):
            if steps.count(phase) < len(expected):
                failures.append("rank %d: %d times %s" % (rank, steps.count(phase), phase))
        memory = [e for e in events if e["ph"] == "C" and e["pid"] == rank]
        if not memory or not all({"parameters", "activations"} <= set(e["args"]) for e in memory):
            failures.append("rank %d: no memory by class" % rank)
    tasks = [e for e in events if e["ph"] == "X" and "op" in e.get("args", {})]
    if not any(e["args"].get("shapes") and e["args"].get("module") and e["args"].get("unit")
               for e in tasks):
        failures.append("no task with shapes, module and unit")
    for failure in failures[:10]:
        print("check_trace: " + failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
