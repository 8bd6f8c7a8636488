"""A script of a user's: a training loop over a schedule, the same in every process. Arguments: schedule, steps, output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from executor.session import Session

MINIBATCH = 4
LR = 1e-2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


Batch = dict[str, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def draw(generator: torch.Generator, num_samples: int) -> Batch:
    return {name: torch.randn(num_samples, 8, generator=generator) for name in "xy"}


def make() -> tuple[nn.Module, object, object]:
    """The model as `harmony-executor profile` takes it."""
    return make_model(), draw, loss


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not, and learn at another rate."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 3 * LR}]
    return torch.optim.AdamW(groups, lr=LR)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [draw(generator, MINIBATCH) for _ in range(count)]


def main(schedule: str, steps: int, output: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    batches = make_batches(steps)
    with Session(schedule, model, optimizer, loss, batches[0], clip_norm=0.5) as session:
        results, evaluations = [], []
        for batch in session.batches(batches):
            results.append(session.step(batch))
            scheduler.step()
            evaluations.append(session.evaluate(batches[0]))
        state = session.state_dict()
        if session.is_first:
            found = {
                "losses": [result.loss for result in results],
                "evaluations": evaluations,
                "norms": [result.gradient_norm for result in results],
                "weights": {name: tensor.tolist() for name, tensor in state.items()},
            }
            output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
