"""What became of each module of a model: which operator stands in for it, or why it stays.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_moe.config import format_bytes

# The operators that may stand in for modules of a model, and what each has forms for.
OPERATORS = {
    "linear": "every stored format, with or without a bias",
    "embedding": "rows out of a packed store: tied to the output, or stored quantised",
    "norm": "rms or layer, w or 1 + w",
    "activation": "the activations of experts",
    "router": "softmax, sigmoid or plain scores, biased choice, groups, normalised and scaled weights",
    "layer": "attention and feed-forward blocks, shared experts computed while routed ones are awaited",
    "paged attention": "grouped queries, windows, sinks, soft caps, latents",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One module. `operator` is empty where the module stays in torch, and `reason` says why.
    `excess` is the largest error over the allowed one that the proof saw.
    """

    module: str
    kind: str
    operator: str = ""
    form: str = ""
    reason: str = ""
    excess: float = 0.0


@dataclass(slots=True)
class TakeoverReport:
    """All findings of a model, whether its attention is paged, and whether what stays in torch was
    proven to compute each row by itself.
    """

    class_name: str
    findings: list[Finding] = field(default_factory=list)
    # Empty where operators were looked for, else why all modules stay in torch.
    not_taken: str = ""
    # Empty where attention is paged, else why the model keeps the path of one sequence.
    not_paged: str = ""
    # Empty where rows were proven independent, else the module and dtype that were not.
    not_independent: str = ""
    # The buffer of attention that stays in torch: keys and values are gathered into it from pages.
    gather_bytes: int = 0

    @property
    def taken(self) -> list[Finding]:
        """The modules that an operator stands in for."""
        return [finding for finding in self.findings if finding.operator]

    @property
    def kept(self) -> list[Finding]:
        """The modules that a form was looked for and not found."""
        return [finding for finding in self.findings if not finding.operator]

    def lines(self) -> list[str]:
        """Returns the report as text, modules of one kind and form together."""
        counts = Counter((finding.operator, finding.kind, finding.form) for finding in self.taken)
        said = [
            f"{operator}: {count} x {kind}{f' ({form})' if form else ''}" for (operator, kind, form), count in counts.items()
        ]
        reasons = Counter((finding.kind, finding.reason) for finding in self.kept)
        said += [f"stays in torch: {count} x {kind}: {reason}" for (kind, reason), count in reasons.items()]
        if self.not_taken:
            said.append(f"all modules stay in torch: {self.not_taken}")
        gathered = f", gathered for torch into a buffer of {format_bytes(self.gather_bytes)}" if self.gather_bytes else ""
        said.append(
            f"attention: {self.not_paged and f'as before, one sequence at a time: {self.not_paged}' or f'paged{gathered}'}"
        )
        if self.not_independent:
            said.append(f"rows are not proven independent of their batch: {self.not_independent}")
        return said

    def to_json(self) -> dict[str, Any]:
        """Returns all fields."""
        return asdict(self)
