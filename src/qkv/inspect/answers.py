"""The attention of a model while it reads what people give it, and answers."""

from __future__ import annotations

from typing import Any

from qkv.config.errors import UsageError
from qkv.config.parts import LogMelInputConfig, PatchInputConfig
from qkv.config.run import Config
from qkv.generate.caption import check_captions
from qkv.generate.media import features_of
from qkv.generate.prompts import is_one, listed
from qkv.generate.reader import Reader
from qkv.generate.transcribe import log_mel_of, one_window, transcripts
from qkv.generate.translate import check_translates, translations
from qkv.inspect.attention import Kind, StackAttention, StackName, attention_of


def attention_of_answer(
    reader: Reader,
    config: Config,
    given: Any,
    target: Any = None,
    *,
    stack: StackName | None = None,
    kind: Kind = "self",
) -> StackAttention:
    """`attention_of`, of texts or ids, an image as `Model.caption` takes it, or a recording as `Model.transcribe` does.

    target: what an encoder-decoder writes of it, a text, ids, or what it gave as an answer (None: its own best one).
    config: how files are read. Raises UsageError for what the model does not read or have.
    """
    network = reader.network
    reads = next(iter(network.config.stacks.values()))
    writes = network.encoder is not None and network.decoder is not None and stack != "encoder"
    source, start_ids = given, reader.start_ids if writes else None
    target = getattr(target, "token_ids", target)
    own = writes and target is None
    if isinstance(reads.input, LogMelInputConfig):
        wave_N = one_window(network, given)
        source = log_mel_of(network, [wave_N])[0]
        if writes:
            prompt, segments = transcripts(reader, wave_N, {})
            start_ids = prompt.start_ids
            if own:
                target = next(segments).token_ids
    elif isinstance(reads.input, PatchInputConfig):
        (source,) = features_of([given], reads, config)
        if own:
            check_captions(network)
            target = next(translations(reader, [source], {})).token_ids
    elif own:
        if not is_one(listed(given)):
            raise UsageError("attention is looked at of one text at a time")
        check_translates(network)
        target = next(translations(reader, [reader.source_line(listed(given), "source 0")], {})).token_ids
    return attention_of(
        network,
        reader.tokenizer,
        source,
        target=target,
        source_tokenizer=reader.source_tokenizer,
        start_ids=start_ids,
        stack=stack,
        kind=kind,
    )
