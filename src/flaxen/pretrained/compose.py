"""A captioner of a ViT and a GPT-2 that were trained apart."""

from flaxen import families
from flaxen.data.images import ImageProcessor
from flaxen.nn.param import initialise
from flaxen.pretrained.model import Pretrained
from flaxen.tree import leaves, map_leaves


def compose(encoder: Pretrained, decoder: Pretrained, seed: int = 0) -> Pretrained:
    """A captioner of two models. What neither has (cross-attention, a bridge between widths) is random."""
    config = families.joined(encoder.config, decoder.config)
    halves = (("encoder", encoder.model), ("decoder", decoder.model))
    known = {f"{half}.{path}": leaf for half, model in halves for path, leaf in leaves(model).items()}
    fresh = initialise(families.of_config(config).model(config), seed)
    model = map_leaves(lambda path, leaf: known.get(path, leaf), fresh)
    processor = encoder.processor or ImageProcessor.default(encoder.config.image_size)
    return Pretrained(model, decoder.tokenizer, {}, processor)
