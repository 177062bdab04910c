"""Logits processors: functions that forbid or penalise tokens, with the order and meaning of transformers' classes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from flaxen.generate.options import Options

# As in transformers: the probability of a forbidden token is exactly 0.
FORBIDDEN = -jnp.inf


class TokenHistory(NamedTuple):
    """The tokens so far, beginning with the prompt or start token, and the numeric options: a processor's context."""

    tokens: Int[Array, "B G T"]
    length: Int[Array, ""]  # number of tokens so far
    begun: Int[Array, ""]  # length of the prompt or start token
    numbers: dict[str, Array]  # numeric options by name, such as "temperature"

    @property
    def new(self) -> Array:
        """Number of tokens generated so far."""
        return self.length - self.begun


LogitsProcessor = Callable[[Float[Array, "B G V"], TokenHistory], Float[Array, "B G V"]]


def processors(options: Options, eos: tuple[int, ...], sampling: bool) -> list[LogitsProcessor]:
    """Return the processors that `options` enable, in transformers' order."""
    active: list[LogitsProcessor] = []
    if options.repetition_penalty is not None:
        active.append(penalise_repetition)
    if options.no_repeat_ngram_size:
        active.append(lambda logits, context: forbid_ngrams(logits, context, options.no_repeat_ngram_size))
    if options.bad_words_ids:
        # As in transformers, banning the end token alone has no effect: an output could never end.
        words = [word for word in options.bad_words_ids if word not in [(token,) for token in eos]]
        active.append(lambda logits, context: forbid_words(logits, context, words))
    if options.min_new_tokens and eos:
        active.append(lambda logits, context: forbid_end(logits, context, eos))
    if options.forced_bos_token_id is not None:
        bos = options.forced_bos_token_id
        active.append(lambda logits, context: force(logits, bos, context.new == 0))
    if options.forced_eos_token_id is not None:
        end = options.forced_eos_token_id
        active.append(lambda logits, context: force(logits, end, context.new == context.numbers["max_new_tokens"] - 1))
    if sampling:
        active.append(lambda logits, context: narrow(logits, context, options))
    return active


def penalise_repetition(logits: Array, context: TokenHistory) -> Array:
    """Penalise tokens that already occurred: divide positive logits by the penalty, multiply negative ones by it."""
    penalty = context.numbers["repetition_penalty"]
    # Positions at or after `length` are padding, which must not count as seen.
    past = jnp.arange(context.tokens.shape[-1]) < context.length
    # JAX drops writes at indices out of range, so the padding before a GPT-2 prompt (ABSENT) counts as no token.
    seen = jax.vmap(jax.vmap(lambda ids: jnp.zeros(logits.shape[-1], bool).at[ids].max(past)))(context.tokens)
    # Dividing a negative logit would raise it.
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def forbid_ngrams(logits: Array, context: TokenHistory, n: int) -> Array:
    """Forbid each token that would complete an n-gram that already occurred."""
    size = context.tokens.shape[-1]
    if size < n:
        return logits

    def forbid(row: Array, ids: Array) -> Array:
        # Compare the last n - 1 tokens with every earlier window of that size; forbid the token after each match.
        # With fewer than n - 1 tokens the slice is not the end of the text; the condition on the length below discards
        # it.
        prefix = jax.lax.dynamic_slice_in_dim(ids, context.length - (n - 1), n - 1)
        starts = jnp.arange(size - n + 1)
        matches = jnp.all(ids[starts[:, None] + jnp.arange(n - 1)] == prefix, axis=-1)
        # The prefix also matches itself, and later windows reach into the padding; no token follows these.
        repeats = matches & (starts + n - 1 < context.length)
        # A minimum with inf changes nothing, so one scatter serves windows that match and those that do not.
        return row.at[ids[starts + n - 1]].min(jnp.where(repeats, FORBIDDEN, jnp.inf))

    return jnp.where(context.length >= n - 1, jax.vmap(jax.vmap(forbid))(logits, context.tokens), logits)


def forbid_words(logits: Array, context: TokenHistory, words: list[tuple[int, ...]]) -> Array:
    """Forbid the last token of each bad word if its other tokens are the latest tokens."""
    for word in words:
        # A word of one token has no prefix to compare: `all` over an empty axis is True, so it is always forbidden.
        n = len(word) - 1
        last = (
            jax.lax.dynamic_slice_in_dim(context.tokens, context.length - n, n, axis=-1)
            if n
            else context.tokens[..., :0]
        )
        hit = jnp.all(last == jnp.asarray(word[:-1], jnp.int32), axis=-1) & (n <= context.length)
        logits = logits.at[..., word[-1]].min(jnp.where(hit, FORBIDDEN, jnp.inf))
    return logits


def forbid_end(logits: Array, context: TokenHistory, eos: tuple[int, ...]) -> Array:
    """Forbid end tokens until min_new_tokens tokens have been generated."""
    early = context.new < context.numbers["min_new_tokens"]
    return logits.at[..., jnp.asarray(eos)].min(jnp.where(early, FORBIDDEN, jnp.inf))


def force(logits: Array, token: int, now: Array) -> Array:
    """Forbid every token but this one where `now` is True."""
    only = jnp.where(jnp.arange(logits.shape[-1]) == token, 0.0, FORBIDDEN)
    return jnp.where(now, only, logits)


def narrow(logits: Array, context: TokenHistory, options: Options) -> Array:
    """Apply temperature, top-k, top-p, `nucleus` and min-p, in this order, to the logits before sampling.

    `nucleus` is the variant of top-p in the original Transformer-VQ code.
    """
    if options.temperature is not None:
        logits = logits / context.numbers["temperature"]
    # Like transformers, sample from the 50 most likely tokens by default; 0 means all of them.
    k = (
        logits.shape[-1]
        if options.top_k == 0
        else min(50 if options.top_k is None else options.top_k, logits.shape[-1])
    )
    if k < logits.shape[-1] or options.top_p is not None:
        # Top-p applies to what top-k has left, so the k best logits suffice and the vocabulary need not be sorted.
        best = jax.lax.top_k(logits, k)[0]
        threshold = best[..., -1:]
        if options.top_p is not None:
            # A token is kept if the probabilities of more likely tokens sum to less than p, so its own probability is
            # subtracted.
            weights = jax.nn.softmax(best, axis=-1)
            kept = jnp.cumsum(weights, axis=-1) - weights < context.numbers["top_p"]
            threshold = jnp.min(jnp.where(kept, best, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= threshold, logits, FORBIDDEN)
    if options.nucleus is not None:
        logits = jnp.where(nucleus(logits, context.numbers["nucleus"]), logits, FORBIDDEN)
    if options.min_p is not None:
        # p ≥ min_p · max(p) in terms of logits: the normaliser of the softmax cancels.
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(context.numbers["min_p"])
        logits = jnp.where(logits >= floor, logits, FORBIDDEN)
    return logits


def nucleus(logits: Float[Array, "*B V"], p: Float[Array, ""] | float) -> Array:
    """Return a mask of the tokens that nucleus sampling in the original Transformer-VQ code keeps.

    It drops the least likely tokens while their probabilities sum to at most 1 - p + 1e-4. Among equally likely
    tokens the earlier ones are dropped first; the most likely token is always kept.
    """
    order = jnp.argsort(logits, axis=-1, stable=True)
    cumulative = jnp.cumsum(jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1), axis=-1)
    kept = (cumulative > 1.0 - (p - 1e-4)) | (jnp.arange(logits.shape[-1]) == logits.shape[-1] - 1)
    # The argsort of a permutation is its inverse: back to vocabulary order.
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
