"""How near captions come to what several people wrote: CIDEr and BLEU as COCO evaluates them, ROUGE, exact match."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from flaxen.errors import InputError

NAMES = ("cider", "bleu1", "bleu2", "bleu3", "bleu4", "rouge1", "rouge2", "rougeL", "exact_match")
ORDER, SIGMA = 4, 6.0

SEAM = re.compile(
    r"(?<=\w)(?=(?:n't|'(?:[smd]|re|ve|ll))\b)|(?<=\bcan)(?=not\b)|(?<=\b(?:gon|wan))(?=na\b)|(?<=\bgot)(?=ta\b)"
)
WORD = re.compile(
    r"n't\b|'(?:[smd]|re|ve|ll)\b"  # what a seam has cut off
    r"|(?:[^\W\d_]\.)+[^\W\d_]\b\.?"  # u.s., p.m.
    r"|(?:\d+[.,:](?=\d))*\w+(?:[-'/&]\w+)*"  # 1,000, black-and-white, o'clock
    r"|[&%$#@+*=/]"
)

Words = list[str]
Gram = tuple[str, ...]


def score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[dict[str, float], list[float]]:
    """All of NAMES, and the CIDEr of each item. All but CIDEr are from 0 to 100; no prediction scores 0.

    BLEU and CIDEr take the items together; ROUGE is the mean over items of the nearest reference's. CIDEr counts what
    sets an item apart from the others, so that a single item has 0, be it right or wrong.
    """
    check(predictions, references)
    if any(isinstance(several, str) for several in references):
        raise ValueError("references are several to a prediction, each item a list of texts; got a text as an item")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError("scoring captions needs rouge-score; pip install 'flaxen[metrics]'") from None

    scorer = RougeScorer(list(NAMES[5:8]), use_stemmer=True)
    totals = dict.fromkeys(NAMES[5:], 0.0)
    ours, theirs = [words(text) for text in predictions], [[words(text) for text in several] for several in references]
    for i, prediction in enumerate(predictions):
        for name, value in scorer.score_multi(references[i], prediction).items():
            totals[name] += value.fmeasure
        totals["exact_match"] += ours[i] in theirs[i]
    mean, each = cider(ours, theirs)
    bleus = {name: 100 * value for name, value in zip(NAMES[1:5], bleu(ours, theirs))}
    means = {name: 100 * total / max(1, len(predictions)) for name, total in totals.items()}
    return {"cider": mean} | bleus | means, each


def words(text: str) -> Words:
    """In lower case, cut as the Penn Treebank does (do n't, dog 's, t-shirt), without punctuation."""
    return WORD.findall(SEAM.sub(" ", text.lower().replace("’", "'")))


def bleu(predictions: Sequence[Words], references: Sequence[Sequence[Words]]) -> tuple[float, float, float, float]:
    """BLEU-1 to BLEU-4 of all items together, from 0 to 1. The reference nearest in length sets the wanted length."""
    check(predictions, references)
    found, tried, length, wanted = np.zeros(ORDER), np.zeros(ORDER), 0, 0
    for prediction, several in zip(predictions, references):
        most: Counter[Gram] = Counter()
        for reference in several:
            most |= Counter(grams(reference))
        for gram, count in (Counter(grams(prediction)) & most).items():
            found[len(gram) - 1] += count
        tried += np.maximum(len(prediction) - np.arange(ORDER), 0)
        length += len(prediction)
        wanted += min(map(len, several), key=lambda n: (abs(n - len(prediction)), n))
    # COCO's constants against division by zero: they show when all predictions are shorter than n words.
    precision = np.cumprod((found + 1e-15) / (tried + 1e-9)) ** (1 / np.arange(1, ORDER + 1))
    brevity = math.exp(min(0.0, 1 - (wanted + 1e-9) / (length + 1e-15)))
    one, two, three, four = (float(value) for value in precision * brevity)
    return one, two, three, four


def cider(predictions: Sequence[Words], references: Sequence[Sequence[Words]]) -> tuple[float, list[float]]:
    """The mean and each item's CIDEr-D, from 0 to 10.

    A run of words weighs more the fewer items have it in their references; what all have, as with one item, weighs 0.
    """
    check(predictions, references)
    if not predictions:
        return 0.0, []
    items: Counter[Gram] = Counter()
    for several in references:
        items.update({gram for reference in several for gram in grams(reference)})
    unseen = math.log(len(references))
    weights = {gram: unseen - math.log(count) for gram, count in items.items()}

    def weigh(caption: Words) -> tuple[dict[Gram, float], list[float]]:
        vector, squares = {}, [0.0] * ORDER
        for gram, count in Counter(grams(caption)).items():
            vector[gram] = value = count * weights.get(gram, unseen)
            squares[len(gram) - 1] += value * value
        return vector, [math.sqrt(square) for square in squares]

    each = []
    for prediction, several in zip(predictions, references):
        vector, norms = weigh(prediction)
        total = 0.0
        for reference in several:
            wanted, wanted_norms = weigh(reference)
            products = [0.0] * ORDER
            for gram in vector.keys() & wanted.keys():
                products[len(gram) - 1] += min(vector[gram], wanted[gram]) * wanted[gram]
            cosines = (dot / (a * b) for dot, a, b in zip(products, norms, wanted_norms) if dot)
            total += sum(cosines) * math.exp(-((len(prediction) - len(reference)) ** 2) / (2 * SIGMA**2))
        each.append(10 * total / ORDER / len(several))
    return sum(each) / len(each), each


def grams(caption: Words) -> Iterator[Gram]:
    """All runs of one to four words."""
    return chain.from_iterable(zip(*(caption[i:] for i in range(n))) for n in range(1, ORDER + 1))


def check(predictions: Sequence[object], references: Sequence[Sequence[object]]) -> None:
    """A prediction for each list of references, and no list empty."""
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} lists of references")
    if not all(references):
        empty = [len(several) for several in references].index(0)
        raise ValueError(f"item {empty} has no reference to compare with; give one, or leave the item out")
