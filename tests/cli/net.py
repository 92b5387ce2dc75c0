"""Sources for the tests of `cas export`, good ones and others. Copied to where a test works."""

import ctypes
import sys

import torch
from torch.export import Dim

print("the user's own output")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(32, 64)
        self.second = torch.nn.Linear(64, 32)
        self.register_buffer("scale", torch.arange(32.0))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale + 1


class Keyword(Net):
    def forward(self, *, x):
        return super().forward(x)


X = torch.ones(4, 32)


def make():
    return Net().eval(), (X,)


def dynamic():
    return Net().eval(), (X,), {"x": {0: Dim("batch", max=16)}}


def keyword():
    return Keyword().eval(), (), {"x": X}


def methods():
    net = Net().eval()
    return {"one": (net, (X,)), "two": (net, (torch.ones(2, 32),))}


def exported():
    return torch.export.export(Net().eval(), (X,))


program = torch.export.export(Net().eval(), (X,))
table = {"a": program, "b": (Net().eval(), (X,))}


class Holder:
    inner = staticmethod(make)


def bare():
    return Net()


def nothing():
    return None


def text():
    return "a model"


def short():
    return (Net(),)


def long():
    return Net(), (X,), {}, None, 1


def no_module():
    return "Net", (X,)


def loose_input():
    return Net(), X


def bad_keywords():
    return Net(), (X,), 3, None


def empty():
    return {}


def bad_method():
    return {"not a name": (Net(), (X,))}


def raises():
    missing = {}
    return missing["weights"]


def parameters(size):
    return Net(), (X,)


class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def untraceable():
    return Branch().eval(), (X,)


class Exits(torch.nn.Module):
    def forward(self, x):
        sys.exit()


def exits():
    return Exits().eval(), (X,)


class Handled(torch.nn.Module):
    def forward(self, x):
        try:
            open("no such file")  # noqa: SIM115
        except OSError:
            raise ValueError("the real reason")  # noqa: B904


def handled():
    return Handled().eval(), (X,)


def wrong_shape():
    return Net().eval(), (torch.ones(4, 7),)


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return x


def complex_buffer():
    return Complex().eval(), (X,)


def prints():
    ctypes.CDLL(None).printf(b"from native code\n")
    sys.__stdout__.write("around the redirection\n")
    return make()


def partitioner_exits():
    sys.exit(0)


def not_quantized_outside():
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    net = Net().eval()
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    )
    quantize_(net, config)
    return net, (X,)
