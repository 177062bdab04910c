"""Image to text: the model sees a picture and writes its caption. So ViT + GPT-2 pairs are fine-tuned."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from flaxen.atomic import whole_file
from flaxen.data.captions import CaptionSet, pixels
from flaxen.data.images import Processor, Unreadable
from flaxen.data.order import examples
from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError
from flaxen.generate.batches import groups
from flaxen.generate.options import Options
from flaxen.generate.run import Generator
from flaxen.generate.search import prepare
from flaxen.metrics import captions as metrics
from flaxen.models.captioner import Captioner, Config, flops
from flaxen.models.gpt2_decoding import CaptionDecoder
from flaxen.nn.loss import Sums
from flaxen.tasks.objective import CaptionObjective, Writing
from flaxen.tasks.sheet import Shown, write_sheet
from flaxen.tasks.task import Batch


class Tokens:
    """The captions of a set as tokens. An example is one caption with its image."""

    def __init__(self, source: CaptionSet, tokenizer: Tokenizer, objective: CaptionObjective):
        texts = [text for i in range(len(source)) for text in source.captions(i)]
        rows = tokenizer.encode_batch([t.lower() for t in texts] if objective.lowercase else texts, specials=False)
        self.image = np.repeat(np.arange(len(source)), [len(source.captions(i)) for i in range(len(source))])
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self._ends = np.cumsum(self.lengths)
        self._tokens = np.array([token for row in rows for token in row], np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def labels(self, numbers: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Captions with these numbers, -1 behind them. One that is cut has no end token: it is not over."""
        batch = np.full((len(numbers), length), -1, np.int32)
        for row, number in enumerate(numbers):
            end = self._ends[number]
            tokens = self._tokens[end - self.lengths[number] : end][:length]
            batch[row, : len(tokens)] = tokens
        return batch


class Caption:
    """The task of the trainer."""

    def __init__(
        self,
        config: Config,
        objective: CaptionObjective,
        writing: Writing,
        tokenizer: Tokenizer,
        processor: Processor,
        train: CaptionSet,
        validation: CaptionSet,
        seed: int,
    ):
        self.config, self.objective, self.writing, self.tokenizer = config, objective, writing, tokenizer
        self.processor, self.seed = processor, seed
        size = config.encoder.image_size
        if processor.shape != size:
            raise InputError(f"preprocessor_config.json makes images of {processor.shape}, but the model takes {size}")
        if objective.length > config.decoder.n_positions:
            raise InputError(
                f"objective.length={objective.length} is more than the decoder's {config.decoder.n_positions} positions"
            )
        self.sets = {"training": train, "validation": validation}
        self._train, self._validation = (Tokens(part, tokenizer, objective) for part in (train, validation))
        longest = int(max(self._train.lengths.max(), self._validation.lengths.max(initial=0)))
        self.length = min(objective.length, -(-longest // 8) * 8)
        self.examples, self.validation_examples = len(self._train), len(self._validation)
        patches = 1 + math.prod(config.encoder.grid)
        self.tokens = patches + round(float(np.minimum(self._train.lengths, self.length).mean()))
        self.flops = 3 * flops(config, self.length)
        self.scores: tuple[str, ...] = metrics.NAMES if writing.examples and len(validation) else ()
        self._options = writing.options(objective.length)
        self.unreadable: dict[str, str] = {}  # images that could not be decoded, and why

    def notes(self, size: int) -> list[str]:
        """What a person should know of the data before it is trained on."""
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
                name: np.pad(a, ((0, fill), *[(0, 0)] * (a.ndim - 1)), constant_values=-1 if name == "labels" else 0)
                for name, a in batch.items()
            }

    def _filled(self, part: str, tokens: Tokens, numbers: np.ndarray) -> Batch:
        """Pixels and labels. An image that cannot be read has no labels: it counts for nothing."""
        images, places = np.unique(tokens.image[numbers], return_inverse=True)
        found, failed = self._pixels(part, images)
        labels = tokens.labels(numbers, self.length)
        labels[np.isin(places, failed)] = -1
        return {"pixels": found[places], "labels": labels, "image": tokens.image[numbers].astype(np.int32)}

    def _pixels(self, part: str, images: Sequence[int] | np.ndarray) -> tuple[np.ndarray, list[int]]:
        source = self.sets[part]
        found, failed = pixels(source, [int(i) for i in images], self.processor)
        for row, reason in failed:
            name = source.name(int(images[row]))
            if name not in self.unreadable:
                self.unreadable[name] = reason
                print(f"left out of {part}: {name}: {reason}", file=sys.stderr)
        return found, [row for row, _ in failed]

    def carry(self, rows: int) -> None:
        return None

    def loss(self, model: Captioner, batch: dict[str, Array], carry: None, key: Array | None) -> tuple[Sums, None]:
        smoothing, z_loss = (self.objective.smoothing, self.objective.z_loss) if key is not None else (0.0, 0.0)
        return model.loss(batch["pixels"], batch["labels"], smoothing=smoothing, z_loss=z_loss, key=key)[1], None

    def divisor(self, batch: dict[str, Array]) -> None:
        return None

    def metrics(self, sums: Sums) -> dict[str, float]:
        loss = float(sums.loss / sums.weight)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": float(sums.correct / sums.weight)}

    def written(self, model: Captioner, path: Path) -> dict[str, float]:
        """Write for the first validation images; predictions and a contact sheet go to `path` and beside it."""
        if not self.scores:
            return {}
        sheet = path.with_suffix(".html")
        return self.write(model, self._options, path, sheet, self.writing.batch_size, self.writing.examples)

    def write(
        self,
        model: Captioner,
        options: Options,
        path: Path | None,
        sheet: Path | None,
        batch_size: int,
        limit: int | None,
        part: str = "validation",
    ) -> dict[str, float]:
        """Scores of what the model writes for all images that can be read; predictions and a contact sheet go to
        files."""
        source = self.sets[part]
        n = min(len(source), limit or len(source))
        lost: set[int] = set()

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for rows in groups(range(n), batch_size):
                found, failed = self._pixels(part, np.maximum(rows, 0))
                lost.update(int(rows[row]) for row in failed)
                yield rows, found

        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        generator = Generator(prepare(CaptionDecoder, model), options, self.config.pad_id, eos)
        made = {one.prompt: self.tokenizer.decode(one.tokens).strip() for one in generator.outputs(batches())}
        read = [i for i in range(n) if i not in lost]
        wanted = [[t.lower() if self.objective.lowercase else t for t in source.captions(i)] for i in read]
        values, each = metrics.score([made[i] for i in read], wanted)
        lines = [(source.name(i), made[i], references) for i, references in zip(read, wanted)]
        if path is not None:
            with whole_file(path) as file:
                for name, prediction, references in lines:
                    line = {"image": name, "prediction": prediction, "references": references}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if sheet is not None:
            said = "  ".join(f"{name} {value:.3g}" for name, value in values.items())
            shown = (
                Shown(_thumbnail(source, i), name, prediction, tuple(references), score)
                for i, (name, prediction, references), score in zip(read, lines, each)
            )
            write_sheet(sheet, shown, f"{len(read):,} captions of {part} images", said)
        return values

    def show(self, batch: Batch, row: int) -> dict[str, str]:
        """An example: the picture's name, and what the model shall write."""
        labels = batch["labels"][row]
        name = self.sets["training"].name(int(batch["image"][row]))
        return {"sees": name, "writes": self.tokenizer.decode(labels[labels >= 0].tolist())}

    @property
    def facts(self) -> dict[str, Any]:
        """What a run on this data cannot go on without."""
        digests = {f"{name}_data": part.identity()["digest"] for name, part in self.sets.items()}
        return digests | {"images": [len(part) for part in self.sets.values()], "examples": self.examples}


def _thumbnail(source: CaptionSet, number: int) -> Any:
    try:
        return source.image(number)
    except Unreadable:  # it has just been read, and is gone
        return None
