"""Cross entropy with label smoothing and a z-loss as PyTorch has them, in f64: loss_terms.json, the sum and
the gradient of logits for several pairs of the two. Usage: make_loss_terms.py. Needs torch."""

import json
import pathlib

import torch

ROWS, CLASSES = 6, 11


def main():
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn((ROWS, CLASSES), generator=generator, dtype=torch.float64)
    targets = torch.tensor([3, -100, 0, 10, 5, 3])
    cases = []
    for z_loss, label_smoothing in ((0.0, 0.1), (0.01, 0.0), (0.01, 0.25)):
        x = logits.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(x, targets, reduction="sum", label_smoothing=label_smoothing)
        log_z = torch.logsumexp(x, -1)[targets != -100]
        loss = loss + z_loss * (log_z ** 2).sum()
        loss.backward()
        cases.append({"z_loss": z_loss, "label_smoothing": label_smoothing, "loss": loss.item(),
                      "gradient": x.grad.flatten().tolist()})
    path = pathlib.Path(__file__).parent / "loss_terms.json"
    path.write_text(json.dumps({"logits": logits.flatten().tolist(), "targets": targets.tolist(),
                                "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
