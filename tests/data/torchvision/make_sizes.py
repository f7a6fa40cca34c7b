#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Computes what torchvision's models give for images that are no multiple of anything.

usage: make_sizes.py [OUT_FILE]

Writes one JSON file (default: sizes.json beside this script). Each case is a model, the shape of its
images, and float64 numbers of an evaluation and of a training step without dropout and stochastic
depth. Weights and images are filled by the rule that tests/support/reference.hpp repeats, so no
weights are needed. Probes are a tensor's norm and its product with fixed numbers. To add a case,
add a line to CASES. Needs torch, torchvision (0.14 or newer) and numpy.
"""

import json
import math
import pathlib
import sys
import zlib

import numpy
import torch
import torchvision

CASES = [
    ("resnet18", (2, 3, 97, 75)),
    ("mobilenet_v2", (2, 3, 97, 75)),
    ("mobilenet_v3_small", (2, 3, 97, 75)),
    ("efficientnet_b0", (2, 3, 97, 75)),
    ("efficientnet_v2_s", (2, 3, 97, 75)),
    ("regnet_y_400mf", (2, 3, 97, 75)),
    ("convnext_tiny", (2, 3, 97, 75)),
    ("swin_t", (2, 3, 97, 75)),  # maps 24x18, 12x9, 6x5, 3x3: none a multiple of the window
    ("swin_t", (1, 3, 112, 112)),  # 28, 14, 7, 4: odd at a merging
    ("swin_t", (1, 3, 225, 223)),  # 56x55, 28x28, 14x14, 7x7: padded in one direction
    ("swin_t", (1, 3, 256, 200)),  # 64x50, 32x25, 16x13, 8x7
    ("swin_t", (1, 3, 32, 224)),  # 8x56, 4x28, 2x14, 1x7: shifted along one side only
]


def uniform(key: str, count: int) -> numpy.ndarray:
    """Numbers in [0, 1), multiples of 2**-24, from a hash of the key's CRC-32 and the position."""
    with numpy.errstate(over="ignore"):
        mixed = numpy.arange(count, dtype=numpy.uint32) * numpy.uint32(0x9E3779B9)
        mixed += numpy.uint32(zlib.crc32(key.encode()))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = (mixed ^ (mixed >> numpy.uint32(shift))) * numpy.uint32(factor)
        mixed ^= mixed >> numpy.uint32(16)
    return (mixed >> numpy.uint32(8)).astype(numpy.float64) / 2**24


def filled(key: str, shape: torch.Size) -> torch.Tensor:
    """The value of the parameter or buffer of that name."""
    count = math.prod(shape)
    u = uniform(key, count)
    v = 2 * u - 1
    last = key.rpartition(".")[2]
    if last == "running_mean":
        value = v / 8
    elif last == "running_var":
        value = 1 + u / 2
    elif last == "layer_scale":
        value = 0.25 + v / 8
    elif last == "weight" and len(shape) == 1:
        value = 1 + v / 4
    elif len(shape) <= 1:
        value = v / 8
    else:
        value = v * 2.0 ** round(math.log2(math.sqrt(3 * shape[0] / count)))
    return torch.from_numpy(value.reshape(tuple(shape)))


def build(name: str) -> torch.nn.Module:
    """The model in float64, filled, with every source of randomness off."""
    model = getattr(torchvision.models, name)(weights=None).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for rate in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(filled(key, tensor.shape))
    return model


def probe(tensor: torch.Tensor, key: str) -> list[float]:
    flat = tensor.detach().reshape(-1)
    return [float(flat.norm()), float(flat @ torch.from_numpy(uniform("probe:" + key, flat.numel()) - 0.5))]


def numbers(name: str, shape: tuple[int, ...]) -> dict:
    model = build(name)
    images = torch.from_numpy((2 * uniform("image", math.prod(shape)) - 1).reshape(shape))
    with torch.no_grad():
        logits = model.eval()(images)
    evaluation = {"logits": logits[:, :4].tolist(), "probe": probe(logits, "logits")}

    images.requires_grad_()
    logits = model.train()(images)
    weights = torch.from_numpy(uniform("loss", logits.numel()).reshape(logits.shape) - 0.5)
    loss = (logits * weights).sum()
    loss.backward()
    training = {
        "probe": probe(logits, "logits"),
        "loss": loss.item(),
        "input_grad": probe(images.grad, "input_grad"),
    }
    return {"model": name, "input": list(shape), "eval": evaluation, "train": training}


def main() -> None:
    here = pathlib.Path(__file__).parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "sizes.json"
    cases = []
    for name, shape in CASES:
        cases.append(numbers(name, shape))
        print(name, shape, cases[-1]["train"]["loss"], flush=True)
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    lines = ",\n".join(json.dumps(case) for case in cases)
    out.write_text(json.dumps(versions)[:-1] + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
