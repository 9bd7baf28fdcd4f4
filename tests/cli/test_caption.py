"""`qkv caption`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generate.test_caption import caption_model
from media_files import write_images

from qkv.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("captions")
    write_images(place, 2)
    caption_model().save(place / "model")
    return place


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["caption", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_each_image_gives_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [folder / "0.png", folder / "1.png"]
    code, out, _ = run(capsys, folder / "model", *files, "--max-new-tokens", 3, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    expected = caption_model().caption(files, max_new_tokens=3)
    assert code == 0
    assert [(one["image"], one["token_ids"]) for one in found] == [
        (str(file), one.token_ids) for file, one in zip(files, expected, strict=True)
    ]
    code, out, _ = run(capsys, folder / "model", *files, "--max-new-tokens", 3)
    assert (code, len(out.split("\n")) - 1) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [(("gone.png",), 3, "gone.png"), (("0.png", "--beam-size", "0"), 2, "beam_size"), ((), 2, "IMAGE")],
)
def test_a_mistake_is_one_error_with_its_code(
    arguments: tuple[str, ...], code: int, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [folder / one if one.endswith(".png") else one for one in arguments]
    found, out, err = run(capsys, folder / "model", *given)
    assert (found, out) == (code, "")
    assert told in err
