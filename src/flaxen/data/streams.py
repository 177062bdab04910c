"""Data settings of language models: streams of text, bytes or pixels."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from flaxen.data.corpus import Corpus
from flaxen.data.files import find_files
from flaxen.data.text_files import TextFiles
from flaxen.errors import InputError


@dataclass(frozen=True)
class LanguageData(Corpus):
    """Language-modelling data: texts, raw bytes, or images pixel by pixel."""

    kind: Literal["text", "bytes", "pixels"] = "text"
    """Kind of data. text: tokenized documents, each ending in eos; bytes: raw bytes of files; pixels: images, row by
    row and colour by colour, from .npz or .npy arrays [images, height, width, channels], folders, or .parquet."""
    test: tuple[str, ...] = ()
    """Test files or glob patterns, used instead of a part of the training data."""
    shares: tuple[float, ...] | None = None
    """Proportions of training, validation and test data, as three numbers of any scale (bytes and pixels only).
    Splits with files of their own are excluded. Default: 90 5 5, or all for training if there are validation files."""
    image_size: int | None = None
    """Side in pixels of the square that image files, not arrays, are cropped and scaled to. Default: not scaled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares is not None and (len(self.shares) != 3 or min(self.shares) < 0 or not sum(self.shares)):
            raise InputError(f"data.shares must be three non-negative numbers that are not all 0, got {self.shares}")

        text = self.kind == "text"
        default = {field.name: field.default for field in dataclasses.fields(LanguageData)}
        for name, applies, hint in (
            ("shares", not text, "use data.validation_percent and data.test"),
            ("validation_percent", text, "use data.shares"),
            ("image_size", self.kind == "pixels", "it requires data.kind pixels"),
            *((name, text, "remove it") for name in ("column", "unit", "invalid", "cache")),
        ):
            if not applies and getattr(self, name) != default[name]:
                raise InputError(f"data.{name} has no effect with data.kind {self.kind}; {hint}")

    @property
    def proportions(self) -> tuple[float, ...]:
        """Proportions of the splits; with validation files, the data counts as split already."""
        return self.shares or ((1.0, 0.0, 0.0) if self.validation else (90.0, 5.0, 5.0))

    def of_files(self, patterns: tuple[str, ...]) -> TextFiles:
        """Return the documents of other files, read with the same settings."""
        return self._of_files(find_files(patterns))
