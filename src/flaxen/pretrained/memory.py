"""What a Transformer-VQ has read, kept to generate from at any time."""

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.errors import InputError
from flaxen.hf.vq_memory import Memory
from flaxen.pretrained.prompts import Prompts

if TYPE_CHECKING:
    from flaxen.pretrained.model import Pretrained


def remember(pretrained: "Pretrained", prompt: Any, memory: Memory | None = None) -> Memory:
    """The memory of a text, or of one that follows a memory. Its size does not depend on the text's."""
    reader = pretrained.family.reader
    if reader is None or pretrained.config.attention != "vq":
        raise InputError("only a Transformer-VQ with attention vq keeps a memory")
    if memory is None:
        (ids,) = pretrained.encode([prompt])
        return Memory(reader(pretrained.model, ids[:-1]), tuple(ids[-1:]), pretrained.digest)
    if memory.model != pretrained.digest:
        raise InputError("this memory was made by a model with other weights; let this one read the text itself")
    # The last token is read when something is to follow it.
    ids = [*memory.unread, *(pretrained.prompts.continuation(prompt) if len(prompt) else [])]
    return Memory(reader(pretrained.model, ids[:-1], memory.state), tuple(ids[-1:]), pretrained.digest)


def continued(pretrained: "Pretrained", prompts: Prompts, memory: Memory) -> tuple[np.ndarray, Any]:
    """The one batch of a prompt, which may be empty, that follows a memory."""
    if isinstance(prompts, os.PathLike):
        raise InputError("a memory goes on with a text or with ids, not with a file")
    (prompt,) = [prompts] if isinstance(prompts, str) else list(prompts)
    now = remember(pretrained, prompt, memory)
    return np.zeros(1, np.int32), (np.array([now.unread], np.int32), np.ones((1, 1), bool), now.state)
