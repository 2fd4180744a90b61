"""``lightning-fp8 doctor``: what works on a machine.

| file | |
|---|---|
| ``report.py`` | the command and its findings; imports neither torch nor a compiler |
| ``processes.py`` | subprocesses with a time limit |
| ``probes.py`` | the tests that run in subprocesses, and import torch |
"""
