"""Pictures are real PNG files with something on them."""

import numpy as np
import pytest
from matplotlib import image

from jax_turbobus.demo import plots
from jax_turbobus.demo.timeline import Span
from jax_turbobus.demo.train import Point


def coloured_pixels(path, width=1.0):
    """Counts them in the left `width` of the picture; the legend is at the right."""
    pixels = image.imread(path)[..., :3]
    pixels = pixels[:, : int(width * pixels.shape[1])]
    return int((np.ptp(pixels, axis=-1) > 0.2).sum())


def test_loss_curve(tmp_path):
    train = [Point(step, 5.5 / step**0.2) for step in range(1, 101)]
    plots.draw_loss(tmp_path / "loss.png", train, train[::10], "title")
    assert coloured_pixels(tmp_path / "loss.png") > 1000


def test_loss_curve_of_a_single_step(tmp_path):
    plots.draw_loss(tmp_path / "loss.png", [Point(1, 5.5)], [Point(0, 5.5)], "title")
    assert coloured_pixels(tmp_path / "loss.png") > 10


@pytest.mark.parametrize("num_blocks", [1, 40])
def test_timeline(tmp_path, num_blocks):
    links = ["pcie0 numa0>gpu0", "nvlink gpu1>gpu0"]
    found = [
        Span(links[i % 2], i % 3, i % 2 == 1, 10 * i, 8) for i in range(num_blocks)
    ]
    panels = {"direct": found[:1], "pooled": found}
    plots.draw_timeline(
        tmp_path / "links.png", panels, [*links, "unused"], one_scale=True
    )
    assert coloured_pixels(tmp_path / "links.png") > 1000


def test_timeline_shows_blocks_too_short_for_a_pixel(tmp_path):
    found = [Span("pcie0 numa0>gpu0", 0, False, start, 1e-4) for start in (0, 2e3, 5e3)]
    plots.draw_timeline(tmp_path / "links.png", {"panel": found}, [found[0].link])
    assert coloured_pixels(tmp_path / "links.png", width=0.8) > 10
