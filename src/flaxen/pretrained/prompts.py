"""Prompts as the inputs of a model: texts to ids, images to pixels, checked and batched."""

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

# Texts, lists of ids, or images: paths, PIL images, arrays of pixels.
Prompts = str | os.PathLike[str] | Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class PromptReader:
    """What stands between a user's prompts and a model of this family."""

    family: Family
    config: Any
    tokenizer: Tokenizer | None
    processor: ImageProcessor | None

    def batches(self, prompts: Prompts, batch_size: int, new: int) -> Iterator[tuple[np.ndarray, Any]]:
        """The inputs of some prompts at a time, with their numbers; `new` tokens are to follow each."""
        rule = self.family.prompting
        if rule.reads == "image":
            images = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
            for rows in groups(range(len(images)), batch_size):
                yield rows, self.pixels([images[max(row, 0)] for row in rows])
            return
        encoded = self.encode(prompts)
        limit = rule.position_limit(self.config)
        for i, ids in enumerate(encoded):
            if limit is not None and len(ids) + new > limit:
                raise InputError(
                    f"prompt {i} has {len(ids):,} tokens and max_new_tokens={new:,} are to follow, but the model "
                    f"has {limit:,} positions; shorten it, or ask for fewer"
                )
        for rows, inputs in batches(encoded, batch_size, self.config.pad_id, left=rule.continues):
            yield rows, (*inputs, None) if rule.carries else inputs

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Prompts as ids, checked: in range, and something in each beside special tokens."""
        return [self._encode(prompt, f"prompt {i}") for i, prompt in enumerate(self.listed(prompts))]

    def listed(self, prompts: Prompts) -> list[Any]:
        """One prompt or several, as a list."""
        found: list[Any] = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
        if found and isinstance(found[0], int | np.integer):
            raise InputError("prompts are texts or lists of ids, got a bare list of ids; wrap it in a list")
        return found

    def _encode(self, prompt: Any, what: str) -> list[int]:
        rule = self.family.prompting
        ids = self.continuation(prompt, what) if rule.continues else self.ids(prompt, what)
        if rule.starts and isinstance(prompt, str):
            ids = [self.config.start_id, *ids]
        if rule.continues:
            return ids or [self.config.start_id]
        blank = isinstance(prompt, str) and self.tokenizer is not None and not self.tokenizer.decode(ids)
        if blank or not set(ids) - {self.config.pad_id, *self.config.eos_ids}:
            problem = "is empty" if not len(prompt) else "holds only special tokens"
            raise InputError(f"{what} {problem}; there is nothing to generate from")
        return ids

    def ids(self, prompt: Any, what: str, eos: bool = True) -> list[int]:
        """A text through the tokenizer, or ids as they are."""
        if not isinstance(prompt, str):
            return self.checked(prompt, what, axes=1).tolist()
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer files; give lists of ids instead of texts")
        return self.tokenizer.encode(prompt, eos=eos, specials=self.family.prompting.specials)

    def continuation(self, prompt: Any, what: str = "prompt") -> list[int]:
        """Ids of a text that something follows: no end token."""
        return self.ids(prompt, what, eos=False)

    def pixels(self, images: Any) -> np.ndarray:
        """Images as the model takes them, [B, C, height, width]: paths, PIL images, or arrays that are so already."""
        if isinstance(images, np.ndarray | jax.Array):
            found = np.asarray(images, np.float32)
        else:
            found = np.stack([self._image(image, i) for i, image in enumerate(images)])
        seeing = getattr(self.config, "encoder", self.config)
        want = (seeing.n_channels, *seeing.image_size)
        if found.ndim != 4 or (found.shape[1:] != want and not seeing.interpolate):
            raise InputError(f"expected pixels of shape (pictures, {', '.join(map(str, want))}), got {found.shape}")
        return found

    def _image(self, image: Any, number: int) -> np.ndarray:
        if isinstance(image, np.ndarray | jax.Array):
            return np.asarray(image, np.float32)
        if self.processor is None:
            raise InputError("this checkpoint has no preprocessor_config.json; give arrays of pixels, not pictures")
        if isinstance(image, str | os.PathLike):
            try:
                image = open_image(Path(image).expanduser())
            except UnreadableImage as error:
                raise InputError(f"picture {number}, {image}: {error}") from None
        return self.processor(image)

    def checked(self, ids: Any, what: str, axes: int = 2) -> np.ndarray:
        """Ids as int32, if they are in the vocabulary."""
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
            raise InputError(f"{what}: id {wrong} is not in 0 … {self.config.vocab_size - 1}, the model's vocabulary")
        return array.astype(np.int32)
