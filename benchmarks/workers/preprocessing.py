"""Decode and preprocess JPEG files: in batches with Flaxen, or in blocks like run_image_captioning_flax.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from measure import emit, peak_gb, pin, timed

if TYPE_CHECKING:
    import numpy as np

BATCH = 8  # batch size of Flaxen
SIZE = 224
COMPARED = 32  # images whose pixels are compared

# (first, end) -> the pixels of images first … end - 1, block by block or batch by batch.
Read = Callable[[int, int], Iterator["np.ndarray"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["transformers", "flaxen", "memory"])
    parser.add_argument("--table", type=Path, help="table.jsonl in the folder of the images")
    parser.add_argument("--block", type=int, default=256, help="images per timed call")
    parser.add_argument("--repeats", type=int, default=3, help="number of timed calls, after an untimed one")
    parser.add_argument("--threads", type=int, default=2, help="number of threads of Flaxen")
    parser.add_argument("--reference", type=Path, help="pixels to compare with; written if the file does not exist")
    parser.add_argument("--pin", type=int, nargs="+", metavar="CORE")
    flags = parser.parse_args()
    pin(flags.pin)
    if flags.what == "memory":
        measure_memory(flags.table, flags.threads)
        return
    if flags.what == "transformers":
        count, read = with_transformers(flags.table)
    else:
        count, read = with_flaxen(flags.table, flags.threads)
    blocks = count // flags.block
    for number in range(flags.repeats + 1):
        first = number % blocks * flags.block
        figures = timed(lambda first=first: drain(read(first, first + flags.block)))
        if number:  # the first call warms up: lazy imports, the file cache
            emit(wall=figures["wall"], cpu=figures["cpu"], images=flags.block)
    emit(difference=compare(read(0, min(count, COMPARED)), flags.reference))  # last, because it needs additional memory
    emit(versions={name: version(name) for name in (flags.what, "pillow", "numpy")})


def with_transformers(table: Path) -> tuple[int, Read]:
    """Open the files of a block one by one and process them in one call. (The script also wrote an Arrow cache.)"""
    from PIL import Image
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": SIZE, "width": SIZE})
    files = sorted(table.parent.glob("*.jpg"))

    def read(first: int, last: int) -> Iterator[np.ndarray]:
        images = [Image.open(file).convert("RGB") for file in files[first:last]]
        yield processor(images=images, return_tensors="np").pixel_values

    return len(files), read


def with_flaxen(table: Path, threads: int) -> tuple[int, Read]:
    """Read batch by batch, as in training."""
    from flaxen.data.captions import Captions, pixels, read_captions
    from flaxen.data.images import ImageProcessor

    captions = read_captions(Captions(train=(str(table),)).train_source())
    processor = ImageProcessor.default(SIZE)

    def read(first: int, last: int) -> Iterator[np.ndarray]:
        for start in range(first, last, BATCH):
            batch, failed = pixels(captions, range(start, min(start + BATCH, last)), processor, threads)
            if failed:
                raise SystemExit(f"cannot read {captions.name(start + failed[0][0])}: {failed[0][1]}")
            yield batch

    return len(captions), read


def drain(batches: Iterator[np.ndarray]) -> None:
    for _ in batches:
        pass


def compare(pixels: Iterator[np.ndarray], reference: Path) -> float:
    """Return the largest absolute difference to the reference, which is written if it does not exist."""
    import numpy as np

    ours = np.concatenate(list(pixels))
    if not reference.exists():
        np.save(reference, ours)
        return 0.0
    theirs = np.load(reference)
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        raise SystemExit(f"expected {theirs.dtype} {theirs.shape}, got {ours.dtype} {ours.shape}")
    return float(np.abs(ours - theirs).max())


def measure_memory(table: Path, threads: int) -> None:
    """Measure peak memory after reading a table, and after reading the pixels of all its rows batch by batch."""
    import numpy  # noqa: F401
    import PIL.Image  # noqa: F401

    import flaxen.data.captions  # noqa: F401

    peaks = {"imports": peak_gb()}
    count, read = with_flaxen(table, threads)
    peaks["table"] = peak_gb()
    reading = timed(lambda: drain(read(0, count)))
    peaks["pixels"] = peak_gb()
    emit(peaks=peaks, rows=count, wall=reading["wall"], cpu=reading["cpu"])


if __name__ == "__main__":
    main()
