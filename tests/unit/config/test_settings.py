"""The settings table: every way to give a setting, their precedence, and what is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe import _core
from dflash_moe.cli.main import run
from dflash_moe.config import (
    ISAS,
    NO_CACHE,
    SECTIONS,
    SETTINGS,
    SETTINGS_BY_NAME,
    CacheSettings,
    MemoryBudget,
    Settings,
    format_bytes,
    on_worker_loss,
    parse_budget,
    parse_bytes,
    resolve_settings,
)
from dflash_moe.config.remedies import brings_workers_back, host_grace_ms
from dflash_moe.errors import ConfigError
from dflash_moe.topology import Topology

IPC = "DFLASH_MOE_EXPERT_COMPUTE_IPC_"
COMPUTE = "DFLASH_MOE_EXPERT_COMPUTE_"

# name: (text as a user writes it, parsed); different from the default where there is a choice
GOOD = {
    "preset": ("Fast", "fast"),
    "experts_on_card": ("12", 12),
    "mode": ("Stream", "stream"),
    "transport": ("SHARED", "shared"),
    "dtype": ("bf16", "bf16"),
    "reply_dtype": ("F16", "f16"),
    "numerics": ("Close", "close"),
    "batch_capacity": ("4096", 4096),
    "stream_tokens": ("7", 7),
    "stream_tokens_max": ("5", 5),
    "shared_bytes": ("64MiB", 64 << 20),
    "socket_buffer_bytes": ("1MiB", 1 << 20),
    "required": ("1", True),
    "profile": ("1", True),
    "threads": ("3", 3),
    "key_file": ("some.key", Path("some.key")),
    "engine_topology": ("two.yaml", Path("two.yaml")),
    "encryption": ("OFF", "off"),
    "call_timeout_s": ("0.5", 0.5),
    "start_timeout_s": ("120", 120.0),
    "stall_timeout_s": (1, 1.0),
    "spin_us": ("0", 0),
    "failure_order": (["Host", "reconnect"], ("host", "reconnect")),
    "hedge": ("0", 0.0),
    "suspect_ms": (150, 150.0),
    "reconnect_grace_ms": ("0", 0.0),
    "park_s": ("0", 0.0),
    "audit_cpu": ("0.2 %", 0.002),
    "scrub_s": ("60", 60.0),
    "restart": ("off", False),
    "restart_backoff_ms": ([50, 800], (50.0, 800.0)),
    "restart_deaths": ("9", 9),
    "restart_window_s": ("30", 30.0),
    "host_fallback": ("Mapped", "mapped"),
    "host_operators": ("Torch", "torch"),
    "host_activations": ("INT8", "int8"),
    "block_tokens": ("16", 16),  # the only value that is allowed
    "kv_memory": ("1.5 GiB", MemoryBudget(3 << 29)),
    "kv_dtype": ("F16", "f16"),
    "max_context": ("4096", 4096),
    "max_batch_tokens": ("256", 256),
    "max_requests": ("16", 16),
    "max_queue": ("100", 100),
    "order": ("Packing", "packing"),
    "micro_batches": ("2", "2"),
    "speculate": ("Prompt", "prompt"),
    "prefix_cache": ("off", False),
    "cache_path": ("/var/cache/experts", Path("/var/cache/experts")),
    "cache_max_bytes": ("64 GiB", 64 << 30),
    "cache_panels": ("Off", "off"),
    "cpu_isa": ("avx2", "avx2"),
    "handover": ("/run/handover", Path("/run/handover")),
    "handover_token_fd": ("7:81234", "7:81234"),
}
# name: values that are not allowed
BAD = {
    "preset": ["", "close", "slow", 1],
    "experts_on_card": ["-1", "4097", "all", "", True],
    "mode": ["", "fast", "batch", 1],
    "transport": ["rdma", "unix"],
    "dtype": ["fp16", "float32", "auto"],
    "reply_dtype": ["int8"],
    "numerics": ["", "int8", "1"],
    "batch_capacity": ["0", "4097", "1e3", "-1", "", 1.0, True],
    "stream_tokens": ["0", "x"],
    "stream_tokens_max": ["0", "4097"],
    "shared_bytes": ["-1", "lots", "1.5.5GiB", "4 parsecs", None.__class__],
    "socket_buffer_bytes": ["4095", "2GiB", "0", "-1", "much", True],
    "required": ["2", "yes", "", 1.0],
    "profile": ["on"],
    "threads": ["0", "many", "1025"],
    "key_file": ["", 3],
    "engine_topology": ["", 3],
    "encryption": ["yes", "tls", "", 1],
    "call_timeout_s": ["0", "-1", "nan", "inf", "soon", "86401", True],
    "start_timeout_s": ["0"],
    "stall_timeout_s": ["nan"],
    "spin_us": ["-1", "1000001", "much"],
    "failure_order": ["drop", ["host", "host"], ["host", "replica"], [1], {}, 3, True],
    "hedge": ["-0.1", "1.01", "nan", "5%", True],
    "suspect_ms": ["0", "60001", "nan", "soon", True],
    "reconnect_grace_ms": ["-1", "60001", "inf", True],
    "park_s": ["-1", "nan", "forever", True],
    "audit_cpu": ["101%", "-1%", "0.2", 0.002, "a little", True, ""],
    "scrub_s": ["-1", "hourly", True],
    "restart": ["never", "", 1],
    "restart_backoff_ms": [[100], [200, 100], [0, 5], [1, 600001], [True, 5], "100,5000", 100, [1, 2, 3]],
    "restart_deaths": ["0", "100001", True],
    "restart_window_s": ["0", "inf"],
    "host_fallback": ["packed", "", 1, True],
    "host_operators": ["own", "", 1],
    "host_activations": ["f64", "", "auto"],
    "block_tokens": ["32", "8", "0", "auto", 16.0, True],
    "kv_memory": ["0", "0%", "101%", "-1%", "25 percent", "%", "lots", "0.25", 0.25, True],
    "kv_dtype": ["", "fp8", "int8"],
    "max_context": ["0", "16777217", "auto", True],
    "max_batch_tokens": ["0", "65537", "lots", True],
    "max_requests": ["0", "4097", "auto"],
    "max_queue": ["0", "-1", "1048577"],
    "order": ["lifo", ""],
    "micro_batches": ["3", "0", "off", True],
    "speculate": ["on", "", "mtp", True],
    "prefix_cache": ["1", "yes", "", 1],
    "cache_path": ["", "cache", "./cache", "~nobody-of-this-name/cache", "/a\0b", 3, True],
    "cache_max_bytes": ["0", "-1", "half", "10%", "", 0, True],
    "cache_panels": ["", "always", "1", 1],
    "cpu_isa": ["sse9", ""],
    "handover": ["", 3],
    "handover_token_fd": ["-1:2", "7", "stdin", ":", ""],
}


def test_the_tables_of_this_test_cover_every_setting():
    assert set(GOOD) == set(BAD) == set(SETTINGS_BY_NAME) == {field.name for field in dataclasses.fields(Settings)}


def test_defaults_of_the_table_are_those_of_the_dataclass():
    assert resolve_settings(environ={}) == Settings()
    for setting in SETTINGS:
        assert getattr(Settings(), setting.name) == setting.default, setting.name


@pytest.mark.parametrize("name", list(GOOD))
def test_argument_environment_and_yaml_give_the_same_value(name):
    text, expected = GOOD[name]
    setting = SETTINGS_BY_NAME[name]
    assert getattr(resolve_settings(environ={}, **{name: text}), name) == expected
    if setting.environment:
        assert getattr(resolve_settings(environ={setting.environment: str(text)}), name) == expected
    if setting.section:
        assert getattr(resolve_settings({setting.yaml: text}, environ={}), name) == expected


@pytest.mark.parametrize("name", list(GOOD))
def test_what_was_read_once_is_taken_again(name):
    # A topology has read its sections already when a runtime resolves its settings.
    setting = SETTINGS_BY_NAME[name]
    read = setting.check(GOOD[name][0], "first")
    again = setting.check(read, "again")
    assert again == read
    assert type(again) is type(read)


def test_an_audit_that_a_topology_turns_off_is_off():
    for text, share in (("off", 0.0), ("0.5%", 0.005)):
        topology = Topology.parse(f"version: 1\nworkers: [{{name: w0}}]\naudit: {{cpu: {text}}}\n")
        assert resolve_settings(topology.stated_settings, environ={}).audit_cpu == share


def test_what_is_kept_on_disk_is_one_value_that_comes_through_a_command_line():
    given = {"cache_path": "~/kept", "cache_max_bytes": "1GiB", "cache_panels": "on"}
    cases = {
        CacheSettings(): {},
        CacheSettings(Path.home() / "kept", max_bytes=1 << 30, panels="on"): given,
        CacheSettings(is_off=True, max_bytes=1 << 30, panels="on"): given | {"cache_path": "None"},
        CacheSettings(panels="off"): {"cache_panels": "off"},
    }
    for expected, overrides in cases.items():
        cache = resolve_settings(environ={}, **overrides).cache
        assert cache == expected
        words = cache.to_options()
        assert CacheSettings.from_options(dict(zip(words[::2], words[1::2], strict=True))) == expected
    assert [cache.has_panels for cache in cases] == [True, True, False, False]


def test_a_path_that_means_nothing_is_kept_is_taken_again():
    setting = SETTINGS_BY_NAME["cache_path"]
    assert setting.check(setting.check(" None ", "first"), "again") == "none"


def test_no_test_touches_what_this_user_keeps_on_disk():
    assert resolve_settings().cache == NO_CACHE


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_that_is_not_allowed_is_named_with_its_origin_and_the_allowed_ones(name, value):
    setting = SETTINGS_BY_NAME[name]
    sources = [(name, {"environ": {}, name: value}, {})]
    if setting.environment and isinstance(value, str):
        sources.append((setting.environment, {"environ": {setting.environment: value}}, {}))
    if setting.section:
        sources.append((setting.yaml, {"environ": {}}, {setting.yaml: value}))
    for origin, arguments, stated in sources:
        with pytest.raises(ConfigError) as caught:
            resolve_settings(stated, **arguments)
        message = str(caught.value)
        assert message.startswith(origin)
        assert setting.allowed in message
        assert not isinstance(value, str) or repr(value) in message


def test_precedence_is_argument_then_environment_then_yaml_then_default():
    environ = {f"{IPC}MODE": "batched", f"{COMPUTE}BATCH": "3"}
    stated = {"ipc.mode": "stream", "ipc.stream_tokens": 2, "ipc.batch_capacity": 99}
    settings = resolve_settings(stated, environ=environ, mode="auto", dtype=None)
    assert (settings.mode, settings.stream_tokens, settings.batch_capacity, settings.dtype) == ("auto", 3, 99, None)


def test_an_unknown_transport_is_refused_wherever_it_is_asked_for(tmp_path, capsys):
    expected = "'pigeon' is not allowed; allowed: auto, shared, stream, fabric"
    (tmp_path / "pigeon.yaml").write_text("version: 1\nipc: {transport: pigeon}\nworkers: [{name: w0}]\n")
    sources = [
        lambda: resolve_settings(environ={}, transport="pigeon"),
        lambda: resolve_settings(environ={f"{IPC}TRANSPORT": "Pigeon"}),
        lambda: resolve_settings({"ipc.transport": "pigeon"}, environ={}),
        lambda: Topology.load(tmp_path / "pigeon.yaml"),
    ]
    for source in sources:
        with pytest.raises(ConfigError, match="(?i)" + re.escape(expected)):
            source()
    assert run(["generate", "--model", ".", "--prompt", "x", "--transport", "pigeon"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"--transport: {expected}"


def test_what_becomes_of_a_lost_workers_experts_is_said_in_the_order_of_the_remedies():
    text = on_worker_loss(Settings())
    words = ["another worker", "wait 2 s", "the host's processor", "raise WorkerLost until it is back"]
    assert [text.index(word) for word in words] == sorted(text.index(word) for word in words)
    assert "50 ms after the loss" in text


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"required": True}, "ipc.required is 1"),
        ({"host_fallback": "none"}, "host.fallback is none"),
        ({"failure_order": ["replica", "reconnect"]}, "failure.order has no host"),
        ({"required": True, "host_fallback": "mapped"}, "ipc.required is 1"),
    ],
)
def test_what_forbids_the_host_to_compute_is_named(overrides, why):
    text = on_worker_loss(resolve_settings(environ={}, **overrides))
    assert f"the host does not compute them: {why}" in text
    assert "processor" not in text


@pytest.mark.parametrize(
    ("overrides", "why"),
    [({"restart": False}, "failure.restart is off"), ({"failure_order": ["host"]}, "failure.order has no reconnect")],
)
def test_workers_come_back_only_where_both_settings_say_so(overrides, why):
    assert brings_workers_back(Settings())
    resolved = resolve_settings(environ={}, **overrides)
    assert not brings_workers_back(resolved)
    assert f"until it is released ({why})" in on_worker_loss(resolved)


def test_the_host_waits_for_no_worker_where_the_order_names_it_first():
    assert host_grace_ms(Settings()) == 50
    assert host_grace_ms(resolve_settings(environ={}, failure_order="host, reconnect")) == 0
    assert host_grace_ms(resolve_settings(environ={}, failure_order="replica, host")) == 50


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.binary(max_size=8), st.lists(st.integers()),
    st.sampled_from([10**400, -(10**5000), "9" * 5000, "~nobody-of-this-name/key", "\0", "x" * 5000, object(), np.int64(3),
                     np.float32("nan"), np.arange(3), {}, {"a": 1}, b"path"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SETTINGS_BY_NAME)), ANYTHING)
def test_any_value_of_any_setting_is_taken_or_a_config_error(name, value):
    for given_as in ({"overrides": {name: value}}, {"stated": {SETTINGS_BY_NAME[name].yaml or "no key": value}}):
        try:
            resolve_settings(given_as.get("stated"), environ={}, **given_as.get("overrides", {}))
        except ConfigError as error:
            assert len(str(error)) < 500  # noqa: PT017 - any other exception fails the test


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_environment_is_taken_or_a_config_error(suffix, text):
    for variable in (f"DFLASH_MOE_{suffix}", f"{IPC}MODE", f"{COMPUTE}BATCH", "DFLASH_MOE_KEY_FILE"):
        with contextlib.suppress(ConfigError):
            resolve_settings(environ={variable: text})


@pytest.mark.parametrize("name", ["mode", "stream_tokens", "required"])
def test_a_losing_source_is_not_read(name):
    setting = SETTINGS_BY_NAME[name]
    text, expected = GOOD[name]
    assert getattr(resolve_settings({setting.yaml: "nonsense"}, environ={}, **{name: text}), name) == expected


def test_stream_tokens_above_the_maximum_is_refused_naming_both():
    with pytest.raises(ConfigError, match=rf"{COMPUTE}BATCH: 33 is not allowed; allowed: 1..32 tokens \({COMPUTE}BATCH_MAX"):
        resolve_settings(environ={f"{COMPUTE}BATCH": "33"})
    assert resolve_settings(environ={f"{COMPUTE}BATCH": "33", f"{COMPUTE}BATCH_MAX": "64"}).stream_tokens == 33


def test_default_of_stream_tokens_follows_a_lower_maximum():
    assert resolve_settings(environ={f"{COMPUTE}BATCH_MAX": "2"}).stream_tokens == 2


def test_a_misspelt_variable_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match=f"{IPC}MODES is not a setting; did you mean '{IPC}MODE'"):
        resolve_settings(environ={f"{IPC}MODES": "auto"})
    with pytest.raises(ConfigError, match="DFLASH_MOE_ZZZ is not a setting; unset it"):
        resolve_settings(environ={"DFLASH_MOE_ZZZ": "1"})
    assert resolve_settings(environ={"PATH": "x", "DFLASH": "y"}) == Settings()


def test_unknown_arguments_and_keys_are_errors_with_a_suggestion():
    with pytest.raises(ConfigError, match="unknown setting 'moode'; did you mean 'mode'"):
        resolve_settings(environ={}, moode="auto")
    with pytest.raises(ConfigError, match=r"unknown key 'ipc.transprt'; did you mean 'ipc.transport'"):
        resolve_settings({"ipc.transprt": "auto"}, environ={})
    with pytest.raises(ConfigError, match=r"unknown key 'engine.kv_memry'; did you mean 'engine.kv_memory'"):
        resolve_settings({"engine.kv_memry": "1GiB"}, environ={})
    # A topology reads these by itself, and states them nowhere as a setting.
    with pytest.raises(ConfigError, match=r"unknown key 'workers\[\].threads'"):
        resolve_settings({"workers[].threads": 1}, environ={})


def test_spin_auto_is_left_to_the_plan():
    assert resolve_settings({"ipc.spin_us": "auto"}, environ={}).spin_us is None


def test_the_dtype_of_the_kv_cache_is_the_models_own_by_default_and_with_auto():
    assert resolve_settings(environ={}).kv_dtype is None
    assert resolve_settings({"engine.kv_dtype": "f16"}, environ={"DFLASH_MOE_ENGINE_KV_DTYPE": "Auto"}).kv_dtype is None


def test_another_block_size_is_refused_with_the_reason():
    with pytest.raises(
        ConfigError, match="^engine.block_tokens: 32 is not allowed; allowed: 16, which is the page of the atten"
    ):
        resolve_settings({"engine.block_tokens": 32}, environ={})


def test_a_setting_of_a_section_has_its_key_there():
    for setting in SETTINGS:
        if setting.section:
            assert (setting.section in SECTIONS, setting.yaml) == (True, f"{setting.section}.{setting.key}")
        else:
            assert setting.key is None


def test_every_kernel_set_of_the_core_can_be_forced():
    assert set(_core.supported_isas()) <= set(ISAS)


AMOUNTS = [("0", 0), (5, 5), ("5 bytes", 5), ("1KiB", 1024), ("1 kb", 1000), ("1.5GiB", 3 << 29), ("2TB", 2 * 10**12)]


@pytest.mark.parametrize(("text", "expected"), AMOUNTS)
def test_amounts_of_memory_take_units(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1G", "1e9", "8gib8", "99999TiB", True, 1.5, None, "1 GiB GiB", "٣GiB"])
def test_other_amounts_are_refused(text):
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "of_800"), [("25%", 200), ("12.5 %", 100), ("100%", 800), ("0%", 0), ("1KiB", 1024), (7, 7), (MemoryBudget(9), 9)]
)
def test_budgets_are_amounts_or_percentages_of_a_whole(value, of_800):
    assert parse_budget(value).resolve(800) == of_800


@pytest.mark.parametrize("value", ["101%", "1e2%", "-1%", "%", "a quarter", 0.25, None, True, "1%%", "٣%", []])
def test_other_budgets_are_refused(value):
    with pytest.raises(ValueError, match="bytes"):
        parse_budget(value)


def test_amounts_are_written_in_the_largest_unit():
    assert [format_bytes(n) for n in (0, 1023, 1536, 13314398618, 1 << 60)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "12.4 GiB", "1048576.0 TiB",
    ]  # fmt: skip
