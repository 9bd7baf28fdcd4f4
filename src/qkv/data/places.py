"""Where in the data the rows of a batch begin, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qkv.data.cache import TokenFiles
from qkv.data.prepare import Prepared
from qkv.data.rows import Batch

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

_QUOTED_TOKENS, _QUOTED_CHARACTERS = 24, 40


def places(
    prepared: Prepared, batches: Sequence[Batch], tokenizer: Tokenizer | None = None, *, most: int = 4
) -> list[str]:
    """The first rows of training batches by file, number and first words, and how many more there are.

    tokenizer: of the texts, or of the sources of pairs; None where there are none.
    """
    named = list(_origins(batches)) if prepared.files else []  # made data come from no file
    told = [_place(prepared, origin, tokenizer) for origin in named[:most]]
    return told if len(named) <= most else [*told, f"{len(named) - most} more"]


def _origins(batches: Sequence[Batch]) -> Iterator[int]:
    for batch in batches:
        if batch.origins_B is not None:
            yield from batch.origins_B.tolist()


def _place(prepared: Prepared, origin: int, tokenizer: Tokenizer | None) -> str:
    """Records are numbered from 1 in the order of the files, those left out or held out being counted too."""
    files = prepared.files[0]
    paths = [str(source["path"]) for source in files.manifest["files"]]
    if not isinstance(files, TokenFiles):
        return paths[origin]
    number = int(np.searchsorted(files.offsets, origin, side="right"))
    among = paths[0] if len(paths) == 1 else f"the {len(paths)} training files"
    place = f"{prepared.train.unit.removesuffix('s')} {number} of {among}"
    if tokenizer is None:
        return place
    ids = files.tokens[origin : min(origin + _QUOTED_TOKENS, int(files.offsets[number]))].tolist()
    return f'{place} from "{" ".join(tokenizer.decode(ids).split())[:_QUOTED_CHARACTERS]}"'
