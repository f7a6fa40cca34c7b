#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write scales.txt: what torch.amp.GradScaler does in 100 iterations of several trainings.

usage: make_scales.py OUT
A training starts with `training NAME INIT_SCALE GROWTH_FACTOR BACKOFF_FACTOR GROWTH_INTERVAL`. Each
line after it is an iteration: the gradients of the two optimizers before scaling, whether the first
one is unscaled and clipped before its step, the scale given to update (0: none), and then what came
out: the scale, the growth tracker, and whether each optimizer was stepped.
"""

import random
import sys

import torch

STEPS = 100
# name: (init scale, growth factor, backoff factor, growth interval, usual gradient)
TRAININGS = {
    "defaults": (65536.0, 2.0, 0.5, 2000, 1.0),
    "interval_5": (65536.0, 2.0, 0.5, 5, 1.0),
    "every_step": (1024.0, 1.5, 0.3, 1, 1.0),
    "odd_factors": (1000.1, 1.1, 0.7, 3, 1.0),
    "overflow": (2.0**120, 4.0, 0.25, 2, 1000.0),
    "no_float32": (1e38, 3.0, 0.9, 2, 0.001),
}


def training(name: str, lines: list) -> None:
    init, growth, backoff, interval, usual = TRAININGS[name]
    lines.append(f"training {name} {init!r} {growth!r} {backoff!r} {interval}")
    draw = random.Random(name)
    scaler = torch.amp.GradScaler("cpu", init, growth, backoff, interval)
    weights = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=1.0) for w in weights]
    for _ in range(STEPS):
        inputs = [usual, usual]
        if draw.random() < 0.15:
            inputs[draw.randrange(2)] = draw.choice([float("inf"), float("-inf"), float("nan")])
        clips = draw.random() < 0.3
        new_scale = draw.choice([3.0, 4096.0, 0.1]) if draw.random() < 0.04 else 0.0
        for optimizer, weight in zip(optimizers, weights):
            optimizer.zero_grad()
            weight.data.zero_()
        # The weights are zero, so that infinite inputs make no infinite loss at first.
        scaler.scale(sum((w * x).sum() for w, x in zip(weights, inputs))).backward()
        if clips:
            scaler.unscale_(optimizers[0])
            torch.nn.utils.clip_grad_norm_(weights[:1], 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        stepped = [int(bool((w != 0).any())) for w in weights]
        scaler.update(new_scale or None)
        state = scaler.state_dict()
        lines.append(
            f"{inputs[0]!r} {inputs[1]!r} {int(clips)} {new_scale!r} "
            f"{state['scale']!r} {state['_growth_tracker']} {stepped[0]} {stepped[1]}"
        )


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lines: list = []
    for name in TRAININGS:
        training(name, lines)
    with open(sys.argv[1], "w", encoding="ascii") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
