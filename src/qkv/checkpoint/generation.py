"""How a published model wants to be decoded: its generation_config.json as our `generation` section, and back."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.published import Published
from qkv.config.errors import QkvError
from qkv.config.run import GenerationConfig
from qkv.tokenizer.tokenizer import Tokenizer


def read_generation(config: Published, generation: Published) -> dict[str, Any]:
    """The `generation` section. What generation_config.json does not say, an older config.json may.

    The decoder of an encoder-decoder starts from `decoder_start_token_id`, then the forced ids; single
    `bad_words_ids` and `suppress_tokens` are never written.
    """
    told = Published({**config.keys, **_said(generation)}, generation.where)
    section: dict[str, Any] = {}
    if "eos_token_id" in told:
        section["eos_ids"] = _ids(told, "eos_token_id")
    if "decoder_start_token_id" in told:
        forced = dict(enumerate(_ids(told, "forced_bos_token_id"), 1))
        for place in told.list("forced_decoder_ids", []):
            if isinstance(place, list) and place[1:] == [None]:
                break  # the model's own choice, on which the rest depends
            if not isinstance(place, list) or len(place) != 2 or not all(_is_id(number) for number in place):
                raise QkvError("`forced_decoder_ids` should be pairs of place and id", where=told.where)
            forced[place[0]] = place[1]
        if list(forced) != list(range(1, len(forced) + 1)):
            raise told.unsupported(
                "forced_decoder_ids", told.keys["forced_decoder_ids"], "places 1, 2, ... without a gap"
            )
        section["start_ids"] = [told.whole("decoder_start_token_id"), *forced.values()]
    never = [word[0] for word in told.list("bad_words_ids", []) if isinstance(word, list) and len(word) == 1]
    suppressed = [*_ids(told, "suppress_tokens"), *never]
    if suppressed:
        section["suppress_ids"] = suppressed
    if first := _ids(told, "begin_suppress_tokens"):
        section["begin_suppress_ids"] = first
    return section


def _said(generation: Published) -> dict[str, Any]:
    return {key: value for key, value in generation.keys.items() if value is not None}


def _ids(told: Published, key: str) -> list[int]:
    """One id or a list of them, none where the key is absent."""
    value = told.keys.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_id(number) for number in ids):
        raise QkvError(f"`{key}` should be an id or a list of ids, not {value!r:.80}", where=told.where)
    return ids


def _is_id(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def write_generation(config: GenerationConfig, tokenizer: Tokenizer | None, *, decodes: bool) -> dict[str, Any]:
    """The keys of a generation_config.json: what `read_generation` reads, and the ids of a tokenizer's special tokens.

    decodes: an encoder-decoder, whose decoder starts from `start_ids`, by default from BOS.
    """
    told = tokenizer and {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    ids = {role: number for role, number in (told or {}).items() if number is not None}
    written: dict[str, Any] = {f"{role}_token_id": number for role, number in ids.items()}
    if config.eos_ids is not None:
        written["eos_token_id"] = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids)
    start = list(config.start_ids or ([ids["bos"]] if "bos" in ids else []))
    if decodes and start:
        written["decoder_start_token_id"], *forced = start
        if len(forced) == 1:
            written["forced_bos_token_id"] = forced[0]
        elif forced:
            written["forced_decoder_ids"] = [[place, number] for place, number in enumerate(forced, 1)]
    if config.suppress_ids:
        written["suppress_tokens"] = list(config.suppress_ids)
    if config.begin_suppress_ids:
        written["begin_suppress_tokens"] = list(config.begin_suppress_ids)
    return written
