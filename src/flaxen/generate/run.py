"""From batches of inputs to outputs: searched to the end."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.generate.batches import padded_length
from flaxen.generate.options import Options
from flaxen.generate.search import Beams, Decoder, Sampling, advance, begin


class Output(NamedTuple):
    """One output. `tokens` ends with the end token if there was one; `logprobs` are the model's own, per token."""

    tokens: list[int]
    logprobs: list[float]
    score: float  # of beam search: transformers' length-normalised score; else the sum of logprobs
    prompt: int  # which one it answers


@dataclass(frozen=True)
class Generator:
    """A model that is prepared for decoding, and how to search."""

    decoder: Decoder
    options: Options
    pad: int
    eos: tuple[int, ...]

    def outputs(self, batches: Iterable[tuple[np.ndarray, Any]]) -> Iterator[Output]:
        """options.num_return_sequences for each row of each batch; a row is the number of its prompt, or -1."""
        for rows, inputs in batches:
            search = self.advance(self.begin(rows, inputs), self.options.max_new_tokens)
            yield from self._collect(search, rows)

    def begin(self, rows: np.ndarray, inputs: Any) -> Sampling | Beams:
        room, inputs = padded_length(self.options.max_new_tokens), jax.tree.map(jnp.asarray, inputs)
        return begin(self.decoder, inputs, jnp.asarray(rows), room, self.options.static(), self.pad)

    def advance(self, search: Sampling | Beams, until: int) -> Sampling | Beams:
        numbers = {name: jnp.asarray(value) for name, value in self.options.numbers().items()}
        limit, static = jnp.asarray(until), self.options.static()
        return advance(self.decoder, search, limit, numbers, static, self.eos, self.pad)

    def _collect(self, search: Sampling | Beams, rows: np.ndarray) -> Iterator[Output]:
        if isinstance(search, Beams):
            found = (search.finished_tokens, search.finished_logprobs, search.finished_scores)
        else:
            found = (search.tokens, search.logprobs, search.logprobs.sum(axis=-1))
        tokens, logprobs, scores = map(np.asarray, found)
        first = int(search.begun)
        n_best, longest = self.options.num_return_sequences, self.options.max_new_tokens
        for row in np.flatnonzero(rows >= 0):
            for ids, log, score in zip(
                tokens[row, :n_best, first:], logprobs[row, :n_best, first:], scores[row, :n_best]
            ):
                ends = np.flatnonzero(np.isin(ids, self.eos))
                n = min(ends[0] + 1 if len(ends) else len(ids), longest)
                yield Output(ids[:n].tolist(), log[:n].tolist(), float(score), int(rows[row]))
