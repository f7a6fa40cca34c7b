#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write published.json: what torchvision says about its published models.

usage: make_published.py OUT NAME...
Asks the installed torchvision for the DEFAULT weights of each model; downloads nothing.
"""

import json
import sys

import torch
from torchvision import models


def pooled_width(name: str, model: torch.nn.Module) -> int:
    """Return the width of what the head gets; MobileNetV3's head has two linear layers."""
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return linear[-2 if name.startswith("mobilenet_v3") else -1].in_features


def facts(name: str) -> dict:
    weights = models.get_model_weights(name).DEFAULT
    transforms = weights.transforms()
    model = models.get_model(name)
    return {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "feature_dim": pooled_width(name, model),
        "weights_file": weights.url.rsplit("/", 1)[1],
        "weights_version": weights.name,
        "resize_size": transforms.resize_size[0],
        "crop_size": transforms.crop_size[0],
        "interpolation": transforms.interpolation.value,
        "mean": transforms.mean,
        "std": transforms.std,
    }


def main() -> None:
    out, *names = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(facts(name)) for name in names) + "\n]\n")


if __name__ == "__main__":
    main()
