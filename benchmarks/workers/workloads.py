"""Workloads of the benchmarks: model sizes, batch sizes, inputs, and their FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # imported at run time only inside functions: a worker must be pinned before NumPy is imported


@dataclass(frozen=True)
class Sizes:
    """Sizes of a T5 1.0 (relu, tied head; the defaults are t5-small), or of a captioner with equally large halves."""

    vocab_size: int = 32128
    d_model: int = 512
    d_head: int = 64
    d_ff: int = 2048
    n_layers: int = 6
    n_heads: int = 8
    attention: str = "full"  # attention of the encoder; local or transient-global makes it a LongT5
    radius: int = 127
    global_block: int = 16
    image: int = 0  # height and width of the images of a captioner; 0 for a text model
    patch: int = 16

    @property
    def family(self) -> str:
        """Prefix of the class names in transformers."""
        return "T5" if self.attention == "full" else "LongT5"


@dataclass(frozen=True)
class Work:
    """`batch` rows of `source` input ids (or image patches), and `target` output ids: labels, or tokens to generate."""

    batch: int
    source: int
    target: int
    beams: int = 0  # 0: a loss; 1: greedy; more: beam search
    update: bool = False  # also apply an AdamW update

    def inputs(self, sizes: Sizes) -> np.ndarray:
        """Ids, or pixels [batch, 3, height, width]."""
        if sizes.image:
            return _random_pixels(self.batch, sizes.image, seed=0)
        return _random_ids(self.batch, self.source, sizes.vocab_size, seed=0)

    def labels(self, sizes: Sizes) -> np.ndarray:
        return _random_ids(self.batch, self.target, sizes.vocab_size, seed=1)

    @property
    def new_tokens(self) -> int:
        """Number of tokens returned: one hypothesis per row, regardless of the number of beams."""
        return self.batch * self.target if self.beams else 0


SMALL = Sizes()
TINY = Sizes(vocab_size=384, d_model=64, d_head=16, d_ff=128, n_layers=2, n_heads=4)
LONG_TINY = Sizes(vocab_size=384, d_model=32, d_head=16, d_ff=64, n_layers=2, n_heads=2, radius=15, global_block=4)
PAIR = Sizes(vocab_size=50257, d_model=384, d_ff=1536, n_heads=6, image=224)
PAIR_TINY = Sizes(vocab_size=384, d_model=64, d_head=16, d_ff=128, n_layers=2, n_heads=4, image=32, patch=8)

LEARNING_RATE = 1e-4  # AdamW without weight decay, clipping or schedule

WORKLOADS = {
    "loss": Work(batch=8, source=512, target=114),
    "train": Work(batch=8, source=512, target=114, update=True),
    "generate": Work(batch=8, source=256, target=64, beams=1),
    "beam": Work(batch=8, source=256, target=64, beams=4),
    # A cold start measures imports, loading and compiling, so one row of work is enough.
    "cold-generate": Work(batch=1, source=256, target=8, beams=1),
    "cold-loss": Work(batch=1, source=512, target=114),
}
TINY_WORKLOADS = {
    name: replace(work, batch=min(work.batch, 2), source=16, target=8) for name, work in WORKLOADS.items()
}


def sizes_and_works(tiny: bool) -> tuple[Sizes, dict[str, Work]]:
    return (TINY, TINY_WORKLOADS) if tiny else (SMALL, WORKLOADS)


def long_sizes_and_works(attention: str, source: int, tiny: bool) -> tuple[Sizes, dict[str, Work]]:
    """Sizes of a LongT5 as large as t5-small, and workloads of one row of `source` ids."""
    target, new_tokens = (16, 8) if tiny else (128, 64)
    works = {"loss": Work(1, source, target), "generate": Work(1, source, new_tokens, beams=1)}
    return replace(LONG_TINY if tiny else SMALL, attention=attention), works


def caption_sizes_and_works(tiny: bool) -> tuple[Sizes, dict[str, Work]]:
    """Sizes and workloads of a ViT + GPT-2. The decoder attends to one vector per patch and the class token."""
    sizes = PAIR_TINY if tiny else PAIR
    batch, target, new_tokens = (2, 8, 8) if tiny else (8, 32, 16)
    source = 1 + (sizes.image // sizes.patch) ** 2
    works = {"loss": Work(batch, source, target), "train": Work(batch, source, target, update=True)}
    return sizes, works | {"beam": Work(batch, source, new_tokens, beams=4)}


def _random_ids(rows: int, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """Random ids without pad (0), eos (1) and unk (2), so that no system can skip work."""
    import numpy as np

    return np.random.default_rng(seed).integers(3, vocab_size, (rows, length), dtype=np.int32)


def _random_pixels(rows: int, size: int, seed: int) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(seed).standard_normal((rows, 3, size, size), dtype=np.float32)


def flops(work: Work, sizes: Sizes) -> float:
    """Count the FLOPs of the necessary matrix products.

    Cross-attention projects its keys and values once per input; a cached decoder attends to its past only. An optimizer
    update has no matrix products. A captioner has those of a T5 of its sizes, plus the patch embedding.
    """
    d_model, inner = sizes.d_model, sizes.n_heads * sizes.d_head
    source_tokens = work.batch * work.source
    rows = work.batch * max(work.beams, 1)
    target_tokens = rows * work.target
    feed_forward = 2 * d_model * sizes.d_ff
    attended = work.target if work.beams == 0 else (work.target + 1) / 2

    # Multiply-adds per layer; a query that sees n keys costs 2 * n * inner (scores, then values).
    encoder = source_tokens * (4 * d_model * inner + feed_forward + 2 * work.source * inner)
    cross_keys_values = source_tokens * 2 * d_model * inner
    decoder = target_tokens * (6 * d_model * inner + feed_forward + 2 * (attended + work.source) * inner)
    head = target_tokens * d_model * sizes.vocab_size

    forward = 2 * (sizes.n_layers * (encoder + cross_keys_values + decoder) + head)
    patch_embedding = 2 * work.batch * 3 * sizes.image**2 * d_model
    # The backward pass has two matmuls for each one of the forward pass, except that pixels need no gradient.
    return forward + patch_embedding if work.beams else 3 * forward + 2 * patch_embedding
