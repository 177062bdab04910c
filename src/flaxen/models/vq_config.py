"""Sizes and switches of a Transformer-VQ, those of well-known models, and what a pass costs."""

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
    """Sizes and switches. The defaults are those of the original's enwik8 model."""

    vocab_size: int = 259
    d_model: int = 768
    d_k: int = 128  # of a head
    d_v: int = 1536  # of a head
    n_heads: int = 1
    n_layers: int = 24  # pairs of gated attention units, or of attention and feed-forward
    n_codes: int = 512  # of a head
    block: int = 512  # queries computed together; it changes no result, only how many keys before them get gradients
    window: int = 512  # keys seen one by one
    heads: str = "shga"  # shga, gated units; or mqa, mha: attention with a feed-forward network behind it
    d_ff: int = 0  # of that network
    attention: str = "vq"  # or full: keys as they are, at quadratic cost
    aggregate: bool = True  # see beyond the window
    through_cache: bool = True  # gradients pass from block to block of an update
    documents: bool = False  # see nothing of the documents before; each ends with an end token
    absolute: bool = False  # add sinusoids of the position, times a learnt scale, to embeddings
    wavelength: float = 1e5  # the longest of all sinusoids
    tied: bool = False  # the head is the embedding table
    norm_out: bool = False  # a norm before the head
    logit_scale: float = 1.0
    embedding_dropout: float = 0.0
    dropout: float = 0.0  # behind each unit
    position_drop: float = 0.0  # of the sinusoids that distances are seen by; one draw for a sequence
    layer_drop: float = 0.0  # of whole units; one draw for a sequence
    image: tuple[int, ...] = ()  # height, width and channels of the images that it generates, if it does
    pad_id: int = 0
    eos_ids: tuple[int, ...] = (1,)
    start_id: int = 1
    reference: bool = False  # round counts and means, and keep those that nobody sees, as the original does
    form: str = "auto"  # how blocks are computed, scan or parallel; it changes no result
    compute: str = "float32"
    scan: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        positive = ("vocab_size", "d_model", "d_k", "d_v", "n_heads", "n_layers", "n_codes", "block", "window")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even, for sines and cosines; got {self.d_model}")
        if (self.heads == "shga") == (self.d_ff > 0):
            asks = "has no feed-forward network: d_ff must be 0" if self.d_ff else "needs d_ff, 4 or 5 times d_model"
            raise ValueError(f"heads={self.heads!r} {asks}, got d_ff={self.d_ff}")
        for name, options in CHOICES.items():
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {getattr(self, name)!r}")
        if self.rounded and self.form == "parallel":
            raise ValueError("reference=true rounds from block to block in bfloat16: form must be scan, got parallel")
        for name in ("embedding_dropout", "dropout", "position_drop", "layer_drop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in 0 … 1, got {getattr(self, name)}")
        for name, ids in (("pad_id", (self.pad_id,)), ("start_id", (self.start_id,)), ("eos_ids", self.eos_ids)):
            if not all(0 <= one < self.vocab_size for one in ids):
                raise ValueError(f"{name}={ids} is not in the vocabulary of {self.vocab_size}")

    def for_vocabulary(self, size: int, pad_id: int, eos_id: int) -> "Config":
        """For the tokens of a tokenizer. Every text begins behind the end of another."""
        return dataclasses.replace(self, vocab_size=size, pad_id=pad_id, eos_ids=(eos_id,), start_id=eos_id)

    @property
    def key_heads(self) -> int:
        """Heads with keys of their own."""
        return 1 if self.heads == "mqa" else self.n_heads

    @property
    def units(self) -> int:
        """Attentions of a layer."""
        return 2 if self.heads == "shga" else 1

    @property
    def rounded(self) -> bool:
        """Whether counts and means lose digits between blocks."""
        return self.reference and self.compute != "float32"

    @property
    def spec(self) -> VQSpec:
        rounding = self.compute if self.reference else "float32"
        collect = self.aggregate or self.reference
        return VQSpec(self.window, self.block, self.aggregate, self.through_cache, self.documents, rounding, collect)

    @property
    def reading(self) -> VQSpec:
        """Where nothing is learnt, smaller blocks give the same: fewer keys of their windows are seen by no query.
        (Where something is, keys get gradients while they are in a window, so these depend on its blocks.)"""
        sizes = [n for n in range(64, 129) if self.block % n == 0]
        small = self.block > 128 and sizes and not self.reference and target().rows_in_sequence
        return self.spec._replace(block=sizes[-1]) if small else self.spec


def flops(config: Config, length: int) -> float:
    """Floating-point operations of the matmuls in the forward pass of one sequence."""
    c = config
    n, g = c.key_heads, c.n_heads // c.key_heads
    gate = c.n_heads * c.d_v if c.heads == "shga" else 0
    unit = float(c.d_model * (c.n_heads * c.d_k + n * (c.d_k + c.d_v) + gate) + c.n_heads * c.d_v * c.d_model)
    if c.attention == "vq":
        span = c.window + c.block
        unit += c.n_heads * (span * (c.d_k + c.d_v) + (c.window + 1) * c.d_k) + n * c.n_codes * c.d_k
        unit += c.n_heads * c.n_codes * (c.d_k + c.d_v) if c.aggregate else 0
    else:
        unit += n * g * (length / 2 * (c.d_k + c.d_v) + (c.window + 1) * c.d_k)
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
