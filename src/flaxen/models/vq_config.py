"""Configuration of a Transformer-VQ, presets, and the cost of a forward pass."""

import dataclasses
from dataclasses import dataclass

from flaxen.nn.hardware import target
from flaxen.nn.vq_plan import VQSpec

CHOICES = {
    "heads": ("shga", "mqa", "mha"),
    "attention": ("vq", "full"),
    "form": ("auto", "scan", "parallel"),
    "compute": ("float32", "bfloat16"),
}


@dataclass(frozen=True)
class Config:
    """Transformer-VQ configuration. The defaults are those of the original implementation's enwik8 model."""

    vocab_size: int = 259
    d_model: int = 768
    d_k: int = 128  # size of a query and key in one head
    d_v: int = 1536  # size of a value in one head
    n_heads: int = 1
    n_layers: int = 24  # each is two gated attention units (shga), or attention and a feed-forward network (mqa, mha)
    n_codes: int = 512  # codes in the codebook of one head
    # Number of queries computed together. Outputs do not depend on it, but gradients do: a key gets gradients from all
    # queries that see it individually, and larger blocks keep keys in view for longer.
    block: int = 512
    window: int = 512  # number of past keys that a query sees individually, with a distance bias
    heads: str = "shga"  # shga: gated attention units; mqa, mha: attention followed by a feed-forward network
    d_ff: int = 0  # width of the feed-forward network (mqa, mha only)
    attention: str = "vq"  # vq: quantised keys, linear cost; full: unquantised keys, quadratic cost
    aggregate: bool = True  # attend to keys beyond the window
    through_cache: bool = True  # let gradients flow between the blocks of a training step
    documents: bool = False  # do not attend to earlier documents; documents are separated by end tokens
    absolute: bool = False  # add sinusoidal position embeddings, times a learned scale, to token embeddings
    wavelength: float = 1e5  # longest wavelength of all sinusoids
    tied: bool = False  # use the embedding table as the output head
    norm_out: bool = False  # normalise before the output head
    logit_scale: float = 1.0
    embedding_dropout: float = 0.0
    dropout: float = 0.0  # dropout on the output of each unit
    position_drop: float = 0.0  # dropout on the sinusoids of distances, drawn once per sequence
    layer_drop: float = 0.0  # probability of skipping a unit, drawn once per sequence
    image: tuple[int, ...] = ()  # height, width and channels of generated images; () for text
    pad_id: int = 0
    eos_ids: tuple[int, ...] = (1,)
    start_id: int = 1
    reference: bool = False  # as in the original: round counts and means to `compute`, and always update them
    form: str = "auto"  # compute blocks in a scan or in parallel; results are the same
    compute: str = "float32"
    scan: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        positive = ("vocab_size", "d_model", "d_k", "d_v", "n_heads", "n_layers", "n_codes", "block", "window")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even (half sines, half cosines), got {self.d_model}")
        # A gated unit has no feed-forward network, the other kinds need one.
        if (self.heads == "shga") == (self.d_ff > 0):
            requirement = "must be 0" if self.d_ff else "must be at least 1 (usually 4 or 5 times d_model)"
            raise ValueError(f"d_ff {requirement} with heads={self.heads!r}, got {self.d_ff}")
        for name, options in CHOICES.items():
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {getattr(self, name)!r}")
        if self.rounded and self.form == "parallel":
            raise ValueError(
                "with reference=true and compute=bfloat16, form must be scan, because the original Transformer-VQ "
                "rounds after each block; got parallel"
            )
        for name in ("embedding_dropout", "dropout", "position_drop", "layer_drop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name, ids in (("pad_id", (self.pad_id,)), ("start_id", (self.start_id,)), ("eos_ids", self.eos_ids)):
            if not all(0 <= token < self.vocab_size for token in ids):
                raise ValueError(f"{name}={ids} is not in the vocabulary of {self.vocab_size} tokens")

    def for_vocabulary(self, size: int, pad_id: int, eos_id: int) -> "Config":
        """Adapt to a tokenizer's vocabulary. Every text starts after an end token, as if it followed another text."""
        return dataclasses.replace(self, vocab_size=size, pad_id=pad_id, eos_ids=(eos_id,), start_id=eos_id)

    @property
    def key_heads(self) -> int:
        """Number of heads with their own keys."""
        return 1 if self.heads == "mqa" else self.n_heads

    @property
    def units(self) -> int:
        """Number of attention units in a layer."""
        return 2 if self.heads == "shga" else 1

    @property
    def rounded(self) -> bool:
        """Whether counts and means are rounded to less than f32 after each block."""
        return self.reference and self.compute != "float32"

    @property
    def spec(self) -> VQSpec:
        """Attention settings for training."""
        rounding = self.compute if self.reference else "float32"
        collect = self.aggregate or self.reference
        return VQSpec(self.window, self.block, self.aggregate, self.through_cache, self.documents, rounding, collect)

    @property
    def reading(self) -> VQSpec:
        """Attention settings when not training: blocks of at most 128 tokens, where that is faster.

        A block computes scores for W + X keys, of which a query needs W + 1, so smaller blocks waste less. Training
        needs the configured block: gradients depend on how long keys are seen individually.
        """
        # Sequences are padded to multiples of `block`, so only its divisors cut them into whole blocks.
        sizes = [n for n in range(64, 129) if self.block % n == 0]
        small = self.block > 128 and sizes and not self.reference and target().rows_in_sequence
        return self.spec._replace(block=sizes[-1]) if small else self.spec


def flops(config: Config, length: int) -> float:
    """Floating-point operations of the matmuls in the forward pass for one sequence."""
    c = config
    n, queries_per_key = c.key_heads, c.n_heads // c.key_heads
    # Multiply-adds per token: projections, then attention, then (mqa, mha) the feed-forward network.
    gate = c.n_heads * c.d_v if c.heads == "shga" else 0
    unit = float(c.d_model * (c.n_heads * c.d_k + n * (c.d_k + c.d_v) + gate) + c.n_heads * c.d_v * c.d_model)
    if c.attention == "vq":
        # A query is compared with the keys of its slice and with W + 1 distances, and a key with M codes to quantise
        # it.
        span = c.window + c.block
        unit += c.n_heads * (span * (c.d_k + c.d_v) + (c.window + 1) * c.d_k) + n * c.n_codes * c.d_k
        unit += c.n_heads * c.n_codes * (c.d_k + c.d_v) if c.aggregate else 0
    else:
        # With full attention, a query sees half of the sequence on average.
        unit += n * queries_per_key * (length / 2 * (c.d_k + c.d_v) + (c.window + 1) * c.d_k)
    layer = 2 * unit if c.heads == "shga" else unit + 2 * c.d_model * c.d_ff
    return 2.0 * length * (c.n_layers * layer + c.d_model * c.vocab_size)


_TINY = {"d_model": 128, "d_k": 32, "d_v": 256, "n_layers": 2, "n_codes": 64, "block": 64, "window": 64}
_LARGE = {"d_model": 2048, "d_v": 4096, "tied": True, "norm_out": True, "logit_scale": 0.005}
PRESETS: dict[str, Config] = {
    "vq-tiny": Config(**_TINY),  # type: ignore[arg-type]
    "vq-mini": Config(d_model=256, d_k=64, d_v=512, n_layers=4, n_codes=256, block=256, window=256),
    "vq-enwik8": Config(dropout=0.5, position_drop=0.2, layer_drop=0.3),
    "vq-pg19": Config(**_LARGE, vocab_size=32000, dropout=0.1, position_drop=0.1, layer_drop=0.1),  # type: ignore[arg-type]
    "vq-imagenet64": Config(**_LARGE, absolute=True, position_drop=0.1),  # type: ignore[arg-type]
}
