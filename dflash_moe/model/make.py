"""Makes checkpoints of real transformers architectures with random weights and a byte-level
tokenizer, on which tests and benches run.

Sizes are set through the fields that the configuration of an architecture has, which are found by
their usual names. Weights are scaled so that the routing spreads over all experts, and that is
measured before anything is written.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe import _core
from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, shown
from dflash_moe.model.capture import ExpertsCall, capture_calls
from dflash_moe.model.progress import quiet_progress
from dflash_moe.model.refusals import refusing
from dflash_moe.telemetry.machine import memory_available

NUM_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = NUM_BYTES
VOCAB_SIZE = NUM_BYTES + 1
MIN_POSITIONS = 8192
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# The generators of torch take no larger seed.
MAX_SEED = (1 << 63) - 1

# Configurations keep one thing under several names. All that a configuration has are set.
_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_TOWER_WIDTH = 64
_TOWER_LAYERS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")
_TOP_K_FIELDS = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "num_experts_per_token")

# An expert may get this many times more or fewer tokens than its share, beyond what chance
# explains.
_BALANCE_FACTOR = 3.0
# Centring the router of a layer changes the inputs of the later ones, so that one round is not
# enough.
_CENTRING_ROUNDS = 2
_TOKENS_PER_EXPERT = 64
_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """What to make. Sizes are in elements, and `dtype` is f32, f16 or bf16."""

    arch: str
    num_layers: int = 4
    hidden_size: int = 256
    num_experts: int = 16
    top_k: int = 4
    moe_intermediate_size: int = 128
    dtype: str = "bf16"
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError for a value that is not allowed, naming the option and what is."""
        limits = _core.wire_limits()
        most = {
            "--layers": (self.num_layers, limits["max_layers"]),
            "--num-experts": (self.num_experts, limits["max_experts_per_shard"]),
            "--top-k": (self.top_k, limits["max_pairs_per_row"]),
            "--moe-intermediate-size": (self.moe_intermediate_size, limits["max_row_width"]),
        }
        for flag, (value, limit) in most.items():
            if not 1 <= value <= limit:
                raise ConfigError(f"{flag} {shown(value)}: must be 1..{limit}")
        if not 32 <= self.hidden_size <= limits["max_row_width"] or self.hidden_size % 32:
            raise ConfigError(
                f"--hidden-size {shown(self.hidden_size)}: must be a multiple of 32, to be cut into heads, and at most "
                f"{limits['max_row_width']}"
            )
        if self.top_k > self.num_experts:
            raise ConfigError(f"--top-k {self.top_k}: must be at most the number of experts, {self.num_experts}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype {shown(self.dtype)}: choose from {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"--seed {shown(self.seed)}: must be 0..{MAX_SEED}")


@dataclass(frozen=True, slots=True)
class Made:
    """What was written. `least_used` and `most_used` are the smallest and the largest number of
    tokens that an expert of any layer gets, divided by the even share.
    """

    directory: Path
    class_name: str
    num_parameters: int
    least_used: float
    most_used: float


def make_checkpoint(options: MakeOptions, directory: Path) -> Made:
    """Writes safetensors, config and tokenizer into `directory`, which must be new or empty. Raises
    ConfigError, and DflashError when the routing is out of balance.
    """
    options.check()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {shown(str(directory))}: no folder can be made there: {error.strerror}") from None
    if not is_empty:
        raise ConfigError(f"--out {directory}: exists and is not an empty directory; name a new one")
    model = build_model(options)
    centre_routers(model, options)
    least, most = check_routing(model, options)
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.eos_token_id = generation_config.pad_token_id = END_OF_TEXT_ID
    with quiet_progress(), refusing(f"--out {directory}: the checkpoint cannot be written", DflashError):
        model.save_pretrained(directory)
        write_tokenizer(directory)
    return Made(directory, type(model).__name__, sum(p.numel() for p in model.parameters()), least, most)


def build_model(options: MakeOptions, fields: Mapping[str, Any] | None = None) -> Any:
    """Builds the model with random weights, in eval mode with its own eager experts. `fields` are
    those of `build_config`.
    """
    import torch

    from dflash_moe.model.architecture import find_model_class

    config = build_config(options, fields)
    model_class = find_model_class(config)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
    what = f"{model_class.__name__}: cannot be built with these sizes"
    with refusing(what), torch.device("meta"):
        _check_memory(model_class._from_config(config, dtype=dtype), DTYPE_BYTES[options.dtype])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        with refusing(what):
            model = model_class._from_config(config, dtype=dtype)
        randomise(model)
    model.set_experts_implementation("eager")
    return model.eval()


def _check_memory(model: Any, item_bytes: int) -> None:
    """Raises ConfigError where this machine lacks the memory for the model, which is given on the
    meta device.
    """
    needed, free = sum(value.numel() for value in model.parameters()) * item_bytes, memory_available()
    if needed > free:
        raise ConfigError(
            f"a model of these sizes takes {format_bytes(needed)} of memory, and {format_bytes(free)} are free; "
            "choose smaller sizes"
        )


def build_config(options: MakeOptions, fields: Mapping[str, Any] | None = None) -> Any:
    """Builds the configuration of the architecture with the wanted sizes. `fields` are further ones
    of its language model, and win over sizes. Raises ConfigError for an architecture that
    transformers lacks.
    """
    from transformers import CONFIG_MAPPING

    with refusing(f"--arch {shown(options.arch)}"):
        is_known = options.arch in CONFIG_MAPPING
    if not is_known:
        close = difflib.get_close_matches(options.arch[:100], list(CONFIG_MAPPING.keys()), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ConfigError(f"--arch {shown(options.arch)}: transformers has no such model type{hint}")
    with refusing(f"--arch {options.arch}: has no configuration to begin with"):
        config_class = CONFIG_MAPPING[options.arch]
        default = config_class()
        text = default.get_text_config()
    sizes = _sizes(text, options) | dict(fields or {})
    if text is not default:
        key = next((name for name in default.sub_configs if getattr(default, name, None) is text), None)
        if key is None:
            raise UnsupportedError(f"{config_class.__name__}: its language model is too deep inside for sizes to be set")
        sizes = {key: {**sizes, "model_type": text.model_type}, **_towers(default, key, options)}
    with refusing(f"{config_class.__name__}: does not take the sizes asked for"):
        return config_class(**sizes)


def _towers(default: Any, key: str, options: MakeOptions) -> dict[str, Any]:
    """Returns settings by which the parts of a model beside its language model, at `key`, such as
    those that see, have one narrow layer each: no text reaches them, and they would be most of the
    model.
    """
    wanted = {
        **dict.fromkeys(_TOWER_LAYERS, 1),
        **dict.fromkeys(("hidden_size", "intermediate_size"), _TOWER_WIDTH),
        **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), 4),
        # What they hand over is as wide as the language model.
        **dict.fromkeys(("out_hidden_size", "text_hidden_size"), options.hidden_size),
        "deepstack_visual_indexes": [0],
    }
    found: dict[str, Any] = {}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if name != key and part is not None:
            sizes = {field: value for field, value in wanted.items() if getattr(part, field, 0)}
            found[name] = {"model_type": part.model_type, **sizes, **_towers(part, "", options)}
    return found


def _sizes(text: Any, options: MakeOptions) -> dict[str, Any]:
    """Returns the settings for those fields that `text`, a default configuration, has."""
    fields = text.to_dict()
    if not any(name in fields for name in _EXPERTS_FIELDS):
        raise ConfigError(f"--arch {options.arch}: {type(text).__name__} has no number of experts; it is not a mixture")
    head_dim = 64 if options.hidden_size >= 256 and options.hidden_size % 64 == 0 else options.hidden_size // 4
    num_heads = options.hidden_size // head_dim
    is_grouped = fields.get("num_key_value_heads") != fields.get("num_attention_heads")
    wanted: dict[str, Any] = {
        "num_hidden_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2) if is_grouped else num_heads,
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "tie_word_embeddings": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1 if options.num_layers > 1 and fields.get("first_k_dense_replace") else 0,
        "moe_layer_start_index": min(fields.get("moe_layer_start_index") or 0, options.num_layers - 1),
        "moe_layer_end_index": options.num_layers - 1,
        "num_nextn_predict_layers": 0,
        "shared_expert_intermediate_size": options.moe_intermediate_size,
        **_width_of_mlp(fields, options),
        **_head_sizes(fields, head_dim),
        **dict.fromkeys(_EXPERTS_FIELDS, options.num_experts),
        **dict.fromkeys(_TOP_K_FIELDS, options.top_k),
    }
    for name, value in (("n_shared_experts", 1), ("layer_types", ["full_attention"] * options.num_layers)):
        if name in fields and fields[name] is None:
            # The default of such a field does not build a model.
            wanted[name] = value
    if (fields.get("max_position_embeddings") or MIN_POSITIONS) < MIN_POSITIONS:
        wanted["max_position_embeddings"] = MIN_POSITIONS
    return {name: value for name, value in wanted.items() if name in fields}


def _width_of_mlp(fields: dict[str, Any], options: MakeOptions) -> dict[str, int]:
    size = options.moe_intermediate_size
    if "moe_intermediate_size" in fields:
        # `intermediate_size` is then the width of the dense layers.
        return {"moe_intermediate_size": size, "intermediate_size": 2 * size}
    return {"intermediate_size": size}


def _head_sizes(fields: dict[str, Any], head_dim: int) -> dict[str, int | None]:
    if not fields.get("kv_lora_rank"):
        return {"head_dim": head_dim}
    # With latent attention half of a query head turns with the position.
    return {
        "kv_lora_rank": 2 * head_dim,
        "q_lora_rank": 2 * head_dim if fields.get("q_lora_rank") else None,
        "qk_rope_head_dim": head_dim // 2,
        "qk_nope_head_dim": head_dim // 2,
        "v_head_dim": head_dim,
    }


def randomise(model: Any) -> None:
    """Fills matrices so that outputs have about the variance of inputs, and fills embeddings and
    biases at random. The rest stays as it is.
    """
    import torch

    with torch.no_grad():
        for module in model.modules():
            _randomise_module(module)


def _randomise_module(module: Any) -> None:
    import torch

    for name, value in module._parameters.items():
        if value is None:
            continue
        if name.endswith("bias"):
            # The correction of a router is a bias as well, but has no weight beside it; it stays 0.
            if "weight" in module._parameters or name.endswith("proj_bias"):
                value.normal_(0.0, 0.1)
        elif isinstance(module, torch.nn.Embedding):
            value.normal_(0.0, 1.0)
        elif value.ndim >= 2:
            fan_in = value.shape[-2] if getattr(module, "is_transposed", False) else value.shape[-1]
            value.normal_(0.0, fan_in**-0.5)


def centre_routers(model: Any, options: MakeOptions) -> None:
    """Makes every router blind to the mean of its inputs, which would pull all tokens to the same
    experts.
    """
    import torch

    for _ in range(_CENTRING_ROUNDS):
        means = {call.name: call.hidden_states.float().mean(dim=0) for call in _routed_calls(model, options)}
        with torch.no_grad():
            for name, mean in means.items():
                block = model.get_submodule(name.rpartition(".")[0])
                for path, value in block.named_parameters():
                    if tuple(value.shape) == (options.num_experts, mean.numel()) and not path.startswith("experts."):
                        wide = value.float()
                        value.copy_(wide - torch.outer(wide @ mean, mean) / mean.square().sum())


def _routed_calls(model: Any, options: MakeOptions) -> list[ExpertsCall]:
    """Returns the calls of all experts modules in one forward pass over random text."""
    import torch

    num_tokens = min(_MAX_TOKENS, max(64, _TOKENS_PER_EXPERT * options.num_experts // options.top_k))
    generator = torch.Generator().manual_seed(options.seed)
    input_ids = torch.randint(0, NUM_BYTES, (1, num_tokens), generator=generator)
    calls: list[ExpertsCall] = []
    # Sizes that fit together for the constructor may not for the forward pass.
    what = f"{type(model).__name__}: does not run with these sizes"
    with refusing(what), torch.no_grad(), capture_calls(model, calls.append):
        model(input_ids=input_ids, use_cache=False)
    return calls


def check_routing(model: Any, options: MakeOptions) -> tuple[float, float]:
    """Returns the smallest and the largest number of tokens that an expert gets on random text,
    divided by the even share. Raises DflashError when a layer is out of balance.
    """
    import torch

    num_experts = options.num_experts
    ids = [call.topk_ids.reshape(-1) for call in _routed_calls(model, options)]
    counts = [torch.bincount(found, minlength=num_experts)[:num_experts] for found in ids]
    shares = [found.double() / (found.sum() / options.num_experts) for found in counts]
    least, most = min(float(share.min()) for share in shares), max(float(share.max()) for share in shares)
    share = min(float(found.sum()) / num_experts for found in counts)
    # A count this small varies by three standard deviations without a fault of the router.
    chance = 0.0 if share >= _TOKENS_PER_EXPERT / 2 else 3.0 / share**0.5
    if least < max(0.0, 1 / _BALANCE_FACTOR - chance) or most > _BALANCE_FACTOR + chance:
        raise DflashError(
            f"the made model's routing is not even: experts get {least:.2f} to {most:.2f} times their share of the tokens; "
            "try another --seed"
        )
    return least, most


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with one token for each byte and an end-of-text token. Any text encodes,
    and decodes to itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2 has a printable stand-in for each byte. They are in the order of the bytes, so that the
    # id of a token is its byte.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={symbol[byte]: byte for byte in range(NUM_BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    fast.save_pretrained(directory)
