"""What denoising can be told."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Objective:
    """Span corruption. Lengths of examples and targets follow from `input_length`."""

    input_length: int = 512
    """Tokens that the model reads; ByT5 uses 1024."""
    density: float = 0.15
    """Share of the text that is cut out."""
    mean_span: float | None = None
    """Mean length of what is cut out at one place. Default 3 tokens; 20 bytes for ByT5."""
    z_loss: float = 0.0
    """Weight of log²(Z), which keeps logits from drifting; 1e-4 is usual with bfloat16."""
