"""Caption metrics with several references per image: CIDEr and BLEU as in COCO's evaluation, ROUGE, exact match."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from flaxen.errors import InputError

NAMES = ("cider", "bleu1", "bleu2", "bleu3", "bleu4", "rouge1", "rouge2", "rougeL", "exact_match")
ORDER, SIGMA = 4, 6.0  # longest n-gram; width of CIDEr-D's length penalty

# Where to split contractions, as the Penn Treebank does: is|n't, dog|'s, can|not, gon|na.
SEAM = re.compile(
    r"(?<=\w)(?=(?:n't|'(?:[smd]|re|ve|ll))\b)|(?<=\bcan)(?=not\b)|(?<=\b(?:gon|wan))(?=na\b)|(?<=\bgot)(?=ta\b)"
)
WORD = re.compile(
    r"n't\b|'(?:[smd]|re|ve|ll)\b"  # split off by SEAM
    r"|(?:[^\W\d_]\.)+[^\W\d_]\b\.?"  # u.s., p.m.
    r"|(?:\d+[.,:](?=\d))*\w+(?:[-'/&]\w+)*"  # 1,000, black-and-white, o'clock
    r"|[&%$#@+*=/]"
)

Words = list[str]
Gram = tuple[str, ...]


def score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[dict[str, float], list[float]]:
    """Compute all metrics in NAMES, and the CIDEr of each item. CIDEr ranges from 0 to 10, the others from 0 to 100.

    An empty prediction scores 0. BLEU is computed over the whole corpus; ROUGE is the mean over items, each scored
    against its best-matching reference. CIDEr weights n-grams by how rare they are among the items, so a single item
    always scores 0.
    """
    check(predictions, references)
    if any(isinstance(item_references, str) for item_references in references):
        raise ValueError("references must be lists of texts, one list per prediction, got a single text")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            "scoring captions requires rouge-score; install it with: pip install 'flaxen[metrics]'"
        ) from None

    scorer = RougeScorer(list(NAMES[5:8]), use_stemmer=True)
    totals = dict.fromkeys(NAMES[5:], 0.0)
    predicted = [words(text) for text in predictions]
    expected = [[words(text) for text in item_references] for item_references in references]
    for i, prediction in enumerate(predictions):
        for name, value in scorer.score_multi(references[i], prediction).items():
            totals[name] += value.fmeasure
        totals["exact_match"] += predicted[i] in expected[i]
    mean, each = cider(predicted, expected)
    bleus = {name: 100 * value for name, value in zip(NAMES[1:5], bleu(predicted, expected))}
    means = {name: 100 * total / max(1, len(predictions)) for name, total in totals.items()}
    return {"cider": mean} | bleus | means, each


def words(text: str) -> Words:
    """Split a text into lower-case words as the Penn Treebank does (do n't, dog 's, t-shirt), without punctuation."""
    return WORD.findall(SEAM.sub(" ", text.lower().replace("’", "'")))


def bleu(predictions: Sequence[Words], references: Sequence[Sequence[Words]]) -> tuple[float, float, float, float]:
    """Compute BLEU-1 to BLEU-4 over the whole corpus, from 0 to 1, using the closest reference lengths."""
    check(predictions, references)
    matched, total, length, reference_length = np.zeros(ORDER), np.zeros(ORDER), 0, 0
    for prediction, item_references in zip(predictions, references):
        # Clip the count of each n-gram to its highest count in any one reference.
        most: Counter[Gram] = Counter()
        for reference in item_references:
            most |= Counter(grams(reference))
        for gram, count in (Counter(grams(prediction)) & most).items():
            matched[len(gram) - 1] += count
        total += np.maximum(len(prediction) - np.arange(ORDER), 0)
        length += len(prediction)
        reference_length += min(map(len, item_references), key=lambda n: (abs(n - len(prediction)), n))
    # COCO's constants that prevent division by zero; they matter if all predictions are shorter than n words.
    precision = np.cumprod((matched + 1e-15) / (total + 1e-9)) ** (1 / np.arange(1, ORDER + 1))
    brevity = math.exp(min(0.0, 1 - (reference_length + 1e-9) / (length + 1e-15)))
    one, two, three, four = (float(value) for value in precision * brevity)
    return one, two, three, four


def cider(predictions: Sequence[Words], references: Sequence[Sequence[Words]]) -> tuple[float, list[float]]:
    """Compute CIDEr-D, from 0 to 10: the mean and the value of each item.

    The fewer items whose references contain an n-gram, the higher its weight (IDF). An n-gram in all items has weight
    0, and so does every n-gram if there is only one item.
    """
    check(predictions, references)
    if not predictions:
        return 0.0, []
    items: Counter[Gram] = Counter()  # number of items whose references contain the n-gram
    for item_references in references:
        items.update({gram for reference in item_references for gram in grams(reference)})
    unseen = math.log(len(references))
    weights = {gram: unseen - math.log(count) for gram, count in items.items()}

    def weigh(caption: Words) -> tuple[dict[Gram, float], list[float]]:
        """Return the TF-IDF vector of a caption, and its norm for each n-gram length."""
        vector, squares = {}, [0.0] * ORDER
        for gram, count in Counter(grams(caption)).items():
            vector[gram] = value = count * weights.get(gram, unseen)
            squares[len(gram) - 1] += value * value
        return vector, [math.sqrt(square) for square in squares]

    each = []
    for prediction, item_references in zip(predictions, references):
        vector, norms = weigh(prediction)
        total = 0.0
        for reference in item_references:
            expected, expected_norms = weigh(reference)
            products = [0.0] * ORDER
            for gram in vector.keys() & expected.keys():
                # Clipped, so that repeating an n-gram does not raise the score.
                products[len(gram) - 1] += min(vector[gram], expected[gram]) * expected[gram]
            cosines = (dot / (a * b) for dot, a, b in zip(products, norms, expected_norms) if dot)
            # Gaussian penalty for a difference in length.
            total += sum(cosines) * math.exp(-((len(prediction) - len(reference)) ** 2) / (2 * SIGMA**2))
        each.append(10 * total / ORDER / len(item_references))
    return sum(each) / len(each), each


def grams(caption: Words) -> Iterator[Gram]:
    """Iterate over all n-grams of one to four words."""
    return chain.from_iterable(zip(*(caption[i:] for i in range(n))) for n in range(1, ORDER + 1))


def check(predictions: Sequence[object], references: Sequence[Sequence[object]]) -> None:
    """Raise a ValueError unless there is a non-empty list of references for each prediction."""
    if len(predictions) != len(references):
        raise ValueError(
            "expected one list of references per prediction, "
            f"got {len(predictions)} predictions and {len(references)} lists"
        )
    if not all(references):
        empty = [len(item_references) for item_references in references].index(0)
        raise ValueError(f"item {empty} has no reference; add one or remove the item")
