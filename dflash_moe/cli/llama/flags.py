"""Reads what llama.cpp's own flags and variables say of the model, of threads and of where experts
lie, and adds ours.

Of several patterns that match a tensor llama.cpp takes the first. Its programs read the
environment before their flags, so that ours goes into the environment only where the user places
nothing, and else behind the user's flags. `llama-bench` has the same names with lists as values
and reads no variables (common/arg.cpp, tools/llama-bench of llama.cpp).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_moe.errors import ConfigError, shown
from dflash_moe.protocol.handover import PlannedTensor

# The buffer type of the plug-in's weights (csrc/ggml_plugin), as -ot names it.
WEIGHTS = "DFLASH_MOE"
CPU = "CPU"
# Tensors that are sent to these are offered to the plug-in.
OFFERED_TO_US = (CPU, WEIGHTS)

MODEL_FLAGS = ("-m", "--model")
HUB_FLAGS = ("-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo")
OVERRIDE_FLAGS = ("-ot", "--override-tensor")
CPU_MOE_FLAGS = ("-cmoe", "--cpu-moe")
NUM_CPU_MOE_FLAGS = ("-ncmoe", "--n-cpu-moe")
THREADS_FLAGS = ("-t", "--threads")
# These name a model of the hub too, by its task: --fim-qwen-3b-default and the like.
_HUB_PRESET = re.compile(r"--[a-z]+-.+-default", re.ASCII)
# The values of these are texts, which may look like flags.
TEXT_FLAGS = (
    "-p", "--prompt", "-r", "--reverse-prompt", "-sys", "--system-prompt", "--in-prefix", "--in-suffix",
    "--dry-sequence-breaker", "--grammar", "-j", "--json-schema", "-a", "--alias", "--api-key", "--chat-template",
)  # fmt: skip
# With these a program says something and computes nothing.
TELLING_FLAGS = (
    "-h", "--help", "--usage", "--version", "--license", "-cl", "--cache-list", "--completion-bash", "--list-devices",
)  # fmt: skip
MODEL_VARIABLE, HUB_VARIABLES = "LLAMA_ARG_MODEL", ("LLAMA_ARG_HF_REPO", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO")
OVERRIDE_VARIABLE, THREADS_VARIABLE = "LLAMA_ARG_OVERRIDE_TENSOR", "LLAMA_ARG_THREADS"
CPU_MOE_VARIABLE, NUM_CPU_MOE_VARIABLE = "LLAMA_ARG_CPU_MOE", "LLAMA_ARG_N_CPU_MOE"
# Words by which llama.cpp's switches are on in the environment.
TRUE_WORDS = ("on", "enabled", "true", "1")
# Every tensor of routed experts has this in its name.
EXPERTS = "_exps."
_BLOCK = re.compile(r"blk\.([0-9]+)\.([A-Za-z0-9_]+)\.([a-z]+)", re.ASCII)


@dataclass(slots=True)
class ProgramFlags:
    """What a program's command line and environment say. `overrides` are the patterns of tensor
    names with the buffer types they are sent to, in the order in which llama.cpp tries them.
    """

    is_bench: bool
    model: str = ""
    hub_flag: str = ""
    is_telling: bool = False
    # 0 where nobody says.
    threads: int = 0
    places_tensors: bool = False
    overrides: list[tuple[str, str]] = field(default_factory=list)


def is_llama_program(program: str) -> bool:
    """Says whether a program is one of llama.cpp's own by its name."""
    return Path(program).name.startswith("llama")


def is_bench(program: str, arguments: Sequence[str]) -> bool:
    """Says whether this is llama-bench, also as `llama bench`."""
    name = Path(program).name
    return name.startswith("llama-bench") or (name == "llama" and arguments[:1] == ["bench"])


def is_server(program: str, arguments: Sequence[str]) -> bool:
    """Says whether this is llama-server, also as `llama serve`."""
    name = Path(program).name
    return name.startswith("llama-server") or (name == "llama" and arguments[:1] in (["serve"], ["server"]))


def refuse_router(program: str, arguments: Sequence[str], flags: ProgramFlags) -> None:
    """Raises ConfigError for a server that names no model of its own: it would be a router, whose
    processes load the models that requests name.
    """
    if is_server(program, arguments) and not flags.model and not flags.hub_flag:
        raise ConfigError(
            f"{Path(program).name}: router mode starts processes of its own, which cannot take the workers; give the program "
            "-m FILE.gguf"
        )


def read_flags(program: str, arguments: Sequence[str], environ: Mapping[str, str]) -> ProgramFlags:
    """Reads a command line as llama.cpp does. Flags that are not looked for are passed over, with
    their values.
    """
    flags = ProgramFlags(is_bench(program, arguments))
    tells = TELLING_FLAGS if is_llama_program(program) else ()
    if not flags.is_bench:
        _read_environment(flags, environ)
    at = 0
    while at < len(arguments):
        flag = arguments[at].replace("_", "-") if arguments[at].startswith("--") else arguments[at]
        value = arguments[at + 1] if at + 1 < len(arguments) else ""
        if flag in tells:
            flags.is_telling = True
        at += 1 + _read_flag(flags, flag, value)
    return flags


def _read_environment(flags: ProgramFlags, environ: Mapping[str, str]) -> None:
    flags.model = environ.get(MODEL_VARIABLE, "")
    flags.hub_flag = next((name for name in HUB_VARIABLES if environ.get(name)), "")
    flags.threads = _most_threads(environ.get(THREADS_VARIABLE, ""))
    if environ.get(OVERRIDE_VARIABLE):
        _add_overrides(flags, environ[OVERRIDE_VARIABLE])
    if environ.get(CPU_MOE_VARIABLE) in TRUE_WORDS or environ.get(NUM_CPU_MOE_VARIABLE):
        flags.places_tensors = True


def _read_flag(flags: ProgramFlags, flag: str, value: str) -> int:
    """Takes one flag, and returns how many values it has taken: 0 or 1."""
    if flag in MODEL_FLAGS:
        flags.model = value
    elif _HUB_PRESET.fullmatch(flag):
        flags.hub_flag = flag
        return 0
    elif flag in HUB_FLAGS:
        flags.hub_flag = flag
    elif flag in THREADS_FLAGS:
        flags.threads = _most_threads(value)
    elif flag in OVERRIDE_FLAGS:
        _add_overrides(flags, value)
    elif flag in NUM_CPU_MOE_FLAGS or flag in CPU_MOE_FLAGS:
        # They send experts to the CPU, whose tensors the plug-in is offered first.
        flags.places_tensors = True
        return int(flag in NUM_CPU_MOE_FLAGS)
    elif flag not in TEXT_FLAGS:
        return 0
    return 1


def _most_threads(value: str) -> int:
    """Returns the largest of a list of numbers, 0 where there is none. Less than one means every
    core to llama.cpp.
    """
    if value.startswith("-") or value == "0":
        return os.cpu_count() or 1
    return max((int(part) for part in re.findall(r"[0-9]{1,6}", value)), default=0)


def _add_overrides(flags: ProgramFlags, value: str) -> None:
    flags.places_tensors = True
    for part in re.split("[,;]" if flags.is_bench else ",", value):
        pattern, is_pair, buffer_type = part.partition("=")
        if is_pair:
            flags.overrides.append((pattern, buffer_type))


def find_model(given: str | None, flags: ProgramFlags) -> Path:
    """Returns the GGUF file that the workers load. Raises ConfigError where nobody names a file
    that is there.
    """
    value = given or flags.model
    if not value:
        if flags.hub_flag:
            raise ConfigError(
                f"{flags.hub_flag}: the workers read a file of this machine; download the model first, then give -m FILE.gguf"
            )
        raise ConfigError("no model is named; give the program's -m FILE.gguf, or --model FILE.gguf before the --")
    if flags.is_bench and not given and "," in value:
        raise ConfigError(f"-m {shown(value)}: the workers hold one model; run the benchmark once for each")
    path = Path(value).expanduser()
    if not path.is_file():
        found = "this is a directory" if path.is_dir() else "no such file"
        raise ConfigError(f"{'--model' if given else '-m'} {shown(value)}: {found}; give the GGUF file")
    return path


def excluded(tensors: Sequence[PlannedTensor], flags: ProgramFlags) -> set[str]:
    """Returns the names of tensors that the user's flags send to a device which is neither the CPU
    nor ours, so that nobody offers them to the plug-in. A pattern that only llama.cpp understands
    counts as one that matches.
    """
    return {tensor.name for tensor in tensors if not _is_offered(tensor.name, flags.overrides)}


def require_whole_layers(tensors: Sequence[PlannedTensor], left: set[str]) -> None:
    """Raises ConfigError for a layer of which only a part, which `left` names, is sent elsewhere.
    Workers compute a layer's experts whole; what the program keeps of one could not reach them.
    """
    kept: dict[int, str] = {}
    for tensor in tensors:
        if tensor.name not in left:
            kept.setdefault(tensor.layer, tensor.name)
    for tensor in tensors:
        if tensor.name in left and tensor.layer in kept:
            raise ConfigError(
                f"the program's flags (-ot) send {tensor.name} elsewhere and leave {kept[tensor.layer]} to the workers; send "
                "all experts of a layer there, or none"
            )


def _is_offered(name: str, overrides: Sequence[tuple[str, str]]) -> bool:
    for pattern, buffer_type in overrides:
        try:
            matches = re.search(pattern, name) is not None
        except re.error:
            matches = True
        if matches:
            return buffer_type in OFFERED_TO_US
    return True


def override_for(tensors: Sequence[PlannedTensor], names: Iterable[str], *, may_be_local: bool = False) -> str:
    """Returns the value of -ot that sends the planned tensors, and no others of the model's, whose
    tensors are `names`, to the workers. It has neither commas nor semicolons, which would split it.

    The plug-in's buffer type is no choice to llama.cpp: without the plug-in, or with a tensor that
    it refuses, nothing is loaded. Where the program `may_be_local`, tensors are sent to the CPU,
    for which llama.cpp asks the plug-in first and then keeps what it refuses.
    """
    buffer_type = CPU if may_be_local else WEIGHTS
    if {name for name in names if EXPERTS in name} == {tensor.name for tensor in tensors}:
        return f"{re.escape(EXPERTS)}={buffer_type}"
    layers: dict[int, None] = {}
    parts: dict[str, None] = {}
    leaves: dict[str, None] = {}
    for tensor in tensors:
        match = _BLOCK.fullmatch(tensor.name)
        if match is None:
            raise ConfigError(f"tensor {shown(tensor.name)}: its name is not one of llama.cpp's, blk.N.PART.LEAF")
        layers[int(match[1])], parts[match[2]], leaves[match[3]] = None, None, None
    number, part, leaf = ("|".join(map(str, sorted(found))) for found in (layers, parts, leaves))
    return f"^blk\\.({number})\\.({part})\\.({leaf})$={buffer_type}"


def add_ours(
    arguments: Sequence[str], environ: Mapping[str, str], flags: ProgramFlags, *, override: str, threads: int
) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments and the environment with which the program runs. `override` is empty
    where no plug-in is loaded, and `threads` counts where the user says nothing of threads.
    """
    given, environment = list(arguments), dict(environ)
    if not flags.threads:
        if flags.is_bench:
            given += [THREADS_FLAGS[0], str(threads)]
        else:
            environment[THREADS_VARIABLE] = str(threads)
    if override and flags.is_bench:
        given = _add_to_groups(given, override)
    elif override and flags.places_tensors:
        # llama.cpp warns of a flag that comes twice in one spelling, although it adds both up.
        given += [next((flag for flag in OVERRIDE_FLAGS if flag not in given), OVERRIDE_FLAGS[0]), override]
    elif override:
        environment[OVERRIDE_VARIABLE] = override
    return given, environment


def _add_to_groups(arguments: list[str], override: str) -> list[str]:
    """Adds to each group of llama-bench's -ot, of which each is a benchmark of its own."""
    given, is_value, has_any = [], False, False
    for argument in arguments:
        if is_value:
            argument = ",".join(f"{group};{override}" if group else override for group in argument.split(","))
            has_any = True
        is_value = not is_value and argument in OVERRIDE_FLAGS
        given.append(argument)
    return given if has_any else [*given, OVERRIDE_FLAGS[0], override]
