"""What a language model is trained on: settings of long rows of text, bytes or pixels."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from flaxen.data.corpus import Corpus
from flaxen.data.files import find_files
from flaxen.data.text_files import TextFiles
from flaxen.errors import InputError


@dataclass(frozen=True)
class LanguageData(Corpus):
    """What to predict: texts, raw bytes, or pictures pixel by pixel."""

    kind: Literal["text", "bytes", "pixels"] = "text"
    """text: documents through a tokenizer, each ended by an end token; bytes: files as they are; pixels: pictures, row
    by row and colour by colour, from .npz or .npy arrays [pictures, height, width, channels], folders, or .parquet."""
    test: tuple[str, ...] = ()
    """Files to test on, instead of a part of the training data."""
    shares: tuple[float, ...] | None = None
    """Of bytes or pictures, without files of their own: how many to train on, then to validate on, then to test on; as
    numbers or percentages, only their proportions count. Default: 90 5 5; all to train on, if validation has files."""
    image_size: int | None = None
    """Of pixels: pictures of folders are scaled to this square. Arrays keep their own size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares is not None and (len(self.shares) != 3 or min(self.shares) < 0 or not sum(self.shares)):
            raise InputError(f"data.shares are three numbers, none negative and not all 0, got {self.shares}")

        text = self.kind == "text"
        default = {field.name: field.default for field in dataclasses.fields(LanguageData)}
        for name, applies, instead in (
            ("shares", not text, "texts have data.validation_percent, and files of their own to test on"),
            ("validation_percent", text, f"{self.kind} have data.shares"),
            ("image_size", self.kind == "pixels", "it is for data.kind pixels"),
            *((name, text, f"{self.kind} are read as they are") for name in ("column", "unit", "invalid", "cache")),
        ):
            if not applies and getattr(self, name) != default[name]:
                raise InputError(f"data.{name} does nothing with data.kind {self.kind}: {instead}")

    @property
    def proportions(self) -> tuple[float, ...]:
        """Who names files to validate on has cut the data already."""
        return self.shares or ((1.0, 0.0, 0.0) if self.validation else (90.0, 5.0, 5.0))

    def of_files(self, places: tuple[str, ...]) -> TextFiles:
        return self._of_files(find_files(places))
