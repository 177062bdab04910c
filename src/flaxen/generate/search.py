"""Greedy search, sampling and beam search, for any model with a `Decoder` that decodes one token at a time.

G sequences (beams or samples) are decoded in parallel for each of B inputs. The progress of a search is a NamedTuple
of arrays (`Sampling` or `Beams`), and a step is a pure function from one to the next. `advance` runs steps in one
compiled loop: to the end, or one token at a time for streaming, with the same executable. After each step, beam search
calls `Decoder.select` to reorder the cache by beam index.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.generate.options import Options
from flaxen.generate.processors import TokenHistory, processors

DEAD = -1e9  # score of a beam that does not exist; finite, as in transformers, so that ties are broken in the same way


@runtime_checkable
class Decoder(Protocol):
    """What a search needs from a model: a pytree with the weights, laid out for decoding, and three functions."""

    def start(self, inputs: Any, length: int, beams: int, reorder: bool) -> tuple[Int[Array, "B G P"], Any]:
        """Return the prompt (or start token) of each sequence, and the state after all but its last token.

        The state has room for `length` more tokens, including that last one. `select` is called only with `reorder`.
        """
        ...

    def step(self, tokens: Int[Array, "B G"], state: Any) -> tuple[Float[Array, "B G V"], Any]:
        """Feed one token per sequence; return the logits of the next token and the new state."""
        ...

    def select(self, state: Any, beams: Int[Array, "B G"]) -> Any:
        """Reorder the cache by beam index: sequence g of input b continues sequence beams[b, g]."""
        ...


def prepare(decoder: Callable[[Any], Decoder], model: Any) -> Decoder:
    """Lay out a model's weights for decoding, once for all tokens of all prompts.

    Not jitted as a whole: jit would copy every argument that it returns, which is the whole model.
    """
    return decoder(model)


class Sampling(NamedTuple):
    """State of a greedy search or of sampling."""

    state: Any
    tokens: Int[Array, "B G T"]  # prompt or start token, then the generated tokens
    logprobs: Float[Array, "B G T"]  # under the model itself, before logits processors
    length: Int[Array, ""]  # number of tokens so far
    begun: Int[Array, ""]  # length of the prompt or start token
    done: Bool[Array, "B G"]
    rows: Int[Array, "B"]  # prompt index of each row: sampling noise depends on it, and not on the batch


class Beams(NamedTuple):
    """State of a beam search: the running beams, the best finished ones, and whether those can still be beaten."""

    state: Any
    tokens: Int[Array, "B G T"]
    logprobs: Float[Array, "B G T"]
    length: Int[Array, ""]
    begun: Int[Array, ""]
    scores: Float[Array, "B G"]  # of the running beams: sums of processed log-probabilities
    finished_tokens: Int[Array, "B G T"]
    finished_logprobs: Float[Array, "B G T"]
    finished_scores: Float[Array, "B G"]
    finished: Bool[Array, "B G"]
    open: Bool[Array, "B"]  # a running beam may still beat the worst finished one


@partial(jax.jit, static_argnames=("room", "options", "pad"))
def begin(
    decoder: Decoder,
    inputs: Any,
    rows: Array,
    room: int,
    options: Options,
    pad: int,
) -> Sampling | Beams:
    """Start a search that may generate up to `room` tokens. Filler rows (index -1) start finished."""
    first, state = decoder.start(inputs, room, options.beams, reorder=options.num_beams > 1)
    # Arrays in a compiled loop cannot grow, so the buffers have their final size from the start.
    tokens = jnp.pad(first, ((0, 0), (0, 0), (0, room)), constant_values=pad)
    logprobs = jnp.zeros(tokens.shape, jnp.float32)
    idle, length, shape = rows < 0, jnp.asarray(first.shape[2], jnp.int32), first.shape[:2]
    if options.num_beams == 1:
        return Sampling(state, tokens, logprobs, length, length, jnp.broadcast_to(idle[:, None], shape), rows)
    # All beams start out equal, so only the first may be extended; the others would duplicate it.
    scores = jnp.broadcast_to(jnp.where(jnp.arange(options.num_beams) == 0, 0.0, DEAD), shape)
    # Filler rows count as finished and closed, so that they never keep the loop running.
    finished = jnp.broadcast_to(idle[:, None], shape)
    worst = jnp.full(shape, DEAD)
    return Beams(state, tokens, logprobs, length, length, scores, tokens, logprobs, worst, finished, ~idle)


@partial(jax.jit, static_argnames=("options", "eos", "pad"), donate_argnames=("search",))
def advance(
    decoder: Decoder,
    search: Sampling | Beams,
    until: Int[Array, ""],
    numbers: dict[str, Array],
    options: Options,
    eos: tuple[int, ...],
    pad: int,
) -> Sampling | Beams:
    """Continue a search until it has generated `until` tokens or ended. The old search is donated."""
    step: Callable[..., Any] = _sampling_step if isinstance(search, Sampling) else _beam_step

    def unfinished(search: Sampling | Beams) -> Bool[Array, ""]:
        return (search.length - search.begun < until) & ~ended(search, options)

    def body(search: Sampling | Beams) -> Sampling | Beams:
        return step(decoder, search, numbers, options, eos, pad)

    return lax.while_loop(unfinished, body, search)


def ended(search: Sampling | Beams, options: Options) -> Bool[Array, ""]:
    """Whether a search has ended before reaching the length limit."""
    if isinstance(search, Sampling):
        return jnp.all(search.done)
    # Otherwise finished beams do not end a search by themselves: a running beam may still replace one of them.
    full = jnp.all(search.finished) if options.early_stopping is True else jnp.zeros((), bool)
    return ~jnp.any(search.open) | full


def _sampling_step(
    decoder: Decoder,
    search: Sampling,
    numbers: dict[str, Array],
    options: Options,
    eos: tuple[int, ...],
    pad: int,
) -> Sampling:
    """Append one token to each sequence, by argmax or by sampling."""
    at = search.length
    # The state holds all tokens but the last one, which this step feeds.
    logits, state = decoder.step(lax.dynamic_index_in_dim(search.tokens, at - 1, 2, keepdims=False), search.state)
    shaped = _process(logits, search, numbers, options, eos)
    if options.do_sample:
        # Gumbel-max trick: the argmax of logits + Gumbel noise is a sample from their softmax. The key depends on seed,
        # position and prompt index, so that a sample is the same in any batch.
        key = jax.random.fold_in(jax.random.key(numbers["seed"]), at - search.begun + 1)
        keys = jax.vmap(partial(jax.random.fold_in, key))(search.rows)
        # One key per input; its G samples differ because the noise has the shape [G, V].
        shaped = shaped + jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    token = jnp.argmax(shaped, axis=-1).astype(jnp.int32)
    token_logit = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    # A finished sequence gets log-probabilities of 0, so that the sum over the whole buffer is the score of its text.
    logprob = jnp.where(search.done, 0.0, token_logit - jax.nn.logsumexp(logits, axis=-1))
    token = jnp.where(search.done, pad, token)
    return search._replace(
        state=state,
        tokens=lax.dynamic_update_index_in_dim(search.tokens, token, at, 2),
        logprobs=lax.dynamic_update_index_in_dim(search.logprobs, logprob, at, 2),
        length=at + 1,
        done=search.done | _is_end(token, eos),
    )


def _beam_step(
    decoder: Decoder,
    search: Beams,
    numbers: dict[str, Array],
    options: Options,
    eos: tuple[int, ...],
    pad: int,
) -> Beams:
    """Extend the running beams by one token and merge those that end into the finished ones, as transformers does."""
    at, n = search.length, options.num_beams
    new = at - search.begun + 1  # number of generated tokens after this step
    limit, penalty = numbers["max_new_tokens"], numbers.get("length_penalty", jnp.ones(()))
    logits, state = decoder.step(lax.dynamic_index_in_dim(search.tokens, at - 1, 2, keepdims=False), search.state)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    # As in transformers, processors see log-probabilities in beam search, and logits in sampling.
    shaped = _process(logprobs, search, numbers, options, eos)

    # Each beam has at most len(eos) continuations that end, so this many candidates include `n` that do not.
    totals, parent, token = _top_candidates(shaped + search.scores[..., None], max(2, 1 + len(eos)) * n)
    # Scores add up processed log-probabilities, but the reported ones are those of the model itself.
    gained = logprobs[jnp.arange(len(logits))[:, None], parent, token]
    tokens = lax.dynamic_update_index_in_dim(_pick(search.tokens, parent), token, at, 2)
    history = lax.dynamic_update_index_in_dim(_pick(search.logprobs, parent), gained, at, 2)
    ends = _is_end(token, eos) | (new >= limit)

    # The best `n` candidates that have not ended are the new running beams.
    running, order = lax.top_k(totals + ends * DEAD, n)
    # A candidate may finish only if it ranks among the best `n`, and only in a row that is still open.
    full = jnp.all(search.finished, axis=1) & (options.early_stopping is True)
    eligible = ends & (jnp.arange(ends.shape[1]) < n)
    # The prompt or start token does not count as length. DEAD is finite, so it may be added more than once.
    scores = totals / new.astype(jnp.float32) ** penalty + DEAD * (
        ~eligible + (full | ~search.open)[:, None].astype(jnp.float32)
    )
    best, keep = lax.top_k(jnp.concatenate([search.finished_scores, scores], axis=1), n)

    def merge(old: Array, new: Array) -> Array:
        return _pick(jnp.concatenate([old, new], axis=1), keep)

    finished = merge(search.finished, eligible)

    # Can the best running beam still beat the worst finished one? Its score is normalised by its length now, or with
    # early_stopping="never" by the length that would be best for it.
    # Scores are negative, so with a positive penalty a greater length raises them, and the limit is the best length.
    reach = jnp.where((options.early_stopping == "never") & (penalty > 0.0), limit, new).astype(jnp.float32)
    attainable = running[:, :1] / reach**penalty
    # A slot without a finished beam can always be beaten.
    worst = jnp.where(finished, jnp.min(best, axis=1, keepdims=True), DEAD)
    return Beams(
        state=decoder.select(state, _pick(parent, order)),
        tokens=_pick(tokens, order),
        logprobs=_pick(history, order),
        length=at + 1,
        begun=search.begun,
        scores=running,
        finished_tokens=merge(search.finished_tokens, tokens),
        finished_logprobs=merge(search.finished_logprobs, history),
        finished_scores=best,
        finished=finished,
        open=search.open & jnp.any(attainable > worst, axis=1),
    )


def _process(
    logits: Array, search: Sampling | Beams, numbers: dict[str, Array], options: Options, eos: tuple[int, ...]
) -> Array:
    """Apply the logits processors."""
    context = TokenHistory(search.tokens, search.length, search.begun, numbers)
    for process in processors(options, eos, sampling=options.do_sample):
        logits = process(logits, context)
    return logits


def _top_candidates(
    scores: Float[Array, "B G V"], k: int, size: int = 128
) -> tuple[Float[Array, "B K"], Int[Array, "B K"], Int[Array, "B K"]]:
    """Find the k largest scores of each row, with their beams and tokens; among equal scores the first ones win.

    The k largest lie in the k chunks of `size` scores that have the largest maxima, so only these chunks are sorted:
    a top-k over all G·V scores would be slower.
    """
    b, g, v = scores.shape
    n, full = -(-v // size), v // size * size  # chunks per beam; scores in full chunks
    # [B, G, V] to one maximum per chunk, [B, G, n]. The remainder is a chunk of its own.
    maxima = scores[..., :full].reshape(b, g, full // size, size).max(axis=-1)
    if full < v:
        maxima = jnp.concatenate([maxima, scores[..., full:].max(axis=-1, keepdims=True)], axis=-1)
    # A small vocabulary may have fewer than k chunks; together they still hold k scores.
    _, chunks = lax.top_k(maxima.reshape(b, -1), min(k, g * n))
    chunks = jnp.sort(chunks, axis=-1)  # top_k prefers the first of equal scores: keep their order
    beams = jnp.broadcast_to((chunks // n)[..., None], (*chunks.shape, size))
    tokens = (chunks % n * size)[..., None] + jnp.arange(size)
    candidates = scores.at[jnp.arange(b)[:, None, None], beams, tokens].get(mode="fill", fill_value=-jnp.inf)
    totals, index = lax.top_k(candidates.reshape(b, -1), k)
    beams, tokens = (jnp.take_along_axis(a.reshape(b, -1), index, axis=1) for a in (beams, tokens))
    # A token beyond the vocabulary comes from the last chunk's padding, whose score is -inf.
    return totals, beams, jnp.minimum(tokens, v - 1).astype(jnp.int32)


def _is_end(tokens: Array, eos: tuple[int, ...]) -> Array:
    return jnp.isin(tokens, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros(tokens.shape, bool)


def _pick(a: Array, index: Int[Array, "B K"]) -> Array:
    """Return a[b, index[b, k]] for all b and k."""
    return jnp.take_along_axis(a, index.reshape(*index.shape, *[1] * (a.ndim - 2)), axis=1)
