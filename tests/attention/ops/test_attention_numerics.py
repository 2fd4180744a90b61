"""The command that measures FP8 attention's errors. The errors themselves: ``test_attention_reference.py``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import attention_numerics
from benchmarks.attention_numerics import NAMES, SCHEMES, exact, main
from benchmarks.contenders import attention_data


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_its_truth_is_torchs_attention_in_float64(mask: str) -> None:
    x = attention_data.gauss(2, 100, 32)
    q, k, v = (y.double().requires_grad_() for y in x[:3])
    o = F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
    for ours, right in zip(exact(*x, mask), (o, *torch.autograd.grad(o, (q, k, v), x.do.double()))):
        torch.testing.assert_close(ours, right)


def test_it_writes_errors_and_says_whether_they_are_small_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(attention_data.DRAWN, "gauss", partial(attention_data.gauss, 2, 256, 64))
    path = tmp_path / "out.json"
    assert main(["--data", "gauss", "--masks", "full,causal", "--json", str(path)]) == 0
    full, result = json.loads(path.read_text())["results"]
    assert (full["mask"], result["mask"]) == ("full", "causal")
    assert full["percent"]["FP8"] == full["percent"]["FP8, keys without the mean of all"]
    assert result["shape"] == [1, 1, 2, 256, 64]
    assert result["met"] is True
    assert set(result["percent"]) == set(SCHEMES)
    for name in NAMES:
        least, ours = result["percent"]["inputs alone"][name], result["percent"]["FP8"][name]
        assert result["percent"]["BF16"][name] < least < ours
        assert result["ratio"][name] == pytest.approx(ours / least, rel=0.01)
    assert "| gauss |" in capsys.readouterr().out

    original = attention_numerics.fp8
    monkeypatch.setitem(SCHEMES, "FP8", lambda *x: tuple(1.2 * y for y in original(*x)))
    assert main(["--data", "gauss", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["results"][0]["met"] is False


def test_known_limits_show_and_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_data.LIMITS, "late keys", partial(attention_data.late_keys, 1, 256, 32))
    monkeypatch.setitem(attention_data.LIMITS, "value offset", partial(attention_data.value_offset, 1, 128, 32))
    path = tmp_path / "out.json"
    assert main(["--data", "late keys,value offset", "--json", str(path)]) == 0
    late, offset = (result["percent"] for result in json.loads(path.read_text())["results"])
    assert max(late["FP8"].values()) < 15, "rows that see the late keys are not counted"
    assert all(late["FP8, keys without the mean of all"][name] > 3 * late["FP8"][name] for name in NAMES)
    assert offset["FP8"]["O"] < 1 < 20 < min(offset["FP8"]["dQ"], offset["FP8"]["dK"])


def test_it_keeps_and_reads_what_it_trained(tmp_path: Path) -> None:
    path = tmp_path / "layers.pt"
    small = {4: [attention_data.gauss(1, 64, 32)], 8: [attention_data.gauss(1, 64, 32, seed=1)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_data, "trained", lambda steps, say: small)
        assert main(["--data", "gpt end", "--trained", str(path)]) == 0
        patch.setattr(attention_data, "trained", None)
        assert main(["--data", "gpt end", "--trained", str(path)]) == 0


def test_trained_layers_are_what_attention_got() -> None:
    found = attention_data.trained(2, width=32, heads=2, depth=2, length=32)
    assert list(found) == [1, 2]
    for layers in found.values():
        assert [x.q.shape for x in layers] == [(1, 2, 32, 16)] * 2
        assert all(y.dtype == torch.bfloat16 and y.any() for x in layers for y in x)


def test_unknown_data_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--data", "gauss,noise"])
    assert (
        "'noise' is not one of gauss, outlier, channel, sink, late keys, value offset, gpt middle, gpt end"
        in capsys.readouterr().err
    )
