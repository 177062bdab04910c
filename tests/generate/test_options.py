"""Options are parsed and checked; errors name the option and what to do."""

import pytest

from flaxen.errors import InputError
from flaxen.generate.options import make_options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beam": 2}, "did you mean 'num_beams'"),
        ({"max_length": 20}, "max_new_tokens"),
        ({"penalty_alpha": 0.6}, "contrastive"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be of type int, got '5'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": True}, "must be of type int"),
        ({"temperature": 0.5}, "do_sample"),
        ({"top_k": 5}, "do_sample"),
        ({"length_penalty": 0.5}, "num_beams"),
        ({"early_stopping": "sometimes", "num_beams": 2}, "early_stopping"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens must be at most max_new_tokens=8, got 9"),
        ({"do_sample": True, "num_beams": 2}, "cannot be combined"),
        ({"num_return_sequences": 3}, "num_return_sequences=3"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_beams=2"),
        ({"do_sample": True, "temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"bad_words_ids": [[]]}, "empty"),
        ({"bad_words_ids": [3]}, "bad_words_ids must be"),
        ({"seed": -1}, "seed"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(given: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_options(given)


def test_arguments_override_generation_config_defaults() -> None:
    file = {
        "max_length": 21,
        "num_beams": 4,
        "length_penalty": 2.0,
        "eos_token_id": 1,
        "top_k": None,
        "early_stopping": True,
    }
    assert make_options({}, file).max_new_tokens == 20
    assert make_options({}, file).num_beams == 4
    assert make_options({"max_new_tokens": 64}, file).max_new_tokens == 64
    sampled = make_options({"do_sample": True}, file)
    assert (sampled.num_beams, sampled.length_penalty) == (1, None)
    greedy = make_options({"num_beams": 1}, file)
    assert greedy.length_penalty is None
    with pytest.raises(InputError, match=r"generation_config\.json"):
        make_options({}, {"guidance_scale": 3.0})


def test_static_options_do_not_depend_on_numeric_values() -> None:
    first = make_options({"do_sample": True, "temperature": 0.3, "max_new_tokens": 5, "seed": 1})
    second = make_options({"do_sample": True, "temperature": 0.9, "max_new_tokens": 50, "seed": 2})
    assert first.static() == second.static()
    assert first.static() != make_options({"do_sample": True}).static()
