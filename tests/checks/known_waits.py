"""Every place that may wait without a limit in its own call, and why it ends: file, expression as
the scan of waits.py writes it, reason.

`straight:` is a mutex that is held over straight-line code only; the scan looks at the code.
`bounded:` is anything else, with what bounds it. A wait without a bound has no place here.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

_NON_BLOCKING_BELL = "bounded: the bell is a non-blocking eventfd, which answers at once"
_NEVER_BLOCKS = "bounded: held over one call of an encrypted connection, and none of those waits"
_WAKES_ONLY = "bounded: FUTEX_WAKE never sleeps, and this file has no FUTEX_WAIT"
_HANDED_BACK = (
    "bounded: the thread takes back what it gave up a line before; the interpreter hands it on every few milliseconds"
)
_KILLED = "bounded: the child was killed by SIGKILL a line before, which no process outlives"

KNOWN: dict[str, dict[str, str]] = {
    # -- C++ ---------------------------------------------------------------------------------------
    "csrc/bindings/bind_call.cc": {
        "wait client": "bounded: each turn waits at most kSignalPeriodNs, the whole until the caller's deadline",
    },
    "csrc/bindings/bind_program.cc": {
        "wait run": "bounded: as that of bind_call.cc, until the call's own deadline",
    },
    "csrc/bindings/client_box.h": {"gil gil_scoped_acquire": _HANDED_BACK},
    "csrc/bindings/bind_secure.cc": {"lock box.mutex": _NEVER_BLOCKS},
    "csrc/bindings/boxes.h": {"lock mutex": _NEVER_BLOCKS},
    "csrc/c_interface/connection.cc": {
        "::connect": "bounded: the socket is non-blocking, so a busy listener answers EAGAIN, and tries end at the deadline",
        "::poll": "bounded: its timeout is what is left until the deadline, a nap of 10 ms, or none",
        "lock sending_": "bounded: held over one message, whose waits end at its sender's deadline of seconds",
    },
    "csrc/c_interface/dflash_moe.cc": {
        "wait session": "bounded: takes a second at a time or the caller's limit; the call's own deadline ends the whole",
    },
    "csrc/c_interface/environment.cc": {
        "::poll": "bounded: its timeout is what is left of five seconds",
        "::read": "bounded: called when poll has said that the pipe has bytes or is at its end",
    },
    "csrc/c_interface/keeper.cc": {
        "::poll": "bounded: for half a second at most, after which the keeper looks whether it is to stop",
        "::read": _NON_BLOCKING_BELL,
        "lock mutex_": "straight: compares or copies counters, and nothing is called",
    },
    "csrc/c_interface/session.cc": {
        "::poll": "bounded: kExitPatienceMs, the time that a process's end may take for its last counters",
        "::write": _NON_BLOCKING_BELL,
        "join keeper_": "bounded: is_stopping_ was set and the bell rung; what the keeper sends or takes has limits of seconds",
        "lock mutex_": "straight: guards the table of calls and the totals, and nothing that waits is called",
        "wait client_": "bounded: takes the caller's deadline as its argument",
    },
    "csrc/client/step_watch.cc": {
        "::ppoll": "bounded: 5 ms, or less until the step's deadline",
        "join thread_": "bounded: is_over_ was set and told; the thread looks at it every 5 ms and takes short turns between",
        "lock mutex_": "straight: keeps or copies one error, and nothing is called",
    },
    "csrc/client/turn.cc": {
        "::read": _NON_BLOCKING_BELL,
        "::write": _NON_BLOCKING_BELL,
        "lock mutex_": "bounded: held over counters and a non-blocking eventfd; a wait on released_ gives it up",
        "wait released_": "bounded: who has the turn gives it up, a driver within one tick of 20 ms, a short turn at its end",
    },
    "csrc/compute/cpu/cpu_layer.cc": {"lock mutex_": "straight: keeps or takes one error, and nothing is called"},
    "csrc/compute/experts/layer_checks.cc": {
        "lock mutex_": "straight: keeps or takes one place, and nothing is called",
    },
    "csrc/compute/cpu/page_buffer.cc": {"lock mutex_": "straight: counts bytes, and maps a region at most"},
    "csrc/compute/cpu/scratch_pool.h": {
        "join releaser_": "bounded: is_closing_ was set and told; between two looks it unmaps idle blocks at most",
        "lock mutex_": "straight: moves pointers, and starts a thread once; a timed wait under it gives it up",
    },
    "csrc/compute/cpu/thread_pool.cc": {
        "join thread": "bounded: is_stopping_ was set and told; sleepers look again by themselves, tasks are finite arithmetic",
        "lock mutex_": "straight: guards the sleepers' counters; waits under it are timed and give it up",
        "lock turn_mutex_": "straight: draws or counts a number; the wait under it is timed and gives it up",
        "spin _mm_pause": "bounded: spin_until looks at its deadline after 32 turns",
    },
    "csrc/cards/gpu_device.cc": {
        "lock mutex_": "bounded: whoever has the device drains it within wait_limit_; then it counts as hung and nobody waits",
        "wait runtime_": "bounded: DeviceRuntime::wait takes the longest time as its argument, in the loop until wait_limit_",
    },
    "csrc/cards/gpu_device.h": {
        "lock lock_": "bounded: a Turn lasts for one batch, whose device work is drained within wait_limit_",
    },
    "csrc/cards/gpu_host.cc": {
        "wait runtime_": "bounded: DeviceRuntime::wait takes the longest time as its argument, handed down by the caller",
    },
    "csrc/cards/gpu_host.h": {
        "lock lock_": "bounded: a Turn lasts for one operation of a device step, each of which has a limit or only queues",
    },
    "csrc/cards/module/module_runtime.cc": {
        "spin sched_yield": "bounded: the loop looks at its deadline in every turn before it yields",
    },
    "csrc/ggml_plugin/initialize.cc": {
        "lock mutex": "bounded: the first call holds it while the library opens, for the supervisor's start timeout at most",
    },
    "csrc/ggml_plugin/notice.h": {"lock mutex": "straight: looks a text up in a set, and prints after it"},
    "csrc/ggml_plugin/weight_buffer.cc": {"lock mutex_": "straight: keeps or copies the first refusal's text"},
    "csrc/measure/bindings/bind_bells.cc": {"gil gil_scoped_acquire": _HANDED_BACK},
    "csrc/measure/bindings/bind_experts.cc": {"gil gil_scoped_acquire": _HANDED_BACK},
    "csrc/simulation/bindings/module.cc": {"gil gil_scoped_acquire": _HANDED_BACK},
    "csrc/measure/bell_device.cc": {
        "spin sched_yield": "bounded: the loop looks at its deadline whenever it yields",
    },
    "csrc/measure/fabric_floor.cc": {
        "::ppoll": "bounded: a tenth of a second at most, after which the deadline is looked at",
    },
    "csrc/measure/floor.cc": {
        "::poll": "bounded: the ten seconds of kTimeoutNs",
        "::sendmsg": "bounded: set_timeouts gave the socket SO_SNDTIMEO before the pipe was made",
        "futex SYS_futex": "bounded: waits for a second at most, and for 100,000 of them or wake-ups altogether",
        "join thread": "bounded: the answering thread ends by its own deadline, also when measuring failed",
    },
    "csrc/cards/entry/host_table.h": {
        "wait host->steps": "bounded: takes the longest time as its argument, timeout_ns of the C table",
    },
    "csrc/plugin/host_device.cc": {
        "lock mutex_": "bounded: held over one call of the plug-in's table; each of them queues only, or takes a limit",
    },
    "csrc/plugin/plugin_backend.cc": {
        "wait table_": "bounded: takes the longest time of a batch as its argument, kBatchTimeoutNs",
    },
    "csrc/store/background_reader.cc": {
        "join thread_": "bounded: stopping_ was set and told; the thread looks at it after each MiB that it reads",
        "lock mutex_": "bounded: held over a list of orders; whoever starts the thread under it waits for no other thread",
        "lock shard->failure_mutex_": "straight: keeps one error, and nothing is called",
        "lock held->failure_mutex_": "straight: keeps one error, and nothing is called",
        "wait changed_": "bounded: it waits for orders of this process for as long as its store lives; the destructor ends it",
    },
    "csrc/store/bus_guard.cc": {"lock mutex": "straight: takes or frees one entry of a list, and nothing that waits is called"},
    "csrc/store/watched_files.cc": {
        "lock mutex_": "bounded: held over one fstat per file, and after a change over a tick of the kernel, 20 ms at most",
    },
    "csrc/store/compute_turns.cc": {
        "lock mutex_": "straight: reads a length or counts",
        "lock turns_.mutex_": "straight: changes lists of as many as there are sessions",
    },
    "csrc/store/compute_turns.h": {
        "lock turns_.mutex_": "straight: changes a list; the wait under it is timed and gives it up",
    },
    "csrc/store/damage_reports.h": {
        "lock mutex_": "straight: adds to or takes from a queue; the wait under it is timed and gives it up",
    },
    "csrc/store/expert_slots.cc": {
        "lock reads_mutex_": "bounded: guards a queue and counters; waits under it give it up, those of calls are timed",
        "lock lease_mutex_": "bounded: held over one call, which ends kStandstillNs after the disk's last sign at the latest",
        "wait has_reads_": "bounded: for orders of this process itself, until the destructor ends it",
        "join reader": "bounded: stopping_ was set and told; a reader ends with the read that it has begun",
    },
    "csrc/store/expert_slots.h": {
        "lock held_": "bounded: lease_mutex_, held over one call, which ends kStandstillNs after the disk's last sign",
    },
    "csrc/store/resident_shard.cc": {
        "lock compute_mutex_": "bounded: held over one forward, or over loading one expert again from the page cache",
        "lock failure_mutex_": "straight: takes one error, and nothing is called",
        "lock files_mutex_": "straight: adds to a short list of files",
        "lock pieces_mutex_": "straight: reads or changes pointers to an expert's memory, and gives pages back",
    },
    "csrc/store/shard_panels.cc": {
        "lock pieces_mutex_": "straight: reads or changes pointers to an expert's memory, and gives pages back",
    },
    "csrc/store/shard_store.cc": {
        "lock mutex_": "straight: guards the table of shards; memory of a device is taken without it",
    },
    "csrc/transport/fabric/endpoint.cc": {
        "lock mutex_": "bounded: held while libfabric looks at the interfaces of this machine, parts of a second",
    },
    "csrc/transport/tapped.cc": {
        "::read": _NON_BLOCKING_BELL,
        "::write": _NON_BLOCKING_BELL,
        "lock mutex_": "bounded: held over a list of copies, or one read or write of a non-blocking bell",
    },
    "csrc/transport/ring/ring_bell.cc": {
        "futex SYS_futex": _WAKES_ONLY,
        "join thread_": "bounded: is_over_ was set; the watching thread looks at it after each nap of microseconds",
        "spin __builtin_ia32_pause": "bounded: the watching loop ends when is_over_ is set, which the destructor does",
    },
    "csrc/transport/ring/ring_channel.cc": {
        "::read": _NON_BLOCKING_BELL,
        "::write": _NON_BLOCKING_BELL,
        "futex SYS_futex": _WAKES_ONLY,
    },
    "csrc/transport/secure/relay.cc": {
        "::poll": "bounded: ends with the connection, by hang-up or keep-alive, or with the bell that its owner rings",
        "::write": _NON_BLOCKING_BELL,
        "join thread_": "bounded: the bell was rung a line before, which the thread sees between two calls that do not wait",
    },
    "csrc/transport/stream/stream_kinds.cc": {
        "::accept4": "bounded: the connection was made a line before, so one waits in the queue",
        "::connect": "bounded: over loopback to a listening socket of this function, which the kernel answers at once",
    },
    "csrc/transport/try_kind.cc": {
        "join worker": "bounded: the thread takes one message within a second and answers into a free slot",
    },
    "csrc/simulation/caller.cc": {
        "wait client_": "bounded: takes the deadline of its caller, in virtual time",
    },
    "csrc/simulation/simulation.cc": {
        "wait caller_": "bounded: ten milliseconds of virtual time a turn; the calls end by their own deadlines",
    },
    "csrc/transport/wait.cc": {
        "::ppoll": "bounded: its timeout is what is left until the deadline",
        "futex SYS_futex": "bounded: FUTEX_WAIT_BITSET until the absolute time of the deadline",
        "spin __builtin_ia32_pause": "bounded: the loop reads the clock after a few turns and ends at the deadline",
    },
    "csrc/worker/pulse.cc": {
        "join thread_": "bounded: stopping_ was set and told; the thread looks again in 20 ms, and its sends never wait",
        "lock mutex_": "straight: guards stopping_; the send under it is MSG_DONTWAIT, the wait is timed and gives it up",
    },
    # -- Python ------------------------------------------------------------------------------------
    "bench/lab/bell_echo.py": {
        "call os.read": "bounded: the parent writes or its death closes the pipe; the answers are read after select said so",
        "call os.waitpid": _KILLED,
        "call os.write": "bounded: four bytes into a pipe that holds 64 KiB and is empty",
    },
    "dflash_moe/bench/streaming/load.py": {
        "call slots.acquire": "bounded: a place is free once a request has ended, and each has the time limit of --timeout",
    },
    "dflash_moe/bench/streaming/served_model.py": {
        "call process.poll": "bounded: it looks whether the process has ended, and waits for nothing",
    },
    "dflash_moe/bench/ipc.py": {
        "call listener.accept": "bounded: the listener has a timeout of five seconds",
        "call os.waitpid": _KILLED,
    },
    "dflash_moe/cli/chat/terminal.py": {
        "lock self._lock": "bounded: held over one write to the terminal, which a notice waits for on stderr as well",
    },
    "dflash_moe/cli/launch.py": {
        "call stopped.wait": "bounded: the command lasts until somebody ends it, and no party is waited for",
    },
    "dflash_moe/cli/llama/program.py": {
        "call self._process.poll": "bounded: Popen.poll asks whether the child has ended and does not wait",
    },
    "dflash_moe/cli/loading.py": {
        "lock self._lock": "bounded: held over a dictionary and rich's own lock; bars are drawn by a thread of rich's",
    },
    "dflash_moe/cli/simulate.py": {
        "leave ThreadPoolExecutor": "bounded: the seeds under way end; virtual time goes on even for code that spins",
        "call done.result": "bounded: a seed ends, because virtual time goes on even for code that spins",
    },
    "dflash_moe/engine/chat_prompts.py": {
        "lock self._lock": "bounded: held while the template is looked for in files of the checkpoint, once",
    },
    "dflash_moe/engine/delivery.py": {
        "lock self._lock": "bounded: held over lists and the bells of who waits; all waits are done without it",
    },
    "dflash_moe/integrations/chat_template.py": {
        "lock self._lock": "bounded: held over one rendering, which ends by its deadline or with its process",
    },
    "dflash_moe/integrations/grammar_process.py": {
        "call socket.recv_fds": "bounded: it waits for what it is to start, and ends with the process that asks",
        "call os.read": "bounded: the pipe was made non-blocking two lines before",
        "call sock.sendall": "bounded: the process is ended by its pipe once nobody reads its answers",
    },
    "dflash_moe/integrations/grammar_starter.py": {
        "call ours.sendall": "bounded: the socket has a timeout of START_S",
        "call ours.recv": "bounded: the socket has a timeout of START_S",
        "call socket.send_fds": "bounded: the socket has a timeout of START_S",
    },
    "dflash_moe/integrations/ray/worker_actor.py": {
        "call self._start().wait": "bounded: an actor lasts as long as its worker, all that this thread is for",
    },
    "dflash_moe/integrations/limited_process.py": {
        "call os.read": "bounded: the pipe does not block, and select before it has the deadline",
        "call os.write": "bounded: the pipe does not block, and select before it has the deadline",
    },
    "dflash_moe/integrations/grammars.py": {
        "lock self._lock": "bounded: held while a command is put into a queue without a bound, or the thread is started",
        "call process.sock.sendall": "bounded: the socket has a timeout of SEND_S",
        "call process.sock.recv": "bounded: the selector has said that there is something, or that it is at its end",
        "call self._wakes.recv": "bounded: the socket does not block",
    },
    "dflash_moe/forward/rotary_tables.py": {
        "lock self._lock": "bounded: held while tables of cosines are computed; nobody waits for anything else within it",
    },
    "dflash_moe/engine/sampling/token_masks.py": {
        "call self._condition.wait": "bounded: it waits for requests for as long as its engine lives; close() wakes it",
        "lock self._condition": "bounded: held over tables and a thread's start; masks are asked without it, waits give it up",
    },
    "dflash_moe/forward/halves/two_halves.py": {
        "call jobs.get": "bounded: it waits for halves for as long as its model lives; close() and its end put None",
    },
    "dflash_moe/integrations/engine_experts.py": {
        "leave ThreadPoolExecutor": "bounded: it has ended, by the line below",
        "call thread.submit(work).result": "bounded: it reads a checkpoint's headers, or starts workers within their limits",
    },
    "dflash_moe/integrations/parameter_values.py": {
        "leave ThreadPoolExecutor": "bounded: each task converts the tensors of one expert, and its taker has STANDSTILL_S"
    },
    "dflash_moe/integrations/tokenizer.py": {
        "call os.write": "bounded: stderr, once while a tokenizer is read; whoever stops reading it stops every line there",
    },
    "dflash_moe/store/expert_loading.py": {
        "leave ThreadPoolExecutor": "bounded: each task sums up a part of one shard in memory, and waits for nobody",
    },
    "dflash_moe/protocol/control.py": {
        "call sock.sendall": "bounded: the line above sets the socket's time-out, which the whole call keeps",
        "call sock.recv": "bounded: the socket's time-out is what is left until the caller's deadline",
        "call sock.connect": "bounded: the socket has a time-out of ANSWER_S",
    },
    "dflash_moe/protocol/framing.py": {
        "call poller.poll": "bounded: without a limit only while its peer lives: the peer's end wakes it (TCP_USER_TIMEOUT)",
        "call self._sock.recvmsg": "bounded: called with MSG_DONTWAIT among its flags",
        "call socket.send_fds": "bounded: few bytes on a Unix socket whose buffer has room, whether or not the peer reads",
    },
    "dflash_moe/holders/client_calls.py": {
        "lock self._lock": "bounded: held over calls of the client that take its turn for microseconds, and wait for nothing",
    },
    "dflash_moe/holders/audit/contents.py": {"lock self._lock": "straight: looks up and keeps one value, calls nothing"},
    "dflash_moe/holders/dialing.py": {
        "call sock.connect": "bounded: the socket has a timeout of CONNECT_S at most, set before",
    },
    "dflash_moe/protocol/tcp_sockets.py": {
        "call sock.connect": "bounded: the socket has a timeout of what its caller gives, set before",
    },
    "dflash_moe/protocol/doorway.py": {
        "call poller.poll": "bounded: who listens waits for others while it lives; close() ends the polled pipe",
        "call self._sock.accept": "bounded: the listening socket is non-blocking",
        "lock self._lock": "straight: counts the lines that are withheld, and logs after it was given up",
    },
    "dflash_moe/holders/newcomers.py": {
        "call waiting.get": "bounded: it waits for newcomers while its runtime lives; call_off() puts the last one",
    },
    "dflash_moe/protocol/strangers.py": {
        "lock self._lock": "bounded: held over a list of as many as its listener keeps; nothing that waits is called",
    },
    "dflash_moe/experts/expert_call.py": {
        "call self._call.result": "bounded: the core's call is done at this point, so it answers at once",
        "call call.result": "bounded: the core's call is done at this point, so it answers at once",
    },
    "dflash_moe/holders/events.py": {
        "lock self._lock": "bounded: held over one write to, or read of, a non-blocking bell, or the take of its descriptor",
    },
    "dflash_moe/holders/fleet.py": {
        "call future.exception": "bounded: asked of futures that wait() has said are done",
        "call session.connect": "bounded: takes timeout_s, the start's limit, as its argument",
        "leave ThreadPoolExecutor": "bounded: each step of a start has the start's limit; a failed one ends the others",
    },
    "dflash_moe/handover/handover_socket.py": {
        "call self._listener.accept": "bounded: the listening socket is non-blocking",
    },
    "dflash_moe/holders/holder_lists.py": {
        "lock self._lock": "bounded: held over one call of the client, which takes its turn for microseconds",
    },
    "dflash_moe/holders/host_fallback.py": {
        "lock self._lock": "bounded: held over fields of stand-ins and a thread that is made, not started",
    },
    "dflash_moe/holders/local_worker.py": {
        "lock self._lock": "bounded: held while what serves is ended or begun, for STOP_S at most where a thread does not end",
    },
    "dflash_moe/holders/launcher.py": {
        "call os.write": "bounded: a key of 32 bytes into a pipe that holds 64 KiB and is empty",
        "call outcome.exception": "bounded: called back when the outcome is there, so it answers at once",
        "call outcome.result": "bounded: called back when the outcome is there, so it answers at once",
        "lock self._lock": "bounded: held over a put on a queue without a limit, which never waits",
        "call self._orders.get": "bounded: it waits for orders for as long as its runtime lives; close() sends the last one",
    },
    "dflash_moe/holders/control.py": {
        "lock self._lock": "straight: adds a thread to a set, takes one out, or copies the set",
        "call listener.accept": "bounded: the listener is non-blocking, and poll has said that somebody is there",
        "call poller.poll": "bounded: it waits for orders for as long as its runtime lives; close() shuts the socket down",
    },
    "dflash_moe/holders/elastic.py": {
        "lock self._lock": "bounded: held over changes of tables and calls of the client, whose turn comes within a tick",
    },
    "dflash_moe/holders/holder.py": {
        "call started.process.poll": "bounded: asks the kernel once whether the child has ended, and never waits",
    },
    "dflash_moe/holders/row_audit.py": {
        "call poller.poll": "bounded: it waits for copies for as long as its runtime lives; call_off() rings the same bell",
        "lock self._lock": "bounded: held over a table of workers or a tap's own short lock",
    },
    "dflash_moe/holders/audit/golden.py": {
        "leave ThreadPoolExecutor": "bounded: what was not begun is given up, and one row loads its few experts",
        "call one.result": "bounded: each row before it loads its few experts, within a budget for all of them",
        "call compared.popleft().result": "bounded: the row has been compared",
        "lock self._computing_lock": "bounded: held while one row is computed, which loads the row's few experts",
        "lock self._lock": "straight: counts a comparison, and nothing is called",
    },
    "dflash_moe/holders/audit/host_twin.py": {
        "lock self._lock": "bounded: held while one row is computed, which loads the row's few experts",
    },
    "dflash_moe/experts/step_replay.py": {"lock self._lock": "straight: counts or copies counts, and nothing is called"},
    "dflash_moe/handover/supervisor.py": {
        "call socket.accept": "bounded: takes timeout_s, one tick of the accepting thread, as its argument",
        "lock self._lock": "bounded: held over the fields of a worker and the start of a thread; nothing in it waits",
    },
    "dflash_moe/holders/worker_keeper.py": {
        "lock self._lock": "bounded: held over a state machine's step, reads of it, or what the client is told of a newcomer",
    },
    "dflash_moe/server/front/large_bodies.py": {
        "lock self._lock": "bounded: held over one body, which is read within a deadline or given up",
    },
    "dflash_moe/server/front/engine_link.py": {"call question.result": "bounded: a future of asyncio that is done"},
    "dflash_moe/server/front/process.py": {"call link.ending.result": "bounded: a future of asyncio that is done"},
    "dflash_moe/server/front/text_threads.py": {
        "call computed.exception": "bounded: asyncio calls this once the future is done",
        "call computed.result": "bounded: asyncio calls this once the future is done",
    },
    "dflash_moe/server/front/event_stream.py": {
        "call taking.result": "bounded: the task is done, as the line before has asked",
        "call writing.result": "bounded: the task is done, as the line before has asked",
    },
    "dflash_moe/server/front/request_log.py": {
        "call os.write": "bounded: a thread that nobody waits for but for a second at the end; what it holds up is dropped",
        "call self._lines.get": "bounded: ends with the line that close() sends, or with the process, whose daemon it is",
    },
    "dflash_moe/server/front_keeper.py": {
        "lock self._lock": "bounded: held over frames that are queued, and over packing the tokenizer; nobody waits in it",
    },
    "dflash_moe/server/relay.py": {
        "call self._sock.recv": "bounded: ends with the front, whose death closes the pair, and by `hang_up`",
        "call self._sock.sendall": "bounded: SO_SNDTIMEO of the socket, 30 s without a byte taken",
        "lock self._lock": "bounded: held over the submission of one prompt, or over the numbers of a step's deltas",
    },
    "dflash_moe/server/serving.py": {
        "call self._events.get": "bounded: ends with a signal, the failure of the front, or the drain, which has a deadline",
        "call self._is_up.wait": "bounded: ends with the front that is up, its failure, or the process, whose daemon it is",
    },
    "dflash_moe/store/scrub.py": {"lock self._lock": "bounded: held over looking up or keeping a shard and a few numbers"},
    "dflash_moe/store/machine_panels.py": {
        "lock self._lock": "bounded: held over dictionaries, and once for a checkpoint while the folder is opened",
    },
    "dflash_moe/store/panel_writer.py": {
        "lock self._lock": "bounded: held over a list, or the start of a thread, which waits for no other",
    },
    "dflash_moe/telemetry/logs.py": {
        "lock self._lock": "bounded: held over a read of at most 4 KiB of memory, or the close of its descriptor",
    },
    "dflash_moe/telemetry/stop_signals.py": {
        "call os.read": "bounded: it waits for signals for as long as its block lasts, whose end closes the other end",
        "call watching.join": "bounded: the pipe that it reads was closed a line before",
    },
    "dflash_moe/workers/listener.py": {
        "call probe.connect": "bounded: the probing socket has a timeout of one second",
        "call self._callers.get": "bounded: a worker waits for hosts for as long as it lives; stop() and close() put None",
    },
    "dflash_moe/workers/process.py": {
        "leave ThreadPoolExecutor": "bounded: a registered worker's life; stop() ends each wait and each session",
        "call one.exception": "bounded: these threads end when stop() is called or their hosts are given up",
    },
    "dflash_moe/workers/resident.py": {
        "lock self._lock": "bounded: held over a list, and over a store made or freed, whose threads end in STOP_S",
    },
}  # fmt: skip
