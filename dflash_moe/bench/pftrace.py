"""Writes a recording as a Perfetto trace (TrackEvent protobufs), for ui.perfetto.dev. It needs the
`trace` extra, of which only message classes are imported: its `trace_processor` would download a
program.

Track by track there are the host (request, steps, calls, and what a call does: encode, wait,
combine) and every worker (link out, queue, compute, link back, and counters). A flow leads through
one slice: encode, link out, queue, compute, link back, combine. Spans of a track that overlap lie
in several tracks of one name.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.recording import Recording
from dflash_moe.errors import DflashError, UnsupportedError

if TYPE_CHECKING:
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

# The number of a slice's flow, and its times (`ExpertRuntime.take_traces`).
Numbered = tuple[int, Mapping[str, int]]
# All packets come from one writer, which may have any number but 0.
SEQUENCE_ID = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted. `children` are within it, one after the other; `flows` are numbers
    that lead from span to span in the order of time.
    """

    name: str
    begin_ns: int
    end_ns: int
    arguments: Mapping[str, int | str] = field(default_factory=dict)
    flows: Sequence[int] = ()
    children: Sequence[Span] = ()


def check_perfetto() -> None:
    """Raises UnsupportedError where the package is missing, before any work."""
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401 - only asked for
    except ImportError:
        raise UnsupportedError("a trace needs the package perfetto: pip install 'dflash-moe[trace]'") from None


def write_trace(recording: Recording, out: Path) -> int:
    """Writes the trace atomically and returns its bytes. Raises DflashError naming the path, and
    what was there before stays.
    """
    content = trace_bytes(recording)
    partial = out.with_name(out.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(out)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DflashError(f"{out}: cannot be written ({error.strerror}); choose another place and record again") from None
    return len(content)


def trace_bytes(recording: Recording) -> bytes:
    """Returns the trace as the bytes of a `.pftrace` file."""
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    tracks = _Tracks(TraceProtoBuilder())
    slices = list(enumerate(recording.slices, start=1))
    host = tracks.group("host")
    tracks.spans("request", host, [_request_span(recording)])
    tracks.spans("steps", host, _step_spans(recording))
    calls: dict[int, list[Numbered]] = {}
    for flow, one in slices:
        calls.setdefault(one["call_id"], []).append((flow, one))
    tracks.spans("calls", host, [_call_span(own) for own in calls.values()])
    tracks.spans("encode", host, [_encode_span(flow, one) for flow, one in slices])
    tracks.spans("wait", host, [_wait_span(own) for own in calls.values()])
    tracks.spans("combine", host, [_combine_span(own) for own in calls.values()])
    for place, worker in enumerate(recording.workers):
        own = [(flow, one) for flow, one in slices if one["worker"] == place]
        if not own:
            continue
        group = tracks.group(f"{worker.name} ({worker.transport})")
        clock = {"clock_offset_ns": worker.offset_ns, "clock_uncertainty_ns": worker.uncertainty_ns}
        for name, begin, end in (
            ("link out", "published_ns", "worker_received_ns"),
            ("queue", "worker_received_ns", "worker_started_ns"),
            ("compute", "worker_started_ns", "worker_finished_ns"),
            ("link back", "worker_finished_ns", "arrived_ns"),
        ):
            tracks.spans(name, group, [_stage_span(name, flow, one, begin, end, clock) for flow, one in own])
        tracks.counter("slices in flight", group, _in_flight(own, lambda _one: 1))
        tracks.counter("rows in flight", group, _in_flight(own, lambda one: one["num_rows"]))
    content: bytes = tracks.builder.serialize()
    return content


def _request_span(recording: Recording) -> Span:
    request = recording.request
    first, last = request.token_ns[0], request.token_ns[-1]
    return Span(
        f"request: {request.num_prompt} prompt tokens, {len(request.token_ns)} new",
        request.submitted_ns,
        last,
        {"model": recording.model, "mode": recording.mode, "dtype": recording.dtype},
        children=(
            Span("queue", request.submitted_ns, request.scheduled_ns),
            Span("prefill", request.scheduled_ns, first),
            Span("decode", first, last),
        ),
    )


def _step_spans(recording: Recording) -> list[Span]:
    spans = []
    for step in recording.steps:
        times = [round(one * 1e9) for one in (step.began, step.planned, step.computed, step.sampled, step.ended)]
        parts = zip(("plan", "forward", "sample", "commit"), times, times[1:], strict=False)
        counts = {"rows": step.num_rows, "sequences": step.num_sequences}
        children = [Span(name, begin, end) for name, begin, end in parts]
        spans.append(Span(f"step: {step.num_rows} rows", times[0], times[-1], counts, children=children))
    return spans


def _call_span(own: Sequence[Numbered]) -> Span:
    first = own[0][1]
    begin = min(one["begun_ns"] for _, one in own)
    counts = {"call": first["call_id"], "layer": first["layer"], "slices": len(own)}
    return Span(f"layer {first['layer']}", begin, max(one["combined_ns"] for _, one in own), counts)


def _encode_span(flow: int, one: Mapping[str, int]) -> Span:
    return Span("encode", one["encode_start_ns"], one["published_ns"], _arguments(one), flows=(flow,))


def _wait_span(own: Sequence[Numbered]) -> Span:
    """Nothing of the call is left to send, and not all replies are there."""
    published, arrived = (max(one[key] for _, one in own) for key in ("published_ns", "arrived_ns"))
    return Span("wait", published, arrived, {"call": own[0][1]["call_id"], "layer": own[0][1]["layer"]})


def _combine_span(own: Sequence[Numbered]) -> Span:
    arrived, combined = (max(one[key] for _, one in own) for key in ("arrived_ns", "combined_ns"))
    flows = [flow for flow, _ in own]
    return Span("combine", arrived, combined, {"call": own[0][1]["call_id"], "layer": own[0][1]["layer"]}, flows)


def _stage_span(name: str, flow: int, one: Mapping[str, int], begin: str, end: str, clock: Mapping[str, int]) -> Span:
    """A stage between two clocks may seem to end before it began, by the uncertainty at most; it is
    then drawn as a moment, and `measured_ns` has what was read.
    """
    measured = one[end] - one[begin]
    arguments = {**_arguments(one), **clock, "measured_ns": measured}
    if measured >= 0:
        return Span(name, one[begin], one[end], arguments, (flow,))
    # Beside the stage of the worker's own clock, whose times stay as they are.
    moment = one[end] if name == "link out" else one[begin]
    return Span(name, moment, moment, arguments, (flow,))


def _arguments(one: Mapping[str, int]) -> dict[str, int]:
    return {"call": one["call_id"], **{key: one[key] for key in ("layer", "shard", "slice", "num_rows")}}


def _in_flight(own: Iterable[Numbered], count: Callable[[Mapping[str, int]], int]) -> list[tuple[int, int]]:
    """Returns (time, value) for each change of what was sent and not answered."""
    changes: dict[int, int] = {}
    for _, one in own:
        changes[one["published_ns"]] = changes.get(one["published_ns"], 0) + count(one)
        changes[one["arrived_ns"]] = changes.get(one["arrived_ns"], 0) - count(one)
    value, found = 0, []
    for at, change in sorted(changes.items()):
        value += change
        found.append((at, value))
    return found


class _Tracks:
    """Adds tracks and their events to a trace, in the order in which they are to be shown."""

    def __init__(self, builder: TraceProtoBuilder) -> None:
        self.builder = builder
        self._last = 0

    def group(self, name: str) -> int:
        """Adds a track that has only tracks in it, and returns its number."""
        self._describe(name, None)
        return self._last

    def spans(self, name: str, parent: int, spans: Iterable[Span]) -> None:
        """Adds spans to as few tracks of this name as have no two of them at a time."""
        lanes: list[list[Span]] = []
        for span in sorted(spans, key=lambda one: (one.begin_ns, one.end_ns)):
            free = next((lane for lane in lanes if lane[-1].end_ns <= span.begin_ns), None)
            if free is None:
                lanes.append([span])
            else:
                free.append(span)
        for lane in lanes:
            track = self._describe(name, parent).uuid
            for span in lane:
                self._span(track, span)

    def counter(self, name: str, parent: int, values: Iterable[tuple[int, int]]) -> None:
        """Adds a counter by its changes in the order of time."""
        described = self._describe(name, parent)
        described.counter.SetInParent()
        for at_ns, value in values:
            event = self._event(described.uuid, at_ns, "TYPE_COUNTER")
            event.counter_value = value

    def _span(self, track: int, span: Span) -> None:
        event = self._event(track, span.begin_ns, "TYPE_SLICE_BEGIN")
        event.name = span.name
        event.flow_ids.extend(span.flows)
        for name, value in span.arguments.items():
            note = event.debug_annotations.add()
            note.name = name
            if isinstance(value, str):
                note.string_value = value
            else:
                note.int_value = value
        for child in span.children:
            self._span(track, child)
        self._event(track, span.end_ns, "TYPE_SLICE_END")

    def _event(self, track: int, at_ns: int, kind: str) -> Any:
        packet = self.builder.add_packet()
        packet.timestamp = at_ns
        packet.trusted_packet_sequence_id = SEQUENCE_ID
        event = packet.track_event
        event.type = event.Type.Value(kind)
        event.track_uuid = track
        return event

    def _describe(self, name: str, parent: int | None) -> Any:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE_ID
        self._last += 1
        found = packet.track_descriptor
        found.uuid, found.name = self._last, name
        found.sibling_order_rank = self._last
        found.child_ordering = found.ChildTracksOrdering.Value("EXPLICIT")
        if parent is not None:
            found.parent_uuid = parent
        # Tracks of one name, lanes of one thing, are drawn below each other.
        found.sibling_merge_behavior = found.SiblingMergeBehavior.Value("SIBLING_MERGE_BEHAVIOR_NONE")
        return found
