"""Language modelling: predict the next token of a long row of text, bytes or pixels, with what came before in mind."""

import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flaxen.data.order import examples
from flaxen.data.stream_store import Measure, Opened, Stream, open_streams, pieces
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer
from flaxen.errors import InputError
from flaxen.models import vq_lm
from flaxen.models.vq_config import Config
from flaxen.models.vq_lm import VQLM, Noise, State
from flaxen.nn.loss import Sums
from flaxen.tasks.objective import LanguageObjective
from flaxen.tasks.task import Batch, ModelFamily, Setup, Task


class Carry(NamedTuple):
    """What an update leaves to the next one of the same sequences. Rows first."""

    position: Array
    documents: Array
    latest: Array
    caches: Any  # [B, L, …]
    key: Array  # of the dropout that stays the same for a whole sequence


class Language(Task):
    """A sequence is trained on in chunks, one update for each; an example is a chunk."""

    def __init__(
        self,
        family: ModelFamily,
        config: Config,
        objective: LanguageObjective,
        tokenizer: Tokenizer,
        data: Opened,
        seed: int,
        split: str = "validation",
    ):
        chunk = objective.chunk
        if config.attention == "full" and objective.continued:
            raise InputError("full attention carries nothing from sequence to sequence: leave objective.continued out")
        if chunk % config.block:
            raise InputError(
                f"an update of {chunk} tokens (objective.update, or objective.length) must be a multiple of the "
                f"model's block of {config.block}; a block that fits: --model.fields "
                f"block={math.gcd(chunk, config.block)}"
            )
        if config.attention == "full" and chunk != objective.length:
            raise InputError(
                "full attention keeps nothing from update to update: leave objective.update out, or use attention vq"
            )
        if data.shape and objective.length % math.prod(data.shape):
            raise InputError(
                f"objective.length={objective.length} must be a multiple of the {math.prod(data.shape)} numbers of a "
                f"picture of shape {data.shape}"
            )
        self.config, self.objective, self.tokenizer, self.seed, self.data = config, objective, tokenizer, seed, data
        self.split = split
        self.train, self.held = data.splits["train"], data.splits[split]
        for name, stream in (("train", self.train), (split, self.held)):
            self._check_ids(name, stream)
        self.chunks = objective.length // chunk
        self.sequences = -(-len(self.train) // objective.length)
        self.examples = self.sequences * self.chunks
        self.validation_examples = -(-len(self.held) // objective.length)
        self.tokens, self.flops = chunk, 3 * family.flops(config, chunk)

    @classmethod
    def open(
        cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True
    ) -> "Language":
        data, objective, config = settings.data, settings.objective, setup.config
        opened = open_streams(data, setup.tokenizer)
        if config.image and opened.shape != config.image:
            got = opened.shape or "none"
            raise InputError(f"the model writes pictures of shape {config.image}, the data has {got}")
        if data.kind != "text" and not isinstance(setup.tokenizer, ByteTokenizer):
            raise InputError(
                f"data.kind {data.kind} reads bytes as they are, and this model's tokens are a vocabulary's; leave "
                "--model.tokenizer out, or read the files with --data.kind text"
            )
        config = dataclasses.replace(config, image=opened.shape)
        if not training:  # any block that divides an update gives the same numbers
            config = dataclasses.replace(config, block=math.gcd(config.block, objective.chunk))
        return cls(setup.family, config, objective, setup.tokenizer, opened, seed, split)

    def _check_ids(self, name: str, stream: Stream) -> None:
        if name == "train" and not len(stream):
            raise InputError("there is nothing to train on: the training data is empty")
        if not len(stream):
            return
        n = min(len(stream), 1 << 16)
        largest = max(int(stream.rows(np.array([at]), n).max()) for at in (0, len(stream) - n))
        if largest >= self.config.vocab_size:
            raise InputError(
                f"the {name} data holds id {largest} and the model's vocabulary ends at {self.config.vocab_size - 1}; "
                "they do not belong together"
            )

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        first, last, _ = rows.indices(size)
        number, chunk = divmod(step, self.chunks)
        chosen = examples(number, (first, last - first), size, self.sequences, self.seed)
        return self._chunk(self.train, chosen * self.objective.length, chunk)

    def _chunk(self, stream: Stream, starts: np.ndarray, chunk: int, fresh: bool | None = None) -> Batch:
        """Chunk number `chunk` of the sequences that start there. With `fresh` said, it alone says what goes on."""
        c, length = self.config, self.objective.chunk
        at = starts + chunk * length
        fresh = chunk == 0 if fresh is None else fresh
        inner = np.full(len(at), not fresh)
        inputs, targets = pieces(stream, at, inner, length, c.start_id, c.pad_id)
        # By place and not by id: where a vocabulary pads with its end token, that token is a label like any other.
        labels = np.where(at[:, None] + np.arange(length) >= len(stream), -1, targets)
        return {"inputs": inputs, "labels": labels, "fresh": ~inner}

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Sequences in order, each from nothing; or all as one text for each row of the batch."""
        n = min(self.validation_examples, limit or self.validation_examples)
        length = self.objective.length
        if self.objective.continued:
            rounds = -(-n // size)
            starts = np.arange(size) * rounds * length
            for number in range(rounds * self.chunks):
                batch = self._chunk(self.held, starts, number, fresh=number == 0)
                batch["labels"][starts // length + number // self.chunks >= n] = -1
                yield batch
            return
        for first in range(0, n, size):
            numbers = first + np.arange(size)
            for chunk in range(self.chunks):
                batch = self._chunk(self.held, numbers * length, chunk)
                batch["labels"][numbers >= n] = -1
                yield batch

    def carry(self, rows: int) -> Carry:
        state = vq_lm.empty(self.config, rows)
        return self._packed(state, jnp.zeros((rows, 2), jnp.uint32))

    def loss(self, model: VQLM, batch: dict[str, Array], carry: Carry, key: Array | None) -> tuple[Sums, Carry]:
        fresh, rows = batch["fresh"], len(batch["fresh"])
        start = self.carry(rows)
        if key is not None:
            begun = jax.random.key_data(jax.random.fold_in(key, 1))
            start = start._replace(key=jnp.broadcast_to(begun, start.key.shape))
        now = jax.tree.map(lambda a, b: jnp.where(fresh.reshape(-1, *[1] * (a.ndim - 1)), a, b), start, carry)
        noise = None
        if key is not None:
            noise = Noise(jax.random.fold_in(key, 0), jax.random.wrap_key_data(now.key[0]))
        sums, state, _ = model.loss(
            batch["inputs"], batch["labels"], self._unpacked(now), commit=self.objective.commit, noise=noise,
            learn=key is not None,
        )  # fmt: skip
        return sums, self._packed(state, now.key)

    def divisor(self, batch: dict[str, Array]) -> int | None:
        return batch["labels"].size if self.objective.normalise == "positions" else None

    def further_metrics(self, loss: float) -> dict[str, float]:
        if self.data.shape:
            return {"bits_per_dim": loss / math.log(2)}
        nats = loss * self.measure.tokens
        values = {"bits_per_byte": nats / self.measure.bytes / math.log(2)}
        if self.measure.words:
            values["word_perplexity"] = math.exp(min(nats / self.measure.words, 700.0))
        return values

    @cached_property
    def measure(self) -> Measure:
        """Of what is evaluated on; if there is nothing, of what is trained on."""
        return (self.held if len(self.held) else self.train).measured()

    @property
    def facts(self) -> dict[str, Any]:
        return {"training_data": self.train.identity, "validation_data": self.held.identity}

    def notes(self, size: int) -> list[str]:
        c, state = self.config, jax.eval_shape(lambda: vq_lm.empty(self.config, 1))
        kind = f"{self.objective.length:,} tokens, {self.chunks} update(s) of {self.objective.chunk:,}"
        return [
            f"{self.sequences:,} training and {self.validation_examples:,} {self.split} sequences of {kind} each",
            f"state of a sequence, whatever its length: {vq_lm.state_bytes(state) / 1e6:,.2f} MB"
            if c.attention == "vq"
            else "full attention: its cost grows with the square of the length, and it has no codebooks",
        ]

    def show(self, batch: Batch, row: int) -> dict[str, str]:
        inputs, labels = batch["inputs"][row], batch["labels"][row]
        if self.data.shape:
            numbers = " ".join(map(str, inputs[1:33].tolist()))
            return {"reads": f"{len(inputs):,} pixels of shape {self.data.shape}: {numbers} …"}
        text = self.tokenizer.decode(np.maximum(labels, 0).tolist())
        return {"reads": self.tokenizer.decode(inputs.tolist()), "writes": text}

    def start(self, model: VQLM) -> VQLM:
        """With codebooks of the data, if they are wanted."""
        if self.objective.codebooks == "random" or self.config.attention == "full":
            return model
        batch = self.batch(0, min(8, self.sequences))
        return jax.jit(vq_lm.fit_codebooks)(model, jnp.asarray(batch["inputs"]), jax.random.key(self.seed))

    def _packed(self, state: State, key: Array) -> Carry:
        # Full attention keeps nothing: its caches are empty arrays, which no file need hold.
        caches = state.caches if self.config.attention == "vq" else ()
        rows_first = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), caches)
        return Carry(state.position, state.seen.documents, state.seen.latest, rows_first, key)

    def _unpacked(self, carry: Carry) -> State:
        seen, caches = vq_lm.Seen(carry.documents, carry.latest), carry.caches
        if self.config.attention == "full":
            return State(carry.position, seen, vq_lm.empty(self.config, len(carry.position)).caches)
        return State(carry.position, seen, jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), caches))
