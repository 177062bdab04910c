"""Image captioning: the model sees an image and generates its caption. Used to fine-tune ViT + GPT-2 captioners."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from flaxen.atomic import atomic_file
from flaxen.data.caption_store import CaptionTokens
from flaxen.data.captions import CaptionSet, open_captions, pixels
from flaxen.data.images import ImageProcessor, UnreadableImage
from flaxen.data.order import examples
from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError
from flaxen.generate.batches import groups
from flaxen.generate.options import Options
from flaxen.generate.run import Generator
from flaxen.generate.search import prepare
from flaxen.metrics import captions as metrics
from flaxen.nn.loss import Sums
from flaxen.tasks.objective import CaptionObjective, EvalGeneration
from flaxen.tasks.sheet import SheetEntry, write_sheet
from flaxen.tasks.task import Batch, ModelFamily, Setup, Task, report_skipped


class Caption(Task):
    """Captioning. An example is one caption with its image."""

    def __init__(
        self,
        family: ModelFamily,
        config: Any,
        objective: CaptionObjective,
        generation: EvalGeneration,
        tokenizer: Tokenizer,
        processor: ImageProcessor,
        train: CaptionSet,
        validation: CaptionSet,
        seed: int,
        cache: Path | None = None,
    ):
        self.family, self.config, self.objective, self.generation = family, config, objective, generation
        self.tokenizer, self.processor, self.seed = tokenizer, processor, seed
        size = config.encoder.image_size
        if processor.shape != size:
            raise InputError(
                f"preprocessor_config.json produces images of {processor.shape}, but the model expects {size}"
            )
        if objective.length > config.decoder.n_positions:
            raise InputError(
                f"objective.length must be at most {config.decoder.n_positions}, the decoder's number of positions, "
                f"got {objective.length}"
            )
        self.sets = {"training": train, "validation": validation}
        self._train, self._validation = (
            CaptionTokens(part, tokenizer, objective.lowercase, cache) for part in (train, validation)
        )
        longest = int(max(self._train.lengths.max(), self._validation.lengths.max(initial=0)))
        # Pad to the longest caption, rounded up to a multiple of 8.
        self.length = min(objective.length, -(-longest // 8) * 8)
        self.examples, self.validation_examples = len(self._train), len(self._validation)
        # The class token counts as a patch.
        patches = 1 + math.prod(config.encoder.grid)
        self.tokens = patches + round(float(np.minimum(self._train.lengths, self.length).mean()))
        # The backward pass takes twice the operations of the forward pass.
        self.flops = 3 * family.flops(config, self.length)
        self.generation_metrics: tuple[str, ...] = metrics.NAMES if generation.examples and len(validation) else ()
        self._options = generation.options(objective.length)

    @classmethod
    def open(
        cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True
    ) -> "Caption":
        assert setup.processor is not None
        options = (settings.objective, settings.generation, setup.tokenizer, setup.processor)
        parts = open_captions(settings.data)
        return cls(setup.family, setup.config, *options, *parts, seed, settings.data.cache)

    def notes(self, size: int) -> list[str]:
        notes = []
        for name, tokens in (("training", self._train), ("validation", self._validation)):
            part = self.sets[name]
            notes.append(f"{len(part):,} {name} images with {len(tokens):,} captions")
            if part.repeated:
                notes.append(f"skipped {part.repeated:,} duplicate {name} captions")
            notes += [f"skipped in the {name} data: {problem}" for problem in part.problems[:5]]
            if len(part.problems) > 5:
                notes.append(f"skipped {len(part.problems) - 5:,} more rows in the {name} data")
            if truncated := int((tokens.lengths > self.length).sum()):
                notes.append(f"truncated {truncated:,} {name} captions to {self.length} tokens")
        return notes

    def evaluation_notes(self, size: int) -> list[str]:
        return self.notes(size)

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        first, last, _ = rows.indices(size)
        numbers = examples(step, (first, last - first), size, self.examples, self.seed)
        return self._read_batch("training", self._train, numbers)

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        n = min(self.validation_examples, limit or self.validation_examples)
        for first in range(0, n, size):
            batch = self._read_batch("validation", self._validation, np.arange(first, min(first + size, n)))
            # Rows that only fill up the batch have image -1, which distinguishes them from unreadable images.
            fill = size - len(batch["labels"])
            yield {
                name: np.pad(a, ((0, fill), *[(0, 0)] * (a.ndim - 1)), constant_values=0 if name == "pixels" else -1)
                for name, a in batch.items()
            }

    def _read_batch(self, part: str, tokens: CaptionTokens, numbers: np.ndarray) -> Batch:
        """Load the pixels and labels of these captions. Unreadable images get no labels and do not affect the loss."""
        # Several captions may share an image: read each image once.
        images, rows = np.unique(tokens.image[numbers], return_inverse=True)
        values, failed = pixels(self.sets[part], images.tolist(), self.processor)
        labels = tokens.labels(numbers, self.length)
        labels[np.isin(rows, [row for row, _ in failed])] = -1
        return {"pixels": values[rows], "labels": labels, "image": tokens.image[numbers].astype(np.int32)}

    def skipped_examples(self, batch: Batch, part: str = "training") -> list[str]:
        """Describe the images of a batch that cannot be read: rows without labels, except filler rows."""
        source = self.sets[part]
        unreadable = np.unique(batch["image"][(batch["labels"] < 0).all(axis=1)])
        return [self._problem(part, i, _read_error(source, i)) for i in unreadable.tolist() if i >= 0]

    def _problem(self, part: str, image: int, reason: str) -> str:
        return f"skipped {part} image {self.sets[part].name(image)}: {reason}"

    def loss(self, model: Any, batch: dict[str, Array], carry: None, key: Array | None) -> tuple[Sums, None]:
        # Label smoothing and z-loss are part of the training loss only; evaluation reports the plain cross-entropy.
        label_smoothing, z_loss = (
            (self.objective.label_smoothing, self.objective.z_loss) if key is not None else (0.0, 0.0)
        )
        return model.loss(batch["pixels"], batch["labels"], smoothing=label_smoothing, z_loss=z_loss, key=key)[1], None

    def generate_and_score_sample(self, model: Any, path: Path, skipped: set[str] | None = None) -> dict[str, float]:
        """Caption the first validation images; save predictions to `path` and a contact sheet next to it, as .html."""
        if not self.generation_metrics:
            return {}
        sizes = (self.generation.batch_size, self.generation.examples)
        return self.generate_and_score(model, self._options, *sizes, path, path.with_suffix(".html"), skipped)

    def generate_and_score(
        self,
        model: Any,
        options: Options,
        batch_size: int,
        limit: int | None,
        path: Path | None = None,
        sheet: Path | None = None,
        skipped: set[str] | None = None,
        part: str = "validation",
    ) -> dict[str, float]:
        """Caption all readable images, save predictions and a contact sheet if requested, and return metrics."""
        source = self.sets[part]
        n = min(len(source), limit or len(source))
        unreadable: set[int] = set()
        known = set[str]() if skipped is None else skipped

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for rows in groups(range(n), batch_size):
                # Filler rows (index -1) repeat image 0, and their output is dropped.
                values, failed = pixels(source, np.maximum(rows, 0).tolist(), self.processor)
                for row, reason in failed:
                    unreadable.add(int(rows[row]))
                    report_skipped([self._problem(part, int(max(rows[row], 0)), reason)], known)
                yield rows, values

        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        generator = Generator(prepare(self.family.decoder, model), options, self.config.pad_id, eos)
        captions = {out.prompt: self.tokenizer.decode(out.tokens).strip() for out in generator.outputs(batches())}
        readable = [i for i in range(n) if i not in unreadable]
        expected = [[t.lower() if self.objective.lowercase else t for t in source.captions(i)] for i in readable]
        values, each = metrics.score([captions[i] for i in readable], expected)
        lines = [(source.name(i), captions[i], references) for i, references in zip(readable, expected)]
        if path is not None:
            with atomic_file(path) as file:
                for name, prediction, references in lines:
                    line = {"image": name, "prediction": prediction, "references": references}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if sheet is not None:
            summary = "  ".join(f"{name} {value:.3g}" for name, value in values.items())
            entries = (
                SheetEntry(_thumbnail(source, i), name, prediction, tuple(references), score)
                for i, (name, prediction, references), score in zip(readable, lines, each)
            )
            write_sheet(sheet, entries, f"{len(readable):,} captions of {part} images", summary)
        return values

    def format_example(self, batch: Batch, row: int) -> dict[str, str]:
        """Format an example as text: the name of the image and its caption."""
        labels = batch["labels"][row]
        name = self.sets["training"].name(int(batch["image"][row]))
        return {"image": name, "target": self.tokenizer.decode(labels[labels >= 0].tolist())}

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        n = len(self.sets["validation"])
        return f"{min(n, limit or n) - skipped:,} images"

    @property
    def fingerprint(self) -> dict[str, Any]:
        digests = {f"{name}_data": part.identity()["digest"] for name, part in self.sets.items()}
        return digests | {"images": [len(part) for part in self.sets.values()], "examples": self.examples}


def _read_error(source: CaptionSet, number: int) -> str:
    """Return the reason why an image cannot be read, by reading it again."""
    try:
        source.image(number)
    except UnreadableImage as error:
        return str(error)
    return "reading it failed once"


def _thumbnail(source: CaptionSet, number: int) -> Any:
    """Read an image for the contact sheet."""
    try:
        return source.image(number)
    except UnreadableImage:  # it was readable a moment ago, but has been deleted since
        return None
