"""Lists the steps that make the recorded results, one for each measuring program, with what it
writes, what it needs of a machine and how long it takes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path

from bench.lab.reference_model import reference_model
from dflash_moe import _core
from dflash_moe.topology.numerics import CLASSES

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "bench" / "settings"
DEMO = ROOT / "bench" / "demo_model"
TWO_WORKERS = SETTINGS / "equal" / "topology.yaml"
ONE_PROCESS = SETTINGS / "one_process" / "topology.yaml"
ONE_AND_ONE = SETTINGS / "one_and_one" / "topology.yaml"
AS_THE_DEMO = SETTINGS / "demo" / "topology.yaml"
MODES = ("equal", "weak_worker", "slow_link")
CLUSTERS = ("ray", "slurm")

Command = list[object]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the files of a step go, and whether it only tries itself out."""

    folder: Path
    is_quick: bool

    def json(self, name: str) -> Path:
        """Returns the path of the result of this name."""
        return self.folder / f"{name}.json"

    def model(self) -> Path:
        """Returns the model of the campaigns, of the recorded shape or a tiny one."""
        if not self.is_quick:
            return reference_model(say=lambda line: print(line, flush=True))
        return self.made("tiny", layers=2, hidden_size=64, num_experts=8, top_k=2, moe_intermediate_size=32)

    def made(self, name: str, **sizes: int) -> Path:
        """Returns a random Qwen3-MoE in bf16 of these sizes, which is made once."""
        from dflash_moe.model.make import MakeOptions, make_checkpoint

        directory = self.folder / "models" / name
        if not (directory / "config.json").is_file():
            shutil.rmtree(directory, ignore_errors=True)
            options = {"num_layers" if key == "layers" else key: value for key, value in sizes.items()}
            make_checkpoint(MakeOptions("qwen3_moe", dtype="bf16", seed=0, **options), directory)
        return directory


@dataclass(frozen=True, slots=True)
class Step:
    """One measuring program. `commands` write `results`, of which `plots` are drawn, each as
    (result, picture, whether it is the timeline). `lacking` says what the machine lacks and is ""
    where the step can run, and `note` says what will be left out of its rows.
    """

    name: str
    results: tuple[str, ...]
    minutes: float
    commands: Callable[[Place], list[Command]]
    plots: tuple[tuple[str, str, bool], ...] = ()
    lacking: Callable[[], str] = field(default=lambda: "")
    note: Callable[[], str] = field(default=lambda: "")


def _bench(*arguments: object) -> Command:
    return [sys.executable, "-m", "dflash_moe", "bench", *arguments]


def _lab(*arguments: object) -> Command:
    return [sys.executable, "-m", "bench.lab", *arguments]


def _campaign(name: str, *arguments: object) -> Command:
    return [sys.executable, "-m", f"bench.campaigns.{name}", *arguments]


def _tried(name: str, *quick: object, full: Sequence[object] = ()) -> Callable[[Place], list[Command]]:
    """Returns the command of a campaign that writes the result of its name. It is tried out with
    the options `quick`, and recorded with `full`.
    """
    return lambda place: [_campaign(name, *_quick(place, [*full], [*quick]), "--json", place.json(name))]


def _quick(place: Place, full: Command, quick: Command) -> Command:
    return quick if place.is_quick else full


def _ipc(place: Place) -> list[Command]:
    return [_bench("ipc", *_quick(place, [], ["--payloads", "64", "--batches", 1]), "--json", place.json("ipc"))]


def _experts(place: Place) -> list[Command]:
    less: Command = ["--formats", "bf16", "--numerics", "f32-canonical", "--tokens", "1", "--threads", "1", "--repeat", 1]
    return [_bench("experts", *_quick(place, ["--repeat", 3], less), "--json", place.json("experts"))]


def _experts_bf16(place: Place) -> list[Command]:
    chosen: Command = ["--formats", "bf16", "--numerics", "f32-canonical,bf16-dot"]
    less: Command = [
        "--formats",
        "bf16",
        "--numerics",
        "f32-canonical",
        "--tokens",
        "8",
        "--threads",
        "1",
        "--repeat",
        1,
        "--no-torch",
    ]
    return [_bench("experts", *_quick(place, [*chosen, "--repeat", 5], less), "--json", place.json("experts_bf16"))]


def _modes(place: Place) -> list[Command]:
    less: Command = (
        ["--rounds", 1, "--stream-rounds", 1, "--prompt-tokens", "32", "--model", place.model()] if place.is_quick else []
    )
    return [_campaign("modes", "--settings", ",".join(MODES), *less, "--out", place.folder)]


def _local_or_remote(place: Place) -> list[Command]:
    less: Command = (
        ["--rounds", 1, "--prompt-tokens", 32, "--new-tokens", 2, "--model", place.model()] if place.is_quick else []
    )
    return [_campaign("local_against_remote", *less, "--out", place.folder)]


def _prefill(place: Place) -> list[Command]:
    less: Command = ["--prompt-tokens", 32, "--new-tokens", 2, "--repeat", 1]
    full: Command = ["--prompt-tokens", 4248, "--new-tokens", 32, "--repeat", 3]
    fixed: Command = ["--model", place.model(), "--topology", TWO_WORKERS, "--dtypes", "bf16,f32"]
    return [_bench("prefill", *fixed, *_quick(place, full, less), "--json", place.json("prefill_4248"))]


def _cores(place: Place) -> list[Command]:
    less: Command = ["--prompt-tokens", 32, "--new-tokens", 2, "--repeat", 1]
    full: Command = ["--prompt-tokens", 1024, "--new-tokens", 32, "--repeat", 5]
    cpus = sorted(os.sched_getaffinity(0))
    commands = []
    for name, chosen in (("one_core", cpus[:1]), ("two_cores", cpus[:2])):
        fixed = [
            "--model",
            DEMO / "dflash_moe_demo" / "model",
            "--topology",
            AS_THE_DEMO,
            "--modes",
            "stream,batched",
            "--no-local",
        ]
        bench = _bench("prefill", *fixed, *_quick(place, full, less), "--json", place.json(f"prefill_{name}"))
        commands.append(["taskset", "-c", ",".join(map(str, chosen)), *bench])
    return commands


def _decode_timeline(place: Place) -> list[Command]:
    less: Command = (
        ["--rounds", 1, "--short-prompt", 8, "--long-prompt", 16, "--model", place.model()] if place.is_quick else []
    )
    return [_campaign("decode_timeline", *less, "--json", place.json("decode_timeline"))]


def _memory(place: Place) -> list[Command]:
    if place.is_quick:
        model = place.model()
    else:
        model = place.made("3_6_gb", layers=6, hidden_size=2048, num_experts=64, top_k=8, moe_intermediate_size=768)
    fixed: Command = ["--model", model, "--topology", TWO_WORKERS, "--modes", "batched", "--no-local", "--repeat", 1]
    sizes: Command = ["--prompt-tokens", 32 if place.is_quick else 256, "--new-tokens", 4]
    return [_bench("prefill", *fixed, *sizes, "--json", place.json("memory_3_6_gb"))]


def _simulation(place: Place) -> list[Command]:
    run: Command = [sys.executable, "-m", "dflash_moe", "simulate", *_quick(place, ["--hours", 100], ["--seeds", 3])]
    return [[*run, "--json", place.json("simulation")]]


# How often each fault campaign breaks something in a record; `make campaign` has full sizes.
FAULTS = {
    "kills": 100, "stops": 5, "all-dead": 4, "crash-loop": 3, "partitions": 2, "lossy-link": 2, "proxies": 2,
    "control-groups": 5, "scribblers": 50, "damaged-files": 4, "strangers": 200, "registrations": 5000,
    "failing-calls": 1, "mode-changes": 4, "soak": 5,
}  # fmt: skip
# Of each place and kind, of which there are 32, a host of its own begins.
SLOW_FAULT = "failing-calls"


def _faults(place: Place) -> list[Command]:
    sizes = {**dict.fromkeys(FAULTS, 1), SLOW_FAULT: 0} if place.is_quick else FAULTS
    fixed: Command = ["--out", place.folder, "--events", place.folder / "events"]
    module: Command = [sys.executable, "-m", "bench.campaigns.faults"]
    return [[*module, name, "--size", size, *fixed] for name, size in sizes.items()]


def _lacks_for_faults() -> str:
    from bench.campaigns.faults.__main__ import CAMPAIGNS

    return next((reason for name in FAULTS if (reason := CAMPAIGNS[name].lacking())), "")


def _cluster_kills(place: Place) -> list[Command]:
    tests = [f"tests/cluster/test_{name}.py" for name in CLUSTERS]
    kills: Command = ["env", f"KILLS={2 if place.is_quick else 100}", f"KILLS_OUT={place.folder.absolute()}"]
    return [[*kills, ".ci/cluster_check", sys.executable, *tests, "-k", "no_call_fails_while_workers_are_killed"]]


def _lacks_clusters() -> str:
    is_made = (ROOT / "build" / "cluster" / "env" / "complete").is_file()
    return "" if is_made else "the environment with Ray (make cluster-check)"


def _earlier_commit(place: Place) -> list[Command]:
    less: Command = ["--rounds", 1, "--calls", 50, "--new-tokens", 4]
    build = Path(os.environ["EARLIER_BUILD"])
    return [_campaign("earlier_commit", build, *_quick(place, [], less), "--json", place.json("earlier_commit"))]


def _lacks_earlier_build() -> str:
    build = os.environ.get("EARLIER_BUILD")
    if not build or not list(Path(build).glob("dflash_moe/_core.*.so")):
        return "EARLIER_BUILD, a built checkout of the commit to compare with"
    return _lacks_two_cores()


def _lacks_kill_program() -> str:
    is_built = (ROOT / "build" / "tests" / "worker_kills").is_file()
    return "" if is_built else "the program that kills workers (cmake --build build/tests --target worker_kills)"


def _bits(place: Place) -> list[Command]:
    return [
        [sys.executable, DEMO / "bits_per_byte.py", *_quick(place, [], ["--windows", 2]), "--out", place.json("bits_per_byte")]
    ]


def _llama_check(place: Place) -> list[Command]:
    tests = [sys.executable, "-m", "pytest", "-q", ROOT / "tests" / "llama" / "test_architectures.py"]
    chosen: Command = _quick(place, [], ["-k", "qwen3moe"])
    return [["env", f"LLAMA_CHECK_OUT={place.json('llama_check')}", *tests, *chosen]]


def _llama_sources() -> Path:
    return Path(os.environ["LLAMA_CPP"]).resolve()


def _gguf_architectures(place: Place) -> list[Command]:
    chosen: Command = _quick(place, [], ["--only", "llama"])
    out = place.json("gguf_architectures")
    return [_campaign("gguf_architectures", "--llama-src", _llama_sources(), *chosen, "--json", out)]


def _gguf_logits(place: Place) -> list[Command]:
    built: Command = ["--llama-bin", Path(os.environ["LLAMA_BUILD"]) / "bin", "--llama-src", _llama_sources()]
    chosen: Command = _quick(place, [], ["--only", "q4_k"])
    return [_campaign("gguf_against_llama", *built, *chosen, "--json", place.json("gguf_against_llama"))]


def _attention(place: Place) -> list[Command]:
    less: Command = ["--contexts", "64", "--dtypes", "bf16", "--repeat", 1]
    return [_lab("attention", *_quick(place, [], less), "--json", place.json("attention"))]


def _limits(place: Place) -> list[Command]:
    less: Command = ["--sequences", 1, "--prefill", 8, "--new-tokens", 2, "--repeat", 1]
    full: Command = ["--prefill", "512,2048", "--repeat", 3]
    fixed: Command = ["--model", place.model(), "--topology", ONE_AND_ONE]
    return [_bench("limits", *fixed, *_quick(place, full, less), "--json", place.json("limits"))]


def _scheduler(place: Place) -> list[Command]:
    less: Command = ["--batch", "1,16", "--prompt-tokens", 8, "--new-tokens", 4, "--warmup", 0, "--repeat", 1]
    full: Command = [
        *("--batch", "1,2,4,8,16,32", "--prompt-tokens", 64, "--new-tokens", 64),
        *("--warmup", 1, "--repeat", 3),
    ]
    fixed: Command = ["--model", place.model(), "--topology", ONE_PROCESS, "--with-loop"]
    return [_bench("scheduler", *fixed, *_quick(place, full, less), "--json", place.json("engine_scheduler"))]


def _micro_batches(place: Place) -> list[Command]:
    less: Command = ["--rounds", 1] if place.is_quick else []
    return [_campaign("micro_batches", "--model", place.model(), *less, "--json", place.json("micro_batches"))]


def _engine_peers(place: Place) -> list[Command]:
    return [_engine_against_peers(place, "engine_against_peers", "prefill-*,decode-*", "decode-q8_0-*")]


def _engine_batches(place: Place) -> list[Command]:
    return [_engine_against_peers(place, "engine_batches", "batch*,engine1-*", "batch4-q8_0-*,engine1-q8_0-*")]


def _engine_against_peers(place: Place, result: str, rows: str, quick_rows: str) -> Command:
    chosen = ["--only", quick_rows if place.is_quick else rows]
    return [*_against_peers(place, "engine_against_peers"), *chosen, "--json", place.json(result)]


def _serving_peers(place: Place) -> list[Command]:
    less: Command = ["--formats", "q8_0"] if place.is_quick else []
    return [[*_against_peers(place, "serving_against_peers"), *less, "--json", place.json("serving_against_peers")]]


def _against_peers(place: Place, campaign: str) -> Command:
    peers: Command = ["--llama-bin", Path(os.environ["LLAMA_BUILD"]) / "bin"]
    if vllm := os.environ.get("VLLM_PYTHON"):
        peers += ["--vllm-python", vllm]
    return _campaign(campaign, *peers, *_quick(place, [], _tiny(place)))


def _larger_than_memory(place: Place) -> list[Command]:
    llama: Command = ["--llama-bin", Path(os.environ["LLAMA_BUILD"]) / "bin"] if "LLAMA_BUILD" in os.environ else []
    sizes = _quick(place, [], ["--rounds", 1, "--layers", 8, "--tokens", 4, "--tiny"])
    return [_campaign("larger_than_memory", *llama, *sizes, "--json", place.json("larger_than_memory"))]


def _serving_interference(place: Place) -> list[Command]:
    out = place.json("serving_interference")
    return [_campaign("serving_interference", *_quick(place, [], _tiny(place)), "--json", out)]


def _tiny(place: Place) -> Command:
    return ["--tiny", "--rounds", 1, "--models", place.folder / "models"]


def _engine_real_shape(place: Place) -> list[Command]:
    fixed: Command = ["--llama-bin", Path(os.environ["LLAMA_BUILD"]) / "bin", "--real-shape", "--only", "*-q4_k-*"]
    sizes = _quick(place, [], _tiny(place))
    return [_campaign("engine_against_peers", *fixed, *sizes, "--json", place.json("engine_real_shape"))]


def _lacks_llama() -> str:
    if not os.environ.get("LLAMA_CPP") or not os.environ.get("LLAMA_BUILD"):
        return "LLAMA_CPP and LLAMA_BUILD, the sources and the build of a llama.cpp"
    is_built = (ROOT / "dflash_moe" / "libggml-dflash-moe.so").is_file()
    return _lacks_two_cores() if is_built else "the plug-in (make ggml LLAMA_CPP=DIR)"


def _lacks_llama_programs() -> str:
    build = os.environ.get("LLAMA_BUILD")
    if not build or not (Path(build) / "bin" / "ggml-rpc-server").is_file():
        return "LLAMA_BUILD, a build of llama.cpp with GGML_RPC=ON"
    return _lacks_two_cores()


def _lacks_llama_sources() -> str:
    sources, build = os.environ.get("LLAMA_CPP"), os.environ.get("LLAMA_BUILD")
    if not sources or not (Path(sources) / "convert_hf_to_gguf.py").is_file():
        return "LLAMA_CPP, the sources of a llama.cpp"
    if not build or not (Path(build) / "bin" / "llama-perplexity").is_file():
        return "LLAMA_BUILD, a build of it with its tools"
    return ""


def _lacks_two_cores() -> str:
    return "" if len(os.sched_getaffinity(0)) >= 2 else "a second core"


def _lacks_bf16_arithmetic() -> str:
    """What bench/settings/one_process asks for: kernels that multiply what is rounded to bf16."""
    if not any(CLASSES[name].activations == "bf16" for name in _core.numerics_classes(_core.best_isa())):
        return "a processor that multiplies bf16 (AVX512-BF16, or Arm's)"
    return _lacks_two_cores()


def _lacks_space(disk: int = 14, memory: int = 17) -> str:
    """By default for a file of 12 GB that is read from the page cache, beside 4 GB of memory."""
    has_disk = shutil.disk_usage(tempfile.gettempdir()).free >= disk << 30
    has_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= memory << 30
    return "" if has_disk and has_memory else f"{disk} GiB of disk for temporary files and {memory} GiB of memory"


def _lacks_network() -> str:
    if os.geteuid() != 0:
        return "root"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun"
    return "" if shutil.which("tc") and shutil.which("ip") else "ip and tc (iproute2)"


def _lacks_corpus() -> str:
    sys.path.insert(0, str(DEMO))
    try:
        from corpus import CORPUS_PYTHON
    finally:
        sys.path.remove(str(DEMO))
    found = ".".join(map(str, sys.version_info[:3]))
    return (
        "" if found == CORPUS_PYTHON else f"Python {CORPUS_PYTHON}, whose documentation is the held-out text (this is {found})"
    )


def _without_llama() -> str:
    return "" if os.environ.get("LLAMA_BUILD") else "LLAMA_BUILD is not set: the rows of llama.cpp are left out"


def _without_peers() -> str:
    return "" if util.find_spec("kt_kernel") else "kt-kernel is not installed here: its rows are left out"


def _lacks_vllm() -> str:
    return "" if os.environ.get("VLLM_PYTHON") else "VLLM_PYTHON, an interpreter that has vLLM (make vllm-check)"


def _without_vllm() -> str:
    return "" if os.environ.get("VLLM_PYTHON") else "VLLM_PYTHON names no interpreter that has vLLM: its rows are left out"


STEPS: tuple[Step, ...] = (
    Step("ipc", ("ipc",), 2, _ipc, (("ipc", "ipc.png", False),), _lacks_two_cores),
    Step("experts", ("experts",), 10, _experts, (("experts", "experts.png", False),)),
    Step("experts-bf16", ("experts_bf16",), 2, _experts_bf16),
    Step("gemm", ("layer_against_gemm",), 3, _tried("layer_against_gemm", "--rounds", 1, "--tokens", 32)),
    Step(
        "peers",
        ("experts_against_peers",),
        15,
        _tried("experts_against_peers", "--rounds", 1, "--tokens", 1, "--threads", 1, "--layers", 1, full=("--rounds", 4)),
        note=_without_peers,
    ),
    Step("loading", ("weight_loading",), 3, _tried("weight_loading", "--rounds", 1, "--experts", 2)),
    Step("stored", ("stored_start",), 5, _tried("stored_start", "--rounds", 1, "--layers", 2, "--tiny")),
    Step(
        "larger",
        ("larger_than_memory",),
        7,
        _larger_than_memory,
        note=_without_llama,
    ),
    Step("mapped", ("mapped_weights",), 6, _tried("mapped_weights", "--rounds", 1, "--experts", 8, "--formats", "q8_0")),
    Step(
        "modes",
        tuple(f"modes_{name}" for name in MODES),
        25,
        _modes,
        tuple(
            (f"modes_{name}", f"modes_{name}{'_timeline' if is_timeline else ''}.png", is_timeline)
            for name in MODES
            for is_timeline in (False, True)
        ),
    ),
    Step("local-remote", ("local_against_remote_prefill", "local_against_remote_decode"), 5, _local_or_remote),
    Step(
        "overlap",
        ("slice_overlap",),
        1,
        _tried("slice_overlap", "--rounds", 1, "--tokens", 128, "--hidden-size", 64, "--moe-intermediate-size", 32),
    ),
    Step("link", ("emulated_link",), 3, _tried("emulated_link", "--rounds", 1), lacking=_lacks_network),
    Step("prefill", ("prefill_4248",), 10, _prefill, (("prefill_4248", "prefill_4248.png", False),)),
    Step("cores", ("prefill_one_core", "prefill_two_cores"), 2, _cores, lacking=_lacks_two_cores),
    Step("timeline", ("decode_timeline",), 9, _decode_timeline, lacking=_lacks_two_cores),
    Step("memory", ("memory_3_6_gb",), 4, _memory),
    Step("parity", ("verify_families",), 5, _tried("verify_families", "--families", "mixtral")),
    Step("odd-settings", ("odd_settings",), 30, _tried("odd_settings", "--families", "mixtral", "--most", 1)),
    Step("verify-real", ("verify_real_size",), 8, _tried("verify_real_size", "--tiny", "--rounds", 1), lacking=_lacks_space),
    Step("weight-errors", ("weight_errors",), 2, _tried("weight_errors", "--formats", "int8_g32,q8_0")),
    Step("class-errors", ("class_errors",), 1, _tried("class_errors", "--classes", next(iter(CLASSES)))),
    Step("simulation", ("simulation",), 8, _simulation),
    Step(
        "worker-kills",
        ("worker_kills",),
        2,
        _tried("worker_kills", "--kills", 4, "--stops", 2, "--lone-kills", 2),
        lacking=_lacks_kill_program,
    ),
    Step(
        "several-hosts",
        ("several_hosts",),
        15,
        _tried("several_hosts", "--tiny", "--rounds", 1, "--seconds", 0.5, "--faults", 1),
        lacking=_lacks_two_cores,
    ),
    Step("cluster-kills", tuple(f"kills_{name}" for name in CLUSTERS), 5, _cluster_kills, lacking=_lacks_clusters),
    Step("rolling-restarts", ("rolling_restarts",), 4, _tried("rolling_restarts", "--quick", "--transports", "shared")),
    Step("audit", ("audit",), 2, _tried("audit", "--runs", 1, "--healthy-rows", 200, "--starts", 1)),
    Step("faults", tuple(f"fault_{name}" for name in FAULTS), 13, _faults, lacking=_lacks_for_faults),
    Step("fallback-kills", ("fallback_kills",), 12, _tried("fallback_kills", "--kills", 2)),
    Step("device-step-faults", ("device_step_faults",), 4, _tried("device_step_faults", "--faults", 4, "--lone-faults", 1)),
    Step("earlier-commit", ("earlier_commit",), 7, _earlier_commit, lacking=_lacks_earlier_build),
    Step("skewed-routing", ("skewed_routing",), 1, _tried("skewed_routing", "--rounds", 1), lacking=_lacks_two_cores),
    Step("bits", ("bits_per_byte",), 5, _bits, lacking=_lacks_corpus),
    Step("gguf-architectures", ("gguf_architectures",), 3, _gguf_architectures, lacking=_lacks_llama_sources),
    Step("gguf-logits", ("gguf_against_llama",), 3, _gguf_logits, lacking=_lacks_llama_sources),
    Step("llama-check", ("llama_check",), 2, _llama_check, lacking=_lacks_llama),
    Step(
        "llama-hosts",
        ("llama_hosts",),
        15,
        _tried("llama_hosts", "--rounds", 1, "--repetitions", 2, "--formats", "q8_0", "--no-slots"),
        lacking=_lacks_llama,
    ),
    Step("attention", ("attention",), 1, _attention),
    Step("limits", ("limits",), 5, _limits, lacking=_lacks_two_cores),
    Step(
        "depth",
        ("depth",),
        12,
        _tried("depth", "--tiny", "--rounds", 1, "--layers", "1,2"),
        lacking=lambda: _lacks_two_cores() or _lacks_space(disk=19, memory=22),
    ),
    Step("dispatch", ("host_dispatch",), 1, _tried("host_dispatch", "--rounds", 1, "--layers", 2)),
    Step("scheduler", ("engine_scheduler",), 2, _scheduler, lacking=_lacks_bf16_arithmetic),
    Step("micro-batches", ("micro_batches",), 2, _micro_batches, lacking=_lacks_bf16_arithmetic),
    Step("requests", ("engine_requests",), 6, _tried("engine_requests", "--requests", 40)),
    Step("engine-peers", ("engine_against_peers",), 30, _engine_peers, lacking=_lacks_llama_programs, note=_without_vllm),
    Step("engine-batches", ("engine_batches",), 20, _engine_batches, lacking=_lacks_llama_programs, note=_without_vllm),
    Step("engine-real", ("engine_real_shape",), 14, _engine_real_shape, lacking=_lacks_llama_programs),
    Step("vllm-workers", ("vllm_workers",), 6, _tried("vllm_workers", "--rounds", 1, "--tiny"), lacking=_lacks_vllm),
    Step("serving-peers", ("serving_against_peers",), 15, _serving_peers, lacking=_lacks_llama_programs, note=_without_vllm),
    Step("serving-interference", ("serving_interference",), 6, _serving_interference, lacking=_lacks_two_cores),
    Step(
        "serving-faults",
        ("serving_faults",),
        5,
        _tried("serving_faults", "--requests", 60, "--vanishing", 20, "--rounds", 1, "--kills", 2),
    ),
)
