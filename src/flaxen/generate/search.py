"""Greedy search, sampling and beam search over anything that decodes one token at a time.

B inputs × G sequences of each (beams, or samples) grow in step. A search is a NamedTuple of arrays and a pure
function that takes it one token further; `advance` runs that function inside one compiled loop, to the end or, for
streaming, token by token with the same executable.
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

DEAD = -1e9  # the score of a beam that does not exist; finite as transformers' is, so that ties fall alike


@runtime_checkable
class Decoder(Protocol):
    """All that the generator knows of a model: a pytree that holds it, and its weights laid out for decoding."""

    def start(self, inputs: Any, length: int, beams: int, reorder: bool) -> tuple[Int[Array, "B G P"], Any]:
        """What is there before anything is generated, of which the state has read all but the last token; the state has
        room for `length` tokens, that one included. `select` is called only with `reorder`."""
        ...

    def step(self, tokens: Int[Array, "B G"], state: Any) -> tuple[Float[Array, "B G V"], Any]:
        """The logits of what follows `tokens`."""
        ...

    def select(self, state: Any, beams: Int[Array, "B G"]) -> Any:
        """Reorder the state by beam index: sequence g continues what was sequence beams[b, g]."""
        ...


def prepare(decoder: Callable[[Any], Decoder], model: Any) -> Decoder:
    """The model with its weights laid out for decoding, once for all tokens of all prompts.

    Not jitted as a whole: JAX copies the arguments that a jitted function returns, and that would be the model.
    """
    return decoder(model)


class Sampling(NamedTuple):
    """Greedy search and sampling in progress."""

    state: Any
    tokens: Int[Array, "B G T"]  # the prompt or start token, then what was generated
    logprobs: Float[Array, "B G T"]  # of the model itself, before processors
    length: Int[Array, ""]
    begun: Int[Array, ""]  # the length before anything was generated
    done: Bool[Array, "B G"]
    rows: Int[Array, "B"]  # which input each row is: noise depends on it and not on the batch


class Beams(NamedTuple):
    """Beam search in progress: running beams, the best finished ones, and whether these can still be beaten."""

    state: Any
    tokens: Int[Array, "B G T"]
    logprobs: Float[Array, "B G T"]
    length: Int[Array, ""]
    begun: Int[Array, ""]
    scores: Float[Array, "B G"]
    finished_tokens: Int[Array, "B G T"]
    finished_logprobs: Float[Array, "B G T"]
    finished_scores: Float[Array, "B G"]
    finished: Bool[Array, "B G"]
    open: Bool[Array, "B"]


@partial(jax.jit, static_argnames=("room", "options", "pad"))
def begin(
    decoder: Decoder,
    inputs: Any,
    rows: Array,
    room: int,
    options: Options,
    pad: int,
) -> Sampling | Beams:
    """A search with room for `room` tokens. Rows of -1 are padding of the batch: they count as finished."""
    first, state = decoder.start(inputs, room, options.beams, reorder=options.num_beams > 1)
    tokens = jnp.pad(first, ((0, 0), (0, 0), (0, room)), constant_values=pad)
    logprobs = jnp.zeros(tokens.shape, jnp.float32)
    idle, length, shape = rows < 0, jnp.asarray(first.shape[2], jnp.int32), first.shape[:2]
    if options.num_beams == 1:
        return Sampling(state, tokens, logprobs, length, length, jnp.broadcast_to(idle[:, None], shape), rows)
    # Only the first beam lives at the start; the others would repeat it.
    scores = jnp.broadcast_to(jnp.where(jnp.arange(options.num_beams) == 0, 0.0, DEAD), shape)
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
    """The search with `until` tokens generated, or fewer if it ended before."""
    step: Callable[..., Any] = _sampling_step if isinstance(search, Sampling) else _beam_step

    def unfinished(search: Sampling | Beams) -> Bool[Array, ""]:
        return (search.length - search.begun < until) & ~ended(search, options)

    def body(search: Sampling | Beams) -> Sampling | Beams:
        return step(decoder, search, numbers, options, eos, pad)

    return lax.while_loop(unfinished, body, search)


def ended(search: Sampling | Beams, options: Options) -> Bool[Array, ""]:
    """Nothing left to do before the length limit."""
    if isinstance(search, Sampling):
        return jnp.all(search.done)
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
    at = search.length
    logits, state = decoder.step(lax.dynamic_index_in_dim(search.tokens, at - 1, 2, keepdims=False), search.state)
    shaped = _process(logits, search, numbers, options, eos)
    if options.do_sample:
        key = jax.random.fold_in(jax.random.key(numbers["seed"]), at - search.begun + 1)
        keys = jax.vmap(partial(jax.random.fold_in, key))(search.rows)
        shaped = shaped + jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    chosen = jnp.argmax(shaped, axis=-1).astype(jnp.int32)
    gold = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    logprob = jnp.where(search.done, 0.0, gold - jax.nn.logsumexp(logits, axis=-1))
    chosen = jnp.where(search.done, pad, chosen)
    return search._replace(
        state=state,
        tokens=lax.dynamic_update_index_in_dim(search.tokens, chosen, at, 2),
        logprobs=lax.dynamic_update_index_in_dim(search.logprobs, logprob, at, 2),
        length=at + 1,
        done=search.done | _is_end(chosen, eos),
    )


def _beam_step(
    decoder: Decoder,
    search: Beams,
    numbers: dict[str, Array],
    options: Options,
    eos: tuple[int, ...],
    pad: int,
) -> Beams:
    at, n = search.length, options.num_beams
    new = at - search.begun + 1  # tokens generated when this step is done
    limit, penalty = numbers["max_new_tokens"], numbers.get("length_penalty", jnp.ones(()))
    logits, state = decoder.step(lax.dynamic_index_in_dim(search.tokens, at - 1, 2, keepdims=False), search.state)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    shaped = _process(logprobs, search, numbers, options, eos)

    # Enough candidates that `n` of them go on even if as many end.
    totals, parent, token = _best(shaped + search.scores[..., None], max(2, 1 + len(eos)) * n)
    gained = logprobs[jnp.arange(len(logits))[:, None], parent, token]
    tokens = lax.dynamic_update_index_in_dim(_pick(search.tokens, parent), token, at, 2)
    history = lax.dynamic_update_index_in_dim(_pick(search.logprobs, parent), gained, at, 2)
    ends = _is_end(token, eos) | (new >= limit)

    # The best `n` that have not ended run on.
    running, order = lax.top_k(totals + ends * DEAD, n)
    # Only the best `n` candidates may finish, and only in a row that is still open.
    full = jnp.all(search.finished, axis=1) & (options.early_stopping is True)
    may = ends & (jnp.arange(ends.shape[1]) < n)
    scores = totals / new.astype(jnp.float32) ** penalty + DEAD * (
        ~may + (full | ~search.open)[:, None].astype(jnp.float32)
    )
    best, keep = lax.top_k(jnp.concatenate([search.finished_scores, scores], axis=1), n)

    def merge(old: Array, new: Array) -> Array:
        return _pick(jnp.concatenate([old, new], axis=1), keep)

    finished = merge(search.finished, may)

    # Can a running beam still beat the worst finished one?
    reach = jnp.where((options.early_stopping == "never") & (penalty > 0.0), limit, new).astype(jnp.float32)
    hope = running[:, :1] / reach**penalty
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
        open=search.open & jnp.any(hope > worst, axis=1),
    )


def _process(
    logits: Array, search: Sampling | Beams, numbers: dict[str, Array], options: Options, eos: tuple[int, ...]
) -> Array:
    context = TokenHistory(search.tokens, search.length, search.begun, numbers)
    for process in processors(options, eos, sampling=options.do_sample):
        logits = process(logits, context)
    return logits


def _best(
    scores: Float[Array, "B G V"], k: int, size: int = 128
) -> tuple[Float[Array, "B K"], Int[Array, "B K"], Int[Array, "B K"]]:
    """The k largest scores of each row, with their beams and tokens; of equal scores, those that come first.

    They lie in the k chunks of `size` scores whose largest are the largest: only these are sorted.
    """
    b, g, v = scores.shape
    n, whole = -(-v // size), v // size * size
    largest = scores[..., :whole].reshape(b, g, whole // size, size).max(axis=-1)
    if whole < v:
        largest = jnp.concatenate([largest, scores[..., whole:].max(axis=-1, keepdims=True)], axis=-1)
    _, chunks = lax.top_k(largest.reshape(b, -1), min(k, g * n))
    chunks = jnp.sort(chunks, axis=-1)  # so that scores stay in their order
    beams = jnp.broadcast_to((chunks // n)[..., None], (*chunks.shape, size))
    tokens = (chunks % n * size)[..., None] + jnp.arange(size)
    found = scores.at[jnp.arange(b)[:, None, None], beams, tokens].get(mode="fill", fill_value=-jnp.inf)
    totals, at = lax.top_k(found.reshape(b, -1), k)
    beams, tokens = (jnp.take_along_axis(a.reshape(b, -1), at, axis=1) for a in (beams, tokens))
    return totals, beams, jnp.minimum(tokens, v - 1).astype(jnp.int32)


def _is_end(tokens: Array, eos: tuple[int, ...]) -> Array:
    return jnp.isin(tokens, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros(tokens.shape, bool)


def _pick(a: Array, index: Int[Array, "B K"]) -> Array:
    """a[b, index[b, k]]"""
    return jnp.take_along_axis(a, index.reshape(*index.shape, *[1] * (a.ndim - 2)), axis=1)
