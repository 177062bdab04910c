"""Caption metrics equal COCO's evaluation on the same words, and rouge-score."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from rouge_score.rouge_scorer import RougeScorer

from flaxen.metrics.captions import NAMES, bleu, cider, score, words

PREDICTIONS = ["A dog runs on the beach.", "Two men are climbing!", "A girl doesn't smile"]
REFERENCES = [
    ["A brown dog is running on the beach .", "A dog runs on the beach ."],
    ["Two climbers on a wall"],
    ["The girl frowns.", "A girl is not smiling.", "A sad girl looks at the dog's bowl."],
]
CAPTION = st.lists(st.sampled_from(["a", "dog", "'s", "t-shirt", "on", "the"]), max_size=9)
ITEM = st.tuples(CAPTION, st.lists(CAPTION, min_size=1, max_size=4))


def coco(captions, references):
    """BLEU and CIDEr of pycocoevalcap for these words."""
    expected = {i: [" ".join(reference) for reference in several] for i, several in enumerate(references)}
    predicted = {i: [" ".join(caption)] for i, caption in enumerate(captions)}
    return Bleu(4).compute_score(expected, predicted, verbose=0)[0], *Cider().compute_score(expected, predicted)


def assert_equals_coco(captions, references) -> None:
    bleus, mean, each = coco(captions, references)
    assert bleu(captions, references) == pytest.approx(bleus, abs=1e-9)
    ours, ours_each = cider(captions, references)
    assert ours == pytest.approx(mean, abs=1e-9)
    np.testing.assert_allclose(ours_each, each, atol=1e-9)


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=6))
def test_equals_coco_on_random_captions(items) -> None:
    captions, references = [item[0] for item in items], [item[1] for item in items]
    references[0] = [["dog"], *references[0]]  # pycocoevalcap fails when no reference has a word
    assert_equals_coco(captions, references)


def test_equals_coco_on_a_corpus() -> None:
    draw = np.random.default_rng(0)
    # Word frequencies follow Zipf's law, as in natural language, so that both common and rare n-grams occur.
    references = [
        [[f"w{word}" for word in draw.zipf(1.6, draw.integers(4, 15))] for _ in range(draw.integers(1, 6))]
        for _ in range(80)
    ]
    captions = [[word if draw.random() < 0.8 else "other" for word in several[-1]] for several in references]
    assert_equals_coco(captions, references)
    assert 1 < cider(captions, references)[0] < 9


@pytest.mark.parametrize("captions", [[["dog"], ["cat"]], [[], []], [["dog"] * 7, ["cat"]], [["dog"], []]])
def test_equals_coco_on_short_and_repeated_words(captions) -> None:
    assert_equals_coco(captions, [[["dog"], ["dog", "dog", "runs"]], [["a", "cat", "sat"]]])


def test_cider_of_a_single_item_is_zero() -> None:
    alone = [["a", "dog", "runs"]]
    assert_equals_coco(alone, [alone])
    assert cider(alone, [alone]) == (0.0, [0.0])
    assert score(["A dog runs here."], [["a dog runs here"]])[0] == pytest.approx(
        {"cider": 0.0} | dict.fromkeys(NAMES[1:], 100.0)
    )


def test_score_equals_coco_and_rouge_score() -> None:
    values, each = score(PREDICTIONS, REFERENCES)
    assert tuple(values) == NAMES
    captions, references = [words(text) for text in PREDICTIONS], [[words(text) for text in r] for r in REFERENCES]
    bleus, mean, expected_each = coco(captions, references)
    assert [values[name] for name in NAMES[1:5]] == pytest.approx([100 * value for value in bleus])
    assert values["cider"] == pytest.approx(mean)
    assert each == pytest.approx(list(expected_each))
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for name in NAMES[5:8]:
        best = [max(scorer.score(r, p)[name].fmeasure for r in several) for p, several in zip(PREDICTIONS, REFERENCES)]
        assert values[name] == pytest.approx(100 * np.mean(best))
    assert values["exact_match"] == pytest.approx(100 / 3)


def test_perfect_and_empty_captions() -> None:
    last = [several[-1] for several in REFERENCES]
    perfect = score(last, [[text] for text in last])[0]
    assert perfect == pytest.approx({"cider": 10.0} | dict.fromkeys(NAMES[1:], 100.0), abs=1e-6)
    assert score([], []) == (dict.fromkeys(NAMES, 0.0), [])
    silent, each = score(["", "!", " "], REFERENCES)
    assert silent == pytest.approx(dict.fromkeys(NAMES, 0.0))
    assert each == [0.0, 0.0, 0.0]


def test_invalid_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="1 predictions and 3 lists"):
        score(PREDICTIONS[:1], REFERENCES)
    with pytest.raises(ValueError, match="item 1 has no reference"):
        score(["a", "b"], [["a"], []])
    with pytest.raises(ValueError, match="got a single text"):
        score(["a dog"], ["a dog"])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", ""),
        (" . , ! '' -- … ", ""),
        ("A dog's ball isn't HERE; don't, can't.", "a dog 's ball is n't here do n't ca n't"),
        ("They’re I'm we've she'll I'd've cannot", "they 're i 'm we 've she 'll i 'd 've can not"),
        ("the dog 's toy, the boys' hats", "the dog 's toy the boys hats"),
        ('A black-and-white cat in a "T-shirt" - upside-down...', "a black-and-white cat in a t-shirt upside-down"),
        ("1,000 people at 3:30 p.m. in the U.S. (50%)", "1,000 people at 3:30 p.m. in the u.s. 50 %"),
        ("five o'clock at a café & bar", "five o'clock at a café & bar"),
    ],
)
def test_words_are_split_as_in_the_penn_treebank(text: str, tokens: str) -> None:
    assert words(text) == tokens.split()
