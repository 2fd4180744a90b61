"""``python -m lightning_fp8`` is ``lightning-fp8``."""

from lightning_fp8.cli.main import main

if __name__ == "__main__":
    main()
