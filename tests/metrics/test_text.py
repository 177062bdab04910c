"""Text metrics equal rouge-score and sacrebleu, and are 0 or 100 where they should be."""

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from flaxen.metrics.text import NAMES, lead, score, sentences

REFERENCES = ["The group agreed. Costs fell, and sales rose.", "It rained in Spain."]
PREDICTIONS = ["Sales rose. The group disagreed.", "In Spain it often rains."]


def test_metrics_equal_the_libraries() -> None:
    values = score(PREDICTIONS, REFERENCES)
    assert tuple(values) == NAMES
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    for name in NAMES[:4]:
        each = [
            scorer.score(r.replace(". ", ".\n"), p.replace(". ", ".\n"))[name].fmeasure
            for r, p in zip(REFERENCES, PREDICTIONS)
        ]
        assert values[name] == pytest.approx(100 * sum(each) / 2)
    assert values["rougeLsum"] != values["rougeL"]
    assert values["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score
    assert values["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score
    assert values["exact_match"] == 0


def test_perfect_and_empty_texts() -> None:
    assert score(REFERENCES, REFERENCES) == pytest.approx(dict.fromkeys(NAMES, 100.0))
    nothing = score(["", "zzz"], REFERENCES)
    assert all(nothing[name] == 0 for name in ("rouge1", "rougeLsum", "exact_match"))
    assert score([" It rained in Spain. "], REFERENCES[1:])["exact_match"] == 100
    assert score([], []) == {}
    with pytest.raises(ValueError, match="1 predictions and 2"):
        score(["a"], REFERENCES)


def test_sentences_and_lead() -> None:
    assert sentences(" One. Two?  Three! four") == "One.\nTwo?\nThree!\nfour"
    assert lead("One. Two? Three! Four.") == "One. Two? Three!"
