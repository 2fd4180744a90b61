"""ConversionSummary: the decision for each layer and its reason, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import wrap

from lightning_fp8.convert.table import WIDTH, Row, grouped, rendered

LINEAR = "linear"
EXPERTS = "experts"
GONE = "gone"
ATTENTION = "dot product attention"
NORM = "norm"
MLP = "mlp"
_COUNTED = {LINEAR: "linear layers", EXPERTS: "weights of experts", ATTENTION: "attentions"}


@dataclass(frozen=True)
class LayerDecision:
    """The precision of one layer, or of one matrix outside linear layers, with the reason.

    Attributes:
        name: the module's name in the model. If the module has several GEMMs, the GEMM's name is appended
            (``mlp.fc1``). For a matrix outside linear layers, the parameter's name.
        shape: ``(out_features, in_features)`` of a linear layer, ``(experts, out_features, in_features)`` of experts,
            or the parameter's shape.
        fp8: whether FP8 is planned; False is high precision.
        reason: the reason why it does not run in FP8, or a note on a layer that does, for example that some forwards
            ran in high precision; empty if there is neither.
        kind: ``"linear"``, ``"experts"``, ``"convolution"``, ``"attention"`` (a matrix of an attention module),
            ``"recurrent"``, ``"parameter"``; without a matrix ``"dot product attention"``, ``"norm"``, ``"mlp"``, and
            ``"gone"`` for a planned layer that is no longer in the model.
        parameters: the number of elements of its weight.
        ran: whether it multiplied in FP8 in the first training step; None if this is unknown, as in compiled code.
        high_precision: the dtype that it runs in without FP8: ``"BF16"``, ``"FP16"`` or ``"FP32"``.
            In plain loops, ``"BF16"`` stands for any high precision.
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
        """``"FP8"`` or ``high_precision``; ``"-"`` for a layer that is gone."""
        if self.fp8 and self.ran is not False and self.kind != NORM:
            return "FP8"
        return "-" if self.kind == GONE else self.high_precision


@dataclass(frozen=True)
class ConversionSummary:
    """The decisions for the matrices of a model, in registration order. ``str()`` is :meth:`table`.

    The table's heading is "planned" before the first training step, and "ran in" after it.

    With FP8 attention, the decisions include the modules that compute attention.

    Attributes:
        flops: the floating-point operations of all GEMMs in the first training step, forward and backward, as
            counted by torch's ``FlopCounterMode``; None before that step, and for compiled models.
        flops_in_fp8: the part of ``flops`` that ran in FP8.
        norms: decisions of ``kind`` "norm": with ``fuse=True``, for each RMSNorm, whether it takes one kernel each way.
            ``fp8`` says so; they compute in high precision.
        mlps: decisions of ``kind`` "mlp": with ``fuse=True``, for each gated MLP, whether it is one autograd function.
        fallbacks: after the first training step, a message with the reason for each cast or GEMM of this process
            that ran without its kernel. Attention without its kernel is noted in its layer's row.
        elsewhere: a message that names what Liger-Kernel computes in the model.
    """

    layers: tuple[LayerDecision, ...]
    norms: tuple[LayerDecision, ...] = ()
    mlps: tuple[LayerDecision, ...] = ()
    flops: int | None = None
    flops_in_fp8: int | None = None
    fallbacks: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[LayerDecision, ...]:
        """All decisions, in the order of the table."""
        return (*self.layers, *self.norms, *self.mlps)

    @property
    def num_fp8(self) -> int:
        """The number of layers, and of weights of experts, that run in FP8; after the first training step, that did."""
        return sum(layer.precision == "FP8" for layer in self.layers if layer.kind not in (ATTENTION, GONE))

    @property
    def share_of_parameters(self) -> float | None:
        """The share of the elements of all matrices that is in matrices that run in FP8; None without matrices."""
        total = sum(layer.parameters for layer in self.layers)
        in_fp8 = sum(layer.parameters for layer in self.layers if layer.precision == "FP8")
        return in_fp8 / total if total else None

    @property
    def share_of_flops(self) -> float | None:
        """The share of the first training step's FLOPs that ran in FP8; None while unknown."""
        return (self.flops_in_fp8 or 0) / self.flops if self.flops else None

    def with_high_precision(self, name: str) -> ConversionSummary:
        """The same decisions for a model whose high precision is ``name``, for example ``"FP32"``."""
        layers, norms, mlps = (
            tuple(replace(layer, high_precision=name) for layer in decisions)
            for decisions in (self.layers, self.norms, self.mlps)
        )
        return replace(self, layers=layers, norms=norms, mlps=mlps)

    def is_of(self, plan: ConversionSummary) -> bool:
        """Whether these are the decisions of ``plan``, without comparing what ran."""
        decisions, planned = (
            [(layer.name, layer.shape, layer.fp8) for layer in summary.rows] for summary in (self, plan)
        )
        return decisions == planned

    @property
    def idle(self) -> tuple[LayerDecision, ...]:
        """The planned FP8 layers that did not multiply in FP8 in the first training step, and the fused norms and MLPs
        that ran as the model's own."""
        return tuple(layer for layer in self.rows if layer.fp8 and layer.ran is False)

    def table(self, verbose: bool = False) -> str:
        """The decisions in lines of at most 80 columns, with equal layers grouped, followed by the counts.

        Args:
            verbose: print one line for each decision, of any length.
        """
        total = sum(layer.parameters for layer in self.layers)
        shares = [row.parameters / total if row.kind == EXPERTS else 0 for row in self.rows]
        rows = [
            Row(row.name, " × ".join(map(str, row.shape)), row.precision, row.reason, 1, share)
            for row, share in zip(self.rows, shares)
        ]
        heading = "ran in" if self._ran else "planned"
        if verbose:
            return "\n".join([*rendered(rows, heading, None), self.verdict(), *self.elsewhere, *self.fallbacks])
        messages = [line for text in (*self.elsewhere, *self.fallbacks) for line in wrap(text, WIDTH)]
        of_layers = len(self.layers)
        together = [*grouped(rows[:of_layers]), *grouped(rows[of_layers:])]
        return "\n".join([*rendered(together, heading), *self._verdict(WIDTH), *messages])

    def __str__(self) -> str:
        return self.table()

    @property
    def _ran(self) -> bool:
        """Whether it is known for any layer whether it ran in FP8."""
        return any(layer.ran is not None for layer in self.rows) or self.flops is not None

    def verdict(self) -> str:
        """The counts in one line."""
        return " ".join(self._verdict())

    def _verdict(self, width: int | None = None) -> list[str]:
        """The counts in one line, or in two if one is too long."""
        of_kinds = {kind: [row.precision for row in self.layers if row.kind == kind] for kind in _COUNTED}
        counts = " and ".join(
            f"{precisions.count('FP8')} of {len(precisions)} {_COUNTED[kind]}"
            for kind, precisions in of_kinds.items()
            if precisions or kind == LINEAR
        )
        counts += f" {'ran' if self._ran else 'planned'} in FP8"
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
