#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What Python's checkpointing costs on the same networks, measured as remat_benchmark measures.

Needs torch 2.13 and, for the steps, torchvision; with timm its twins are measured as well. Memory is
counted by remat's own meter, built as a shared library beside remat_benchmark (--meter).
"""

import argparse
import ctypes
import dataclasses
import json
import re
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint, checkpoint_sequential,
                                    create_selective_checkpoint_contexts)

# timm's network of the same design.
TIMM_TWINS = {
    "resnet18": "resnet18", "resnet34": "resnet34", "resnet50": "resnet50", "resnet101": "resnet101",
    "resnet152": "resnet152", "mobilenet_v2": "mobilenetv2_100",
    "mobilenet_v3_small": "mobilenetv3_small_100", "mobilenet_v3_large": "mobilenetv3_large_100",
    "efficientnet_b0": "efficientnet_b0", "efficientnet_b1": "efficientnet_b1",
    "efficientnet_b2": "efficientnet_b2", "efficientnet_v2_s": "efficientnetv2_s",
    "efficientnet_v2_m": "efficientnetv2_m", "efficientnet_v2_l": "efficientnetv2_l",
    "regnet_y_400mf": "regnety_004", "regnet_y_800mf": "regnety_008", "regnet_y_1_6gf": "regnety_016",
    "regnet_y_3_2gf": "regnety_032", "regnet_y_8gf": "regnety_080", "regnet_y_16gf": "regnety_160",
    "regnet_y_32gf": "regnety_320", "vit_b_16": "vit_base_patch16_224",
    "vit_b_32": "vit_base_patch32_224", "vit_l_16": "vit_large_patch16_224",
    "vit_l_32": "vit_large_patch32_224", "swin_t": "swin_tiny_patch4_window7_224",
    "swin_s": "swin_small_patch4_window7_224", "swin_b": "swin_base_patch4_window7_224",
    "maxvit_t": "maxvit_tiny_tf_224", "convnext_tiny": "convnext_tiny",
    "convnext_small": "convnext_small", "convnext_base": "convnext_base",
    "convnext_large": "convnext_large"}


class Then(nn.Module):
    """Modules and functions in a row, as one unit."""

    def __init__(self, *steps):
        super().__init__()
        self.steps = steps
        self.modules_of_it = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


def vit_embedding(net):
    def embed(images):
        patches = net._process_input(images)
        tokens = torch.cat([net.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        return net.encoder.dropout(tokens + net.encoder.pos_embedding)
    return embed


def opened(layers):
    """Stages, which are nn.Sequential itself, become their blocks."""
    return [unit for layer in layers for unit in (layer if type(layer) is nn.Sequential else [layer])]


def units_of(name):
    """torchvision's network as remat cuts it into units; the last one is the head.

    Returns the network, its units, and whether each is checkpointed per block.
    """
    import torchvision
    net = torchvision.models.get_model(name, weights=None).train()
    pool = [getattr(net, "avgpool", nn.Identity()), lambda x: torch.flatten(x, 1)]
    if name.startswith("resnet"):
        body = [Then(net.conv1, net.bn1, net.relu, net.maxpool)]
        body += opened([net.layer1, net.layer2, net.layer3, net.layer4])
        head = [*pool, net.fc]
    elif name.startswith("mobilenet_v2"):
        body, head = list(net.features), [lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), net.classifier]
    elif name.startswith(("mobilenet", "efficientnet")):
        body, head = opened(net.features), [*pool, net.classifier]
    elif name.startswith("regnet"):
        body = [net.stem] + [block for stage in net.trunk_output for block in stage]
        head = [*pool, net.fc]
    elif name.startswith("vit"):
        body = [Then(vit_embedding(net)), *net.encoder.layers]
        head = [net.encoder.ln, lambda x: net.heads(x[:, 0])]
    elif name.startswith("swin"):
        body = [net.features[0]] + opened(net.features[1:])
        head = [net.norm, net.permute, net.avgpool, net.flatten, net.head]
    elif name.startswith("maxvit"):
        body, head = [net.stem] + [layer for block in net.blocks for layer in block.layers], [net.classifier]
    else:
        body, head = [net.features[0]], [net.avgpool, net.classifier]
        for index in range(1, len(net.features)):
            body += list(net.features[index]) if index % 2 == 1 else [net.features[index]]
    # As remat: transformers' embeddings and merging layers and ConvNeXt's transitions are plain.
    is_block = {"vit": nn.Module, "swin": torchvision.models.swin_transformer.SwinTransformerBlock,
                "maxvit": torchvision.models.maxvit.MaxVitLayer,
                "convnext": torchvision.models.convnext.CNBlock}.get(name.split("_")[0])
    checkpointed = [is_block is None or isinstance(unit, is_block) for unit in body]
    if name.startswith("vit"):
        checkpointed[0] = False
    return net, [*body, Then(*head)], [*checkpointed, False]


PRODUCTS = {torch.ops.aten.convolution.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default}


def keep_products(_context, operation, *_arguments, **_options):
    is_kept = operation in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class RecomputeClock:
    """Times the calls that backward makes to what forward has called already."""

    def __init__(self):
        self.seconds, self.is_backward = 0.0, False

    def around(self, unit):
        def call(*arguments):
            if not self.is_backward:
                return unit(*arguments)
            start = time.perf_counter()
            try:  # a recompute stops by an exception as soon as it has what it needs
                return unit(*arguments)
            finally:
                self.seconds += time.perf_counter() - start
        return call


def forward_plain(units, _checkpointed, x):
    for unit in units:
        x = unit(x)
    return x


def forward_per_block(units, checkpointed, x, **options):
    for unit, is_checkpointed in zip(units, checkpointed):
        x = checkpoint(unit, x, use_reentrant=False, **options) if is_checkpointed else unit(x)
    return x


def selective(policy):
    def context():
        return create_selective_checkpoint_contexts(policy)
    return lambda units, checkpointed, x: forward_per_block(units, checkpointed, x, context_fn=context)


def sequential(segments):
    return lambda units, _, x: checkpoint_sequential(units, segments, x, use_reentrant=False)


STRATEGIES = {
    "python plain": forward_plain,
    "python checkpoint per block": forward_per_block,
    "python checkpoint_sequential, 8": sequential(8),
    "python selective, convolutions and matmuls kept": selective(keep_products),
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


@dataclasses.dataclass
class Step:
    net: nn.Module
    forward: Callable
    base: str  # the strategy that it is compared with
    clock: RecomputeClock | None = None
    out_of_place: list[nn.Module] = dataclasses.field(default_factory=list)  # activations, while it runs

    def run_somehow(self, images, labels, meter):
        """As run. What refuses activations in place, as selective checkpointing may, gets none from here on."""
        try:
            return self.run(images, labels, meter)
        except RuntimeError:
            self.out_of_place = [module for module in self.net.modules() if getattr(module, "inplace", False)]
            return self.run(images, labels, meter)

    def run(self, images, labels, meter):
        for parameter in self.net.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        torch.manual_seed(2)  # dropout and stochastic depth alike in all strategies
        clock = self.clock or RecomputeClock()
        clock.seconds, clock.is_backward = 0.0, False
        for module in self.out_of_place:
            module.inplace = False
        try:
            with meter:
                start, cpu_start = time.perf_counter(), time.process_time()
                loss = F.cross_entropy(self.forward(images), labels)
                forward_seconds, clock.is_backward = time.perf_counter() - start, True
                loss.backward()
                return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start,
                        "forward_seconds": forward_seconds, "recompute_seconds": clock.seconds,
                        "peak": meter.peak_mib()}
        finally:
            for module in self.out_of_place:
                module.inplace = True


def steps_of(name):
    net, units, checkpointed = units_of(name)
    clock = RecomputeClock()
    units = [clock.around(unit) for unit in units]
    steps = {strategy: Step(net, lambda x, forward=forward: forward(units, checkpointed, x), "python plain", clock)
             for strategy, forward in STRATEGIES.items()}
    try:
        import timm
    except ImportError:
        return steps
    twin = timm.create_model(TIMM_TWINS[name], num_classes=1000).train()

    def run_twin(is_checkpointed):
        def forward(x):
            twin.set_grad_checkpointing(is_checkpointed)
            return twin(x)
        return forward
    steps["timm plain"] = Step(twin, run_twin(False), "timm plain")
    steps["timm set_grad_checkpointing"] = Step(twin, run_twin(True), "timm plain")
    return steps


def measure_model(model, options, meter):
    name, _, batch = model.partition(":")
    batch = int(batch or options.batch)
    torch.manual_seed(0)
    steps = steps_of(name)
    wanted = {strategy for strategy in steps if re.search(options.strategies, strategy)}
    wanted |= {"python plain"} | {steps[strategy].base for strategy in wanted}
    steps = {strategy: step for strategy, step in steps.items() if strategy in wanted}
    torch.manual_seed(1)
    images = torch.randn(batch, 3, options.size, options.size)
    labels = torch.randint(1000, (batch,))

    wait_for_turn(options)
    expected, equal = {}, {}
    for strategy, step in list(steps.items()):
        try:
            step.run_somehow(images, labels, meter)
        except RuntimeError as error:
            print(f"{model}, {strategy}: {str(error).splitlines()[0]}", file=sys.stderr)
            del steps[strategy]
            continue
        found = [parameter.grad.clone() for parameter in step.net.parameters()]
        reference = expected.setdefault(step.base, found)
        equal[strategy] = all(torch.equal(a, b) for a, b in zip(found, reference))
    expected.clear()
    end_turn(options)

    rounds = {strategy: [] for strategy in steps}
    for _ in range(options.repeats):
        wait_for_turn(options)
        for strategy, step in steps.items():
            rounds[strategy].append(step.run(images, labels, meter))
        end_turn(options)

    def row_of(strategy):
        base, clock = steps[strategy].base, steps[strategy].clock

        def ratio(figure, to):
            return statistics.median(mine[figure] / theirs[to] for mine, theirs in zip(rounds[strategy], rounds[base]))
        peak = rounds[strategy][-1]["peak"]
        row = {"model": model, "strategy": strategy, "peak_mib": peak, "saving": 1 - peak / rounds[base][-1]["peak"],
               "step_ms": 1e3 * statistics.median(figures["seconds"] for figures in rounds[strategy]),
               "time_ratio": ratio("seconds", "seconds"), "cpu_ratio": ratio("cpu_seconds", "cpu_seconds"),
               "gradients_equal": equal[strategy]}
        if clock is not None:
            row["recomputed_share"] = ratio("recompute_seconds", "forward_seconds")
        return row
    return [row_of(strategy) for strategy in steps]


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
    parser.add_argument("--strategies", default="", help="regular expression; what they are compared with is measured, too")
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
