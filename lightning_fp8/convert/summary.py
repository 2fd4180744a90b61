"""ConversionSummary: the decision for each layer and its reason, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import wrap

from lightning_fp8.convert.table import WIDTH, Row, grouped, rendered

LINEAR = "linear"
ATTENTION = "dot product attention"
NORM = "norm"
MLP = "mlp"


@dataclass(frozen=True)
class LayerDecision:
    """The precision of one layer, or of one matrix that no linear layer holds, and why: planned, or what ran.

    Attributes:
        name: the module's name in its model, with the GEMM's if the module has several, ``mlp.fc1``; of a matrix that
            is no layer's ``weight``, the parameter's.
        shape: ``(out_features, in_features)`` of a linear layer, else the parameter's.
        fp8: whether FP8 is planned; False is high precision.
        reason: why it does not run in FP8; empty where it does.
        kind: ``"linear"``, ``"experts"``, ``"convolution"``, ``"attention"`` (a matrix of its own), ``"recurrent"``,
            ``"parameter"``, or ``"dot product attention"``, which has no matrix.
        parameters: elements of its weight.
        ran: whether it multiplied in FP8 in the first training step; None where it is not known, as in compiled code.
        high_precision: what it runs in where it does not run in FP8, ``"BF16"``, ``"FP16"`` or ``"FP32"``.
    """

    name: str
    shape: tuple[int, ...]
    fp8: bool
    reason: str
    kind: str = LINEAR
    parameters: int = 0
    ran: bool | None = None
    high_precision: str = "BF16"

    @property
    def precision(self) -> str:
        return "FP8" if self.fp8 and self.ran is not False else self.high_precision


@dataclass(frozen=True)
class ConversionSummary:
    """The decisions for the matrices of a model, in registration order. ``str()`` is :meth:`table`.

    Its heading is "planned" as long as it is not known of any layer whether it ran in FP8, and then "ran in".

    Where attention shall run in FP8, the modules that compute it are among them.

    Attributes:
        flops: floating-point operations of all products of the first training step, forward and backward, as torch's
            ``FlopCounterMode`` counts them; None while unknown, and of compiled models.
        flops_in_fp8: those of them that ran in FP8.
        norms: with ``fuse=True``, for each norm whether it casts for the layers that read it; of ``kind`` "norm".
        mlps: likewise for each MLP whether it casts its activation for its last layer; of ``kind`` "mlp".
        fallbacks: after the first training step, what this process ran instead of kernels, a sentence each with the
            reason: of casts and products. Attention without its kernels is in its layer's row.
    """

    layers: tuple[LayerDecision, ...]
    norms: tuple[LayerDecision, ...] = ()
    mlps: tuple[LayerDecision, ...] = ()
    flops: int | None = None
    flops_in_fp8: int | None = None
    fallbacks: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[LayerDecision, ...]:
        """All decisions, in the order of the table."""
        return (*self.layers, *self.norms, *self.mlps)

    @property
    def num_fp8(self) -> int:
        """The number of layers that run in FP8; after the first training step, without those that did not."""
        return sum(layer.precision == "FP8" for layer in self.layers if layer.kind != ATTENTION)

    @property
    def num_fp8_attention(self) -> int:
        """Likewise of modules that compute attention, which are listed where attention shall run in FP8."""
        return sum(layer.precision == "FP8" for layer in self.layers if layer.kind == ATTENTION)

    @property
    def share_of_parameters(self) -> float | None:
        """The share of all matrices' elements that are in matrices that run in FP8; None without matrices."""
        total = sum(layer.parameters for layer in self.layers)
        in_fp8 = sum(layer.parameters for layer in self.layers if layer.precision == "FP8")
        return in_fp8 / total if total else None

    @property
    def share_of_flops(self) -> float | None:
        """The share of the first training step's FLOPs that ran in FP8; None while unknown."""
        return (self.flops_in_fp8 or 0) / self.flops if self.flops else None

    def with_high_precision(self, name: str) -> ConversionSummary:
        """The same decisions for a model that computes in ``name``, such as ``"FP32"``, what it does not in FP8."""
        layers, norms, mlps = (
            tuple(replace(layer, high_precision=name) for layer in decisions)
            for decisions in (self.layers, self.norms, self.mlps)
        )
        return replace(self, layers=layers, norms=norms, mlps=mlps)

    def is_of(self, plan: ConversionSummary) -> bool:
        """Whether these are the decisions of ``plan``, whatever is known of what ran."""
        decisions, planned = (
            [(layer.name, layer.shape, layer.fp8) for layer in summary.rows] for summary in (self, plan)
        )
        return decisions == planned

    @property
    def idle(self) -> tuple[LayerDecision, ...]:
        """Layers that should run in FP8 and multiplied, or of norms and MLPs cast, nothing in FP8 in the first training
        step."""
        return tuple(layer for layer in self.rows if layer.fp8 and layer.ran is False)

    def table(self, verbose: bool = False) -> str:
        """The decisions in lines of at most 80 columns, equal ones of equal layers in one line; the counts last.

        Args:
            verbose: a line for each decision, as long as it is.
        """
        rows = [Row(row.name, " × ".join(map(str, row.shape)), row.precision, row.reason) for row in self.rows]
        heading = "ran in" if self._ran else "planned"
        if verbose:
            return "\n".join([*rendered(rows, heading, None), self.verdict(), *self.fallbacks])
        fallbacks = [line for text in self.fallbacks for line in wrap(text, WIDTH)]
        return "\n".join([*rendered(grouped(rows), heading), *self._verdict(WIDTH), *fallbacks])

    def __str__(self) -> str:
        return self.table()

    @property
    def _ran(self) -> bool:
        """Whether it is known of any layer what it ran in."""
        return any(layer.ran is not None for layer in self.rows) or self.flops is not None

    def verdict(self) -> str:
        """The counts in one line."""
        return " ".join(self._verdict())

    def _verdict(self, width: int | None = None) -> list[str]:
        """The counts in one line, or in two where one is too long."""
        linears = sum(layer.kind == LINEAR for layer in self.layers)
        counts = f"{self.num_fp8} of {linears} linear layers {'ran' if self._ran else 'planned'} in FP8"
        if attentions := sum(layer.kind == ATTENTION for layer in self.layers):
            counts += f" and {self.num_fp8_attention} of {attentions} attentions"
        shares = [
            f"{100 * value:.3g} % of {what}"
            for value, what in (
                (self.share_of_parameters, "the parameters of all matrices"),
                (self.share_of_flops, "the step's FLOPs"),
            )
            if value is not None
        ]
        if not shares:
            return [counts]
        lines = [f"{counts}:", ", ".join(shares)]
        return lines if width is not None and sum(map(len, lines)) >= width else [" ".join(lines)]
