"""``lightning-fp8 report``: writes an HTML page on a run with ``FP8Monitor``.

lightning-fp8 report lightning_logs/version_3
lightning-fp8 report fp8.npz bf16.npz -o page.html
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_fp8.files import replacing
from lightning_fp8.monitor.record import Record
from lightning_fp8.monitor.report import page

PATTERN = "fp8_monitor*.npz"


def record_in(path: Path) -> Path:
    """``path``, or the record inside if it is a folder. It exits if there is none, or if there are several."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise SystemExit(f"{path} does not exist; pass the file of FP8Monitor, or the folder of a run's logs")
    found = sorted(path.glob(PATTERN))
    if not found:
        raise SystemExit(f"{path} has no {PATTERN}; train with callbacks=[FP8Monitor()], or pass the file itself")
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise SystemExit(f"{path} has several records: {names}; pass one of these files")
    return found[0]


def _read(path: Path) -> Record:
    try:
        record = Record.load(path)
        record.environment = {"record": str(path.absolute()), **record.environment}
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    try:
        record.require_rows()
    except ValueError as error:
        raise SystemExit(f"{path} has no page: {error}") from None
    return record


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page. It exits with a message if a path is not a record, or if the page cannot be written."""
    parser = argparse.ArgumentParser(prog="lightning-fp8 report", description="Write a page on a run with FP8Monitor.")
    parser.add_argument("run", type=Path, help="the record of a run, or the folder of its logs")
    parser.add_argument(
        "other", type=Path, nargs="?", help="another run, for example in BF16, whose loss is plotted for comparison"
    )
    parser.add_argument(
        "-o", "--out", type=Path, help="file of the page; default: fp8_monitor.html in the folder of the record"
    )
    args = parser.parse_args(argv)
    paths = [record_in(each) for each in (args.run, args.other) if each is not None]
    out = args.out or paths[0].with_suffix(".html")
    if any(out.exists() and out.samefile(each) for each in paths):
        raise SystemExit(f"{out} is a record, which the page would replace; pass another file with -o")
    text = page(*map(_read, paths))
    try:
        with replacing(out) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"cannot write {out}: {error}; pass another file with -o") from None
    print(f"{out}: {len(text) // 1024} kB")
