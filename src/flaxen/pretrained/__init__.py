"""The Python API: load a model with its tokenizer, generate, embed, compute logits, save.

model.py      Pretrained: a model with its tokenizer, and the methods to use it
loading.py    load, create; reading and writing checkpoint directories
prompts.py    texts and images to model inputs
embedding.py  text embeddings from encoder hidden states
compose.py    a captioner from a ViT and a GPT-2
memory.py     stored state of a Transformer-VQ, to continue generating from
"""

from flaxen.pretrained.compose import compose
from flaxen.pretrained.loading import create, load
from flaxen.pretrained.model import Generated, Pretrained

__all__ = ["Generated", "Pretrained", "compose", "create", "load"]
