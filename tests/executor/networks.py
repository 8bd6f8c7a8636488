"""Small networks of the kinds that people train, as specs name them: `tests/executor/networks.py:unet`."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.workload import Batch, Workload

VOCABULARY = 40


def sequential() -> Workload:
    """Blocks one after the other, nothing else."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {name: torch.randn(num_samples, 8, generator=generator) for name in "xy"}

    return Workload(
        nn.Sequential(*blocks), draw, lambda model, batch: functional.mse_loss(model(batch["x"]), batch["y"])
    )


class Careful(nn.Module):
    """Part of it stays in float32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.wide(self.norm(x)))
        with torch.autocast("cpu", enabled=False):
            y = self.narrow(y.to(self.narrow.weight.dtype))
        out: Tensor = x + self.drop(y)
        return out


def autocast() -> Workload:
    """The blocks run in bfloat16 where torch.autocast says so."""

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {name: torch.randn(num_samples, 8, generator=generator) for name in "xy"}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model(batch["x"])
        return functional.mse_loss(predicted.float(), batch["y"])

    return Workload(nn.Sequential(*(Careful() for _ in range(3)), nn.Linear(8, 8)), draw, loss)


class Damped(nn.Module):
    """What it gives shrinks with every call; its weights are divided by their largest singular value, as far as a
    power iteration of one step a call knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.calls: Tensor
        self.register_buffer("calls", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        out: Tensor = x + torch.tanh(self.linear(x)) / self.calls
        return out


def damped() -> Workload:
    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {name: torch.randn(num_samples, 8, generator=generator) for name in "xy"}

    return Workload(
        nn.Sequential(*(Damped() for _ in range(5))),
        draw,
        lambda model, batch: functional.mse_loss(model(batch["x"]), batch["y"]),
    )


class UNet(nn.Module):
    """Ronneberger, Fischer and Brox, MICCAI 2015: each level's result skips to the other side."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 16)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in [(3, widths[0]), *pairs[:-1]])
        self.bottom = _convolutions(*pairs[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(_convolutions(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            x = down(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], 1))
        out: Tensor = self.head(x)
        return out


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    def one(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(*one(inputs), *one(outputs))


def unet() -> Workload:
    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {
            "image": torch.randn(num_samples, 3, 8, 8, generator=generator),
            "mask": torch.rand(num_samples, 1, 8, 8, generator=generator).round(),
        }

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch["image"]), batch["mask"])

    return Workload(UNet(), draw, loss)


class Recurrent(nn.Module):
    """A language model of two LSTM layers in one module, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.words(tokens))[0])
        return out


def lstm() -> Workload:
    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {"tokens": torch.randint(0, VOCABULARY, (num_samples, 6), generator=generator)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch["tokens"]
        predicted = model(tokens)[:, :-1].reshape(-1, VOCABULARY)
        return functional.cross_entropy(predicted, tokens[:, 1:].reshape(-1))

    return Workload(Recurrent(), draw, loss)


class Experts(nn.Module):
    """A token goes to one of several experts; one that no token chose is not run."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )
        self.drop = nn.Dropout(0.1)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        self.calls = self.calls + 1
        given = self.norm(x)
        weights, chosen = self.router(given).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            own = chosen == i
            if own.any():
                out[own] = expert(given[own]) * weights[own].unsqueeze(-1)
        return x + scale * self.drop(out), weights.mean(-1)


class Mixture(nn.Module):
    """A language model whose blocks are experts; what their routers say is part of the loss."""

    def __init__(self, width: int = 8, count: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Experts(width, count) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, certain = self.words(tokens), []
        for block in self.blocks:
            x, weight = block(x, scale=0.5)
            certain.append(weight)
        return self.head(x), torch.stack(certain).mean(0)


def mixture() -> Workload:
    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {"tokens": torch.randint(0, VOCABULARY, (num_samples, 3), generator=generator)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch["tokens"]
        predicted, certain = model(tokens)
        words = functional.cross_entropy(predicted[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        out: Tensor = words + 0.1 * certain.mean()
        return out

    return Workload(Mixture(), draw, loss)
