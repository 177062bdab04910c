"""A model with its tokenizer: loaded from a checkpoint, asked for logits or text, saved again.

model.py    Pretrained: the facade            loading.py  load, create; checkpoint directories
prompts.py  texts and images as model inputs  memory.py   what a Transformer-VQ has read
compose.py  a captioner of two models         embedding.py  one vector for each text
"""

from flaxen.pretrained.compose import compose
from flaxen.pretrained.loading import create, load
from flaxen.pretrained.model import Generated, Pretrained

__all__ = ["Generated", "Pretrained", "compose", "create", "load"]
