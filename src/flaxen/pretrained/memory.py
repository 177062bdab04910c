"""Read a text into the memory of a Transformer-VQ, and generate from a memory."""

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.errors import InputError
from flaxen.hf.vq_memory import Memory
from flaxen.pretrained.prompts import Prompts

if TYPE_CHECKING:
    from flaxen.pretrained.model import Pretrained


def remember(pretrained: "Pretrained", prompt: Any, memory: Memory | None = None) -> Memory:
    """Read a text into a new memory, or append it to an existing one. The size of a memory is constant."""
    reader = pretrained.family.reader
    if reader is None or pretrained.config.attention != "vq":
        raise InputError("memory is supported only by Transformer-VQ models with attention=vq")
    if memory is None:
        (ids,) = pretrained.encode([prompt])
        # The last token stays unread: decoding begins by feeding it.
        return Memory(reader(pretrained.model, ids[:-1]), tuple(ids[-1:]), pretrained.digest)
    if memory.model != pretrained.digest:
        raise InputError(
            "the memory was created by a model with different weights; read the text again with this model"
        )
    # The last token of the memory has not been read yet: it is prepended to the prompt.
    ids = [*memory.unread, *(pretrained.prompts.continuation(prompt) if len(prompt) else [])]
    return Memory(reader(pretrained.model, ids[:-1], memory.state), tuple(ids[-1:]), pretrained.digest)


def continued(pretrained: "Pretrained", prompts: Prompts, memory: Memory) -> tuple[np.ndarray, Any]:
    """The batch of inputs that continues a memory with a single prompt, which may be empty."""
    if isinstance(prompts, os.PathLike):
        raise InputError("generation from a memory accepts text or token ids, not a file")
    (prompt,) = [prompts] if isinstance(prompts, str) else list(prompts)
    now = remember(pretrained, prompt, memory)
    return np.zeros(1, np.int32), (np.array([now.unread], np.int32), np.ones((1, 1), bool), now.state)
