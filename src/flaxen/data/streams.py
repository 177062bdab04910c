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

    train: tuple[str, ...] = ()
    """Training files or glob patterns. Text: .txt .jsonl .json .csv .tsv (each also with .gz) or .parquet; for bytes
    and pixels, see data.kind."""
    validation_percent: float = 5.0
    """Percentage of the training text to hold out for validation, taken from the start; ignored if there are validation
    files or a validation split. Bytes and pixels are split by data.shares instead."""
    kind: Literal["text", "bytes", "pixels"] = "text"
    """Kind of data. text: tokenized documents, each followed by an end token; bytes: raw bytes of files; pixels: images
    flattened by row, column and channel, from .npz or .npy arrays [images, height, width, channels], image folders, or
    .parquet files."""
    test: tuple[str, ...] = ()
    """Test files or glob patterns. Without them, text has no test data, and bytes and pixels are split by
    data.shares."""
    shares: tuple[float, ...] | None = None
    """Proportions in which the training data is split into training, validation and test data: three numbers, which
    need not sum to 100 (bytes and pixels only). The number of a split that has its own files is ignored. Default: 90 5
    5, or 100 0 0 if there are validation files."""
    image_size: int | None = None
    """Height and width, in pixels, that image files are cropped and resized to; arrays are not resized. Default: the
    original size."""

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
        """Proportions of the splits; if there are validation files, by default all of the data is for training."""
        return self.shares or ((1.0, 0.0, 0.0) if self.validation else (90.0, 5.0, 5.0))

    def of_files(self, patterns: tuple[str, ...]) -> TextFiles:
        """Return the documents of other files, read with the same settings."""
        return self._of_files(find_files(patterns))
