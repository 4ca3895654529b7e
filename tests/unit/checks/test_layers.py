"""The layer checks find what they are for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import includes, layers


def _package_file(root: Path, name: str, text: str) -> None:
    path = root / "dflash_moe" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _room_file(root: Path, name: str, text: str) -> None:
    path = root / "csrc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.py", "from dflash_moe.holders import session\n"),
        ("workers/loader.py", "def load():\n    from dflash_moe import holders\n"),
        ("holders/session.py", "from ..workers import loader\n"),
        ("telemetry/log.py", "import dflash_moe.config\n"),
        ("holders/session.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dflash_moe.cli import main\n"),
        ("holders/session.py", "import dflash_moe\nprint(dflash_moe.version, dflash_moe.workers)\n"),
        ("engine/scheduler.py", "import dflash_moe.testing.cases\n"),
        ("operators/linear.py", "from dflash_moe.engine import blocks\n"),
        ("operators/linear.py", "from dflash_moe.integrations import transformers\n"),
        ("operators/linear.py", "from dflash_moe import workers\n"),
        ("holders/session.py", "def swap():\n    from dflash_moe.operators import linear\n"),
        ("holders/session.py", "from dflash_moe.experts import layer_table\n"),
        ("holders/audit/contents.py", "from dflash_moe.holders import session\n"),
        ("operators/linear.py", "from dflash_moe.operators.layers import blocks\n"),
        ("model/formats/gguf_header.py", "from dflash_moe.model.checkpoint import Checkpoint\n"),
        ("forward/forward.py", "from dflash_moe.engine.request import Request\n"),
        ("engine/engine.py", "def prove():\n    from dflash_moe.proofs import verify\n"),
        ("integrations/generation.py", "from dflash_moe.engine import blocks\n"),
        ("forward/blocks.py", "from dflash_moe.server import app\n"),
        ("workers/loader.py", "def load():\n    from dflash_moe import _measure\n"),
    ],
)
def test_arrow_against_the_layers_is_found(tmp_path: Path, name: str, text: str) -> None:
    _package_file(tmp_path, name, text)
    assert len(layers.find(tmp_path)) == 1


def test_arrows_along_the_layers_pass(tmp_path: Path) -> None:
    _package_file(tmp_path, "holders/session.py", "from dflash_moe import errors\nfrom . import launcher\nimport numpy\n")
    _package_file(tmp_path, "cli/main.py", "from dflash_moe.holders import session\nfrom dflash_moe import errors\n")
    _package_file(tmp_path, "operators/linear.py", "import torch\nfrom dflash_moe.model import ffn\n")
    _package_file(tmp_path, "operators/layers/blocks.py", "from dflash_moe.operators import linear\nfrom . import reads\n")
    _package_file(tmp_path, "holders/fleet.py", "from dflash_moe.holders.audit.contents import compare\n")
    _package_file(tmp_path, "workers/loader.py", "from dflash_moe.model.formats import weight_formats\n")
    _package_file(tmp_path, "integrations/generation.py", "from dflash_moe.operators import linear\n")
    _package_file(tmp_path, "forward/forward.py", "from dflash_moe import integrations, operators\n")
    assert layers.find(tmp_path) == []


def test_torch_in_a_worker_is_found_even_inside_a_function(tmp_path: Path) -> None:
    _package_file(tmp_path, "workers/loader.py", "def load():\n    import torch\n")
    assert "workers must not import torch" in layers.find(tmp_path)[0]


def test_torch_at_the_top_of_an_optional_user_is_found(tmp_path: Path) -> None:
    _package_file(tmp_path, "model/spec.py", "import torch\n")
    _package_file(tmp_path, "model/inspect.py", "def look():\n    import torch\n")
    _package_file(tmp_path, "bench/forward.py", "import torch\n")
    # Whoever runs an engine has torch, and imports the engine inside a function.
    _package_file(tmp_path, "forward/forward.py", "import torch\n")
    found = sorted(finding.split(":")[0] for finding in layers.find(tmp_path))
    assert found == ["dflash_moe/bench/forward.py", "dflash_moe/model/spec.py"]


def test_the_package_knows_nothing_of_what_lies_beside_it(tmp_path: Path) -> None:
    _package_file(tmp_path, "cli/demo.py", "def demo():\n    from bench.lab.overlap import run_overlap\n")
    _package_file(tmp_path, "cli/bench/bench.py", "from dflash_moe.bench import results\n")
    assert [finding.split(" must")[0] for finding in layers.find(tmp_path)] == ["dflash_moe/cli/demo.py:2: the package"]


def test_unknown_room_is_found(tmp_path: Path) -> None:
    _package_file(tmp_path, "helpers/x.py", "")
    assert "not in the layer table" in layers.find(tmp_path)[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wire/frame.h", '#include "transport/channel.h"\n'),
        ("transport/channel.h", '#include "wire/frame.h"\n'),
        ("compute/x.cc", '#include "transport/channel.h"\n'),
        ("client/x.cc", '#include "worker/expert_worker.h"\n'),
        ("base/x.h", '#include "wire/limits.h"\n'),
        ("wire/x.cc", "#include <sys/socket.h>\n"),
        ("wire/y.cc", '#include "base/owned_fd.h"\n'),
        ("worker/x.cc", "#include <pybind11/pybind11.h>\n"),
        ("worker/x.cc", "void f() { throw 1; }\n"),
        ("worker/x.cc", "void f() { try { g(); } catch (...) {} }\n"),
        ("wire/z.cc", '#include "limits.h"\n'),
        ("compute/formats/x.h", '#include "compute/experts/ffn_spec.h"\n'),
        ("compute/experts/x.h", '#include "compute/cpu/thread_pool.h"\n'),
        ("cards/kernels/x.h", '#include "compute/cpu/kernel_set.h"\n'),
        ("compute/misplaced/x.h", '#include "compute/numerics.h"\n'),
        ("cards/kernels/x.h", '#include "wire/frame_layout.h"\n'),
        ("cards/kernels/x.h", '#include "cards/device_exchange/step_params.h"\n'),
        ("cards/device_exchange/x.cc", '#include "transport/channel.h"\n'),
        ("cards/device_exchange/x.cc", '#include "compute/cpu/kernel_set.h"\n'),
        ("cards/device_exchange/x.cc", '#include "client/sending.h"\n'),
        ("plugin/host_device.cc", '#include "cards/device_exchange/gpu_steps.h"\n'),
        ("c_interface/x.cc", '#include "compute/experts/ffn_spec.h"\n'),
        ("client/x.cc", '#include "c_interface/session.h"\n'),
        ("c_interface/x.cc", "void f() { throw 1; }\n"),
        ("client/x.cc", "void f() { try { g(); } catch (...) { h(); } }\n"),
    ],
)
def test_include_against_the_rooms_is_found(tmp_path: Path, name: str, text: str) -> None:
    _room_file(tmp_path, name, text)
    assert len(includes.find(tmp_path)) == 1


def test_includes_along_the_rooms_pass(tmp_path: Path) -> None:
    _room_file(tmp_path, "worker/x.cc", '#include "wire/frame.h"\n#include <vector>\n// never throw 1;\n')
    _room_file(tmp_path, "worker/y.cc", "void f() { try { g(); } catch (const std::system_error& e) { h(); } }\n")
    _room_file(
        tmp_path, "compute/cpu/panels/x.cc", '#include "compute/formats/matrix_view.h"\n#include "compute/cpu/kernel_set.h"\n'
    )
    _room_file(
        tmp_path,
        "cards/device_exchange/kernels/x.h",
        '#include "transport/ring/ring_words.h"\n#include "wire/frame_layout.h"\n#include "cards/portable.h"\n',
    )
    _room_file(tmp_path, "c_interface/x.cc", '#include "client/types.h"\nvoid f() { try { g(); } catch (...) { h(); } }\n')
    _room_file(tmp_path, "cards/entry/x.h", '#include "cards/device_exchange/gpu_steps.h"\n')
    _room_file(tmp_path, "bindings/x.cc", "#include <pybind11/pybind11.h>\nvoid f() { throw 1; }\n")
    assert includes.find(tmp_path) == []
