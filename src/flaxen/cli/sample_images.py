"""Pictures out of a model of pixels: each as .png, and a grid of them."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.data.stream_store import FIRST
from flaxen.errors import InputError
from flaxen.hf.files import atomic_directory
from flaxen.pretrained import Pretrained

OPTIONS = ("do_sample", "seed", "temperature", "top_k", "top_p", "min_p", "nucleus", "repetition_penalty")


def draw(pretrained: Pretrained, n: int, directory: Path, batch_size: int, options: dict[str, Any]) -> np.ndarray:
    """Samples, of shape [n, height, width, channels]. No special id can be drawn, so every picture is whole."""
    shape = getattr(pretrained.config, "image", ())
    if not shape:
        raise InputError("this model writes no pictures; train one with `flaxen train language --data.kind pixels`")
    strange = [name for name in options if name not in OPTIONS]
    if strange or not options.get("do_sample", True):
        what = f"--{strange[0].replace('_', '-')}" if strange else "--no-do-sample"
        raise InputError(f"{what} is not for pictures, which are sampled whole; there are {', '.join(OPTIONS)}")
    size = math.prod(shape)
    special = [[id] for id in range(pretrained.config.vocab_size) if not FIRST <= id < FIRST + 256]
    asked = {"do_sample": True, "top_k": 0, "max_new_tokens": size, **options}
    asked |= {"bad_words_ids": special, "eos_token_id": ()}
    with atomic_directory(directory, "grid.png") as fresh:  # what is in the way is refused now, not at the end
        print(f"{n} pictures of {size:,} numbers each", file=sys.stderr)
        found = pretrained.generate([[pretrained.config.start_id]] * n, batch_size=batch_size, **asked)
        drawn = np.array([one.tokens for one in found], np.int64).reshape(n, *shape) - FIRST
        pictures = drawn.astype(np.uint8)
        for i, picture in enumerate(pictures):
            (fresh / f"{i:04d}.png").write_bytes(png(picture))
        (fresh / "grid.png").write_bytes(png(grid(pictures)))
    print(f"pictures and grid.png in {directory}", file=sys.stderr)
    return pictures


def grid(pictures: np.ndarray) -> np.ndarray:
    """All pictures in one, in rows, with a line between them."""
    n, height, width, channels = pictures.shape
    across = math.ceil(math.sqrt(n))
    down = math.ceil(n / across)
    sheet = np.full((down * (height + 1) + 1, across * (width + 1) + 1, channels), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = 1 + i // across * (height + 1), 1 + i % across * (width + 1)
        sheet[top : top + height, left : left + width] = picture
    return sheet


def png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(file, "PNG")
    return file.getvalue()
