"""Curves of runs: what is drawn is what was measured."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from qkv.config.errors import NotFoundError, QkvError, UsageError
from qkv.inspect.plots import drawable, save_plot
from qkv.inspect.run_plots import CURVES, plot_runs


def make_run(path: Path, records: list[dict[str, object]]) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("train: {steps: 3}\n", encoding="utf-8")
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


RECORDS: list[dict[str, object]] = [
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": 2.0},
    {"step": 2, "val_loss": 2.5},
    {"step": 3, "loss": 1.0},
]


def seed(path: Path, number: int, losses: list[float], steps: int = 3) -> Path:
    """A run of that seed with these losses."""
    make_run(path, [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    (path / "config.yaml").write_text(f"train: {{steps: {steps}, seed: {number}}}\n", encoding="utf-8")
    return path


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_loss_plot_shows_training_and_validation_with_units_and_the_config(tmp_path) -> None:
    axes = plot_runs([make_run(tmp_path / "a", RECORDS)])
    training, validation = axes.get_lines()
    assert training.get_xydata().tolist() == [[1, 3], [2, 2], [3, 1]]
    assert validation.get_xydata().tolist() == [[2, 2.5]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per token)")
    assert legend(axes) == ["training", "validation"]
    digest = hashlib.sha256((tmp_path / "a/config.yaml").read_bytes()).hexdigest()
    assert texts(axes) == [f"config {digest[:8]}"]


def test_the_loss_plot_tells_runs_apart_by_name_colour_and_config(tmp_path) -> None:
    runs = [make_run(tmp_path / name, RECORDS) for name in ("a", "b")]
    (runs[1] / "config.yaml").write_text("train: {steps: 4}\n", encoding="utf-8")
    (tmp_path / "latest").symlink_to("b")
    axes = plot_runs([runs[0], tmp_path / "latest"])
    assert legend(axes) == ["training", "validation", "a", "b"]
    assert len({line.get_color() for line in axes.get_lines()}) == 2
    first, second = texts(axes)[0].removeprefix("config ").split(", ")
    assert first != second


def test_a_run_without_validation_has_no_validation_in_the_legend(tmp_path) -> None:
    axes = plot_runs([make_run(tmp_path / "a", RECORDS[:2])])
    assert legend(axes) == ["training"]


def test_a_name_is_drawn_as_it_is_or_in_codes_but_never_as_boxes(tmp_path, recwarn) -> None:
    names = ("诗-é", "cost_$5_$6", "\U000e0041")
    axes = plot_runs([make_run(tmp_path / name, RECORDS) for name in names])
    save_plot(axes, tmp_path / "a.png")  # a character that a font misses is a warning of Matplotlib's
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
    assert legend(axes)[2:] == [drawable(name) for name in names]
    assert legend(axes)[2].endswith("-é")
    assert legend(axes)[3:] == ["cost_$5_$6", "U+E0041"]


def test_runs_without_the_metric_are_named_and_refused(tmp_path) -> None:
    run = make_run(tmp_path / "mine", [{"step": 1}])
    for kind, said in (("loss", "no loss yet"), ("grad-norm", "no gradient norm yet"), ("heads", "no plot `heads`")):
        with pytest.raises(QkvError, match=said) as error:
            plot_runs([run], kind)
        assert kind not in CURVES or "mine" in str(error.value)
    with pytest.raises(NotFoundError):
        plot_runs([tmp_path / "gone"])
    with pytest.raises(UsageError, match="which run"):
        plot_runs([])


def test_seeds_of_one_configuration_are_their_mean_in_a_band(tmp_path) -> None:
    runs = [seed(tmp_path / f"s{n}", n, [3.0 + n, 2.0 - n, 1.0][: 2 + n]) for n in (0, 1)]
    axes = plot_runs([*runs, seed(tmp_path / "other", 0, [5.0, 4.0], steps=9)])
    mean, alone = axes.get_lines()
    assert mean.get_xydata().tolist() == [[1, 3.5], [2, 1.5]]  # a step that one seed lacks is no mean of both
    assert alone.get_xydata().tolist() == [[1, 5], [2, 4]]
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} >= {(1, 3), (1, 4), (2, 1), (2, 2)}
    assert legend(axes) == ["training", "line: mean of the seeds; band: lowest to highest", "s0 (2 seeds)", "other"]


def test_a_repeated_seed_is_a_run_of_its_own(tmp_path) -> None:
    axes = plot_runs([seed(tmp_path / "a", 1, [3.0]), seed(tmp_path / "b", 1, [2.0])])
    assert legend(axes) == ["training", "a", "b"]
    assert not axes.collections


@pytest.mark.parametrize("kind", CURVES)
def test_every_curve_has_its_unit_and_logarithmic_axes_on_request(tmp_path, kind: str) -> None:
    run = make_run(tmp_path / "a", [{"step": step, CURVES[kind].key: 1.5 * step} for step in (1, 2)])
    axes = plot_runs([run], kind, log_x=True, log_y=True)
    assert axes.get_lines()[0].get_xydata().tolist() == [[1, 1.5], [2, 3]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_title() == f"{CURVES[kind].title} of a"
    assert axes.get_ylabel() == CURVES[kind].axis
    save_plot(axes, tmp_path / "a.svg")
    assert plot_runs([run], kind).get_xscale() == "linear"


def test_logarithmic_axes_are_labelled_with_plain_numbers(tmp_path) -> None:
    run = make_run(tmp_path / "a", [{"step": step, "loss": 0.002 * step} for step in (1, 30, 100_000)])
    axes = plot_runs([run], log_x=True, log_y=True)
    save_plot(axes, tmp_path / "a.svg")
    ticks = [[label.get_text() for label in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)]
    assert {"1", "10", "100", "1000", "10000", "100000"} <= set(ticks[0])
    assert {"0.01", "0.1", "1", "10", "100"} <= set(ticks[1])
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert ">1000<" in drawn
    assert "mathdefault" not in drawn


def test_less_than_a_decade_has_labels_between(tmp_path) -> None:
    axes = plot_runs([make_run(tmp_path / "a", RECORDS)], log_y=True)
    save_plot(axes, tmp_path / "a.svg")
    labels = [label.get_text() for label in axes.yaxis.get_minorticklabels()]
    assert {"2", "3"} <= set(labels)


def test_curves_leave_pyplot_alone_and_are_drawn_on_given_axes(tmp_path) -> None:
    run, before, mine = make_run(tmp_path / "a", RECORDS), dict(plt.rcParams), Figure().add_subplot()
    assert plot_runs([run], axes=mine) is mine
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == before


def test_no_text_overlaps_another_in_a_loss_plot_of_several_runs(tmp_path) -> None:
    runs = [make_run(tmp_path / f"2026-01-01_120000_some-run_{number}", RECORDS) for number in range(4)]
    axes = plot_runs(runs)
    axes.figure.canvas.draw()
    low, high = axes.get_xlim()
    ticks = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    artists = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *ticks]
    boxes = [artist.get_window_extent() for artist in artists]
    inside = axes.figure.bbox
    assert len(ticks) > 2
    for index, box in enumerate(boxes):
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1
        assert inside.y0 <= box.y0
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
