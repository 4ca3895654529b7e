"""Imports every module of the package that needs nothing but the standard library, on whatever
Python runs this: a name that this version lacks is found here. It is run by interpreters.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import dflash_moe
from dflash_moe.errors import UnsupportedError

# Who lacks one of these cannot import what needs it, and that is no finding. Everything else is.
OTHERS = frozenset(
    ("blake3", "click", "gguf", "httptools", "huggingface_hub", "matplotlib", "msgpack", "numpy", "prometheus_client",
     "prompt_toolkit", "ray", "rich", "safetensors", "sglang", "starlette", "tokenizers", "torch", "transformers",
     "typer", "uvicorn", "vllm", "yaml")
)  # fmt: skip
EXTENSIONS = ("_core", "_measure", "_simulation")


def findings() -> tuple[int, list[str]]:
    """Returns how many modules could be imported, and what failed of the others."""
    count, found = 0, []
    root = Path(dflash_moe.__path__[0])
    for path in sorted(root.rglob("*.py")):
        if path.stem in ("__init__", "__main__"):
            continue
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        try:
            importlib.import_module(name)
        except UnsupportedError as error:
            # What is built apart from the core is named so where it is not there.
            if not any(f"(dflash_moe.{extension})" in str(error) for extension in EXTENSIONS):
                found.append(f"{name}: {error}")
        except ImportError as error:
            lacks_extension = any(f"'{extension}'" in str(error) for extension in EXTENSIONS)
            if not lacks_extension and (error.name or "").partition(".")[0] not in OTHERS:
                found.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, this version cannot use the module
            found.append(f"{name}: {error!r}")
        else:
            count += 1
    return count, found


if __name__ == "__main__":
    imported, failed = findings()
    print("\n".join(failed) or f"{imported} modules")
    sys.exit(1 if failed else 0)
