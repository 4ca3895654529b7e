"""Device steps of a simulated GPU host with real worker processes: the bits of plain calls, and no
hang whatever a worker does.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import ConfigError, ExpertRuntime, Topology, UnsupportedError, WorkerError, WorkerLost, WorkerTimeout, _core
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint

torch = pytest.importorskip("torch")

NUM_EXPERTS, TOP_K, HIDDEN, LAYERS = 9, 3, 96, 3
# A simulated card computes slowly, and shows progress seldom where others have the cores.
TOPOLOGY = """
version: 1
ipc: {stall_timeout_s: 60}
host: {device: %s, experts: {memory: 30%%}}
workers:
  - {name: near, backend: cpu, threads: 1%s}
  - {name: card, backend: sim, simulate: hip}
"""
PROMPT_S = 20.0  # below the call timeout that is the default: what must not wait for that


def topology(device: str = "'sim:0', simulate: cuda", near: str = "") -> Topology:
    return Topology.parse(TOPOLOGY % (device, near))


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    directory = tmp_path_factory.mktemp("steps")
    return tiny_checkpoint(directory, hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=TOP_K, num_layers=LAYERS)


def batch(tokens: int, dtype: Any = torch.float32, seed: int = 0) -> tuple[Any, Any, Any]:
    made = routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=seed)
    hidden, ids, weights = (torch.from_numpy(np.asarray(part)) for part in made)
    return hidden.to(dtype), ids, weights


def bits(tensor: Any) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def decode(experts: Any, dtype: Any) -> list[bytes]:
    """A step as a model makes it: each layer reads the former one's result. Several sizes, and
    layers with idle holders.
    """
    found = []
    for tokens in (1, 4, 64):
        hidden, ids, weights = batch(tokens, dtype, seed=tokens)
        for layer in range(LAYERS):
            hidden = experts(layer, hidden, ids, weights)
            found.append(bits(hidden))
    hidden, ids, weights = batch(2, dtype, seed=9)
    # the first holder alone, the last alone, nobody
    for alone in (0, NUM_EXPERTS - 1, NUM_EXPERTS):
        found.append(bits(experts(1, hidden, torch.full_like(ids, alone), weights)))
    return found


@pytest.mark.parametrize(("model", "wire"), [("float32", "f32"), ("bfloat16", "bf16"), ("float32", "f16")])
def test_a_step_gives_the_bits_of_plain_calls_and_of_a_host_without_a_device(spec, model, wire):
    dtype = getattr(torch, model)
    with ExpertRuntime.start(topology("cpu"), model=spec, dtype=wire) as runtime:
        expected = decode(runtime.experts, dtype)
    # A step asks each worker once; `auto` may cut the calls that are compared with it.
    with ExpertRuntime.start(topology(), model=spec, dtype=wire, mode="batched") as runtime:
        assert decode(runtime.experts, dtype) == expected
        before = runtime.stats()["totals"]
        with runtime.device_step() as step:
            found = decode(step.experts, dtype)
        assert found == expected
        with runtime.device_step():
            assert decode(runtime.experts, dtype) == expected, "experts() in a step is the step's"
        after = runtime.stats()["totals"]
        assert decode(runtime.experts, dtype) == expected, "plain calls go on after steps"
    for count in ("calls", "rows", "pairs", "request_bytes", "reply_bytes", "floor_bytes"):
        assert after[count] == 3 * before[count], count


def test_a_models_decode_steps_give_the_tokens_of_plain_calls(tmp_path):
    pytest.importorskip("transformers")
    from transformers import DynamicCache

    from bench.models.families import tiny_options
    from dflash_moe.integrations.transformers import expert_calls, load_model
    from dflash_moe.model.make import make_checkpoint

    make_checkpoint(tiny_options("qwen3_moe", "f32"), tmp_path)
    prompt = torch.arange(80).reshape(1, 80) % 200

    def generate(model: Any, step: Any) -> list[bytes]:
        cache, found = DynamicCache(config=model.config), []
        with torch.inference_mode():
            # more than a step takes
            token = model(input_ids=prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
            for _ in range(3):
                with step():
                    logits = model(input_ids=token, past_key_values=cache).logits[:, -1:]
                found.append(bits(logits))
                token = logits.argmax(-1)
        return found

    with ExpertRuntime.start(topology(), model=tmp_path) as runtime:
        model = load_model(tmp_path, runtime)
        expected = generate(model, nullcontext)
        calls = sum(expert_calls(model).values())
        assert generate(model, runtime.device_step) == expected
        assert sum(expert_calls(model).values()) == 2 * calls > 0


def test_steps_need_a_device_shared_memory_and_few_tokens(spec):
    with ExpertRuntime.start(topology("cpu"), model=spec) as runtime, pytest.raises(ConfigError, match=r"host\.device is cpu"):
        runtime.device_step()
    with ExpertRuntime.start(topology(near=", address: unix"), model=spec) as runtime:
        refused = pytest.raises(UnsupportedError, match="worker near is reached by unix; device steps need shared memory")
        with refused, runtime.device_step():
            pass
        assert runtime.experts(0, *batch(3)).shape == (3, HIDDEN)
    with ExpertRuntime.start(topology(), model=spec) as runtime:
        with pytest.raises(ConfigError, match=r"tokens 65; allowed are 1\.\.64"), runtime.device_step() as step:
            step.experts(0, *batch(65))
        with runtime.device_step(), pytest.raises(ConfigError, match="a step is open already"), runtime.device_step():
            pass
        assert runtime.experts(0, *batch(65)).shape == (65, HIDDEN)


@pytest.mark.parametrize(("worker", "is_warned"), [
    ("backend: sim, simulate: cuda", True), ("backend: sim, simulate: cuda, address: loopback", False),
    ("backend: sim, simulate: hip", False), ("backend: cpu, threads: 1", False),
])  # fmt: skip
def test_a_worker_process_on_the_hosts_own_card_is_warned_of_with_the_remedy(spec, caplog, worker, is_warned):
    asked = f"version: 1\nhost: {{device: 'sim:0', simulate: cuda}}\nworkers: [{{name: near, {worker}}}]\n"
    with caplog.at_level(logging.WARNING), ExpertRuntime.start(Topology.parse(asked), model=spec):
        pass
    found = [text for text in caplog.messages if "the host's own card, in another process" in text]
    assert len(found) == is_warned
    assert all(text.startswith("worker near computes on sim-cuda 0") and "`address: loopback`" in text for text in found)


def test_calls_of_other_threads_wait_until_the_step_is_over(spec):
    with ExpertRuntime.start(topology(), model=spec) as runtime:
        expected = bits(runtime.experts(0, *batch(2)))
        found: list[bytes] = []
        other = threading.Thread(target=lambda: found.append(bits(runtime.experts(0, *batch(2)))))
        with runtime.device_step() as step:
            other.start()
            assert bits(step.experts(0, *batch(2))) == expected
            assert not found
        other.join(PROMPT_S)
        assert found == [expected]


def test_a_step_that_is_never_left_ends_other_threads_calls_by_their_own_deadline(spec):
    with ExpertRuntime.start(topology(), model=spec, call_timeout_s=0.3) as runtime:
        expected = bits(runtime.experts(0, *batch(2)))
        found: list[BaseException] = []

        def call_and_switch() -> None:
            for action in (lambda: runtime.experts(0, *batch(2)), lambda: runtime.submit(0, *batch(2)).result()):
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - looked at below
                    found.append(error)

        other = threading.Thread(target=call_and_switch)
        with runtime.device_step():
            other.start()
            other.join(PROMPT_S)
            assert not other.is_alive()
            with pytest.raises(ConfigError, match="this thread is in a device step"):
                runtime.set_mode("stream")
            with pytest.raises(ConfigError, match="open already"), runtime.device_step():
                pass
        assert [type(error) for error in found] == [WorkerTimeout, WorkerTimeout]
        assert "device step" in str(found[0])
        assert bits(runtime.experts(0, *batch(2))) == expected


def stop(runtime: ExpertRuntime, name: str, number: int) -> int:
    pid = next(process.pid for process in runtime.worker_processes() if process.name == name)
    os.kill(pid, number)
    until = time.monotonic() + PROMPT_S
    while number == signal.SIGSTOP and not is_stopped(pid) and time.monotonic() < until:
        os.sched_yield()  # a thread on another core goes on until it is told
    return pid


def is_stopped(pid: int) -> bool:
    """True once no thread of the process runs any more."""
    try:
        states = [
            task.joinpath("stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
        ]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
        return False
    return all(state == "T" for state in states)


def test_a_worker_killed_in_a_step_ends_it_as_lost_and_a_new_runtime_goes_on(spec):
    with ExpertRuntime.start(topology(), model=spec, restart=False, host_fallback="none") as runtime:
        expected = bits(runtime.experts(0, *batch(4)))
        hidden, ids, weights = batch(4)
        alone = bits(runtime.experts(0, hidden, torch.full_like(ids, NUM_EXPERTS - 1), weights))
        began = time.monotonic()
        with pytest.raises(WorkerLost, match=r"worker near") as caught, runtime.device_step() as step:  # noqa: PT012
            step.experts(0, *batch(4))
            stop(runtime, "near", signal.SIGKILL)
            for layer in range(LAYERS):
                step.experts(layer, *batch(4))
        assert time.monotonic() - began < PROMPT_S
        assert str(caught.value).count("worker near") == 1, caught.value
        assert "layer " in str(caught.value)
        with pytest.raises(WorkerLost, match="near"):
            runtime.experts(0, *batch(4))
        last = torch.full_like(ids, NUM_EXPERTS - 1)
        assert bits(runtime.experts(0, hidden, last, weights)) == alone, "calls that do not need it go on"
    with ExpertRuntime.start(topology(), model=spec) as runtime, runtime.device_step() as step:
        assert bits(step.experts(0, *batch(4))) == expected


def test_a_call_in_a_step_raises_the_steps_own_error_with_its_cause(spec, monkeypatch):
    cause = OSError("why")

    def fail(*_: Any) -> None:
        raise WorkerLost("worker near is lost", worker="near") from cause

    with ExpertRuntime.start(topology(), model=spec) as runtime, runtime.device_step() as step:
        monkeypatch.setattr(step, "experts", fail)
        with pytest.raises(WorkerLost) as caught:
            runtime.experts(0, *batch(4))
        assert str(caught.value) == "worker near is lost", "no remedy of plain calls is added"
        assert caught.value.__cause__ is cause


def test_a_worker_killed_in_a_step_is_back_for_a_later_one(spec):
    with ExpertRuntime.start(topology(), model=spec, park_s=PROMPT_S, host_fallback="none") as runtime:
        expected = bits(runtime.experts(0, *batch(4)))
        with pytest.raises(WorkerLost, match=r"worker near"), runtime.device_step() as step:  # noqa: PT012
            step.experts(0, *batch(4))
            stop(runtime, "near", signal.SIGKILL)
            for layer in range(LAYERS):
                step.experts(layer, *batch(4))
        assert bits(runtime.experts(0, *batch(4))) == expected, "plain calls wait until it is back"
        with runtime.device_step() as step:
            assert bits(step.experts(0, *batch(4))) == expected


def test_a_stopped_worker_costs_the_deadline_and_its_late_reply_is_never_taken(spec):
    with ExpertRuntime.start(topology(), model=spec, call_timeout_s=3.0) as runtime:
        expected = [bits(runtime.experts(layer, *batch(4))) for layer in range(LAYERS)]
        began = time.monotonic()
        with pytest.raises(WorkerTimeout, match=r"worker near, layer model\.layers\.0.*deadline of a device step"):  # noqa: PT012, SIM117
            with runtime.device_step() as step:
                pid = stop(runtime, "near", signal.SIGSTOP)
                for layer in range(LAYERS):
                    step.experts(layer, *batch(4))
        assert 2.9 < time.monotonic() - began < PROMPT_S
        os.kill(pid, signal.SIGCONT)
        assert [bits(runtime.experts(layer, *batch(4))) for layer in range(LAYERS)] == expected, "replayed by plain calls"
        with runtime.device_step() as step:
            assert [bits(step.experts(layer, *batch(4))) for layer in range(LAYERS)] == expected


def test_a_step_after_a_plain_call_that_timed_out_gets_paths_without_its_late_reply(spec):
    with ExpertRuntime.start(topology(), model=spec, call_timeout_s=3.0, host_fallback="none") as runtime:
        expected = bits(runtime.experts(0, *batch(4)))
        pid = stop(runtime, "near", signal.SIGSTOP)
        with pytest.raises(WorkerTimeout):
            runtime.experts(0, *batch(4))
        os.kill(pid, signal.SIGCONT)
        with runtime.device_step() as step:
            assert bits(step.experts(0, *batch(4))) == expected


def test_ctrl_c_in_a_step_ends_it_and_the_next_works(spec):
    with ExpertRuntime.start(topology(), model=spec) as runtime:
        expected = bits(runtime.experts(0, *batch(4)))
        with pytest.raises(KeyboardInterrupt), runtime.device_step() as step:  # noqa: PT012
            step.experts(0, *batch(4))
            raise KeyboardInterrupt
        with runtime.device_step() as step:
            assert bits(step.experts(0, *batch(4))) == expected


def test_numbers_that_do_not_fit_fail_the_step_by_layer_and_token(spec):
    with ExpertRuntime.start(topology(), model=spec, dtype="f16") as runtime:
        hidden, ids, weights = batch(4)
        hidden[2, 5] = 1e6
        with pytest.raises(WorkerError, match=r"layer model\.layers\.1\.mlp\.experts, token 2: a finite hidden state"):  # noqa: SIM117
            with runtime.device_step() as step:
                step.experts(1, hidden, ids, weights)
        for wrong in (-1, -2, NUM_EXPERTS + 1, 10**6):
            ids[3, 0] = wrong
            with pytest.raises(ConfigError, match=r"token 3: an id of topk_ids is no expert"), runtime.device_step() as step:
                step.experts(1, batch(4)[0], ids, weights)
        assert runtime.experts(1, *batch(4)).shape == (4, HIDDEN)


def test_an_error_in_the_block_leaves_the_runtime_usable(spec):
    with ExpertRuntime.start(topology(), model=spec) as runtime:
        with pytest.raises(ZeroDivisionError), runtime.device_step() as step:  # noqa: PT012
            step.experts(0, *batch(4))
            1 / 0  # noqa: B018
        with runtime.device_step() as step:
            step.experts(0, *batch(4))


def test_where_the_device_takes_no_read_only_memory_started_workers_give_open_segments(spec, monkeypatch):
    real, attempts = _core.DeviceStep, [0]

    class Choosy:
        """The device of a driver that registers writable mappings only."""

        define_layer = real.define_layer

        def __new__(cls, *arguments, **options):
            attempts[0] += 1
            if attempts[0] == 1:
                raise UnsupportedError("registering 4096 bytes of the host's memory to be read failed: not supported")
            return real(*arguments, **options)

    with ExpertRuntime.start(topology(), model=spec) as runtime:
        expected = bits(runtime.experts(0, *batch(4)))
        monkeypatch.setattr(_core, "DeviceStep", Choosy)
        for _ in range(2):
            with runtime.device_step() as step:
                assert bits(step.experts(0, *batch(4))) == expected
        assert attempts == [3], "asked once for other segments"
        assert bits(runtime.experts(0, *batch(4))) == expected
        attempts[0] = 0
        with pytest.raises(UnsupportedError, match="registering"), runtime.device_step():
            pass
        assert bits(runtime.experts(0, *batch(4))) == expected, "plain calls go on where steps cannot"
