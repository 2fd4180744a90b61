"""LoadReport says what became of each FP8 state of a foreign checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["loaded", "remapped", "defaulted", "ignored"]


@dataclass(frozen=True)
class Entry:
    """One module of the file or of the model.

    Attributes:
        key: the file's key, or the model's module that the file has nothing for.
        outcome: ``loaded`` under its own name; ``remapped`` to another; ``defaulted`` to scale 1 and amax 0, as
            Transformer Engine starts; ``ignored``.
        reason: where it went, or why not.
        writer: the versions of Transformer Engine that write this form.
    """

    key: str
    outcome: Outcome
    reason: str
    writer: str = ""


@dataclass(frozen=True)
class LoadReport:
    """The entries of one load. ``str()`` is a sentence and the entries that did not simply load.

    Attributes:
        missing_keys: parameters and buffers of the model that are not in the file and stayed as they were.
        unexpected_keys: names of the file that the model does not have, after renaming. Both are torch's words, and
            empty unless the load was not strict.
    """

    entries: tuple[Entry, ...]
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()

    def with_outcome(self, outcome: Outcome) -> tuple[Entry, ...]:
        """The entries that became this; for scripts that stop where something was ignored."""
        return tuple(entry for entry in self.entries if entry.outcome == outcome)

    @property
    def writers(self) -> tuple[str, ...]:
        """The versions that wrote the file's states, each once."""
        return tuple(dict.fromkeys(entry.writer for entry in self.entries if entry.writer))

    def __str__(self) -> str:
        counts = Counter(entry.outcome for entry in self.entries)
        numbers = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome.__args__)  # type: ignore[attr-defined]
        written_by = f" written by {'; '.join(self.writers)}" if self.writers else ""
        lines = [f"Transformer Engine state{written_by}: {numbers}"]
        lines += [
            f"  {entry.key}: {entry.outcome}, {entry.reason}" for entry in self.entries if entry.outcome != "loaded"
        ]
        for keys, what in (
            (self.missing_keys, "not in the file, and as they were"),
            (self.unexpected_keys, "not in the model"),
        ):
            if keys:
                more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
                lines.append(f"  {what}: {', '.join(keys[:5])}{more}")
        return "\n".join(lines)
