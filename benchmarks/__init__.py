"""Numbers of lightning_fp8: ``python -m benchmarks`` makes them, ``docs/benchmarks.md`` says how and what they mean."""
