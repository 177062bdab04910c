"""Transformer-VQ: a language model whose attention sees all the past at a cost linear in its length."""

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
    """All that the model remembers of what it has read; its size does not grow with it. Rows first.

    Training carries it from update to update, prefill makes it, a memory file holds it, and decoding lays it out as a
    ring. Checkpoints of a run name its leaves, `carry.position`, `carry.caches.0.codes` and so on: a name that changes
    here makes older ones unreadable.
    """

    position: Int[Array, "B"]  # tokens read, of the document if they are kept apart
    documents: Int[Array, "B W"]  # of each token of the window, from 1 on; 0 for padding
    latest: Int[Array, "B"]  # the document that the means are of
    caches: tuple[Any, ...]  # of the one or two attentions of a layer, [B, L, …]; () for full attention
    key: UInt32[Array, "B 2"]  # of the dropout that stays the same for a whole sequence


class VQLM(nnx.Module):
    """Token ids in, hidden states out, and the state behind them; `output` turns hidden states into logits."""

    def __init__(self, config: Config):
        c = config
        self.embedding = Embedding(c.vocab_size, c.d_model, 1.0)
        self.scale = constant(value=0.0) if c.absolute else None
        self.layers = stacked(Layer(c), c.n_layers)
        self.norm = RMSNorm(c.d_model, EPSILON, bias=True) if c.norm_out else None
        self.head = None if c.tied else Embedding(c.vocab_size, c.d_model, c.d_model**-0.5)
        self.bias = constant(c.vocab_size, value=0.0)  # of logits
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
        """Hidden states of a multiple of `block` tokens. `valid` is False for padding at the left. With `room`, the
        state of full attention holds all keys, and slots for so many more."""
        c = self.config
        if ids.shape[1] % c.block:
            raise ValueError(f"{ids.shape[1]} tokens are no multiple of the block, {c.block}")
        state = initial_state(c, len(ids)) if state is None else state
        documents = number_documents(c, ids, state, valid) if documents is None else documents
        positions = token_positions(c, state, documents)
        keys = (None, None) if noise is None else tuple(jax.random.split(noise.chunk))
        x = dropout(self.embed(ids, positions), c.embedding_dropout, keys[0])
        seen = jnp.concatenate([state.documents, documents], axis=1)
        plan: VQPlan = FullPass(c.spec, documents, room)
        if c.attention == "vq":
            # Where nothing is learnt, smaller blocks give the same result in less time.
            spec = c.reading if weights is None else c.spec
            parallel = c.form == "parallel" or (c.form == "auto" and not target().rows_in_sequence and not c.rounded)
            plan = BlockwisePass(spec, seen, state.latest, weights, parallel)
        noises = None
        if noise is not None and keys[1] is not None:
            noises = DropoutKeys(*(_of_layers(key, c.n_layers) for key in (keys[1], noise.sequence)))
        x, caches, learning = self._run(x, plan, state.caches or (None,) * c.units, noises)
        if room is not None:
            left = jnp.pad(documents, ((0, 0), (0, room)))
        else:
            left = seen[:, seen.shape[1] - c.window :]
            caches = caches if c.attention == "vq" else ()
        after = VQState(positions[:, -1] + 1, left, seen[:, -c.window - 1], caches, state.key)
        return self.normed(x), lax.stop_gradient(after), learning

    def _run(self, x: Array, plan: VQPlan, caches: tuple[Any, ...], noises: DropoutKeys | None) -> tuple:
        """Through all layers, scanned or one by one. Their axis is the first of a scan and the second of a state."""
        c = self.config
        caches = jax.tree.map(_swapped, caches)
        policy = None if c.remat else jax.checkpoint_policies.save_only_these_names(SAVED)

        def body(x: Array, xs: tuple[Layer, Any, Any]) -> tuple[Array, tuple]:
            layer, caches, noise = xs
            x, caches, learning = layer(x, plan, caches, noise)
            return x, (caches, learning)

        body = jax.checkpoint(body, policy=policy, prevent_cse=not c.scan)
        if c.scan:
            x, (caches, learning) = lax.scan(body, x, (self.layers, caches, noises))
        else:
            made = []
            for i, layer in enumerate(unstack(self.layers)):
                x, one = body(x, (layer, *jax.tree.map(lambda a, i=i: a[i], (caches, noises))))
                made.append(one)
            caches, learning = jax.tree.map(lambda *a: jnp.stack(a), *made)
        return x, jax.tree.map(_swapped, caches), QuantisationLoss(*map(jnp.sum, learning))

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Hidden states of what the last layer gives."""
        return x if self.norm is None else self.norm(x, jnp.dtype(self.config.compute))

    def embed(self, ids: Int[Array, "*B"], positions: Int[Array, "*B"]) -> Float[Array, "*B D"]:
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
        """Of whole sequences, of any length. `valid` is False for padding at the left."""
        padding = -ids.shape[1] % self.config.block
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
        """Sums over labels that are not negative. With `learn`, their gradient is of the loss, of `commit` times the
        error of quantisation, and what codebooks learn from; their value is of the loss alone."""
        weights = (labels >= 0).astype(jnp.float32)
        hidden, state, learning = self(ids, state, None, weights if learn else None, documents, noise)
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32) * self.config.logit_scale
        bias = self.bias[...] * self.config.logit_scale
        table, wanted = self.output_head.weight[...], jnp.maximum(labels, 0).reshape(-1)
        sums = cross_entropy(flat, table, wanted, weights.reshape(-1), bias=bias)
        added = commit * learning.error + learning.surrogate
        return sums._replace(loss=sums.loss + added - lax.stop_gradient(added)), state, learning

    @property
    def output_head(self) -> Embedding:
        return self.embedding if self.head is None else self.head


def initial_state(config: Config, rows: int) -> VQState:
    """The state before anything is read."""
    c, caches = config, ()
    if c.attention == "vq":  # full attention is trained on whole sequences, and carries nothing
        one = VQCache.empty(rows, c.key_heads, c.window, c.n_codes, c.d_k, c.d_v)
        # An array for each unit: they may be donated one by one.
        caches = tuple(jax.tree.map(partial(_for_layers, c.n_layers), one) for _ in range(c.units))
    documents, key = jnp.zeros((rows, c.window), jnp.int32), jnp.zeros((rows, 2), jnp.uint32)
    return VQState(jnp.zeros(rows, jnp.int32), documents, jnp.zeros(rows, jnp.int32), caches, key)


def _for_layers(n: int, a: Array) -> Array:
    return jnp.broadcast_to(a[:, None], (len(a), n, *a.shape[1:]))


def _swapped(a: Array) -> Array:
    return jnp.swapaxes(a, 0, 1)


def _of_layers(key: Array, n: int) -> Array:
    """A key for each layer."""
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n))


def number_documents(
    config: Config, ids: Int[Array, "B T"], state: VQState, valid: Bool[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """Each end token, which also stands before a text, begins the next document; padding is of none."""
    valid = jnp.ones(ids.shape, bool) if valid is None else valid
    begins = jnp.isin(ids, jnp.asarray(config.eos_ids, jnp.int32)) & valid
    number = state.documents[:, -1:] + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    # A text that begins without an end token is of the first document all the same.
    number = number + jnp.any((number == 0) & valid, axis=1, keepdims=True)
    return jnp.where(valid, number, 0)


def token_positions(config: Config, state: VQState, documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token in its sequence, or in its document if these are kept apart."""
    real = documents > 0
    count = state.position[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    if not config.documents:
        return jnp.maximum(count, 0)
    before = jnp.concatenate([state.documents[:, -1:], documents[:, :-1]], axis=1)
    begins = lax.cummax(jnp.where(real & (documents != before), count, 0), axis=1)
    return jnp.maximum(count - begins, 0)


def state_bytes(state: VQState) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))
