"""``lightning-fp8 doctor``: what of this machine takes part in FP8 training, what does not work, and the way out.

``checks`` are pure functions from facts to findings. Facts come from ``machine``, which imports none of the packages
that it looks at: what the driver and the compilers' libraries say is asked in processes of their own (``driver``,
``compilers``), and so a cast and a product are started (``probes``), with a time limit: a hang is an answer.
"""
