"""Image to text: the model sees a picture and writes its caption. So ViT + GPT-2 pairs are fine-tuned."""

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
    """An example is one caption with its image."""

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
            raise InputError(f"preprocessor_config.json makes images of {processor.shape}, but the model takes {size}")
        if objective.length > config.decoder.n_positions:
            raise InputError(
                f"objective.length={objective.length} is more than the decoder's {config.decoder.n_positions} positions"
            )
        self.sets = {"training": train, "validation": validation}
        self._train, self._validation = (
            CaptionTokens(part, tokenizer, objective.lowercase, cache) for part in (train, validation)
        )
        longest = int(max(self._train.lengths.max(), self._validation.lengths.max(initial=0)))
        self.length = min(objective.length, -(-longest // 8) * 8)
        self.examples, self.validation_examples = len(self._train), len(self._validation)
        patches = 1 + math.prod(config.encoder.grid)
        self.tokens = patches + round(float(np.minimum(self._train.lengths, self.length).mean()))
        self.flops = 3 * family.flops(config, self.length)
        self.generation_metrics: tuple[str, ...] = metrics.NAMES if generation.examples and len(validation) else ()
        self._options = generation.options(objective.length)

    @classmethod
    def open(
        cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True
    ) -> "Caption":
        assert setup.processor is not None
        how = (settings.objective, settings.generation, setup.tokenizer, setup.processor)
        parts = open_captions(settings.data)
        return cls(setup.family, setup.config, *how, *parts, seed, settings.data.cache)

    def notes(self, size: int) -> list[str]:
        said = []
        for name, tokens in (("training", self._train), ("validation", self._validation)):
            part = self.sets[name]
            said.append(f"{len(part):,} {name} images with {len(tokens):,} captions")
            if part.repeated:
                said.append(f"{part.repeated:,} {name} captions were there twice and count once")
            said += [f"left out of {name}: {problem}" for problem in part.problems[:5]]
            if len(part.problems) > 5:
                said.append(f"left out of {name}: {len(part.problems) - 5:,} more")
            if cut := int((tokens.lengths > self.length).sum()):
                said.append(f"{cut:,} {name} captions are longer than {self.length} tokens and are cut")
        return said

    def evaluation_notes(self, size: int) -> list[str]:
        return self.notes(size)

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        first, last, _ = rows.indices(size)
        numbers = examples(step, (first, last - first), size, self.examples, self.seed)
        return self._filled("training", self._train, numbers)

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        n = min(self.validation_examples, limit or self.validation_examples)
        for first in range(0, n, size):
            batch = self._filled("validation", self._validation, np.arange(first, min(first + size, n)))
            fill = size - len(batch["labels"])
            yield {
                name: np.pad(a, ((0, fill), *[(0, 0)] * (a.ndim - 1)), constant_values=0 if name == "pixels" else -1)
                for name, a in batch.items()
            }

    def _filled(self, part: str, tokens: CaptionTokens, numbers: np.ndarray) -> Batch:
        """Pixels and labels. An image that cannot be read has no labels: it counts for nothing."""
        images, places = np.unique(tokens.image[numbers], return_inverse=True)
        found, failed = pixels(self.sets[part], images.tolist(), self.processor)
        labels = tokens.labels(numbers, self.length)
        labels[np.isin(places, [row for row, _ in failed])] = -1
        return {"pixels": found[places], "labels": labels, "image": tokens.image[numbers].astype(np.int32)}

    def skipped_examples(self, batch: Batch, part: str = "training") -> list[str]:
        """Images that cannot be read: rows without a label that are no padding."""
        source = self.sets[part]
        lost = np.unique(batch["image"][(batch["labels"] < 0).all(axis=1)])
        return [self._problem(part, i, _reason(source, i)) for i in lost.tolist() if i >= 0]

    def _problem(self, part: str, image: int, reason: str) -> str:
        return f"left out of {part}: {self.sets[part].name(image)}: {reason}"

    def loss(self, model: Any, batch: dict[str, Array], carry: None, key: Array | None) -> tuple[Sums, None]:
        label_smoothing, z_loss = (
            (self.objective.label_smoothing, self.objective.z_loss) if key is not None else (0.0, 0.0)
        )
        return model.loss(batch["pixels"], batch["labels"], label_smoothing=label_smoothing, z_loss=z_loss, key=key)[
            1
        ], None

    def generate_and_score_sample(self, model: Any, path: Path, skipped: set[str] | None = None) -> dict[str, float]:
        """The contact sheet lies beside the predictions."""
        if not self.generation_metrics:
            return {}
        how = (self.generation.batch_size, self.generation.examples)
        return self.generate_and_score(model, self._options, *how, path, path.with_suffix(".html"), skipped)

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
        """For all images that can be read; predictions and a contact sheet go to files."""
        source = self.sets[part]
        n = min(len(source), limit or len(source))
        lost: set[int] = set()
        known = set[str]() if skipped is None else skipped

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for rows in groups(range(n), batch_size):
                found, failed = pixels(source, np.maximum(rows, 0).tolist(), self.processor)
                for row, reason in failed:
                    lost.add(int(rows[row]))
                    report_skipped([self._problem(part, int(max(rows[row], 0)), reason)], known)
                yield rows, found

        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        generator = Generator(prepare(self.family.decoder, model), options, self.config.pad_id, eos)
        made = {one.prompt: self.tokenizer.decode(one.tokens).strip() for one in generator.outputs(batches())}
        read = [i for i in range(n) if i not in lost]
        wanted = [[t.lower() if self.objective.lowercase else t for t in source.captions(i)] for i in read]
        values, each = metrics.score([made[i] for i in read], wanted)
        lines = [(source.name(i), made[i], references) for i, references in zip(read, wanted)]
        if path is not None:
            with atomic_file(path) as file:
                for name, prediction, references in lines:
                    line = {"image": name, "prediction": prediction, "references": references}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if sheet is not None:
            said = "  ".join(f"{name} {value:.3g}" for name, value in values.items())
            shown = (
                SheetEntry(_thumbnail(source, i), name, prediction, tuple(references), score)
                for i, (name, prediction, references), score in zip(read, lines, each)
            )
            write_sheet(sheet, shown, f"{len(read):,} captions of {part} images", said)
        return values

    def format_example(self, batch: Batch, row: int) -> dict[str, str]:
        """An example: the picture's name, and what the model shall write."""
        labels = batch["labels"][row]
        name = self.sets["training"].name(int(batch["image"][row]))
        return {"sees": name, "writes": self.tokenizer.decode(labels[labels >= 0].tolist())}

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        n = len(self.sets["validation"])
        return f"{min(n, limit or n) - skipped:,} pictures"

    @property
    def fingerprint(self) -> dict[str, Any]:
        digests = {f"{name}_data": part.identity()["digest"] for name, part in self.sets.items()}
        return digests | {"images": [len(part) for part in self.sets.values()], "examples": self.examples}


def _reason(source: CaptionSet, number: int) -> str:
    """Why an image cannot be read."""
    try:
        source.image(number)
    except UnreadableImage as error:
        return str(error)
    return "it could not be read before"


def _thumbnail(source: CaptionSet, number: int) -> Any:
    try:
        return source.image(number)
    except UnreadableImage:  # it has just been read, and is gone
        return None
