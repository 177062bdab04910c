"""Flaxen: T5, LongT5, ViT + GPT-2 captioning and Transformer-VQ in JAX.

Load a Hugging Face checkpoint, generate text or embeddings, train, and save it back.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxen.errors import InputError
    from flaxen.generate.options import Options
    from flaxen.pretrained import Generated, Pretrained, create, load

__all__ = ["Generated", "InputError", "Options", "Pretrained", "create", "load"]
__version__ = "0.2.0"
_HOME = {
    "load": "flaxen.pretrained",  # a checkpoint directory or hub id -> Pretrained
    "create": "flaxen.pretrained",  # a Config -> Pretrained with random weights
    "Pretrained": "flaxen.pretrained",  # .logits .generate .stream .embed .save
    "Generated": "flaxen.pretrained",  # .text .tokens .logprobs .score .index
    "Options": "flaxen.generate.options",  # options of Pretrained.generate and .stream
    "InputError": "flaxen.errors",  # an invalid file, option or prompt
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `flaxen --help` does not wait for JAX."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'flaxen' has no attribute {name!r}")
