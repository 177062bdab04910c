"""Sample images from a Transformer-VQ trained on pixels and write them as .png files, plus a grid of all of them."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.atomic_directory import atomic_directory
from flaxen.data.stream_store import FIRST
from flaxen.errors import InputError
from flaxen.pretrained import Pretrained

OPTIONS = ("do_sample", "seed", "temperature", "top_k", "top_p", "min_p", "nucleus", "repetition_penalty")


def draw(
    pretrained: Pretrained, n: int, directory: Path, batch_size: int, options: dict[str, Any], overwrite: bool = False
) -> np.ndarray:
    """Sample n images and write them to a directory. Returns uint8 [n, height, width, channels].

    Special ids are excluded from sampling, so that every image is complete.
    """
    shape = getattr(pretrained.config, "image", ())
    if not shape:
        raise InputError(
            "this model does not generate images; train one that does with: flaxen train language --data.kind pixels"
        )
    unsupported = [name for name in options if name not in OPTIONS]
    if unsupported or not options.get("do_sample", True):
        flag = f"--{unsupported[0].replace('_', '-')}" if unsupported else "--no-do-sample"
        raise InputError(f"{flag} cannot be combined with --sample-images; supported options: {', '.join(OPTIONS)}")
    size = math.prod(shape)
    special = [[id] for id in range(pretrained.config.vocab_size) if not FIRST <= id < FIRST + 256]
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": size, **options}
    arguments |= {"bad_words_ids": special, "eos_token_id": ()}
    with atomic_directory(directory, overwrite) as fresh:  # fails now, not after sampling, if the directory is in use
        print(f"sampling {n} images of {size:,} values each", file=sys.stderr)
        outputs = pretrained.generate([[pretrained.config.start_id]] * n, batch_size=batch_size, **arguments)
        drawn = np.array([output.tokens for output in outputs], np.int64).reshape(n, *shape) - FIRST
        images = drawn.astype(np.uint8)
        for i, image in enumerate(images):
            (fresh / f"{i:04d}.png").write_bytes(png(image))
        (fresh / "grid.png").write_bytes(png(grid(images)))
    print(f"wrote {n} images and grid.png to {directory}", file=sys.stderr)
    return images


def grid(images: np.ndarray) -> np.ndarray:
    """Tile images [n, height, width, channels] into one, separated by white lines."""
    n, height, width, channels = images.shape
    across = math.ceil(math.sqrt(n))
    down = math.ceil(n / across)
    sheet = np.full((down * (height + 1) + 1, across * (width + 1) + 1, channels), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = 1 + i // across * (height + 1), 1 + i % across * (width + 1)
        sheet[top : top + height, left : left + width] = image
    return sheet


def png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
    return file.getvalue()
