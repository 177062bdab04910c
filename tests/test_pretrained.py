"""The public methods of `Pretrained`, and their errors."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from conftest import Reference
from flax import nnx

import flaxen
from flaxen.errors import InputError
from flaxen.models.t5 import Config


def test_generate_from_text_returns_text(byt5: Path, tmp_path: Path) -> None:
    pretrained = flaxen.load(byt5)
    (output,) = pretrained.generate("Grüße, 世界", max_new_tokens=7)
    assert output.text == pretrained.tokenizer.decode(output.tokens)
    assert len(output.tokens) == len(output.logprobs) <= 7
    pretrained.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("Grüße").input_ids == pretrained.tokenizer.encode("Grüße")


def test_streamed_pieces_join_to_the_text_of_generate(byt5: Path) -> None:
    pretrained = flaxen.load(byt5)
    for options in ({}, {"do_sample": True, "seed": 3}):
        pieces = list(pretrained.stream("Hello", max_new_tokens=12, **options))
        (output,) = pretrained.generate("Hello", max_new_tokens=12, **options)
        assert "".join(pieces) == output.text
    with pytest.raises(InputError, match="one sequence"):
        list(pretrained.stream("Hello", num_beams=2))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([""], "prompt 0 is empty"),
        (["fine", "</s>"], "prompt 1 has only special tokens"),
        (["<pad></s><pad>"], "only special tokens"),
        ([[]], "prompt 0 is empty"),
        ([[5, 6], [0, 1]], "prompt 1 has only special tokens"),
        ([[5, 384]], "ids must be between 0 and 383, got 384"),
        ([[5, -1]], "ids must be between 0 and 383, got -1"),
        ([5, 6], "wrap it in a list"),
        ([[0.5]], "integer ids"),
    ],
    ids=str,
)
def test_invalid_prompts_are_rejected(byt5: Path, prompts: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        flaxen.load(byt5).generate(prompts)


def test_empty_list_of_prompts_gives_no_outputs(byt5: Path) -> None:
    assert flaxen.load(byt5).generate([]) == []


def test_invalid_arguments_are_rejected(t5_reference: Reference) -> None:
    pretrained = flaxen.load(t5_reference.directory)
    with pytest.raises(InputError, match="input_ids: ids must be between 0 and 96, got 97"):
        pretrained.logits([[97]], [[0]])
    with pytest.raises(InputError, match="differ in length"):
        pretrained.logits([[5, 6], [7]], [[0], [0]])
    with pytest.raises(InputError, match="valid must have the shape of input_ids"):
        pretrained.logits([[5, 6]], [[0]], [[True]])
    with pytest.raises(InputError, match="no tokenizer"):
        pretrained.generate("text")
    with pytest.raises(InputError, match="token ids in options must be between 0 and 96, got 97"):
        pretrained.generate([[5]], bad_words_ids=[[97]])
    with pytest.raises(InputError, match="dtype and compute must be one of"):
        flaxen.load(t5_reference.directory, dtype="float16")


def test_created_model_round_trips_through_save(tmp_path: Path) -> None:
    from flaxen.models.t5 import Config

    tiny = Config(vocab_size=40, d_model=16, d_head=4, d_ff=24, n_layers=1, n_decoder_layers=1, n_heads=4)
    created = flaxen.create(tiny, seed=3)
    created.save(tmp_path / "tiny")
    loaded = flaxen.load(tmp_path / "tiny")
    np.testing.assert_array_equal(created.logits([[5, 6]], [[0, 7]]), loaded.logits([[5, 6]], [[0, 7]]))


def test_save_to_a_full_disk_leaves_nothing(byt5: Path, tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: writing fails halfway through the weights."""
    script = (
        "import resource, signal, sys, flaxen\n"
        "pretrained = flaxen.load(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n"
        "    pretrained.save(sys.argv[2])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "    sys.exit(7)\n"
    )
    run = [sys.executable, "-c", script, str(byt5), str(tmp_path / "out" / "model")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_decoder_is_rebuilt_when_weights_change_in_place() -> None:
    """The weights laid out for decoding are cached between calls; a change of the weights invalidates them."""
    config = Config(vocab_size=50, d_model=16, d_head=4, d_ff=16, n_layers=1, n_decoder_layers=1, n_heads=2)
    first, second = (flaxen.create(config, seed=seed) for seed in (0, 1))
    prompt = [[5, 6, 7]]
    before, expected = (model.generate(prompt, max_new_tokens=6)[0].tokens for model in (first, second))
    prepared = first.decoder
    assert first.decoder is prepared
    nnx.update(first.model, nnx.state(second.model))
    assert first.generate(prompt, max_new_tokens=6)[0].tokens == expected != before
