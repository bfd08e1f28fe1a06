#!/usr/bin/env python3
"""What TensorBoard (PyPI) reads of a run's event files, beside its metrics.jsonl.

    event_files.py RUN

RUN is the output.dir of a run with output.tensorboard. Every number of every line must be under its
tag and step, as f32, and nothing else: by TensorBoard's Python reader and by its data server, which
read the files each in its own way. Of a step that came twice (a rewind) the last one counts.
"""
import argparse
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

GROUPS = {"loss": "loss/train", "val_loss": "loss/validation", "grad_norm": "optimizer/grad_norm", "lr": "optimizer/lr",
          "loss_scale": "optimizer/loss_scale", "skipped": "optimizer/skipped",
          "tokens_per_second": "speed/tokens_per_second", "step_ms": "speed/step_ms", "tokens": "speed/tokens",
          "mfu": "speed/mfu", "peak_bytes": "memory/peak_bytes", "reserved_bytes": "memory/reserved_bytes",
          "exposed_gather_ms": "exposed/gather_ms", "exposed_reduce_ms": "exposed/reduce_ms",
          "slowest_rank": "slow_ranks/slowest_rank", "slowest_behind_ms": "slow_ranks/behind_ms",
          "chosen": "preference/chosen", "rejected": "preference/rejected", "margin": "preference/margin",
          "accuracy": "preference/accuracy"}


def tag_of(key):
    for prefix, group in (("val_", "validation/"), ("eval.", "eval/")):
        if key not in GROUPS and key.startswith(prefix):
            return group + key[len(prefix):]
    return GROUPS.get(key, "run/" + key)


def f32(value):
    return math.nan if value is None else struct.unpack("f", struct.pack("f", value))[0]


def numbers(tag, value):
    if isinstance(value, dict):
        for key, member in value.items():
            yield from numbers(f"{tag}/{key}", member)
    elif isinstance(value, list):
        for element in value:
            if isinstance(element, dict) and "unit" in element:
                yield from numbers(f"{tag}/{element['unit']}", {k: v for k, v in element.items() if k != "unit"})
    elif not isinstance(value, (str, bool)):
        yield tag, f32(value)


def expected_scalars(run):
    tags, last = {}, 0
    with open(os.path.join(run, "metrics.jsonl")) as file:
        for line in map(json.loads, file):
            step = line.pop("step")
            for steps in tags.values() if step <= last else ():
                for later in [s for s in steps if s >= step]:
                    del steps[later]
            last = step
            line.pop("memory_over_step", None)  # no number
            for key, value in line.items():
                name = key if isinstance(value, (dict, list)) else tag_of(key)
                for tag, number in numbers(name, value):
                    tags.setdefault(tag, {})[step] = number
    return tags


def python_scalars(run):
    events = EventAccumulator(run, size_guidance={"tensors": 0},
                              tensor_size_guidance={"scalars": 0, "text": 0}).Reload()
    tags = {tag: {e.step: e.tensor_proto.float_val[0] for e in events.Tensors(tag)}
            for tag in events.PluginTagToContent("scalars")}
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
             for tag in events.PluginTagToContent("text")}
    return tags, texts, list(events.PluginTagToContent("hparams"))


def served_scalars(run, tags):
    """By `tensorboard --load_fast=true`, over HTTP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", "--logdir", run, "--port", str(port),
                               "--load_fast=true", "--samples_per_plugin=scalars=1000000", "--host", "127.0.0.1"],
                              stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}/data/plugin/scalars/"
    try:
        listed = {}
        for _ in range(120):
            try:
                listed = json.load(urllib.request.urlopen(base + "tags", timeout=5))
            except OSError:
                pass
            if listed:
                break
            time.sleep(0.5)
        if list(listed) != ["."]:
            raise SystemExit(f"the server lists {list(listed)}, expected one run")
        served = {}
        for tag in listed["."]:
            for _ in range(40):  # it loads beside
                query = urllib.parse.urlencode({"run": ".", "tag": tag})
                points = json.load(urllib.request.urlopen(base + "scalars?" + query, timeout=30))
                served[tag] = {step: float(value) for _, step, value in points}
                if len(served[tag]) >= len(tags.get(tag, ())):
                    break
                time.sleep(0.25)
        return served
    finally:
        server.terminate()
        server.wait()


def compare(what, found, expected, forgets_by_tag=False):
    if forgets_by_tag:  # what was taken back stays of a tag until it comes again at an earlier step
        found = {tag: {s: v for s, v in steps.items() if s in expected.get(tag, ())}
                 for tag, steps in found.items()}
    if sorted(found) != sorted(expected):
        raise SystemExit(f"{what}: tags {sorted(set(found) ^ set(expected))} are on one side only")
    for tag, steps in expected.items():
        if sorted(found[tag]) != sorted(steps):
            raise SystemExit(f"{what}: {tag} has steps {sorted(found[tag])}, expected {sorted(steps)}")
        for step, value in steps.items():
            same = found[tag][step] == value or (math.isnan(value) and math.isnan(found[tag][step]))
            if not same:
                raise SystemExit(f"{what}: {tag} of step {step} is {found[tag][step]}, expected {value}")
    print(f"{what}: {len(expected)} tags, {sum(map(len, expected.values()))} values, all equal")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    run = parser.parse_args().run
    expected = expected_scalars(run)
    found, texts, hparams = python_scalars(run)
    compare("Python reader", found, expected)
    if "config" not in texts or "[output]" not in texts["config"]:
        raise SystemExit(f"texts {sorted(texts)}, expected the resolved configuration among them")
    if hparams != ["_hparams_/session_start_info"]:
        raise SystemExit(f"hyperparameters {hparams}, expected those of the session")
    print(f"texts: {', '.join(sorted(texts))}; hyperparameters are there")
    compare("data server", served_scalars(run, expected), expected, forgets_by_tag=True)


if __name__ == "__main__":
    main()
