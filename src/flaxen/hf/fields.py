"""config.json, field by field: what is known, what says nothing, what we would compute wrongly."""

from collections.abc import Collection
from typing import Any

from flaxen.errors import InputError, did_you_mean

# Fields of any model that say nothing about its arithmetic, whatever their value. transformers 4 wrote them all out,
# its defaults of generation included, which generation_config.json holds today.
SILENT = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path",
    "tokenizer_class", "task_specific_params", "use_cache", "id2label", "label2id", "num_labels", "problem_type",
    "output_attentions", "output_hidden_states", "return_dict", "bos_token_id", "sep_token_id", "cls_token_id",
    "unk_token_id", "finetuning_task", "gradient_checkpointing", "eos_token_id", "tie_word_embeddings",
    "generation_config", "is_encoder_decoder", "prefix", "_attn_implementation_autoset", "attn_implementation",
    "_attn_implementation", "return_dict_in_generate", "output_scores", "tf_legacy_loss", "_commit_hash",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
}  # fmt: skip
# Fields that would change the arithmetic: only these values are the model that we compute.
FIXED: dict[str, tuple[Any, ...]] = {
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0,),
    "torchscript": (False,),
    "use_bfloat16": (False,),
    "quantization_config": (None,),
}


def read(
    json: dict[str, Any],
    names: dict[str, str],
    config: type,
    silent: Collection[str] = (),
    fixed: dict[str, tuple[Any, ...]] | None = None,
    what: str = "config.json",
) -> dict[str, Any]:
    """Our fields out of theirs (`names` maps theirs to ours); all that is wrong is reported at once."""
    rules, problems = FIXED | (fixed or {}), []
    for name, value in json.items():
        if name in rules:
            if value not in rules[name]:
                problems.append(f"{name}={value!r} is not supported; only {rules[name][0]!r} is")
        elif name not in names and name not in SILENT and name not in silent and value is not None:
            problems.append(f"unknown field {name}={value!r}{did_you_mean(name, [*names, *rules])}")
    fields = {ours: json[theirs] for theirs, ours in names.items() if json.get(theirs) is not None}
    for name, value in fields.items():
        want = type(getattr(config, name))
        if isinstance(value, bool) != (want is bool) or not isinstance(value, (int, float) if want is float else want):
            problems.append(f"{name} must be {want.__name__}, got {value!r}")
    if problems:
        raise InputError(f"{what} asks for what flaxen does not compute:\n  " + "\n  ".join(problems))
    return fields


def make_config(config: type, fields: dict[str, Any], what: str = "config.json") -> Any:
    """The configuration, or an error that says which value it refuses."""
    try:
        return config(**fields)
    except (ValueError, TypeError) as error:
        raise InputError(f"{what}: {error}") from None


def ids(value: Any) -> tuple[int, ...]:
    """Token ids that config.json gives as one, as a list or as nothing."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else list(ids) or None
