"""`qkv tokenizer train | encode | decode | explain | stats`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import bad_bytes_option, json_option, print_json
from qkv.config.errors import ConflictError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from qkv.tokenizer import Tokenizer

KINDS = ("bpe", "unigram", "wordpiece", "word", "char", "byte")
_FOLDER = click.Path(path_type=Path)


@click.group()
def tokenizer() -> None:
    """Train a tokenizer; encode, decode, explain and measure with one.

    PATH is a tokenizer: a folder with tokenizer.json, or such a file (ours or Hugging Face's); a .gguf, .tiktoken or
    SentencePiece .model file, BERT's vocab.txt, llama2.c's tokenizer.bin.
    """


def encoding_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--encoding`, of commands that read a tokenizer."""
    return click.option(
        "--encoding", metavar="NAME", help="Of a tiktoken file that is not a known one: how it cuts text."
    )(command)


@tokenizer.command()
@click.argument("files", nargs=-1, required=True, type=_FOLDER, metavar="FILE...")
@click.option("-o", "--output", required=True, type=_FOLDER, help="The folder to write.")
@click.option("--vocab-size", type=click.IntRange(min=1), help="At most so many ids. [default: 4096; char: all]")
@click.option("--kind", type=click.Choice(KINDS), default="bpe", show_default=True, help="How text becomes tokens.")
@click.option("--force", is_flag=True, help="Replace the tokenizer that OUTPUT holds already.")
@bad_bytes_option
@json_option
def train(
    files: tuple[Path, ...],
    output: Path,
    vocab_size: int | None,
    kind: str,
    force: bool,
    bad_bytes: Any,
    as_json: bool,
) -> None:
    """Learn a vocabulary from text files (UTF-8; .gz and .xz are read as they are)."""
    _check_output(output, force)
    from qkv.tokenizer import Tokenizer

    if not as_json:
        click.echo(f"training a {kind} tokenizer on {len(files)} file(s) ...", err=True)
    trained = Tokenizer.train(files, kind=kind, vocab_size=vocab_size, bad_bytes=bad_bytes)
    trained.save(output)
    if as_json:
        special = {role: trained.token_to_id(token) for role, token in trained.roles.items()}
        print_json(
            {
                "path": str(output),
                "kind": kind,
                "vocab_size": trained.vocab_size,
                "special": special,
                "fingerprint": trained.fingerprint,
            }
        )
        return
    click.echo(f"{output}: {kind}, {trained.vocab_size} ids")
    click.echo(f'look at it: qkv tokenizer explain {output} "some text"', err=True)


def _check_output(output: Path, force: bool) -> None:
    if output.is_file():
        raise ConflictError("the output is a file, not a folder", where=str(output), hint="another name with -o")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / "tokenizer.json").is_file():
        raise ConflictError("the folder holds something else", where=str(output), hint="another name with -o")
    if not force:
        raise ConflictError("there is a tokenizer already", where=str(output), hint="another name with -o, or --force")


@tokenizer.command()
@click.argument("path", type=_FOLDER)
@click.argument("text", required=False)
@click.option("--text-file", type=_FOLDER, help="Encode this file's text.")
@click.option("--parse-special", is_flag=True, help="Text that spells a special token becomes that token.")
@click.option("--add-special", is_flag=True, help="Put <bos> and <eos>, or what the tokenizer's template says, around.")
@click.option("--strict", is_flag=True, help="Fail on a character that is not in the vocabulary.")
@encoding_option
@bad_bytes_option
@json_option
def encode(
    path: Path,
    text: str | None,
    text_file: Path | None,
    parse_special: bool,
    add_special: bool,
    strict: bool,
    encoding: str | None,
    bad_bytes: Any,
    as_json: bool,
) -> None:
    """Print the token ids of TEXT, of a file, or of standard input."""
    loaded = _load(path, encoding)
    if text is not None and text_file is not None:
        raise UsageError("there are two texts: TEXT and --text-file", hint="one of them")
    from qkv.tokenizer.text import normalize, read_blocks, read_stream

    if text is not None:
        text = normalize(text)
    elif text_file:
        text = "".join(read_blocks(text_file, bad_bytes))
    else:
        text = "".join(read_stream(sys.stdin.buffer, "standard input", bad_bytes))
    ids = loaded.encode(text, parse_special=parse_special, add_special=add_special, strict=strict)
    if as_json:
        print_json({"ids": ids})
        return
    click.echo(" ".join(map(str, ids)))
    if len(ids) <= 200:
        from qkv.tokenizer.explain import visible

        click.echo(" | ".join(visible(loaded.token_bytes(token_id)) for token_id in ids), err=True)


@tokenizer.command(context_settings={"ignore_unknown_options": True})  # -1 is a wrong id, not an option
@click.argument("path", type=_FOLDER)
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--keep-special", is_flag=True, help="Show special tokens too.")
@encoding_option
@json_option
def decode(path: Path, ids: tuple[str, ...], keep_special: bool, encoding: str | None, as_json: bool) -> None:
    """Print the text of token IDs, separated by spaces or commas."""
    numbers = []
    for part in " ".join(ids).replace(",", " ").strip("[] ").split():
        if not part.lstrip("-").isdecimal():
            raise UsageError(f"{part!r} is not a token id", hint="whole numbers, such as 12 7 33")
        numbers.append(int(part))
    text = _load(path, encoding).decode(numbers, skip_special=not keep_special)
    if as_json:
        print_json({"text": text})
    else:
        click.echo(text)


@tokenizer.command()
@click.argument("words", nargs=-1, required=True, metavar="[PATH] TEXT")
@click.option("-t", "--tokenizer", "path", type=_FOLDER, help="The tokenizer, if not given as PATH.")
@encoding_option
@json_option
def explain(words: tuple[str, ...], path: Path | None, encoding: str | None, as_json: bool) -> None:
    """Show how TEXT becomes tokens: its pieces, and each merge in the order it happens.

    Without a tokenizer, a small one is trained on a few sentences on the spot.
    """
    if path is None and len(words) == 2:
        path = Path(words[0])
        words = words[1:]
    if len(words) != 1:
        raise UsageError(f"explain takes one TEXT, got {len(words)} arguments", hint="quotes around the text")
    if path is None and Path(words[0]).is_dir():
        raise UsageError("explain what TEXT?", where=words[0], hint=f'`qkv tokenizer explain {words[0]} "some text"`')
    from qkv.tokenizer.text import normalize

    explanation = (_load(path, encoding) if path else _toy()).explain(normalize(words[0]))
    if as_json:
        print_json(explanation.to_dict())
        return
    if path is None:
        click.echo("a toy tokenizer, trained just now on a few sentences; -t PATH takes a real one\n", err=True)
    click.echo(str(explanation))


@tokenizer.command()
@click.argument("path", type=_FOLDER)
@click.argument("files", nargs=-1, required=True, type=_FOLDER, metavar="FILE...")
@encoding_option
@bad_bytes_option
@json_option
def stats(path: Path, files: tuple[Path, ...], encoding: str | None, bad_bytes: Any, as_json: bool) -> None:
    """How many tokens the text of FILEs takes, for Chinese and for other characters."""
    measured = _load(path, encoding).stats(files, bad_bytes=bad_bytes)
    if as_json:
        print_json(measured.to_dict())
        return
    click.echo(f"{'':<10}{'characters':>12}{'bytes':>12}{'tokens':>12}{'tokens/char':>13}{'bytes/token':>13}")
    for name, share in (("all", measured.all), ("Chinese", measured.chinese), ("other", measured.other)):
        ratios = [
            f"{ratio:.3f}" if ratio is not None else "-"
            for ratio in (share.tokens_per_character, share.bytes_per_token)
        ]
        click.echo(
            f"{name:<10}{share.characters:>12,}{share.bytes:>12,}{share.tokens:>12,.0f}{ratios[0]:>13}{ratios[1]:>13}"
        )
    if measured.unknown:
        click.echo(f"not in the vocabulary: {measured.unknown:,} tokens")


def _load(path: Path, encoding: str | None) -> Tokenizer:
    from qkv.tokenizer import Tokenizer

    return Tokenizer.load(path, encoding=encoding)


def _toy() -> Tokenizer:
    from qkv.tokenizer import Tokenizer
    from qkv.tokenizer.explain import TOY_TEXT

    return Tokenizer.train(TOY_TEXT, kind="bpe", vocab_size=290)
