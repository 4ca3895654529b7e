"""What llama.cpp's flags and variables say, and what we add to them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re

import pytest

from dflash_moe.cli.command_line import with_values
from dflash_moe.cli.llama.flags import (
    ProgramFlags,
    add_ours,
    excluded,
    find_model,
    override_for,
    read_flags,
    refuse_router,
    require_whole_layers,
)
from dflash_moe.cli.main import _normalised
from dflash_moe.errors import ConfigError
from dflash_moe.protocol.handover import PlannedTensor
from tests.unit.cli.test_any_value import commands

SERVER, BENCH = "/opt/bin/llama-server", "/opt/bin/llama-bench"
OURS = "^blk\\.(0|1|10)\\.(ffn_down_exps|ffn_up_exps)\\.(weight)$=DFLASH_MOE"


def tensor(layer: int, part: str = "ffn_up_exps", leaf: str = "weight") -> PlannedTensor:
    return PlannedTensor(
        layer=layer, name=f"blk.{layer}.{part}.{leaf}", ggml_type=1, extents=(1,), num_bytes=2, file_offset=0, has_sample=False,
        sample=0,
    )  # fmt: skip


TENSORS = [tensor(layer, part) for layer in (0, 1, 10) for part in ("ffn_up_exps", "ffn_down_exps")]


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["-m", "x.gguf"], {}, {"model": "x.gguf"}),
        (["--model", "x.gguf", "-c", "512"], {}, {"model": "x.gguf"}),
        ([], {"LLAMA_ARG_MODEL": "e.gguf"}, {"model": "e.gguf"}),
        (["-m", "x.gguf"], {"LLAMA_ARG_MODEL": "e.gguf"}, {"model": "x.gguf"}),
        (["-hf", "a/b"], {}, {"hub_flag": "-hf"}),
        ([], {"LLAMA_ARG_HF_REPO": "a/b"}, {"hub_flag": "LLAMA_ARG_HF_REPO"}),
        (["-t", "5"], {}, {"threads": 5}),
        (["--threads", "5"], {"LLAMA_ARG_THREADS": "3"}, {"threads": 5}),
        ([], {"LLAMA_ARG_THREADS": "3"}, {"threads": 3}),
        (["-tb", "5", "--threads-http", "2"], {}, {}),
        (["--help"], {}, {"is_telling": True}),
        (["--list_devices"], {}, {"is_telling": True}),
        (["--version", "-m", "x"], {}, {"is_telling": True, "model": "x"}),
        (["-p", "-h", "-r", "--help", "--prompt", "--version"], {}, {}),
        (["--reverse-prompt", "-m", "--alias", "-h"], {}, {}),
        (["-p", "-h", "-h"], {}, {"is_telling": True}),
        (["--fim-qwen-1.5b-default"], {}, {"hub_flag": "--fim-qwen-1.5b-default"}),
        (["--spec-default", "-m", "x"], {}, {"model": "x"}),
        (["-cmoe"], {}, {"places_tensors": True}),
        (["--cpu-moe", "-m", "x"], {}, {"places_tensors": True, "model": "x"}),
        (["-ncmoe", "4", "-t", "2"], {}, {"places_tensors": True, "threads": 2}),
        (["--n_cpu_moe", "4"], {}, {"places_tensors": True}),
        ([], {"LLAMA_ARG_CPU_MOE": "1"}, {"places_tensors": True}),
        ([], {"LLAMA_ARG_CPU_MOE": "0"}, {}),
        ([], {"LLAMA_ARG_N_CPU_MOE": "3"}, {"places_tensors": True}),
        (["-ot", "a=CPU,b=CUDA0"], {}, {"places_tensors": True, "overrides": [("a", "CPU"), ("b", "CUDA0")]}),
        (
            ["--override-tensor", "b=CPU"], {"LLAMA_ARG_OVERRIDE_TENSOR": "a=CUDA0"},
            {"places_tensors": True, "overrides": [("a", "CUDA0"), ("b", "CPU")]},
        ),
        (["-otd", "a=CPU", "--cpu-moe-draft"], {}, {}),
        (["-m"], {}, {}),
        (["-ot", "nonsense"], {}, {"places_tensors": True}),
    ],
)  # fmt: skip
def test_flags_of_programs_are_read(arguments, environ, expected):
    assert read_flags(SERVER, arguments, environ) == ProgramFlags(False, **expected)


@pytest.mark.parametrize("flag", ["-h", "--version"])
def test_programs_that_are_not_llama_cpps_are_asked_for_nothing(flag):
    assert not read_flags("/usr/bin/python3", [flag], {}).is_telling


@pytest.mark.parametrize(
    ("program", "arguments", "environ"),
    [
        (SERVER, [], {}),
        (SERVER, ["--models-dir", "models"], {}),
        (SERVER, ["--spec-default"], {"LLAMA_ARG_MODELS_DIR": "models"}),
        ("/opt/bin/llama", ["serve"], {}),
        ("/opt/bin/llama", ["server", "--port", "1"], {}),
    ],
)
def test_router_is_refused(program, arguments, environ):
    with pytest.raises(ConfigError, match="router mode starts processes of its own"):
        refuse_router(program, arguments, read_flags(program, arguments, environ))


@pytest.mark.parametrize(
    ("program", "arguments", "environ"),
    [
        (SERVER, ["-m", "x.gguf"], {}),
        (SERVER, ["-hf", "a/b"], {}),
        (SERVER, ["--embd-gemma-default"], {}),
        (SERVER, [], {"LLAMA_ARG_MODEL": "x.gguf"}),
        (SERVER, [], {"LLAMA_ARG_HF_REPO": "a/b"}),
        ("/opt/bin/llama", ["serve", "-m", "x.gguf"], {}),
        ("/opt/bin/llama", ["run"], {}),
        ("/opt/bin/llama-cli", [], {}),
    ],
)
def test_server_with_a_model_is_no_router(program, arguments, environ):
    refuse_router(program, arguments, read_flags(program, arguments, environ))


def test_flags_of_llama_bench_are_lists_and_it_reads_no_variables():
    environ = {"LLAMA_ARG_MODEL": "e", "LLAMA_ARG_THREADS": "9", "LLAMA_ARG_OVERRIDE_TENSOR": "c=CPU"}
    found = read_flags(BENCH, ["-m", "x", "-t", "1,2,4", "-ot", "a=CPU;b=CUDA0,a=CPU"], environ)
    overrides = [("a", "CPU"), ("b", "CUDA0"), ("a", "CPU")]
    assert found == ProgramFlags(True, model="x", threads=4, places_tensors=True, overrides=overrides)
    assert read_flags("/opt/bin/llama", ["bench"], {}).is_bench
    assert not read_flags("/opt/bin/llama", ["server"], {}).is_bench


def test_negative_threads_are_all_cores():
    assert read_flags(SERVER, ["-t", "-1"], {}).threads >= 1


def test_override_names_planned_tensors_only_and_cannot_be_split():
    names = [one.name for one in TENSORS]
    short = override_for(TENSORS, [*names, "blk.0.ffn_up_shexp.weight", "output.weight"])
    assert short == "_exps\\.=DFLASH_MOE"
    value = override_for(TENSORS, [*names, "blk.2.ffn_up_exps.weight"])
    assert value == OURS
    assert not set(",;") & set(value)
    assert override_for(TENSORS, names[1:], may_be_local=True) == OURS.replace("DFLASH_MOE", "CPU")
    pattern = value.rpartition("=")[0]
    assert "=" not in pattern
    assert all(re.search(pattern, one.name) for one in TENSORS)
    others = ("blk.2.ffn_up_exps.weight", "blk.1.ffn_up.weight", "blk.0.ffn_up_exps.bias", "blk.11.ffn_up_exps.weight")
    assert not any(re.search(pattern, name) for name in others)


def test_override_refuses_names_that_could_hold_anything():
    odd = PlannedTensor(
        layer=0,
        name="blk.0.ffn_up_exps,x=CPU",
        ggml_type=1,
        extents=(1,),
        num_bytes=2,
        file_offset=0,
        has_sample=False,
        sample=0,
    )
    with pytest.raises(ConfigError, match="its name"):
        override_for([odd], [])


@pytest.mark.parametrize(
    ("program", "given", "expected", "variables"),
    [
        # Nothing is placed: the environment, and threads with it.
        (SERVER, ["-m", "x"], ["-m", "x"], {"LLAMA_ARG_OVERRIDE_TENSOR": OURS, "LLAMA_ARG_THREADS": "6"}),
        # A placement flag stands before ours.
        (SERVER, ["-cmoe", "-t", "2"], ["-cmoe", "-t", "2", "-ot", OURS], {}),
        (SERVER, ["-ot", "a=CPU"], ["-ot", "a=CPU", "--override-tensor", OURS], {"LLAMA_ARG_THREADS": "6"}),
        (BENCH, ["-p", "512"], ["-p", "512", "-t", "6", "-ot", OURS], {}),
        (BENCH, ["-t", "1", "-ot", "a=CPU;b=CPU,c=CPU"], ["-t", "1", "-ot", f"a=CPU;b=CPU;{OURS},c=CPU;{OURS}"], {}),
        (BENCH, ["-t", "1", "-ncmoe", "2"], ["-t", "1", "-ncmoe", "2", "-ot", OURS], {}),
    ],
)
def test_ours_is_added_behind_what_the_user_says(program, given, expected, variables):
    flags = read_flags(program, given, {})
    assert add_ours(given, {"HOME": "/"}, flags, override=OURS, threads=6) == (expected, {"HOME": "/", **variables})


def test_variable_of_the_user_keeps_its_place():
    environ = {"LLAMA_ARG_OVERRIDE_TENSOR": "a=CPU", "LLAMA_ARG_THREADS": "2"}
    flags = read_flags(SERVER, [], environ)
    assert add_ours([], environ, flags, override=OURS, threads=6) == (["-ot", OURS], environ)


def test_without_a_plugin_nothing_is_placed():
    flags = read_flags(SERVER, [], {})
    assert add_ours([], {}, flags, override="", threads=6) == ([], {"LLAMA_ARG_THREADS": "6"})


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ("", []),
        ("blk\\.0\\..*exps=CUDA0", [0]),
        ("exps=CPU", []),
        ("blk\\.1\\.=CPU,exps=CUDA0", [0, 10]),
        ("exps=CUDA0", [0, 1, 10]),
        ("ffn_up=DFLASH_MOE,exps=CUDA0", [0, 1, 10]),
        ("(=CUDA0", [0, 1, 10]),
    ],
)
def test_tensors_on_other_devices_are_excluded(overrides, layers):
    flags = read_flags(SERVER, ["-ot", overrides], {})
    left = excluded(TENSORS, flags)
    assert sorted({int(name.split(".")[1]) for name in left}) == layers


@pytest.mark.parametrize("overrides", ["blk\\.1\\.ffn_up_exps=CUDA0", "ffn_down=CUDA0"])
def test_part_of_a_layer_elsewhere_is_refused(overrides):
    left = excluded(TENSORS, read_flags(SERVER, ["-ot", overrides], {}))
    assert left
    with pytest.raises(ConfigError, match="send all experts of a layer there, or none"):
        require_whole_layers(TENSORS, left)


@pytest.mark.parametrize("overrides", ["", "blk\\.1\\.=CUDA0", "exps=CUDA0"])
def test_whole_layers_may_be_elsewhere(overrides):
    require_whole_layers(TENSORS, excluded(TENSORS, read_flags(SERVER, ["-ot", overrides], {})))


def test_model_is_ours_before_the_programs(tmp_path):
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    ours.touch()
    theirs.touch()
    flags = read_flags(SERVER, ["-m", str(theirs)], {})
    assert find_model(str(ours), flags) == ours
    assert find_model(None, flags) == theirs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no model is named"),
        (["-hf", "a/b"], "download the model first"),
        (["-m", "gone.gguf"], "'gone.gguf': no such file"),
        (["-m", "/"], "-m '/': this is a directory; give the GGUF file"),
    ],
)
def test_model_that_is_not_there_is_a_sentence(arguments, said):
    with pytest.raises(ConfigError, match=said):
        find_model(None, read_flags(SERVER, arguments, {}))


def test_llama_bench_gets_one_model():
    with pytest.raises(ConfigError, match="one model"):
        find_model(None, read_flags(BENCH, ["-m", "a.gguf,b.gguf"], {}))


def test_arguments_of_the_program_are_left_alone():
    given = ["llama", "--profile", "--debug", "--", "server", "--profile", "--debug"]
    assert _normalised(given) == (["llama", "--profile", "--", "server", "--profile", "--debug"], True)
    options = commands()["llama",].params
    assert with_values(given[1:], options) == ["--profile=1", "--debug", "--", "server", "--profile", "--debug"]
