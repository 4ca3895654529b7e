"""Compares a family's models with odd settings, run as an engine runs them, with their own eager
code: logits of all positions, past every boundary that a setting may have. Only tests use it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.models.odd_models import odd_model, rotary_width, source_of
from bench.models.odd_settings import TOKENS, OddSetting, odd_settings
from dflash_moe.errors import DflashError, UnsupportedError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.forward.forward import StepRows
from dflash_moe.forward.host_model import HostModel, open_host
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.make import NUM_BYTES
from dflash_moe.model.progress import quiet_progress
from dflash_moe.proofs.eager_pass import model_logits
from dflash_moe.topology import Topology

# A prompt is computed in parts that begin at these tokens, the last ones token by token: within a
# block of pages, at its border, and in one part past every boundary.
_CUTS = (5, 16, 47, 48, 49, TOKENS - 3, TOKENS - 2, TOKENS - 1)
# Logits may differ by so much of their standard deviation, or by so many times what an embedding
# that is moved by a few of its last bits does to eager's.
_ALLOWED, _ALLOWED_OF_MOVED = 3e-5, 8.0
_MOVED = 2.0**-20
# Where embeddings moved by that change logits by more, a choice of experts is close to a tie and
# a prompt with other logits says nothing; then others are tried.
_TIE, _PROMPTS, _TURNS = 1e-3, 4, 3

_TOPOLOGY = """
version: 1
host: {threads: 1}
workers:
  - {name: w0, backend: cpu, address: loopback}
  - {name: w1, backend: cpu, address: loopback}
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one setting. `taken` is layers, modules (its attention is paged), torch (one
    sequence at a time), or "" where nothing was compared. `error` is the largest difference of a
    logit over the standard deviation of all, and `allowed` what it may be.
    """

    setting: str
    # Why nothing was compared, or what stays in torch and why.
    reason: str = ""
    # Whose refusal it is: the family's own code (model), or ours (dflash_moe).
    refused_by: str = ""
    taken: str = ""
    error: float = 0.0
    allowed: float = 0.0
    is_wrong: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns all fields that are not empty, and the error of whatever was compared."""
        kept = ("setting", "error") if self.taken else ("setting",)
        return {name: value for name, value in asdict(self).items() if value or name in kept}


def settings_of(arch: str) -> list[OddSetting]:
    """Returns the usual setting of a family, of an empty name, and its odd ones. Raises DflashError
    where no model of it can be built.
    """
    model = odd_model(arch, {})
    text = model.config.get_text_config()
    usual = OddSetting("", {})
    return [usual, *odd_settings(text, source_of(model), rotary_width(model))]


def sweep(arch: str, chosen: Callable[[list[OddSetting]], list[OddSetting]] = list) -> Iterator[Outcome]:
    """Yields what became of each setting of a family, or of those that are `chosen`, but of those
    that its configuration class takes for the same as one before.
    """
    try:
        settings = settings_of(arch)
    except DflashError as error:
        yield Outcome("", str(error), refused_by="model")
        return
    seen: list[Any] = []
    for setting in chosen(settings):
        outcome = try_setting(arch, setting, seen)
        if outcome is not None:
            yield outcome


def try_setting(arch: str, setting: OddSetting, seen: list[Any]) -> Outcome | None:
    """Returns what became of a setting, None for one whose configuration is among those `seen`
    before, to which it is added.
    """
    try:
        model = odd_model(arch, setting.fields)
        config = model.config.to_dict()
        if config in seen:
            return None
        seen.append(config)
        prompt, allowed = _prompt(0), _ALLOWED
        expected = _eager(model, prompt)
    except Exception as error:  # noqa: BLE001 - whatever a family's code raises, it does not run with this
        return Outcome(setting.name, _first_line(error), refused_by="model")
    with tempfile.TemporaryDirectory(prefix="odd_model") as folder, quiet_progress():
        model.save_pretrained(folder)
        try:
            with ExpertRuntime.start(Topology.parse(_TOPOLOGY), model=Path(folder), kv_memory="16MiB") as runtime:
                host = open_host(folder, runtime)
                found = _logits(host, prompt)
                if not _difference(found, expected) <= allowed:
                    # Moved embeddings take three passes, which only such a setting has to pay.
                    try:
                        prompt, expected, allowed = _without_ties(model)
                    except UnsupportedError as error:
                        return Outcome(setting.name, _first_line(error), refused_by="model")
                    found = _logits(host, prompt)
        except DflashError as error:
            return Outcome(setting.name, _first_line(error), refused_by="dflash_moe")
        except Exception as error:  # noqa: BLE001 - anything else is a fault of ours, which the table shows
            return Outcome(setting.name, _first_line(error), is_wrong=True)
        difference = _difference(found, expected)
        if not difference <= allowed:
            # What lies in the files decides, should it be another model than the one in memory.
            difference = _difference(found, _loaded_logits(Path(folder), prompt, _attention_of(host)))
    return Outcome(setting.name, _reasons(host), "", _taken(host), difference, allowed, not difference <= allowed)


# -- eager -----------------------------------------------------------------------------------------
def _prompt(seed: int) -> list[int]:
    drawn: list[int] = torch.randint(0, NUM_BYTES, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def _eager(model: Any, prompt: list[int]) -> torch.Tensor:
    """Returns eager's logits of a prompt. Raises UnsupportedError where they say nothing."""
    expected = _model_logits(model, prompt)
    if not bool(expected.isfinite().all()):
        raise UnsupportedError("its own logits are not finite")
    return expected


def _without_ties(model: Any) -> tuple[list[int], torch.Tensor, float]:
    """Returns a prompt whose choices of experts are no near ties, eager's logits of it, and by how
    much others may differ. Raises UnsupportedError where there is none.
    """
    for prompt in map(_prompt, range(_PROMPTS)):
        expected = _eager(model, prompt)
        moved = max(_difference(_moved_logits(model, prompt, turn), expected) for turn in range(_TURNS))
        if moved <= _TIE:
            return prompt, expected, max(_ALLOWED, _ALLOWED_OF_MOVED * moved)
    raise UnsupportedError(f"its own logits change by {moved:.2g} when its embeddings do by their last bits")


def _model_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model_logits(model, torch.tensor([prompt]))


def _moved_logits(model: Any, prompt: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)

    def move(_module: Any, _arguments: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1.0 + _MOVED * torch.randn(out.shape, generator=generator))

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        return _model_logits(model, prompt)
    finally:
        handle.remove()


def _loaded_logits(folder: Path, prompt: list[int], attention: str) -> torch.Tensor:
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": attention}
    model = find_model_class(load_config(Checkpoint.open(folder))).from_pretrained(folder, **options)
    return _model_logits(model.eval(), prompt)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).abs().max() / expected.double().std()
    return float(difference.nan_to_num(nan=float("inf")))


# -- ours ------------------------------------------------------------------------------------------
def _logits(host: HostModel, prompt: list[int]) -> torch.Tensor:
    if host.packed is None:
        return _model_logits(host.model, prompt)
    sequence = host.packed.admit(TOKENS)
    places = (0, *_CUTS, TOKENS)
    parts = [prompt[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    found = [host.packed.forward([StepRows(sequence, part, num_logits=len(part))]).clone() for part in parts]
    sequence.release()
    return torch.cat(found)


def _attention_of(host: HostModel) -> str:
    """Returns the name of the attention that has to be agreed with. What runs in torch has the one
    that transformers prefers, which differs from eager's where a mask hides all keys of a query.
    """
    return str(host.model.config._attn_implementation) if host.packed is None else "eager"


def _taken(host: HostModel) -> str:
    if host.packed is None:
        return "torch"
    layers = [finding for finding in host.report.taken if finding.operator == "layer"]
    return "layers" if len(layers) == host.model.config.get_text_config().num_hidden_layers else "modules"


def _reasons(host: HostModel) -> str:
    found = [host.report.not_paged, *(f"{finding.kind}: {finding.reason}" for finding in host.report.kept)]
    return "; ".join(dict.fromkeys(reason for reason in found if reason))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
