"""What `generate` can be asked for. Names and meanings are transformers'; what is not here is an error."""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flaxen.errors import InputError, did_you_mean

# Numbers that may change from call to call without a new compilation: they are arguments of the compiled search.
NUMBERS = (
    "max_new_tokens",
    "min_new_tokens",
    "seed",
    "temperature",
    "top_p",
    "min_p",
    "nucleus",
    "repetition_penalty",
    "length_penalty",
)
INSTEAD = {
    "max_length": "use max_new_tokens (which does not count the start token)",
    "min_length": "use min_new_tokens (which does not count the start token)",
    "num_beam_groups": "group beam search is not supported",
    "penalty_alpha": "contrastive search is not supported",
    "generator": "use seed",
    "prng_key": "use seed",
}


@dataclass(frozen=True)
class Options:
    """How to search for the output. None means: off, or the checkpoint's own default."""

    max_new_tokens: int = 64
    """Longest output, end token included."""
    min_new_tokens: int = 0
    """No end token before this many."""
    num_beams: int = 1
    """Beams of beam search; 1 is greedy search or sampling."""
    num_return_sequences: int = 1
    """Outputs per input: the best beams, or independent samples."""
    length_penalty: float | None = None
    """Beam scores are sums of log-probabilities over length ** this (default 1)."""
    early_stopping: bool | Literal["never"] | None = None
    """Stop at num_beams finished beams (True), by transformers' heuristic (False), or when safe ('never')."""
    do_sample: bool = False
    """Draw tokens instead of taking the best."""
    seed: int = 0
    """Of sampling: the same seed and inputs give the same outputs, however they are batched."""
    temperature: float | None = None
    """Divides the logits before sampling."""
    top_k: int | None = None
    """Sample among the k best tokens (default 50; 0 for all)."""
    top_p: float | None = None
    """Sample among the fewest tokens whose probabilities reach p."""
    min_p: float | None = None
    """Sample among tokens at least this fraction as likely as the best."""
    nucleus: float | None = None
    """As top_p, by the rule of the original Transformer-VQ: a ten-thousandth less, so that 1 cuts a tail too."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens that already occurred less likely."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur."""
    forced_bos_token_id: int | None = None
    """First token of every output."""
    forced_eos_token_id: int | None = None
    """Last token of an output that reaches max_new_tokens."""
    eos_token_id: tuple[int, ...] | None = None
    """Ids that end an output (default: the checkpoint's). With none behind the flag, only max_new_tokens ends it."""

    def __post_init__(self) -> None:
        positive = ("max_new_tokens", "num_beams", "num_return_sequences")
        _require(all(getattr(self, name) >= 1 for name in positive), f"{', '.join(positive)} must be at least 1")
        _require(self.min_new_tokens >= 0, f"min_new_tokens must be at least 0, got {self.min_new_tokens}")
        _require(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}",
        )
        _require(0 <= self.seed < 2**31, f"seed must be in 0 … 2^31 - 1, got {self.seed}")
        _require(self.no_repeat_ngram_size >= 0, "no_repeat_ngram_size must be at least 0")
        _require(all(self.bad_words_ids), "bad_words_ids holds an empty sequence")
        for name, low, high in (
            ("temperature", 0.0, float("inf")),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("nucleus", 0.0, 1.0),
            ("repetition_penalty", 0.0, float("inf")),
        ):
            value = getattr(self, name)
            _require(value is None or low < value <= high, f"{name} must be in ({low:g}, {high:g}], got {value}")
        _require(self.top_k is None or self.top_k >= 0, f"top_k must be at least 0, got {self.top_k}")
        for name in ("temperature", "top_k", "top_p", "min_p", "nucleus"):
            alone = getattr(self, name) is not None and not self.do_sample
            _require(not alone, f"{name} only acts on sampling; set do_sample=True or leave it out")
        for name in ("length_penalty", "early_stopping"):
            alone = getattr(self, name) is not None and self.num_beams == 1
            _require(not alone, f"{name} only acts on beam search; set num_beams above 1 or leave it out")
        _require(
            not (self.do_sample and self.num_beams > 1),
            "do_sample and num_beams > 1 together are not supported",
        )
        n = self.num_return_sequences
        _require(
            self.do_sample or n <= self.num_beams,
            f"num_return_sequences={n} needs do_sample=True, or at least as many beams (num_beams={self.num_beams})",
        )

    @property
    def beams(self) -> int:
        """How many sequences grow side by side for each input."""
        return self.num_return_sequences if self.do_sample else self.num_beams

    def numbers(self) -> dict[str, float | int]:
        """The values that the compiled search takes as arguments."""
        values = {name: value for name in NUMBERS if (value := getattr(self, name)) is not None}
        whole = ("max_new_tokens", "min_new_tokens", "seed")
        return {name: value if name in whole else float(value) for name, value in values.items()}

    def static(self) -> "Options":
        """What the compiled search is specialised to: which options are on, not the value of a number."""
        off = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
        blank: dict[str, Any] = {
            "max_new_tokens": 1,
            "min_new_tokens": int(self.min_new_tokens > 0),
            "seed": 0,
        }
        for name in ("temperature", "top_p", "min_p", "nucleus", "repetition_penalty", "length_penalty"):
            value = getattr(self, name)
            blank[name] = None if value is None or value == off.get(name) else 0.5
        return dataclasses.replace(self, **blank)


def make_options(given: dict[str, Any], defaults: dict[str, Any] | None = None) -> Options:
    """Options from a call's names and values, over those of a generation_config.json; lists may stand for tuples."""
    hints = get_type_hints(Options)
    clean = {}
    for name, value in {**_defaults(defaults or {}, given), **given}.items():
        if name not in hints:
            hint = f": {INSTEAD[name]}" if name in INSTEAD else did_you_mean(name, hints)
            origin = "" if name in given else " of the checkpoint's generation_config.json"
            raise InputError(f"generate does not support the option {name!r}{origin}{hint}")
        value = _tuples(value)
        if name == "eos_token_id" and isinstance(value, int):
            value = (value,)
        _require(_fits(value, hints[name]), f"{name} must be {_words(hints[name])}, got {value!r}")
        clean[name] = value
    return Options(**clean)


# Fields of generation_config.json that are no options of ours: ids that the config holds, book-keeping, outputs.
NOT_OPTIONS = {
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "eos_token_id", "transformers_version",
    "_from_model_config", "use_cache", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits",
}  # fmt: skip
BEAM_ONLY = {"num_beams", "length_penalty", "early_stopping"}
SAMPLING_ONLY = {"temperature", "top_k", "top_p", "min_p"}


def _defaults(file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json as options. A call that asks for another kind of search drops what belongs to the old."""
    kept = {name: value for name, value in file.items() if value is not None and name not in NOT_OPTIONS}
    for theirs, ours in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if isinstance(length := kept.pop(theirs, None), int) and length > 0:
            kept.setdefault(ours, length - 1)  # theirs counts the start token
    sampling = given.get("do_sample", kept.get("do_sample", False))
    drop = BEAM_ONLY if sampling else SAMPLING_ONLY
    if given.get("num_beams", kept.get("num_beams", 1)) == 1:
        drop = drop | BEAM_ONLY
    return {name: value for name, value in kept.items() if name not in drop}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, (list, tuple)) else value


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, args[0]) for one in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint or (hint is types.NoneType and value is None)


def _words(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "").replace("Literal", "")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)
