"""``lightning-fp8 doctor``: what works on a machine.

| file | |
|---|---|
| ``report.py`` | the command and its findings; imports neither torch nor a compiler |
| ``processes.py`` | subprocesses with a time limit |
| ``run.py`` | the program of a subprocess; imports what its probe needs |
| ``probes.py`` | tests of what training starts |
"""
