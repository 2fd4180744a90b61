"""The page in a headless browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lightning_fp8.monitor.record import INDEX
from lightning_fp8.monitor.report import page
from tests.monitor.browser import Browser, browser, executable
from tests.monitor.recorded import baseline, record

pytestmark = pytest.mark.skipif(executable() is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def shown() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "page.html").write_text(page(record(layers=20, intervals=40), baseline(40)))
    return tmp_path / "page.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_fits_and_complains_of_nothing(shown: Browser, path: Path, width: int, dark: bool) -> None:
    shown.requests.clear()
    shown.open(path, width, dark)
    assert shown.problems == []
    assert shown.requests == [path.resolve().as_uri()]
    assert shown.value("innerWidth") == width
    assert shown.value("document.documentElement.scrollWidth") <= width
    pictures = "[...document.querySelectorAll('svg, canvas')]"
    assert shown.value(f"{pictures}.length") == 12
    assert shown.value(f"{pictures}.every((each) => each.getAttribute('role') === 'img')")
    assert shown.value(f"{pictures}.every((each) => each.getAttribute('aria-label').length > 20)")
    assert shown.value(f"{pictures}.every((each) => each.getBoundingClientRect().right <= innerWidth)")
    background = shown.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


def test_figures_that_are_not_finite_do_not_stop_it(shown: Browser, tmp_path: Path) -> None:
    run = record(layers=20, intervals=40)
    for name, value in (("head_room", -np.inf), ("amax", np.inf), ("noise", np.nan)):
        run.intervals[5].values[:, INDEX[name]] = value
    run.intervals[7].loss = np.nan
    (tmp_path / "page.html").write_text(page(run, baseline(40)))
    shown.open(tmp_path / "page.html", 1440)
    assert shown.problems == []
    assert shown.value("document.querySelectorAll('svg, canvas').length") == 12


def test_cells_are_read_by_keyboard(shown: Browser, path: Path) -> None:
    shown.open(path, 1440)
    shown.value("document.querySelector('canvas').focus()")
    shown.press("ArrowRight")  # the first cell, then two to the right: the interval that clips
    shown.press("ArrowRight")
    shown.press("ArrowRight")
    said = shown.value("document.getElementById('cell').textContent")
    assert said == 'Clipped: inputs, blocks.0.<b>"0"</b>, steps 101 to 150: about 5.0 bits'
    shown.press("ArrowDown")
    assert shown.value("document.getElementById('cell').textContent").endswith("steps 101 to 150: nothing")


def test_plots_show_the_losses(shown: Browser, path: Path) -> None:
    shown.open(path, 1440)
    label = shown.value("document.querySelector('#loss-plot svg').getAttribute('aria-label')")
    assert label == "Training loss from step 50 to 2000: FP8, delayed 5 to -14.5; bf16-true 4.9 to -14.6"
    assert shown.value("document.querySelectorAll('#loss-plot polyline').length") == 2
    assert shown.value("document.querySelector('#loss-plot title').textContent") == "step 121, outlier step: 5.0 bits"


def test_heat_maps_have_a_key_and_axes_have_ticks(shown: Browser, path: Path) -> None:
    shown.open(path, 390)
    keys = shown.value("[...document.querySelectorAll('.key')].map((each) => each.innerText.split('\\n').join('|'))")
    bits = "bits or less|{} bits or more|nothing"
    ends = [
        f"0.0 {bits.format('8.0')}",
        "0.001 % of its values|100 % of its values|nothing",
        f"-8.0 {bits.format('8.0')}",
    ]
    assert keys == [end for end in ends for _ in range(3)]
    shades = "getComputedStyle(document.querySelector('.key i')).backgroundImage.match(/rgb/g).length"
    assert shown.value(shades) == 9
    texts = "[...document.querySelector('#loss-plot svg').querySelectorAll('text')].map((each) => each.textContent)"
    assert shown.value(texts)[5:] == ["step 50", "538", "1025", "1513", "step 2000"]
    texts = "[...document.querySelectorAll('#lines svg')[1].querySelectorAll('text')].map((each) => each.textContent)"
    assert shown.value(texts)[-6:] == ["2^-24", "2^-16", "2^-8", "2^0", "2^-27", "2^3"]


def test_a_cast_is_chosen(shown: Browser, path: Path) -> None:
    shown.open(path, 390)
    choose = (
        "const choice = document.querySelector('select'); choice.value = 4; choice.dispatchEvent(new Event('change'))"
    )
    shown.value(choose)
    label = shown.value("document.querySelector('#lines svg').getAttribute('aria-label')")
    assert 'blocks.1.<b>"1"</b>.weight' in label
    label = shown.value("document.querySelectorAll('#lines svg')[1].getAttribute('aria-label')")
    assert label == (
        'Exponents of blocks.1.<b>"1"</b>.weight: magnitudes from 2^-7 to 2^3; up to 2^-18.8 they become 0, '
        "beyond 2^0.1 they clip"
    )
    assert shown.problems == []


def test_it_prints(shown: Browser, path: Path) -> None:
    shown.open(path, 800, print_=True)
    assert shown.value("getComputedStyle(document.querySelector('.scroll')).maxHeight") == "none"
    assert shown.problems == []
