"""Loads the structure of a model without its weights: its configuration, the model on the meta
device, and its experts modules.

The experts interface of transformers alone decides what counts as an experts module, never the name
of a family.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import UnsupportedError, shown
from dflash_moe.model.config_limits import check_counts
from dflash_moe.model.formats.quantization_methods import check_quantization
from dflash_moe.model.refusals import refusing

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModel")

# transformers.integrations.moe.use_experts_implementation leaves these attributes on a module.
_INTERFACE_MARKS = ("has_gate", "has_bias", "is_transposed", "_is_expert_parallel", "_apply_gate", "config")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The configuration and class of a checkpoint's model, the model on the meta device, and its
    experts modules by qualified name in the order of the model.
    """

    config: Any
    model_class: Any
    model: Any
    experts: dict[str, Any]


def load_architecture(checkpoint: Checkpoint) -> Architecture:
    """Builds the model on the meta device. Raises CheckpointError where config.json is missing or
    bad, and UnsupportedError naming class and field.
    """
    import torch

    config = load_config(checkpoint)
    model_class = find_model_class(config)
    with refusing(f"{model_class.__name__}: cannot be built from config.json"), torch.device("meta"):
        model = model_class(config)
    return Architecture(config, model_class, model, find_experts(model))


def load_config(checkpoint: Checkpoint) -> Any:
    """Returns the transformers configuration of a checkpoint. Code in the checkpoint is never run.

    `quantization_config` is taken off, because quantised weights are dequantised here and not by
    transformers. Raises UnsupportedError for other methods of quantisation.
    """
    from transformers import AutoConfig

    if checkpoint.metadata is not None:
        from dflash_moe.model.gguf_architectures.reading import gguf_config

        return gguf_config(checkpoint)
    directory = checkpoint.path
    check_counts(checkpoint.config(), str(directory / "config.json"))
    with refusing(f"{directory / 'config.json'}: not readable"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        owners = {id(item): item for item in (config, config.get_text_config())}
    for owner in owners.values():
        quantization = getattr(owner, "quantization_config", None)
        if quantization is not None:
            _check_quantization(type(owner).__name__, quantization)
            del owner.quantization_config
    return config


def _check_quantization(owner: str, quantization: Any) -> None:
    fields = quantization if isinstance(quantization, dict) else getattr(quantization, "__dict__", None)
    if fields is None:
        raise UnsupportedError(f"{owner}.quantization_config: found {shown(quantization)}, expected a map with quant_method")
    check_quantization(fields, owner)


def find_model_class(config: Any) -> Any:
    """Returns the class that config.json names in `architectures`, or else the one that the auto
    classes of transformers have for the configuration.

    Only classes of models count, whatever else transformers may have under the name. A name that it
    does not have at all is passed over, because many checkpoints name a class of the code they were
    trained with. Raises UnsupportedError naming field and value.
    """
    import transformers

    field = f"{type(config).__name__}.architectures"
    named = getattr(config, "architectures", None) or ()
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise UnsupportedError(f"{field}: found {shown(named)}, expected a list of class names")
    for name in named:
        with refusing(f"{field}: {shown(name)} cannot be imported from transformers {transformers.__version__}"):
            found = getattr(transformers, name, None)
        if found is None:
            continue
        if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
            raise UnsupportedError(
                f"{field}: {shown(name)} is no model class of transformers {transformers.__version__}; "
                "name one such as MixtralForCausalLM, or leave the field out"
            )
        return found
    for found in auto_classes(config):
        return found
    raise UnsupportedError(
        f"{field}: found {shown(named)}, which transformers {transformers.__version__} does not have, and no model class "
        f"belongs to {shown(config.model_type)}"
    )


def auto_classes(config: Any) -> list[Any]:
    """Returns the model classes that the auto classes of transformers have for a configuration, the
    most specific one first.
    """
    import transformers

    mappings = [getattr(transformers, name)._model_mapping for name in _AUTO_CLASSES if hasattr(transformers, name)]
    found = [mapping.get(type(config), None) for mapping in mappings]
    return [model_class for model_class in found if model_class is not None]


def is_on_interface(module: Any) -> bool:
    """Says whether the experts interface of transformers dispatches the forward of this module."""
    return hasattr(type(module).forward, "__wrapped__") and all(hasattr(module, mark) for mark in _INTERFACE_MARKS)


def find_experts(model: Any) -> dict[str, Any]:
    """Returns the experts modules of a model by qualified name. Raises UnsupportedError when there
    are none, naming a class that looks like one.
    """
    found = {name: module for name, module in model.named_modules() if is_on_interface(module)}
    if found:
        return found
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "expert" in kind.lower() or kind.lower().endswith(("moe", "moeblock", "moelayer")):
            raise UnsupportedError(
                f"{kind} ({name}): its experts are not on transformers' experts interface, through which "
                "they are given to workers; a newer transformers may have put them there"
            )
    raise UnsupportedError(
        f"{type(model).__name__}: the model is dense: it has no experts that workers could compute; transformers alone runs "
        "it, and llama.cpp alone runs a GGUF file of it"
    )
