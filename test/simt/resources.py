"""Registers, shared memory and spills of every CUDA kernel, as ptxas reported them when the product
was compiled; spills and stack frames in the kernels of WATCHED are errors. Shared memory is what
the code itself declares. What launches ask for on top is in a second table, by the names of
launches: the most that the tests of the emulator asked for when they last ran; more than the
architecture has is an error.
Usage: resources.py FAMILY_FILE.resources... [--launches DIRECTORY_OF_FAMILY.launches]
"""

import pathlib
import re
import subprocess
import sys

# Family: what the names of its kernels that must not use local memory contain, in any case.
WATCHED = {"attention": "", "optimizer": "adamw", "pointwise": "", "shaping": ""}

# Bytes of shared memory that a block may ask for, by compute capability times 10.
MAX_DYNAMIC = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024,
               120: 99 * 1024}

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def parse(text):
    """A dict for each kernel and architecture of one report."""
    kernels = []
    for line in text.splitlines():
        if match := ENTRY.search(line):
            kernels.append({"symbol": match[1], "arch": match[2], "registers": None, "shared": 0,
                            "stack": 0, "stores": 0, "loads": 0})
        elif (match := LOCAL.search(line)) and kernels:
            # Of the kernel or of a function it calls.
            for key, value in zip(("stack", "stores", "loads"), match.groups()):
                kernels[-1][key] += int(value)
        elif (match := USED.search(line)) and kernels:
            kernels[-1]["registers"] = int(match[1])
            if shared := SHARED.search(line):
                kernels[-1]["shared"] = int(shared[1])
    return kernels


def demangle(symbols):
    """Readable names, without namespaces and arguments."""
    if not symbols:
        return []
    names = subprocess.run(["c++filt"], input="\n".join(symbols), text=True, check=True,
                           stdout=subprocess.PIPE).stdout.splitlines()
    return [shorten(name) for name in names]


def shorten(name):
    name = name.replace("(anonymous namespace)::", "").replace("tessera::", "")
    name = name.replace("kernels::cuda::", "").removeprefix("void ")
    depth = 0
    for i, char in enumerate(name):
        depth += {"<": 1, ">": -1}.get(char, 0)
        if char == "(" and depth == 0:
            return name[:i]
    return name


def faults(family, kernels):
    """What a watched kernel does wrong; that a watched family has none is a fault too."""
    if family not in WATCHED:
        return
    watched = [k for k in kernels if WATCHED[family] in k["name"].lower()]
    if not watched:
        yield f"{family}: no kernel named *{WATCHED[family]}* in the report"
    for k in watched:
        if k["stack"] or k["stores"] or k["loads"]:
            yield (f"{family}: {k['name']} on {k['arch']} uses local memory: {k['stack']} bytes "
                   f"of stack, {k['stores']} of spill stores, {k['loads']} of spill loads")


def parse_launches(text):
    """(launch, device, threads of a block, bytes of dynamic shared memory) of each line."""
    rows = []
    for line in text.splitlines():
        name, *numbers = line.rsplit(maxsplit=3)
        rows.append((name, *map(int, numbers)))
    return rows


def launch_faults(family, launches):
    """Launches that a device refuses; and where one device has room that another lacks, the other
    must have been tried."""
    tried = {(name, device) for name, device, _, _ in launches}
    for name, device, _, nbytes in launches:
        for other, limit in MAX_DYNAMIC.items():
            if nbytes > limit and (other == device or (name, other) not in tried):
                yield (f"{family}: {name} asks for {nbytes} bytes of dynamic shared memory on "
                       f"{device}, expected at most {limit} on {other}")


def print_launches(directory):
    """The table of all families' launches; their faults."""
    problems = []
    print(f"\n{'threads':>9} {'dynamic shared':>14}  device  launch")
    paths = sorted(pathlib.Path(directory).glob("*.launches"))
    for path in paths:
        launches = parse_launches(path.read_text(encoding="utf-8"))
        for name, device, threads, nbytes in launches:
            print(f"{threads:>9} {nbytes:>14}  {device:>6}  {path.stem}: {name}")
        problems += launch_faults(path.stem, launches)
    if not paths:
        print("(none yet: the tests of the emulator write them)")
    return problems


def check_the_check():
    """A planted spill is found, in a watched kernel only; so is a launch that asks for too much."""
    launches = parse_launches("flash fwd 90 128 101376\nadamw_step 90 256 0\n")
    assert launches == [("flash fwd", 90, 128, 101376), ("adamw_step", 90, 256, 0)], launches
    assert not list(launch_faults("attention", launches))
    large = [("flash", 90, 128, 101377)]
    assert len(list(launch_faults("attention", large))) == 3  # devices with 99 KiB were not tried
    small = [("flash", device, 64, 4096) for device in (86, 89, 120)]
    assert not list(launch_faults("attention", large + small))
    [fault] = launch_faults("attention", large + [("flash", 86, 128, 101377)] + small[1:])
    assert "flash asks for 101377 bytes of dynamic shared memory on 86" in fault, fault
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z12adamw_kernelIfEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z12adamw_kernelIfEvPT_
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 376 bytes cmem[0]
"""
    [kernel] = parse(report)
    [kernel["name"]] = demangle([kernel["symbol"]])
    assert kernel["name"] == "adamw_kernel<float>", kernel
    assert (kernel["registers"], kernel["shared"], kernel["arch"]) == (255, 1024, "sm_90"), kernel
    [fault] = faults("optimizer", [kernel])
    assert "8 bytes of stack, 4 of spill stores, 12 of spill loads" in fault, fault
    assert list(faults("attention", [kernel])) and not list(faults("norm", [kernel]))
    clean = kernel | {"stack": 0, "stores": 0, "loads": 0}
    assert not list(faults("optimizer", [clean]))
    assert list(faults("optimizer", [clean | {"name": "sgd_kernel"}]))


def main():
    check_the_check()
    by_family = {}
    reports, launches = sys.argv[1:], None
    if "--launches" in reports:
        *reports, _, launches = reports
    for path in map(pathlib.Path, reports):
        family = next((f for f in WATCHED if path.name.startswith(f + "_")),
                      path.stem.rsplit("_", 1)[0])
        by_family.setdefault(family, []).extend(parse(path.read_text(encoding="utf-8")))
    print(f"{'registers':>9} {'shared':>7} {'stack':>6} {'spills':>7}  arch   kernel")
    problems = [f"{family}: no report" for family in WATCHED if family not in by_family]
    num_kernels = 0
    for family, kernels in sorted(by_family.items()):
        for kernel, name in zip(kernels, demangle([k["symbol"] for k in kernels])):
            kernel["name"] = name
        for k in sorted(kernels, key=lambda k: (k["name"], k["arch"])):
            print(f"{k['registers']:>9} {k['shared']:>7} {k['stack']:>6} "
                  f"{k['stores'] + k['loads']:>7}  {k['arch']}  {family}: {k['name']}")
        num_kernels += len(kernels)
        problems += faults(family, kernels)
    if launches is not None:
        problems += print_launches(launches)
    print(*problems, sep="\n")
    print(f"{num_kernels} kernels, {len(problems)} faults")
    return 1 if problems or num_kernels == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
