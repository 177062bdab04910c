"""Caption tokens, cached on disk, with the image each caption belongs to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.data.captions import CaptionSet
from flaxen.data.files import OnProgress, ignore_progress
from flaxen.data.store import TokenStore, open_store
from flaxen.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class CaptionTexts:
    """The captions of a CaptionSet, image by image, as a DataSource for the token store."""

    captions: CaptionSet
    lowercase: bool
    size: int | None = None

    @property
    def name(self) -> str:
        return self.captions.source.name

    def identity(self) -> dict[str, Any]:
        """Return what the texts depend on, as JSON."""
        return {"lowercase": self.lowercase, **self.captions.identity()}

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        """Iterate over the captions in order."""
        for i in range(len(self.captions)):
            for text in self.captions.captions(i):
                yield text.lower() if self.lowercase else text


class CaptionTokens:
    """The captions of a CaptionSet as tokens, each ending in eos; `image` maps a caption to its image number."""

    def __init__(self, captions: CaptionSet, tokenizer: Tokenizer, lowercase: bool, cache: Path | None):
        counts = [len(captions.captions(i)) for i in range(len(captions))]
        self.image = np.repeat(np.arange(len(captions)), counts)
        self._store: TokenStore | None = None
        self.lengths = np.zeros(0, np.int64)
        if len(captions):
            self._store = open_store(CaptionTexts(captions, lowercase), tokenizer, cache)
            self.lengths = self._store.document_lengths()

    def __len__(self) -> int:
        return len(self.lengths)

    def labels(self, numbers: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return captions padded with -1. A truncated caption has no eos: the model must not learn to stop there."""
        batch = np.full((len(numbers), length), -1, np.int32)
        for row, number in enumerate(numbers):
            assert self._store is not None
            tokens = self._store.document(int(number))[:length]
            batch[row, : len(tokens)] = tokens
        return batch
