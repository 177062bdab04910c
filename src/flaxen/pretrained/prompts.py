"""Convert prompts to model inputs: texts to token ids, images to pixels, checked and batched."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.data.images import ImageProcessor, UnreadableImage, open_image
from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError
from flaxen.families import Family
from flaxen.generate.batches import batches, groups

# One or several prompts: texts, lists of token ids, or images (paths, PIL images, arrays of pixels).
Prompts = str | os.PathLike[str] | Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class PromptReader:
    """Converts a user's prompts to inputs of a model of this family."""

    family: Family
    config: Any
    tokenizer: Tokenizer | None
    processor: ImageProcessor | None

    def batches(self, prompts: Prompts, batch_size: int, new: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield (prompt indices, inputs) per batch; raise an error if a prompt leaves no room for `new` tokens."""
        rule = self.family.prompting
        if rule.reads == "image":
            images = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
            for rows in groups(range(len(images)), batch_size):
                # Filler rows (index -1) can hold any image.
                yield rows, self.pixels([images[max(row, 0)] for row in rows])
            return
        encoded = self.encode(prompts)
        limit = rule.position_limit(self.config)
        for i, ids in enumerate(encoded):
            if limit is not None and len(ids) + new > limit:
                raise InputError(
                    f"prompt {i} has {len(ids):,} tokens, which together with max_new_tokens={new:,} exceed the "
                    f"model's {limit:,} positions; shorten the prompt or reduce max_new_tokens"
                )
        for rows, inputs in batches(encoded, batch_size, self.config.pad_id, left=rule.continues):
            # None: there is no earlier state to continue from.
            yield rows, (*inputs, None) if rule.carries else inputs

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Convert prompts to token ids; raise an error if one is empty and the model needs a prompt."""
        return [self._encode(prompt, f"prompt {i}") for i, prompt in enumerate(self.as_list(prompts))]

    def as_list(self, prompts: Prompts) -> list[Any]:
        """Return one or several prompts as a list."""
        items: list[Any] = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
        if items and isinstance(items[0], int | np.integer):
            raise InputError("prompts must be texts or lists of ids, got a single list of ids; wrap it in a list")
        return items

    def _encode(self, prompt: Any, what: str) -> list[int]:
        rule = self.family.prompting
        ids = self.continuation(prompt, what) if rule.continues else self.ids(prompt, what)
        if rule.starts and isinstance(prompt, str):
            ids = [self.config.start_id, *ids]
        if rule.continues:
            return ids or [self.config.start_id]
        blank = isinstance(prompt, str) and self.tokenizer is not None and not self.tokenizer.decode(ids)
        if blank or not set(ids) - {self.config.pad_id, *self.config.eos_ids}:
            problem = "is empty" if not len(prompt) else "has only special tokens"
            raise InputError(f"{what} {problem}, so there is nothing to generate from")
        return ids

    def ids(self, prompt: Any, what: str, eos: bool = True) -> list[int]:
        """Tokenize a text, or check a list of ids."""
        if not isinstance(prompt, str):
            return self.check_ids(prompt, what, axes=1).tolist()
        if self.tokenizer is None:
            raise InputError("the checkpoint has no tokenizer; pass lists of token ids instead of texts")
        return self.tokenizer.encode(prompt, eos=eos, specials=self.family.prompting.specials)

    def continuation(self, prompt: Any, what: str = "prompt") -> list[int]:
        """Return the ids, without an end token, of a prompt that the output continues."""
        return self.ids(prompt, what, eos=False)

    def pixels(self, images: Any) -> np.ndarray:
        """Convert images (paths, PIL images or pixel arrays) to model inputs of shape [B, C, height, width]."""
        if isinstance(images, np.ndarray | jax.Array):
            pixels = np.asarray(images, np.float32)
        else:
            pixels = np.stack([self._image(image, i) for i, image in enumerate(images)])
        vision = getattr(self.config, "encoder", self.config)
        expected = (vision.n_channels, *vision.image_size)
        if pixels.ndim != 4 or (pixels.shape[1:] != expected and not vision.interpolate):
            raise InputError(f"expected pixels of shape (images, {', '.join(map(str, expected))}), got {pixels.shape}")
        return pixels

    def _image(self, image: Any, index: int) -> np.ndarray:
        """Convert one image to pixels of shape [C, height, width]."""
        if isinstance(image, np.ndarray | jax.Array):
            return np.asarray(image, np.float32)
        if self.processor is None:
            raise InputError("the checkpoint has no preprocessor_config.json; pass arrays of pixels instead of images")
        if isinstance(image, str | os.PathLike):
            try:
                image = open_image(Path(image).expanduser())
            except UnreadableImage as error:
                raise InputError(f"cannot read image {index}, {image}: {error}") from None
        return self.processor(image)

    def check_ids(self, ids: Any, what: str, axes: int = 2) -> np.ndarray:
        """Convert ids to an int32 array; raise an error unless it has `axes` axes and ids in the vocabulary."""
        try:
            array = np.asarray(ids)
        except ValueError:
            raise InputError(f"{what}: rows of ids differ in length; pad them and pass `valid`") from None
        if array.size == 0 and axes == 1:
            return array.astype(np.int32)
        if array.ndim != axes or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise InputError(f"{what} must be integer ids with {axes} axes, got {array.dtype} of shape {array.shape}")
        if not 0 <= array.min() <= array.max() < self.config.vocab_size:
            wrong = array.min() if array.min() < 0 else array.max()
            raise InputError(f"{what}: ids must be between 0 and {self.config.vocab_size - 1}, got {wrong}")
        return array.astype(np.int32)
