"""The page at `/`: the files in `page`, which load nothing from elsewhere and run nothing that is
not theirs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from dflash_moe.server.front.api_error import ApiError

INDEX = "index.html"
# Whatever a model writes, the browser makes no script, style, foreign picture or form of it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cache-control": "no-store",
}  # fmt: skip
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PageFiles:
    """The files of the page, which are read once."""

    def __init__(self) -> None:
        folder = Path(__file__).parent / "page"
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in folder.iterdir() if path.suffix in _TYPES
        }

    def response(self, name: str) -> Response:
        """Returns a file. Raises ApiError where there is none of this name."""
        if name not in self._files:
            raise ApiError(404, f"the page has no file {name[:40]!r}; it is at /")
        body, kind = self._files[name]
        return Response(body, headers=_HEADERS, media_type=kind)
