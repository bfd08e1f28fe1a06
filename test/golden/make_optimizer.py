"""Prints the tables of test/optim/{adamw,sgd,lion}_test.cc: parameters and states after six steps of
PyTorch's AdamW and SGD and of lion-pytorch (f32) from formula values, in two groups."""

import math

import lion_pytorch
import torch

NUM_STEPS, NUMEL, SPLIT = 6, 7, 4


def value(step, i):
    return math.cos(0.7 * step + 1.3 * i) * (1e-4 if i == 2 else 1.0)


def run(make):
    start = torch.tensor([math.sin(i + 1.0) for i in range(NUMEL)], dtype=torch.float32)
    parts = [start[:SPLIT].clone().requires_grad_(), start[SPLIT:].clone().requires_grad_()]
    decaying = {"params": [parts[0]]}
    plain = {"params": [parts[1]], "weight_decay": 0.0}
    optimizer = make([decaying, plain])
    for step in range(1, NUM_STEPS + 1):
        lr = 0.1 / step
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[1]["lr"] = lr * 0.5
        grad = torch.tensor([value(step, i) for i in range(NUMEL)], dtype=torch.float32)
        parts[0].grad, parts[1].grad = grad[:SPLIT].clone(), grad[SPLIT:].clone()
        optimizer.step()
    show("parameters", parts)
    for name in optimizer.state[parts[0]]:
        if name != "step":
            show(name, [optimizer.state[p][name] for p in parts])


def show(name, parts):
    print(f"{name}: {{{', '.join(repr(x) for x in torch.cat(parts).tolist())}}}")


print("AdamW")
run(lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1))
for nesterov in (False, True):
    print(f"SGD nesterov={nesterov}")
    run(lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, weight_decay=0.1,
                                       nesterov=nesterov))
print("SGD without momentum")
run(lambda groups: torch.optim.SGD(groups, lr=1.0, weight_decay=0.1))
print("Lion")
run(lambda groups: lion_pytorch.Lion(groups, lr=1.0, betas=(0.9, 0.99), weight_decay=0.1))
