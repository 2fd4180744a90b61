"""The page of a monitored run: one HTML file that needs no network."""

from lightning_fp8.monitor.report.page import page

__all__ = ["page"]
