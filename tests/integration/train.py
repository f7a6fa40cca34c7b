#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains by the program train in temporary folders: killed, stopped and resumed runs give the bits of an
uninterrupted one, and so do runs within a memory budget; folders of images and of views, PNG and JPEG, mixed precision
and accumulation run; mistakes are told.

Needs nothing but Python's standard library.
"""

import argparse
import json
import os
import pathlib
import signal
import struct
import subprocess
import tempfile
import time
import zlib

# Small on purpose: one thread, 20 steps.
TINY = ["--backbone", "mobilenet_v3_small", "--image-size", "32", "--epochs", "2", "--batch-size", "8", "--lr", "1e-3",
        "--set", "data.limit=80", "--set", "training.gradient_checkpointing.enabled=true",
        "--set", "training.threads=1"]
EVERY_STEP = ["--set", "output.checkpoint_steps=1"]
KILLS_AT_LINE = [1, 4, 9, 10, 14]  # of the metrics: 10 steps and one line of the epoch
FILES = ["last.safetensors", "best.safetensors", "checkpoint.safetensors"]


class Trainer:
    def __init__(self, program: str, work: pathlib.Path):
        self.program = str(pathlib.Path(program).resolve())
        self.work = work

    def start(self, *arguments) -> subprocess.Popen:
        return subprocess.Popen([self.program, *map(str, arguments)], cwd=self.work, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env={**os.environ, "OMP_NUM_THREADS": "1"})

    def run(self, *arguments, code: int = 0) -> str:
        process = self.start(*arguments)
        text = process.communicate(timeout=600)[0]
        assert process.returncode == code, f"{arguments}: exit code {process.returncode}, {code} expected\n{text}"
        return text

    def refuses(self, *arguments, says: list) -> None:
        text = self.run(*arguments, code=2)
        for part in says:
            assert part in text, f"{arguments}: {part!r} is missing in\n{text}"


def tensors(path: pathlib.Path) -> dict:
    """Each tensor's type, shape and bytes; metadata is left out."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], data[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]])
            for name, entry in header.items()}


def metrics(folder: pathlib.Path) -> list:
    """The lines of the metrics without what the clock and the allocator say."""
    loose = {"images_per_second", "peak_bytes", "seconds"}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in loose} for line in lines]


def expect_same_run(folder: pathlib.Path, reference: pathlib.Path) -> None:
    for file in FILES:
        left, right = tensors(folder / file), tensors(reference / file)
        assert left.keys() == right.keys(), f"{file}: other tensors, {left.keys() ^ right.keys()}"
        different = [name for name in left if left[name] != right[name]]
        assert not different, f"{folder.name}/{file} has other bits: {different[:5]}"
    assert metrics(folder) == metrics(reference), "other metrics"
    extra = {path.name for path in folder.iterdir()} - {*FILES, "metrics.jsonl", "config.yaml", ".lock"}
    assert not extra, f"left behind: {extra}"


def interrupt_at(trainer: Trainer, folder: pathlib.Path, line_count: int, number: int, *arguments) -> tuple:
    """Sends a signal as soon as the metrics have so many lines; returns exit code and text."""
    process = trainer.start(*arguments, "--output", folder, "--resume")
    file = folder / "metrics.jsonl"
    while process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= line_count:
            process.send_signal(number)
            break
        time.sleep(0.002)
    text = process.communicate(timeout=600)[0]
    return process.returncode, text


def check_kills(trainer: Trainer, reference: pathlib.Path) -> None:
    folder = trainer.work / "killed"
    for line_count in KILLS_AT_LINE:
        code, text = interrupt_at(trainer, folder, line_count, signal.SIGKILL, *TINY, *EVERY_STEP)
        assert code == -signal.SIGKILL, f"not killed at {line_count}: {code}\n{text}"
    # What a kill in the middle of writing leaves: half a file under each name that is used then.
    half = (reference / "last.safetensors").read_bytes()[:1000]
    for name in ("checkpoint.safetensors.new", "last.safetensors.new", "best.safetensors.new.17.part"):
        (folder / name).write_bytes(half)
    trainer.run(*TINY, *EVERY_STEP, "--output", folder, "--resume")
    expect_same_run(folder, reference)


def check_signals(trainer: Trainer, reference: pathlib.Path) -> None:
    for number, line_count in ((signal.SIGINT, 3), (signal.SIGTERM, 13)):
        folder = trainer.work / number.name
        code, text = interrupt_at(trainer, folder, line_count, number, *TINY, *EVERY_STEP)
        assert code == 128 + number, f"{number.name}: exit code {code}\n{text}"
        assert "--resume goes on there" in text, text
        trainer.run(*TINY, *EVERY_STEP, "--output", folder, "--resume")
        expect_same_run(folder, reference)
    trainer.refuses(*TINY, "--output", folder, says=["there is a run already", "--resume", "--overwrite"])


def write_png(path: pathlib.Path, rows: list) -> None:
    """Writes rows of red, green and blue bytes."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]) // 3, len(rows), 8, 2, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) +
                     chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))) + chunk(b"IEND", b""))


def write_jpeg(path: pathlib.Path, blocks: list) -> None:
    """Writes rows of blocks of 8 x 8 pixels of one colour: grey levels, or tuples (Y, Cb, Cr).

    A baseline JPEG of constant terms only, with Huffman tables of our own: four bits say how many bits of a difference
    follow, and one bit ends a block. The constant term is eight times the pixel, and is divided by eight: exact.
    """
    def segment(marker: int, data: bytes) -> bytes:
        return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data

    parts = len(blocks[0][0]) if isinstance(blocks[0][0], tuple) else 1
    bits, before = "", [0] * parts
    for block in (block for row in blocks for block in row):
        for part, level in enumerate(block if parts > 1 else (block,)):
            difference, before[part] = level - 128 - before[part], level - 128
            size = abs(difference).bit_length()
            bits += f"{size:04b}"
            if size:
                bits += f"{difference if difference > 0 else difference + (1 << size) - 1:0{size}b}"
            bits += "0"
    bits += "1" * (-len(bits) % 8)
    data = bytes(int(bits[i:i + 8], 2) for i in range(0, len(bits), 8)).replace(b"\xff", b"\xff\0")
    ids = range(1, parts + 1)
    frame = struct.pack(">BHHB", 8, 8 * len(blocks), 8 * len(blocks[0]), parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\xff\xd8" + segment(0xDB, b"\0" + bytes([8] * 64)) +
                     segment(0xC0, frame + b"".join(bytes((i, 0x11, 0)) for i in ids)) +
                     segment(0xC4, bytes([0x00] + [0, 0, 0, 12] + [0] * 12) + bytes(range(12))) +
                     segment(0xC4, bytes([0x10] + [1] + [0] * 15) + b"\0") +
                     segment(0xDA, bytes((parts,)) + b"".join(bytes((i, 0)) for i in ids) + bytes((0, 63, 0))) +
                     data + b"\xff\xd9")


def pattern(size: int, color: tuple, shift: int) -> list:
    return [bytes((part + 3 * x + 5 * y + shift) % 256 for x in range(size) for part in color) for y in range(size)]


COLORS = {"green": (20, 200, 40), "red": (220, 30, 10)}
SHORT = ["--backbone", "mobilenet_v3_small", "--image-size", "32", "--epochs", "1", "--batch-size", "2",
         "--set", "training.threads=1"]


def check_images(trainer: Trainer) -> None:
    images, views = trainer.work / "images", trainer.work / "views"
    for name, color in COLORS.items():
        for i in range(5):
            write_png(images / name / f"{i}.png", pattern(40, color, i))
            for view in range(1 + i % 3):
                write_png(views / name / f"case{i}" / f"{view}.png", pattern(36, color, 7 * i + view))
    text = trainer.run(*SHORT, "--data", images, "--output", "of_images", "--set", "data.augment=crop_and_flip")
    assert "8 training and 2 validation cases, 2 classes" in text, text
    trainer.run(*SHORT, "--views", views, "--output", "of_views", "--set", "model.num_views=3")
    write_png(images / "red" / "broken.png", pattern(8, (1, 2, 3), 0))
    (images / "red" / "broken.png").write_bytes(b"\x89PNG")
    trainer.refuses(*SHORT, "--data", images, "--output", "of_broken", says=["1 image is broken", "broken.png"])


def check_jpeg(trainer: Trainer) -> None:
    """Grey blocks are the same pixels in both formats, and so give the same weights; colour is read, too."""
    png, jpeg, colored = (trainer.work / name for name in ("png", "jpeg", "colored_jpeg"))
    for label, chroma in (("bright", (90, 200)), ("dark", (170, 60))):
        for i in range(5):
            levels = [[(130 if label == "bright" else 20) + 9 * i + 11 * x + 7 * y for x in range(5)] for y in range(6)]
            rows = [bytes(level for level in row for _ in range(8 * 3)) for row in levels for _ in range(8)]
            write_png(png / label / f"{i}.png", rows)
            write_jpeg(jpeg / label / f"{i}.{'jpg' if i % 2 else 'JPEG'}", levels)
            write_jpeg(colored / label / f"{i}.jpg", [[(level, *chroma) for level in row] for row in levels])
    text = trainer.run(*SHORT, "--data", png, "--output", "of_png")
    assert "8 training and 2 validation cases, 2 classes" in text, text
    trainer.run(*SHORT, "--data", jpeg, "--output", "of_jpeg")
    expect_same_run(trainer.work / "of_jpeg", trainer.work / "of_png")
    trainer.run(*SHORT, "--data", colored, "--output", "of_colored")
    left, right = (tensors(trainer.work / name / "last.safetensors") for name in ("of_colored", "of_png"))
    assert left != right, "colours make no difference"
    (jpeg / "dark" / "broken.jpg").write_bytes((jpeg / "dark" / "1.jpg").read_bytes()[:20])
    trainer.refuses(*SHORT, "--data", jpeg, "--output", "of_broken_jpeg", says=["1 image is broken", "broken.jpg"])


# Large enough that activations, and not the optimizer, are the peak of a step.
LARGER = ["--backbone", "mobilenet_v3_small", "--image-size", "64", "--epochs", "1", "--batch-size", "16",
          "--set", "data.limit=48", "--set", "training.threads=1"]


def last_peak(folder: pathlib.Path) -> int:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["peak_bytes"] for line in lines if line["kind"] == "step"][-1]


def check_budget(trainer: Trainer) -> None:
    """A memory budget gives the bits of plain training in less memory, however the run is cut into parts."""
    plain, within, mixed = (trainer.work / name for name in ("without_budget", "within_budget", "half_within"))
    trainer.run(*LARGER, "--output", plain)
    text = trainer.run(*LARGER, "--output", within, "--budget", "0.7")
    assert "gradient checkpointing on, within 0.7 of plain" in text and "predicted peak" in text, text
    expect_same_run(within, plain)
    assert last_peak(within) < 0.8 * last_peak(plain), f"{last_peak(within)} bytes of {last_peak(plain)}"
    trainer.run(*LARGER, "--output", mixed, "--set", "training.max_steps=1")
    trainer.run(*LARGER, "--output", mixed, "--budget", "0.8", "--resume")
    expect_same_run(mixed, plain)

    views = [*LARGER, "--views", trainer.work / "views", "--set", "model.num_views=3"]
    amp = [*LARGER, "--set", "training.use_amp=true"]
    for name, arguments, budget in (("views", views, "0.95"), ("amp", amp, "0.8")):
        trainer.run(*arguments, "--output", f"{name}_plain")
        text = trainer.run(*arguments, "--output", f"{name}_within", "--budget", budget)
        assert "predicted peak" in text, text
        expect_same_run(trainer.work / f"{name}_within", trainer.work / f"{name}_plain")

    trainer.refuses(*LARGER, "--output", "of_nothing", "--budget", "1KiB",
                    says=["training.gradient_checkpointing.budget is 1KiB", "the least that was found is"])
    trainer.refuses("--budget", "2GB", says=["--budget", "write 2GiB"])
    (trainer.work / "both.yaml").write_text(
        "training:\n  gradient_checkpointing:\n    enabled: true\n    segments: 4\n    budget: 2GiB\n")
    trainer.refuses("--config", "both.yaml", says=["both.yaml:5:13", "segments", "Set segments to 0"])
    assert "budget: 1536MiB\n" in trainer.run("--budget", "1.5GiB", "--print-config")


def check_options(trainer: Trainer) -> None:
    short = [*SHORT, "--set", "data.limit=16"]
    trainer.run(*short, "--output", "of_amp", "--set", "training.use_amp=true")
    text = trainer.run(*short, "--output", "of_parts", "--set", "training.accumulation_steps=2")
    assert "epochs of 4 steps" in text, text


def check_configuration(trainer: Trainer) -> None:
    printed = trainer.run("--set", "training.lr=3e-4", "--budget", "0.33", "--print-config")
    (trainer.work / "printed.yaml").write_text(printed)
    assert trainer.run("--config", "printed.yaml", "--print-config") == printed, "another configuration comes back"
    (trainer.work / "wrong.yaml").write_text(
        "training:\n  learning_rate: 1\n  epochs: many\ndata:\n  validation_share: 3\n")
    trainer.refuses("--config", "wrong.yaml", says=["wrong.yaml:2:3", "training.lr", "wrong.yaml:3:11", "training.epochs",
                                                    "wrong.yaml:5:21", "data.validation_share"])
    trainer.refuses("--set", "training.batchsize=1", says=["--set training.batchsize=1", "training.batch_size"])
    trainer.refuses("--data", "no-such-folder", "--output", "of_none", says=["there is no such folder"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(options.program, pathlib.Path(folder))
        reference = trainer.work / "reference"
        trainer.run(*TINY, *EVERY_STEP, "--output", reference)
        for check in (check_configuration, check_options, check_images, check_jpeg, check_budget, lambda it: check_signals(it, reference),
                      lambda it: check_kills(it, reference)):
            check(trainer)
    print("killed, stopped and resumed runs have the bits of an uninterrupted one")


if __name__ == "__main__":
    main()
