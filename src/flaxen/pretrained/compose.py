"""Combine a pretrained ViT and a pretrained GPT-2 into an image captioner."""

from flaxen import families
from flaxen.data.images import ImageProcessor
from flaxen.nn.param import initialise
from flaxen.pretrained.model import Pretrained
from flaxen.tree import leaves, map_leaves


def compose(encoder: Pretrained, decoder: Pretrained, seed: int = 0) -> Pretrained:
    """Combine a ViT and a GPT-2 into a captioner.

    Weights that neither model has are initialised randomly: the cross-attention, and a projection if the widths differ.
    """
    config = families.joined(encoder.config, decoder.config)
    halves = (("encoder", encoder.model), ("decoder", decoder.model))
    # The weights of both models keep their paths, prefixed with "encoder" or "decoder".
    pretrained = {f"{half}.{path}": leaf for half, model in halves for path, leaf in leaves(model).items()}
    random = initialise(families.of_config(config).model(config), seed)
    model = map_leaves(lambda path, leaf: pretrained.get(path, leaf), random)
    processor = encoder.processor or ImageProcessor.default(encoder.config.image_size)
    return Pretrained(model, decoder.tokenizer, {}, processor)
