"""Metrics for generated texts, each compared with one reference: ROUGE, BLEU, chrF, exact match."""

import re
from collections.abc import Sequence

from flaxen.errors import InputError

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "exact_match")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Compute all metrics in NAMES, from 0 to 100: BLEU and chrF over the corpus, the others as means over pairs."""
    if len(predictions) != len(references):
        raise ValueError(
            "expected one reference per prediction, "
            f"got {len(predictions)} predictions and {len(references)} references"
        )
    if not predictions:
        return {}
    try:
        import sacrebleu
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            "scoring texts requires rouge-score and sacrebleu; install them with: pip install 'flaxen[metrics]'"
        ) from None

    scorer = RougeScorer(list(NAMES[:4]), use_stemmer=True)
    totals = dict.fromkeys(NAMES[:4], 0.0)
    for prediction, reference in zip(predictions, references):
        for name, value in scorer.score(sentences(reference), sentences(prediction)).items():
            totals[name] += value.fmeasure
    exact = sum(prediction.strip() == reference.strip() for prediction, reference in zip(predictions, references))
    means = {name: 100 * total / len(references) for name, total in totals.items()}
    return means | {
        "bleu": sacrebleu.corpus_bleu(list(predictions), [list(references)]).score,
        "chrf": sacrebleu.corpus_chrf(list(predictions), [list(references)]).score,
        "exact_match": 100 * exact / len(references),
    }


def sentences(text: str) -> str:
    """Put each sentence on its own line, as rougeLsum expects."""
    return "\n".join(SENTENCE_END.split(text.strip()))


def lead(text: str, n: int = 3) -> str:
    """Return the first `n` sentences: a baseline summary that needs no model."""
    return " ".join(SENTENCE_END.split(text.strip())[:n])
