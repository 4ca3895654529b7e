"""The loader of a model whose experts are elsewhere: that of vLLM, without the experts' tensors.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from dflash_moe.errors import UnsupportedError

if TYPE_CHECKING:
    from dflash_moe.integrations.engine_experts import EngineExperts

log = logging.getLogger(__name__)


def loader_without_experts(
    prepare: Callable[[], None], experts_of: Callable[[Any], EngineExperts | None]
) -> type[DefaultModelLoader]:
    """Returns the loader's class. `prepare` is called once the model's own module is imported and
    before a layer is built; `experts_of` gives the experts of the engine with a certain
    `VllmConfig`, None where none of its layers has routed experts.
    """

    class LoaderWithoutExperts(DefaultModelLoader):  # type: ignore[misc]
        """Loads what is not of routed experts."""

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            from vllm.model_executor.model_loader.utils import get_model_architecture

            get_model_architecture(model_config)
            prepare()
            self._config = vllm_config
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

        def load_weights(self, model: Any, model_config: Any) -> None:
            engine = experts_of(self._config)
            if engine is None:
                raise UnsupportedError(
                    f"DFLASH_MOE_TOPOLOGY is set, and {model_config.model} has no routed experts that vLLM builds as "
                    f"RoutedExperts ({type(model).__name__}): unset it for this model"
                )
            engine.all_built()
            _refuse_local(model)
            self._left_out = engine.expert_tensors()
            # vLLM's own filter, for one rank of several: no expert is this rank's. It passes over
            # the tensor of a single expert before that is read; one that holds all experts of a
            # layer is mapped, handed out and left unread by `get_all_weights`.
            self.local_expert_ids: set[int] | None = set()
            super().load_weights(model, model_config)

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in super().get_all_weights(model_config, model):
                if self._left_out.match(name) is None:
                    yield name, tensor

    return LoaderWithoutExperts


def _refuse_local(model: Any) -> None:
    """Raises UnsupportedError where vLLM would compute experts of `model` itself."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and "remote_method" not in module.__dict__:
            raise UnsupportedError(f"{name}: vLLM built {type(module).__name__}, whose experts it would compute itself")
