"""Runs one `dflash-moe` command that loads a model several times at once. The processes are forked
after the imports, which are most of the start of a command.

It is run as `python -m tests.fault.forked_commands OUT,ERR[:OUT,ERR...] ARGUMENTS...`, with the
inherited descriptors for stdout and stderr of each process. It prints the process ids in that
order, and then `PID STATUS` as each one ends, where a negative status is a signal.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dflash_moe.cli import main as command_line
from dflash_moe.integrations import generation, tokenizer, transformers  # noqa: F401 - preloaded
from dflash_moe.model.spec import model_spec


def main(ends: list[tuple[int, int]], arguments: list[str]) -> int:
    """Returns the exit code of the command in a forked process, and 0 in this one once all have
    ended.
    """
    # This imports the module of the model.
    model_spec(Path(arguments[arguments.index("--model") + 1]))
    pids = []
    for out, err in ends:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(out, 1)
            os.dup2(err, 2)
            for descriptor in (end for pair in ends for end in pair):
                os.close(descriptor)
            return command_line.run(arguments)
        pids.append(pid)
    for descriptor in (end for pair in ends for end in pair):
        os.close(descriptor)
    print(*pids, flush=True)
    for _ in pids:
        pid, status = os.wait()
        print(pid, os.waitstatus_to_exitcode(status), flush=True)
    return 0


if __name__ == "__main__":
    pairs = [pair.split(",") for pair in sys.argv[1].split(":")]
    sys.exit(main([(int(out), int(err)) for out, err in pairs], sys.argv[2:]))
