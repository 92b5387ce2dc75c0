"""Small models that between them have every kind of weight an export meets."""

from __future__ import annotations

import torch
from torch import nn


def seeded(seed: int) -> None:
    torch.manual_seed(seed)


class Mlp(nn.Module):
    """The second weight has 400 KiB: several chunks of a test store and an odd tail."""

    def __init__(self) -> None:
        super().__init__()
        seeded(1)
        self.first = nn.Linear(64, 320)
        self.second = nn.Linear(320, 320)
        self.third = nn.Linear(320, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return Mlp().eval().to(dtype)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeded(3)
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.norm = nn.BatchNorm2d(32)
        self.up = nn.ConvTranspose2d(32, 16, 2)
        self.last = nn.Conv2d(16, 40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.up(self.norm(self.depthwise(torch.relu(self.first(x))))))


class Tied(nn.Module):
    """One parameter under two names, and a buffer that is a view of another one."""

    def __init__(self) -> None:
        super().__init__()
        seeded(2)
        self.one = nn.Linear(96, 96, bias=False)
        self.two = nn.Linear(96, 96, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("whole", torch.randn(192, 96))
        self.register_buffer("view", self.whole[8:104])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x))) @ self.view.t() + (x @ self.whole.t())[:, :96]


class Layouts(nn.Module):
    """Transposed, permuted, channels-last, empty, bfloat16 and int8 constants."""

    def __init__(self) -> None:
        super().__init__()
        seeded(4)
        self.register_buffer("transposed", torch.randn(32, 48).t())
        self.register_buffer("permuted", torch.randn(4, 8, 16).permute(2, 0, 1))
        last = torch.randn(1, 4, 6, 6).to(memory_format=torch.channels_last)
        self.register_buffer("channels_last", last)
        self.register_buffer("empty", torch.zeros(0, 32))
        self.register_buffer("bf16", torch.randn(32, 32).to(torch.bfloat16))
        self.register_buffer("int8", torch.randint(-128, 127, (32, 32), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (x @ self.transposed[:32]) + self.permuted.sum() + self.channels_last.mean()
        total = total + torch.cat([self.empty, x]).sum() + self.int8.float().sum()
        return total + (x.to(torch.bfloat16) @ self.bf16).float()


class Mutable(nn.Module):
    """A buffer that the model changes."""

    def __init__(self) -> None:
        super().__init__()
        seeded(5)
        self.register_buffer("state", torch.randn(48, 48))
        self.linear = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(1.0)
        return self.linear(x) + self.state


class CachedAttention(nn.Module):
    """A one-layer decoder step that keeps its keys and values in mutable buffers."""

    def __init__(self, width: int = 96, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        seeded(6)
        self.heads, self.size = heads, width // heads
        self.embed = nn.Embedding(200, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 200, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("keys", torch.zeros(length, heads, self.size))
        self.register_buffer("values", torch.zeros(length, heads, self.size))
        self.requires_grad_(False)  # the cache may not depend on something that requires grad

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        q, k, v = self.qkv(self.norm(x)).view(1, 3, self.heads, self.size).unbind(1)
        self.keys.index_put_((position,), k)
        self.values.index_put_((position,), v)
        scores = torch.einsum("bhd,lhd->bhl", q, self.keys) / self.size**0.5
        mixed = torch.einsum("bhl,lhd->bhd", torch.softmax(scores, -1), self.values)
        return self.head(x + self.out(mixed.reshape(1, -1)))
