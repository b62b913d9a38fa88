"""A collector of traces on a real socket: OTLP over HTTP, as exporters send it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

DEADLINE_S = 30.0


@dataclass(frozen=True)
class SeenSpan:
    """One span as it came over the wire. `parent_id` is "" for one that began elsewhere."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool


class Collector:
    """Listen on a free port, keep what is sent, and answer with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[SeenSpan] = []
        self.bodies: list[bytes] = []
        self.resources: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_for(self, *names: str) -> list[SeenSpan]:
        """Wait until a span of each name has come; all spans so far."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: set(names) <= {span.name for span in self.spans}, DEADLINE_S
            )
            assert arrived, f"only {[span.name for span in self.spans]} came"
            return list(self.spans)

    def take(self, body: bytes) -> None:
        """Keep the spans of one export."""
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        with self._changed:
            self.bodies.append(body)
            for resource in request.resource_spans:
                self.resources.append(_attributes(resource.resource.attributes))
                for scope in resource.scope_spans:
                    self.spans += map(_seen, scope.spans)
            self._changed.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if collector.status == 200:
                    collector.take(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def of_turn(spans: Sequence[SeenSpan], turn_id: str) -> list[SeenSpan]:
    """The span of a turn, and those below it in the order in which they began."""
    (root,) = (s for s in spans if s.attributes.get("gen_ai.response.id") == turn_id)
    children = [s for s in spans if s.parent_id == root.span_id]
    return [root, *sorted(children, key=lambda span: (span.begin_ns, span.end_ns))]


def _seen(span: Any) -> SeenSpan:
    return SeenSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        is_error=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(item) for item in found.values] if kind == "array_value" else found
