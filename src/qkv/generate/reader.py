"""What people give a model, as its network reads it, and what its texts begin and end with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qkv.config.errors import UsageError
from qkv.config.run import GenerationConfig
from qkv.generate.decode import check_ids, check_prompts, pad
from qkv.generate.prompts import Prompt, begin_of, end_of, prompt_ids, whole_ids
from qkv.generate.suppression import Suppression
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

WRITERS = {"log-mel": "transcribe", "patches": "caption"}
"""What writes down what the encoder reads, where that is a file of another kind."""


@dataclass(frozen=True)
class Reader:
    """Reads for one model. source_tokenizer: of what an encoder reads; without a tokenizer the model speaks in ids."""

    network: Transformer
    tokenizer: Tokenizer | None
    source_tokenizer: Tokenizer | None
    generation: GenerationConfig

    @property
    def vocab_size(self) -> int | None:
        """Ids from there on only pad the embedding."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def eos_ids(self) -> list[int]:
        """Any of them ends a text."""
        eos_ids = self.generation.eos_ids
        return end_of(self.tokenizer) if eos_ids is None else list(eos_ids)

    @property
    def start_ids(self) -> list[int]:
        """What the decoder of an encoder-decoder starts from. Raises UsageError where nothing says it."""
        if self.generation.start_ids is not None:
            return list(self.generation.start_ids)
        start = begin_of(self.tokenizer)
        if not start:
            raise UsageError(
                "the decoder starts from BOS, and the model's tokenizer has none",
                hint="generation.start_ids in the model's configuration",
            )
        return start

    @property
    def suppression(self) -> Suppression:
        """What is never written."""
        return Suppression(self.generation.suppress_ids, self.generation.begin_suppress_ids)

    def prompts(
        self, prompts: Sequence[Prompt] | Tensor, *, parse_special: bool = False
    ) -> tuple[list[list[int]], Tensor | None, Tensor | None, list[int]]:
        """What the decoder starts from, the source and its lengths (see `sources`), and the counts to be told."""
        check_prompts(self.network, [])
        if self.network.encoder is not None:
            source, lengths_B, counts = self.sources(prompts, parse_special=parse_special)
            return [self.start_ids] * len(counts), source, lengths_B, counts
        if isinstance(prompts, Tensor):
            raise UsageError(
                f"a tensor of {prompts.dtype} is no prompt: ids are whole numbers, and features are for an "
                "encoder-decoder"
            )
        rows = [
            prompt_ids(self.tokenizer, prompt, parse_special=parse_special, where=f"prompt {number}")
            for number, prompt in enumerate(prompts)
        ]
        return rows, None, None, [len(row) for row in rows]

    def sources(
        self, sources: Sequence[Prompt] | Tensor, *, parse_special: bool = False
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """What the encoder reads, lengths [B] (None: all whole), and how many vectors become of each."""
        parameter = next(self.network.parameters())
        assert self.network.encoder is not None
        reads = self.network.encoder.config.input
        if isinstance(sources, Tensor):
            if reads.reads_ids or sources.dim() != len(reads.axes):
                wanted = "ids" if reads.reads_ids else reads.expects
                raise UsageError(f"the encoder reads {wanted}, not a tensor {list(sources.shape)} of {sources.dtype}")
            counts = [reads.length(sources.shape[1])] * len(sources)
            return sources.to(parameter.device, parameter.dtype), None, counts
        rows = [
            self.source_ids(source, f"source {number}", parse_special=parse_special)
            for number, source in enumerate(sources)
        ]
        for number, row in enumerate(rows):
            if not row:
                raise UsageError(f"source {number} is empty: there is nothing to read")
        ids_BS, lengths_B = pad(rows, parameter.device)
        return ids_BS, lengths_B, [len(row) for row in rows]

    def source_line(self, text: Prompt, where: str) -> list[int]:
        """The ids of a source to be translated, none of a blank text."""
        return [] if isinstance(text, str) and not text.strip() else self.source_ids(text, where)

    def source_ids(self, source: Prompt, where: str, *, parse_special: bool = False) -> list[int]:
        """The ids of a source that the encoder can read; `where` names it in errors."""
        assert self.network.encoder is not None
        config = self.network.encoder.config
        if not config.input.reads_ids:
            features = f"a float tensor: {config.input.expects}"
            raise UsageError(
                f"the encoder reads {config.input.reads}, not texts or ids",
                hint=f"{WRITERS[config.input.kind]}, or {features}" if config.input.kind in WRITERS else features,
            )
        ids = whole_ids(self.source_tokenizer, source, parse_special=parse_special, where=where)
        if len(ids) > config.max_seq_len:
            raise UsageError(
                f"{where} has {len(ids)} tokens, which do not fit the encoder's context of {config.max_seq_len}",
                hint="a shorter text, or a model with a larger max_seq_len",
            )
        check_ids(ids, config.vocab_size, where)
        return ids

    def whole_rows(self, texts: Sequence[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
        """The ids of texts that are read to their end; a blank text is as an empty one."""
        stack = self.network.encoder if self.network.encoder is not None else self.network.decoder
        assert stack is not None
        rows = []
        for number, text in enumerate(texts):
            blank = isinstance(text, str) and not text.strip()
            rows.append(whole_ids(tokenizer, "" if blank else text, where=f"text {number}"))
            if not rows[-1]:
                raise UsageError(f"text {number} is empty: there is nothing to read")
            check_ids(rows[-1], stack.config.vocab_size, f"text {number}")
        return rows
