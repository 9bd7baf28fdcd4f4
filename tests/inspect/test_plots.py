"""Plots: what is drawn is what was measured."""

from __future__ import annotations

import logging

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from qkv import Config, Transformer
from qkv.config.errors import QkvError, UsageError
from qkv.inspect import plots
from qkv.inspect.attention_plots import (
    CAUTION,
    MOST_CELLS,
    MOST_LABELS,
    MOST_PANELS,
    THUMBNAIL,
    plot_alignment,
    plot_attention_grid,
    plot_attention_head,
    plot_image_alignment,
    plot_sound_alignment,
)
from qkv.inspect.plots import (
    mask_examples,
    plot_masks,
    plot_positions,
    position_table,
    save_plot,
)


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_sinusoidal_positions_are_those_of_the_paper() -> None:
    stack = next(iter(Config.load("attention-is-all-you-need").model.stacks.values()))
    table, kind = position_table(stack, length=50)
    place, dimension = np.meshgrid(np.arange(50), np.arange(512), indexing="ij")
    angle = place / 10000 ** (dimension // 2 * 2 / 512)
    wanted = np.where(dimension % 2 == 0, np.sin(angle), np.cos(angle))
    assert kind == "sinusoidal"
    np.testing.assert_allclose(table.numpy(), wanted, atol=1e-5)
    assert position_table(stack)[0].shape == (stack.max_seq_len, 512)


def test_the_position_plot_is_a_red_blue_map_symmetric_about_zero(tmp_path) -> None:
    axes = plot_positions(torch.tensor([[-0.5, 0.2], [0.1, 0.3]]), "learned", footer="config 12345678")
    (image,) = axes.get_images()
    assert image.get_cmap().name == "RdBu"
    assert image.get_clim() == (-0.5, 0.5)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("dimension", "position")
    assert texts(axes) == ["config 12345678"]
    assert plot_positions(torch.zeros(2, 4), "sinusoidal").get_images()[0].get_clim() == (-1, 1)


def test_learned_positions_are_the_network_s_own() -> None:
    network = Transformer(Config.load("encoder-tiny").model).to(torch.bfloat16)
    table, kind = position_table(network, length=7)
    assert kind == "learned"
    assert torch.equal(table, network.encoder_embedding.position.weight[:7].float())


def test_positions_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(UsageError, match="rope"):
        position_table(Config.load("llama-tiny").model)
    with pytest.raises(UsageError, match="in a model's weights"):
        position_table(Config.load("encoder-tiny").model)
    sinusoidal = Config.load("llama-tiny", "model.position.kind=sinusoidal").model
    for length in (0, 257):
        with pytest.raises(UsageError, match="1 to 256"):
            position_table(sinusoidal, length)


def test_the_mask_panels_are_what_each_rule_means() -> None:
    panels = {axes.get_title(): np.asarray(axes.get_images()[0].get_array()) for axes in plot_masks()}
    assert list(panels) == list(mask_examples())
    q, k = np.meshgrid(np.arange(12), np.arange(12), indexing="ij")
    document = np.array([0] * 4 + [1] * 5 + [2] * 3)
    wanted = {
        "causal": k <= q,
        "causal, window of 4": (k <= q) & (q - k < 4),
        "prefix of 5": (k <= q) | ((q < 5) & (k < 5)),
        "causal, 3 documents": (k <= q) & (document[q] == document[k]),
        "both ways, window of 3": abs(q - k) < 3,
        "both ways, 8 tokens and padding": k < 8,
    }
    for title, allowed in wanted.items():
        assert (panels[title] == allowed).all(), title


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_the_suffix_chooses_the_format(tmp_path, name: str, magic: bytes) -> None:
    save_plot(plot_masks()[0], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_another_format_or_a_place_that_cannot_be_written_is_refused(tmp_path) -> None:
    axes = plot_positions(torch.zeros(2, 4), "sinusoidal")
    for name in ("a.jpg", "a", "a.exe"):
        with pytest.raises(UsageError, match="PNG, SVG or PDF"):
            save_plot(axes, tmp_path / name)
    with pytest.raises(QkvError, match="cannot be written"):
        save_plot(axes, tmp_path / "gone" / "a.png")
    assert not list(tmp_path.iterdir())


def test_plots_leave_pyplot_alone_and_draw_on_given_axes() -> None:
    before = dict(plt.rcParams)
    plot_masks()
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == before
    from matplotlib.figure import Figure

    mine = Figure().add_subplot()
    assert plot_positions(torch.zeros(2, 4), "sinusoidal", mine) is mine


# --- attention --------------------------------------------------------------------------------------------------------


def drawn_by(axes) -> np.ndarray:
    return np.asarray(axes.get_images()[0].get_array())


def labels(axes) -> tuple[list[str], list[str]]:
    """Of rows and of columns."""
    rows, columns = ([label.get_text() for label in get()] for get in (axes.get_yticklabels, axes.get_xticklabels))
    return rows, columns


def weights_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).softmax(-1)


def test_a_head_is_drawn_as_it_is_with_its_tokens_on_both_axes() -> None:
    weights_TS = weights_of(3, 4)
    axes = plot_attention_head(
        weights_TS, ["<bos>", " a", "\\xe8"], ["b", "\n", "c" * 30, "$x$"], footer="config 12345678"
    )
    np.testing.assert_array_equal(drawn_by(axes), weights_TS.numpy())
    assert labels(axes) == (["<bos>", "␣a", "\\xe8"], ["b", "\\n", "c" * 18 + "..", "$x$"])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key: the token attended to", "query: the token that attends")
    assert texts(axes) == [f"{CAUTION}; config 12345678"]
    assert axes.get_images()[0].colorbar.ax.get_ylabel() == "attention weight"


def test_an_alignment_says_that_its_rows_are_predicted() -> None:
    axes = plot_alignment(weights_of(2, 2), ["a", "b"], ["c", "d"], title="Layer 3")
    assert axes.get_ylabel() == "target: the token being predicted"
    assert axes.get_xlabel() == "source: the token attended to"
    assert axes.get_title() == "Layer 3"
    assert texts(axes) == [CAUTION]


def test_chinese_without_a_font_for_it_is_drawn_in_codes_and_said_once(tmp_path, caplog, recwarn, monkeypatch) -> None:
    monkeypatch.setattr(plots, "_fonts", lambda: ("DejaVu Sans",))
    plots._say_no_chinese.cache_clear()
    with caplog.at_level(logging.WARNING, logger="qkv"):
        for _ in range(2):
            axes = plot_alignment(weights_of(1, 2), ["shī"], ["诗", "歌"])
            save_plot(axes, tmp_path / "a.png")
    assert labels(axes) == (["shī"], ["U+8BD7", "U+6B4C"])
    (record,) = caplog.records
    assert "Noto Sans CJK SC" in record.getMessage()
    assert not recwarn.list


def test_long_axes_are_numbered_and_longer_ones_drawn_in_blocks_that_say_so() -> None:
    tokens = ["a"] * (MOST_LABELS + 1)
    axes = plot_attention_head(weights_of(3, len(tokens)), ["b"] * 3, tokens)
    assert labels(axes)[0] == ["b"] * 3
    assert set(labels(axes)[1]).isdisjoint({"a"})
    assert axes.get_xlabel() == "key: the token attended to, by number"
    assert drawn_by(axes).shape == (3, len(tokens))

    count = 2 * MOST_CELLS + 1
    weights_TS = weights_of(count, count)
    axes = plot_attention_head(weights_TS, ["a"] * count, ["a"] * count)
    shown = drawn_by(axes)
    assert shown.shape == (342, 342)  # 1025 tokens by 3
    np.testing.assert_allclose(shown[0, 1], weights_TS[:3, 3:6].sum(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(shown[-1, -1], weights_TS[-2:, -2:].sum(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(shown.sum(1), 1, rtol=1e-5)
    assert axes.get_xlabel().endswith("(sums of 3 keys)")
    assert axes.get_ylabel().endswith("(means of 3 queries)")
    assert max(axes.get_xticks()) > 900  # tokens are counted, not blocks


def test_the_grid_has_a_line_per_layer_and_a_tile_per_head() -> None:
    layers = [weights_of(2, 3, 4), weights_of(3, 3, 4).flip(-1)]
    axes = plot_attention_grid(iter(layers), layers=[5, 7], title="Some")
    shown = axes.get_images()[0].get_array()
    assert shown.shape == (2 * 3, 3 * 4)
    np.testing.assert_array_equal(shown[:3, 4:8], layers[0][1])
    np.testing.assert_array_equal(shown[3:, 8:], layers[1][2])
    assert shown.mask[:3, 8:].all()  # the first layer has no third head
    assert labels(axes) == (["5", "7"], ["0", "1", "2"])
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("head", "layer", "Some")
    assert texts(axes) == [CAUTION]
    axes = plot_attention_grid([weights_of(2, 3, THUMBNAIL + 1)])
    assert axes.get_xlabel() == "head (sums of 2 keys)"
    assert drawn_by(axes).shape == (3, 2 * 33)


def test_weights_that_do_not_fit_their_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[2, 3\] do not fit 2 rows and 2 columns"):
        plot_alignment(weights_of(2, 3), ["a", "b"], ["c", "d"])
    with pytest.raises(UsageError, match="no layers"):
        plot_attention_grid([])


# --- attention to images and sound ------------------------------------------------------------------------------------


def test_each_token_s_attention_is_drawn_upon_the_image_and_the_rest_is_told() -> None:
    weights_TS = weights_of(2, 1 + 6)  # a class token and 2 x 3 patches
    image_CHW = torch.linspace(-1, 1, 1 * 4 * 6).view(1, 4, 6)
    whole, *panels = plot_image_alignment(weights_TS, [" two", "<eos>"], image_CHW, (2, 3), footer="config 12345678")
    np.testing.assert_allclose(drawn_by(whole), (image_CHW[0] + 1) / 2, atol=1e-6)
    for panel, token, weights_S in zip(panels, ["␣two", "<eos>"], weights_TS, strict=True):
        drawn = panel.get_images()[1]
        np.testing.assert_array_equal(drawn.get_array(), weights_S[1:].view(2, 3))
        assert drawn.get_extent() == [0, 6, 4, 0]  # the pixels'
        assert drawn.get_clim() == (0, pytest.approx(float(weights_TS[:, 1:].max())))
        assert panel.get_title() == f"{token} ({float(weights_S[0]):.0%} elsewhere)"
    assert whole.figure.get_supxlabel() == f"{CAUTION}; config 12345678"


def test_colour_images_are_drawn_in_colour_and_of_a_long_text_the_first_tokens() -> None:
    count = MOST_PANELS + 2
    panels = plot_image_alignment(weights_of(count, 4), ["a"] * count, torch.rand(3, 2, 2), (2, 2))
    assert drawn_by(panels[0]).shape == (2, 2, 3)
    assert len(panels) == 1 + MOST_PANELS
    assert panels[1].get_title() == "a"  # nothing goes elsewhere
    assert panels[0].figure.get_supxlabel() == f"{CAUTION}; the first {MOST_PANELS} of {count} tokens"


def test_attention_to_sound_stands_below_its_features_over_the_same_seconds() -> None:
    weights_TS, features_FS = weights_of(2, 50), torch.rand(100, 8)
    sound, below = plot_sound_alignment(weights_TS, ["o", "n"], features_FS, title="Some")
    np.testing.assert_array_equal(drawn_by(sound), features_FS.T)
    np.testing.assert_array_equal(drawn_by(below), weights_TS)
    assert below.get_images()[0].get_extent() == pytest.approx((-0.01, 0.99, 1.5, -0.5))  # vector n at n x 20 ms
    assert sound.get_images()[0].get_extent() == pytest.approx((-0.005, 0.995, -0.5, 7.5))
    assert sound.get_xlim() == below.get_xlim()
    assert labels(below)[0] == ["o", "n"]
    assert (sound.get_title(), below.get_xlabel()) == ("Some", "seconds")
    assert texts(below) == [CAUTION]


def test_weights_that_do_not_fit_the_image_or_sound_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fit 1 rows and 6 patches"):
        plot_image_alignment(weights_of(1, 5), ["a"], torch.rand(1, 4, 6), (2, 3))
    with pytest.raises(UsageError, match="do not fit 1 rows and 8 frames"):
        plot_sound_alignment(weights_of(1, 5), ["a"], torch.rand(8, 4))
