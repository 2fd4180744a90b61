"""What docs/onnx.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from packaging.version import Version

PAGE = Path(__file__).parents[2] / "docs/onnx.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if Version(onnxruntime.__version__) < Version("1.29"):  # the option that the page names
        create = onnxruntime.InferenceSession
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, **args: create(path, options, **args))
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)
    assert float(capsys.readouterr().out.splitlines()[-1]) < 1e-2
    model = onnx.load("model.onnx")
    codes = [each for each in model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT8E4M3FN and each.dims]
    assert sorted(tuple(each.dims) for each in codes) == [(64, 256), (256, 64)]
