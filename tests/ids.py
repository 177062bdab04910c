"""A token stream of given ids, for tests."""

from dataclasses import dataclass

import numpy as np

from flaxen.data.stream_store import TextSize


@dataclass(frozen=True)
class Ids:
    """A stream of token ids in memory."""

    ids: np.ndarray
    identity: str = "ids"

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return np.stack([self.ids[s : s + length] for s in starts]) if len(starts) else np.empty((0, length), np.int32)

    def measured(self) -> TextSize:
        return TextSize(len(self), 0, len(self))
