"""What a model in training writes, so that one can read along."""

from __future__ import annotations

from pathlib import Path

from qkv.data.media import Features
from qkv.data.prepare import Dataset, Pairs
from qkv.evaluate.tasks import greedy, source_at
from qkv.generate.decode import Decoding
from qkv.generate.prompts import begin_of
from qkv.generate.sampling import Sampling
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

TOKENS = 128
PAIRS = 8


def write_sample(
    path: Path,
    network: Transformer,
    tokenizer: Tokenizer | None,
    source_tokenizer: Tokenizer | None = None,
    validation: Dataset | None = None,
) -> str | None:
    """Keep at `path` what the model writes: a decoder from the beginning of a text, always with the same seed, an
    encoder-decoder of the first pairs held out.

    Draws nothing from a global generator. Returns the text, or None where there is nothing to write.
    """
    text: str | None
    if tokenizer is None:
        return None
    if isinstance(validation, Pairs):
        text = _translations(network, validation, tokenizer, source_tokenizer or tokenizer)
    elif network.config.family == "decoder" and network.config.head and network.config.head.predicts_tokens:
        text = _continuation(network, tokenizer)
    else:
        return None
    if text is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return text


def _continuation(network: Transformer, tokenizer: Tokenizer) -> str | None:
    begin = begin_of(tokenizer)
    if not begin:
        return None
    decoding = Decoding(
        network,
        [begin],
        sampling=Sampling(temperature=0.8),
        seeds=[0],
        max_new_tokens=TOKENS,
        eos_ids=[] if tokenizer.eos_id is None else [tokenizer.eos_id],
        vocab_size=tokenizer.vocab_size,
    )
    for _ in decoding:
        pass
    return tokenizer.decode(decoding.generated[0])


def _translations(network: Transformer, pairs: Pairs, tokenizer: Tokenizer, source_tokenizer: Tokenizer) -> str:
    numbers = range(min(PAIRS, pairs.num_documents))
    written = greedy(network, [source_at(pairs, number) for number in numbers], tokenizer, pairs.start_ids)
    parts = []
    for number, text in zip(numbers, written, strict=True):
        lines = [f"reference  {tokenizer.decode(pairs.target.document(number).tolist())}", f"model      {text}"]
        if not isinstance(pairs.source, Features):
            lines.insert(0, f"source     {source_tokenizer.decode(pairs.source.document(number).tolist())}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
