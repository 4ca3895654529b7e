"""Reads Perfetto traces back: tracks with their spans and counters, each span proven to end after
it began, and within the span that it began in.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ReadSpan:
    name: str
    begin: int
    arguments: dict[str, Any]
    flows: tuple[int, ...]
    end: int = -1
    children: list[ReadSpan] = field(default_factory=list)


@dataclass(slots=True)
class ReadTrack:
    name: str
    parent: str | None
    spans: list[ReadSpan] = field(default_factory=list)
    values: list[tuple[int, int]] = field(default_factory=list)


def read_trace(content: bytes) -> list[ReadTrack]:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    tracks: dict[int, ReadTrack] = {}
    is_open: dict[int, list[ReadSpan]] = {}
    latest: dict[int, int] = {}
    for packet in Trace.FromString(content).packet:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            assert described.uuid not in tracks
            parent = tracks[described.parent_uuid].name if described.HasField("parent_uuid") else None
            tracks[described.uuid] = ReadTrack(described.name, parent)
            continue
        event, at = packet.track_event, packet.timestamp
        track, stack = tracks[event.track_uuid], is_open.setdefault(event.track_uuid, [])
        assert at >= latest.get(event.track_uuid, 0), f"{track.name}: events of a track are in the order of time"
        latest[event.track_uuid] = at
        if event.type == TrackEvent.Type.TYPE_SLICE_BEGIN:
            notes = {one.name: one.string_value or one.int_value for one in event.debug_annotations}
            span = ReadSpan(event.name, at, notes, tuple(event.flow_ids))
            (stack[-1].children if stack else track.spans).append(span)
            stack.append(span)
        elif event.type == TrackEvent.Type.TYPE_SLICE_END:
            stack.pop().end = at
        else:
            track.values.append((at, event.counter_value))
    assert not any(is_open.values()), "a span has no end"
    return list(tracks.values())
