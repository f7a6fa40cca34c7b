#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What Python's checkpointing costs on the same networks, measured as remat_benchmark measures.

Needs torch 2.13. The ResNet is written out here, so torchvision is not needed. Memory is counted by
remat's own meter, built as a shared library beside remat_benchmark (--meter).
"""

import argparse
import ctypes
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint, checkpoint_sequential,
                                    create_selective_checkpoint_contexts)

DESIGNS = {18: ("basic", (2, 2, 2, 2)), 34: ("basic", (3, 4, 6, 3)), 50: ("bottleneck", (3, 4, 6, 3)),
           101: ("bottleneck", (3, 4, 23, 3)), 152: ("bottleneck", (3, 8, 36, 3))}


def conv(inputs, outputs, kernel, stride=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block: `layers` around which the input, projected where needed, is added."""

    def __init__(self, kind, inputs, width, stride):
        super().__init__()
        outputs = width if kind == "basic" else 4 * width
        if kind == "basic":
            convolutions = [conv(inputs, width, 3, stride), conv(width, width, 3)]
        else:
            convolutions = [conv(inputs, width, 1), conv(width, width, 3, stride), conv(width, outputs, 1)]
        layers = []
        for convolution in convolutions:
            layers += [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.outputs = outputs

    def forward(self, x):
        y = self.layers(x)
        y += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(y)


class Head(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def resnet(depth):
    """The network as a list of units: stem, blocks, head."""
    kind, counts = DESIGNS[depth]
    units = [nn.Sequential(conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                           nn.MaxPool2d(3, 2, 1))]
    inputs = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            units.append(Block(kind, inputs, 64 << stage, stride))
            inputs = units[-1].outputs
    units.append(Head(inputs, 1000))
    return nn.ModuleList(units).train()


def keep_convolutions(_context, operation, *_arguments, **_options):
    is_kept = operation is torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_narrow_convolutions(_context, operation, *arguments, **_options):
    """Of a bottleneck the 3x3 only: the set that remat's benchmark calls second convolution."""
    is_kept = operation is torch.ops.aten.convolution.default and arguments[1].shape[-1] == 3
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def forward_plain(units, x):
    for unit in units:
        x = unit(x)
    return x


def forward_per_block(units, x, **options):
    for unit in units[:-1]:
        x = checkpoint(unit, x, use_reentrant=False, **options)
    return units[-1](x)


def selective(policy):
    def context():
        return create_selective_checkpoint_contexts(policy)
    return lambda units, x: forward_per_block(units, x, context_fn=context)


def sequential(segments):
    return lambda units, x: checkpoint_sequential(list(units), segments, x, use_reentrant=False)


STRATEGIES = {
    "python plain": forward_plain,
    "python checkpoint per block": forward_per_block,
    "python checkpoint_sequential, 4": sequential(4),
    "python checkpoint_sequential, 8": sequential(8),
    "python selective, convolutions kept": selective(keep_convolutions),
    "python selective, 3x3 convolutions kept": selective(keep_narrow_convolutions),
}


class Meter:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.remat_meter_peak.restype = ctypes.c_longlong

    def __enter__(self):
        self.library.remat_meter_start()
        return self

    def __exit__(self, *_):
        self.library.remat_meter_stop()

    def peak_mib(self):
        return self.library.remat_meter_peak() / 2**20


def wait_for_turn(options):
    if options.turns:
        sys.stdin.readline()


def end_turn(options):
    if options.turns:
        print("done", flush=True)


def measure_model(name, options, meter):
    depth = int(name.removeprefix("resnet"))
    torch.manual_seed(0)
    net = resnet(depth)
    torch.manual_seed(1)
    images = torch.randn(options.batch, 3, options.size, options.size)
    labels = torch.randint(1000, (options.batch,))

    def step(forward):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        with meter:
            start, cpu_start = time.perf_counter(), time.process_time()
            F.cross_entropy(forward(net, images), labels).backward()
            return time.perf_counter() - start, time.process_time() - cpu_start, meter.peak_mib()

    wait_for_turn(options)
    expected, equal, peaks = None, {}, {}
    for strategy, forward in STRATEGIES.items():
        _, _, peaks[strategy] = step(forward)
        found = [parameter.grad.clone() for parameter in net.parameters()]
        expected = expected or found
        equal[strategy] = all(torch.equal(a, b) for a, b in zip(found, expected))
    end_turn(options)

    seconds = {strategy: [] for strategy in STRATEGIES}
    cpu_seconds = {strategy: [] for strategy in STRATEGIES}
    for _ in range(options.repeats):
        wait_for_turn(options)
        for strategy, forward in STRATEGIES.items():
            duration, cpu_duration, peaks[strategy] = step(forward)
            seconds[strategy].append(duration)
            cpu_seconds[strategy].append(cpu_duration)
        end_turn(options)

    def ratio(times, strategy):
        return statistics.median(a / b for a, b in zip(times[strategy], times["python plain"]))
    return [{"model": name, "strategy": strategy, "peak_mib": peaks[strategy],
             "saving": 1 - peaks[strategy] / peaks["python plain"],
             "step_ms": 1e3 * statistics.median(seconds[strategy]),
             "time_ratio": ratio(seconds, strategy), "cpu_ratio": ratio(cpu_seconds, strategy),
             "gradients_equal": equal[strategy]} for strategy in STRATEGIES]


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def measure_micro():
    """Microseconds of forward and backward of one tiny layer, the same as remat_benchmark's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tiny, x = Tiny(), torch.randn(4, 16, requires_grad=True)

    def nested(t):
        return checkpoint(tiny, t, use_reentrant=False)
    calls = {"tiny layer plain": tiny, "tiny layer checkpointed": nested,
             "tiny layer nested": lambda t: checkpoint(nested, t, use_reentrant=False)}

    def microseconds(call, count=500):
        start = time.perf_counter()
        for _ in range(count):
            call(x).sum().backward()
        return 1e6 * (time.perf_counter() - start) / count
    figures = {name: [] for name in calls}
    for call in calls.values():
        microseconds(call)
    for _ in range(7):
        for name, call in calls.items():
            figures[name].append(microseconds(call))
    result = {name: statistics.median(values) for name, values in figures.items()}
    result["region, added"] = result["tiny layer checkpointed"] - result["tiny layer plain"]
    result["region in a region, added"] = result["tiny layer nested"] - result["tiny layer plain"]
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["micro", "steps", "all"], default="all")
    parser.add_argument("--models", default="resnet18,resnet50")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--meter", help="the shared library remat_meter; needed for the steps")
    parser.add_argument("--json", required=True)
    parser.add_argument("--turns", action="store_true", help="wait for a line before each round")
    options = parser.parse_args()
    if options.part != "micro" and not options.meter:
        parser.error("--meter is needed for the steps")

    result = {"torch": torch.__version__, "micro_us": {}, "steps": []}
    if options.part != "steps":
        result["micro_us"] = measure_micro()
    if options.part != "micro":
        torch.set_num_threads(options.threads)
        meter = Meter(options.meter)
        for name in options.models.split(","):
            result["steps"] += measure_model(name, options, meter)
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
