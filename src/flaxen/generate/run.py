"""Generator: runs a search over batches of inputs and collects the outputs."""

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
    """One generated sequence; `tokens` ends with the end token, if there was one."""

    tokens: list[int]
    logprobs: list[float]  # of each token under the model itself, before logits processors
    score: float  # beam search: transformers' length-normalised score; otherwise the sum of logprobs
    prompt: int  # index of its prompt


@dataclass(frozen=True)
class Generator:
    """A decoder and the options to search with."""

    decoder: Decoder
    options: Options
    pad: int
    eos: tuple[int, ...]

    def outputs(self, batches: Iterable[tuple[np.ndarray, Any]]) -> Iterator[Output]:
        """Yield num_return_sequences outputs per prompt.

        A batch is (rows, inputs); `rows` holds the index of each row's prompt, or -1 for a filler row.
        """
        for rows, inputs in batches:
            search = self.advance(self.begin(rows, inputs), self.options.max_new_tokens)
            yield from self._collect(search, rows)

    def begin(self, rows: np.ndarray, inputs: Any) -> Sampling | Beams:
        """Start a search over one batch."""
        # Rounded up to a bucket, so that a new max_new_tokens rarely causes recompilation.
        room, inputs = padded_length(self.options.max_new_tokens), jax.tree.map(jnp.asarray, inputs)
        return begin(self.decoder, inputs, jnp.asarray(rows), room, self.options.static(), self.pad)

    def advance(self, search: Sampling | Beams, until: int) -> Sampling | Beams:
        """Continue a search until it has generated `until` tokens or ended."""
        numbers = {name: jnp.asarray(value) for name, value in self.options.numbers().items()}
        limit, static = jnp.asarray(until), self.options.static()
        return advance(self.decoder, search, limit, numbers, static, self.eos, self.pad)

    def _collect(self, search: Sampling | Beams, rows: np.ndarray) -> Iterator[Output]:
        """Yield the outputs of a completed search, cut after the end token."""
        if isinstance(search, Beams):
            results = (search.finished_tokens, search.finished_logprobs, search.finished_scores)
        else:
            results = (search.tokens, search.logprobs, search.logprobs.sum(axis=-1))
        tokens, logprobs, scores = map(np.asarray, results)
        first = int(search.begun)
        n_best, longest = self.options.num_return_sequences, self.options.max_new_tokens
        for row in np.flatnonzero(rows >= 0):
            for ids, log, score in zip(
                tokens[row, :n_best, first:], logprobs[row, :n_best, first:], scores[row, :n_best]
            ):
                ends = np.flatnonzero(np.isin(ids, self.eos))
                n = min(ends[0] + 1 if len(ends) else len(ids), longest)
                yield Output(ids[:n].tolist(), log[:n].tolist(), float(score), int(rows[row]))
