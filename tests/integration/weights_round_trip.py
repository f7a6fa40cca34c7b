#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Takes weights of torchvision's networks to remat and back: one network of each family, bit by bit.

Needs Python's torch, torchvision and safetensors, and says so if they are not there (exit code 77). For each
network: random weights by torchvision, saved by torch.save (both forms) and by safetensors; the example
08_published_weights reads each and writes a .safetensors; that is compared with the first, and loaded by
torchvision with every key in place.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

FAMILIES = ["resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "efficientnet_v2_s",
            "regnet_y_400mf", "vit_b_32", "swin_t", "maxvit_t", "convnext_tiny"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="08_published_weights")
    parser.add_argument("names", nargs="*", default=FAMILIES)
    options = parser.parse_args()
    try:
        import torch
        import torchvision
        from safetensors.torch import load_file, save_file
    except ImportError as error:
        print(f"skipped: {error}")
        return 77

    savers = {
        "zip.pth": torch.save,
        "legacy.pth": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
        "python.safetensors": save_file,
    }
    for name in options.names:
        torch.manual_seed(len(name))
        network = torchvision.models.get_model(name, weights=None)
        state = network.state_dict()
        for value in state.values():
            value.copy_(torch.randn(value.shape).to(value.dtype))
        for suffix, save in savers.items():
            with tempfile.TemporaryDirectory() as folder:
                written = pathlib.Path(folder) / suffix
                back = pathlib.Path(folder) / "back.safetensors"
                save(state, str(written))
                subprocess.run([options.program, name, written, back], check=True, stdout=subprocess.DEVNULL)
                read = load_file(back)
                assert read.keys() == state.keys(), f"{name}, {suffix}: {read.keys() ^ state.keys()}"
                for key, value in state.items():
                    assert read[key].dtype == value.dtype and torch.equal(read[key], value), \
                        f"{name}, {suffix}: {key}"
                network.load_state_dict(read)
        print(f"{name}: {len(state)} tensors, the same bits there and back from {', '.join(savers)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
