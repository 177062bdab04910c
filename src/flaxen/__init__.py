"""Flaxen: T5, mT5 and ByT5 in JAX. Load a Hugging Face checkpoint, generate, save it back."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxen.errors import InputError
    from flaxen.generate.options import Options
    from flaxen.pretrained import Generated, Pretrained, create, load

__all__ = ["Generated", "InputError", "Options", "Pretrained", "create", "load"]
__version__ = "0.1.0"
_HOME = {
    "load": "flaxen.pretrained",  # a checkpoint directory or hub id -> Pretrained
    "create": "flaxen.pretrained",  # a Config -> Pretrained with random weights
    "Pretrained": "flaxen.pretrained",  # .logits .generate .stream .embed .save
    "Generated": "flaxen.pretrained",  # .text .tokens .logprobs .score .index
    "Options": "flaxen.generate.options",  # what .generate can be asked for
    "InputError": "flaxen.errors",  # a wrong file, option or prompt
}


def __getattr__(name: str) -> Any:
    """Import on first use: `flaxen --help` must not wait for JAX."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'flaxen' has no attribute {name!r}")
