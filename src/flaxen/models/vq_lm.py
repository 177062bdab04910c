"""Transformer-VQ: a language model whose attention sees the whole past at a cost linear in its length."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from flaxen.models.vq_config import Config
from flaxen.models.vq_unit import EPSILON, DropoutKeys, Layer, QuantisationLoss
from flaxen.nn.full import FullPass
from flaxen.nn.hardware import target
from flaxen.nn.layers import Embedding, RMSNorm, dropout
from flaxen.nn.loss import Sums, cross_entropy
from flaxen.nn.param import constant, stacked
from flaxen.nn.position import sinusoids
from flaxen.nn.stack import SAVED, unstack
from flaxen.nn.vq import BlockwisePass, VQCache
from flaxen.nn.vq_plan import VQPlan


class VQState(NamedTuple):
    """The recurrent state of the model: all it retains of the tokens read, in constant size. Arrays have rows first.

    Training carries it from chunk to chunk, prefill computes it, memory files store it, and decoding converts it to
    ring buffers. Checkpoints contain the names of its leaves (`carry.position`, `carry.caches.0.codes` and so on):
    renaming a field makes existing checkpoints unreadable.
    """

    position: Int[Array, "B"]  # number of tokens read so far; if documents are separate, only those of the current one
    documents: Int[Array, "B W"]  # document number of each token in the window, starting at 1; 0 for padding
    latest: Int[Array, "B"]  # the document that the means belong to
    caches: tuple[Any, ...]  # one for each attention unit of a layer, [B, L, …]; () for full attention
    key: UInt32[Array, "B 2"]  # PRNG key for the dropout that is drawn once per sequence


class VQLM(nnx.Module):
    """A Transformer-VQ. A call returns hidden states and the new state; `output` turns hidden states into logits."""

    def __init__(self, config: Config):
        c = config
        self.embedding = Embedding(c.vocab_size, c.d_model, 1.0)
        self.scale = constant(value=0.0) if c.absolute else None
        self.layers = stacked(Layer(c), c.n_layers)
        self.norm = RMSNorm(c.d_model, EPSILON, bias=True) if c.norm_out else None
        self.head = None if c.tied else Embedding(c.vocab_size, c.d_model, c.d_model**-0.5)
        self.bias = constant(c.vocab_size, value=0.0)  # added to logits
        self.config = config

    def __call__(
        self,
        ids: Int[Array, "B T"],
        state: VQState | None = None,
        valid: Bool[Array, "B T"] | None = None,
        weights: Float[Array, "B T"] | None = None,
        documents: Int[Array, "B T"] | None = None,
        noise: DropoutKeys | None = None,
        room: int | None = None,
    ) -> tuple[Float[Array, "B T D"], VQState, QuantisationLoss]:
        """Return hidden states of T tokens (a multiple of `block`), the state after them, and quantisation losses.

        `valid` is False for padding, which is on the left. `weights` are the weights of tokens in the codebook update;
        without them codebooks are not updated. If `room` is given, the state of full attention holds all keys, with
        empty slots for that many more.
        """
        c = self.config
        if ids.shape[1] % c.block:
            raise ValueError(
                f"the number of tokens must be a multiple of the block length {c.block}, got {ids.shape[1]}"
            )
        state = initial_state(c, len(ids)) if state is None else state
        documents = number_documents(c, ids, state, valid) if documents is None else documents
        positions = token_positions(c, state, documents)
        keys = (None, None) if noise is None else tuple(jax.random.split(noise.chunk))
        x = dropout(self.embed(ids, positions), c.embedding_dropout, keys[0])
        seen = jnp.concatenate([state.documents, documents], axis=1)
        plan: VQPlan = FullPass(c.spec, documents, room)
        if c.attention == "vq":
            # When not training, smaller blocks give the same result in less time.
            spec = c.reading if weights is None else c.spec
            parallel = c.form == "parallel" or (c.form == "auto" and not target().rows_in_sequence and not c.rounded)
            plan = BlockwisePass(spec, seen, state.latest, weights, parallel)
        noises = None
        if noise is not None and keys[1] is not None:
            noises = DropoutKeys(*(_split_by_layer(key, c.n_layers) for key in (keys[1], noise.sequence)))
        x, caches, learning = self._run(x, plan, state.caches or (None,) * c.units, noises)
        if room is not None:
            # Full attention has a slot for every token: those of the prompt, then empty ones.
            retained = jnp.pad(documents, ((0, 0), (0, room)))
        else:
            retained = seen[:, seen.shape[1] - c.window :]
            caches = caches if c.attention == "vq" else ()
        # The key evicted last is the one just before the window; the means belong to its document.
        after = VQState(positions[:, -1] + 1, retained, seen[:, -c.window - 1], caches, state.key)
        return self.normed(x), lax.stop_gradient(after), learning

    def _run(self, x: Array, plan: VQPlan, caches: tuple[Any, ...], noises: DropoutKeys | None) -> tuple:
        """Run all layers, scanned or unrolled. Caches have the layer axis second; a scan needs it first."""
        c = self.config
        caches = jax.tree.map(_swap_rows_and_layers, caches)
        policy = None if c.remat else jax.checkpoint_policies.save_only_these_names(SAVED)

        def body(x: Array, xs: tuple[Layer, Any, Any]) -> tuple[Array, tuple]:
            layer, caches, noise = xs
            x, caches, learning = layer(x, plan, caches, noise)
            return x, (caches, learning)

        # As in nn/stack.py, whose `run` cannot be used here because layers also return caches and losses.
        body = jax.checkpoint(body, policy=policy, prevent_cse=not c.scan)
        if c.scan:
            x, (caches, learning) = lax.scan(body, x, (self.layers, caches, noises))
        else:
            results = []
            for i, layer in enumerate(unstack(self.layers)):
                x, result = body(x, (layer, *jax.tree.map(lambda a, i=i: a[i], (caches, noises))))
                results.append(result)
            caches, learning = jax.tree.map(lambda *a: jnp.stack(a), *results)
        return x, jax.tree.map(_swap_rows_and_layers, caches), QuantisationLoss(*map(jnp.sum, learning))

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the final norm, if there is one, to the output of the last layer."""
        return x if self.norm is None else self.norm(x, jnp.dtype(self.config.compute))

    def embed(self, ids: Int[Array, "*B"], positions: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Token embeddings, with absolute positions if the model has them."""
        c = self.config
        x = self.embedding(ids).astype(jnp.float32)
        if self.scale is not None:
            x = x + self.scale[...] * sinusoids(positions, c.d_model, c.wavelength)
        return x.astype(jnp.dtype(c.compute))

    def output(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits, in f32."""
        logits = self.output_head.logits(hidden.astype(jnp.float32)) + self.bias[...]
        return logits * self.config.logit_scale

    def logits(
        self, ids: Int[Array, "B T"], source: None = None, valid: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits of whole sequences of any length. `valid` is False for padding, which is on the left."""
        padding = -ids.shape[1] % self.config.block
        # A pass needs whole blocks; padding before the text changes no result, since it is masked and not counted.
        valid = jnp.pad(jnp.ones(ids.shape, bool) if valid is None else valid, ((0, 0), (padding, 0)))
        hidden, _, _ = self(jnp.pad(ids, ((0, 0), (padding, 0))), valid=valid)
        return self.output(hidden[:, padding:])

    def loss(
        self,
        ids: Int[Array, "B T"],
        labels: Int[Array, "B T"],
        state: VQState | None = None,
        *,
        commit: float = 0.0,
        noise: DropoutKeys | None = None,
        documents: Int[Array, "B T"] | None = None,
        learn: bool = False,
    ) -> tuple[Sums, VQState, QuantisationLoss]:
        """Return the loss sums over non-negative labels, the state after them, and the quantisation losses.

        The value of the loss is the cross-entropy alone. With `learn`, its gradient also includes `commit` times the
        commitment loss, and the surrogate gradient of the codebook update.
        """
        weights = (labels >= 0).astype(jnp.float32)
        hidden, state, learning = self(ids, state, None, weights if learn else None, documents, noise)
        # `cross_entropy` computes the logits, so their scale is applied to what it computes them from.
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32) * self.config.logit_scale
        bias = self.bias[...] * self.config.logit_scale
        table, targets = self.output_head.weight[...], jnp.maximum(labels, 0).reshape(-1)
        sums = cross_entropy(flat, table, targets, weights.reshape(-1), bias=bias)
        extra = commit * learning.error + learning.surrogate
        # extra - stop_gradient(extra) is 0 and has the gradient of extra.
        return sums._replace(loss=sums.loss + extra - lax.stop_gradient(extra)), state, learning

    @property
    def output_head(self) -> Embedding:
        return self.embedding if self.head is None else self.head


def initial_state(config: Config, rows: int) -> VQState:
    """The state before the first token."""
    c, caches = config, ()
    if c.attention == "vq":  # full attention is trained on whole sequences and carries no cache
        cache = VQCache.empty(rows, c.key_heads, c.window, c.n_codes, c.d_k, c.d_v)
        # Separate arrays for each unit, because a buffer can be donated only once.
        caches = tuple(jax.tree.map(partial(_repeat_for_layers, c.n_layers), cache) for _ in range(c.units))
    documents, key = jnp.zeros((rows, c.window), jnp.int32), jnp.zeros((rows, 2), jnp.uint32)
    return VQState(jnp.zeros(rows, jnp.int32), documents, jnp.zeros(rows, jnp.int32), caches, key)


def _repeat_for_layers(n: int, a: Array) -> Array:
    """Repeat [B, …] along a new layer axis: [B, L, …]."""
    return jnp.broadcast_to(a[:, None], (len(a), n, *a.shape[1:]))


def _swap_rows_and_layers(a: Array) -> Array:
    """Transpose [B, L, …] to [L, B, …], or back."""
    return jnp.swapaxes(a, 0, 1)


def _split_by_layer(key: Array, n: int) -> Array:
    """Split a PRNG key into one for each layer."""
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n))


def number_documents(
    config: Config, ids: Int[Array, "B T"], state: VQState, valid: Bool[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """Number the document of each token, continuing from the state. Documents start at 1; padding is 0.

    An end token starts the next document: a text begins with the end token of the preceding text.
    """
    valid = jnp.ones(ids.shape, bool) if valid is None else valid
    begins = jnp.isin(ids, jnp.asarray(config.eos_ids, jnp.int32)) & valid
    number = state.documents[:, -1:] + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    # A text that does not begin with an end token still belongs to document 1, not to 0.
    number = number + jnp.any((number == 0) & valid, axis=1, keepdims=True)
    return jnp.where(valid, number, 0)


def token_positions(config: Config, state: VQState, documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token in its sequence or, with `documents`, in its document. Padding is not counted."""
    real = documents > 0
    count = state.position[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    if not config.documents:
        return jnp.maximum(count, 0)
    before = jnp.concatenate([state.documents[:, -1:], documents[:, :-1]], axis=1)
    # The running maximum propagates the start position of each document to all of its tokens.
    begins = lax.cummax(jnp.where(real & (documents != before), count, 0), axis=1)
    return jnp.maximum(count - begins, 0)


def state_bytes(state: VQState) -> int:
    """Size of a state in bytes."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))
