"""A real HTTP server on the loopback interface that answers as it is told."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Loopback:
    """`replies` are answered in turn, the last one again and again.

    A reply is (status, headers, body): a body that is a list is an event stream whose items are dicts (JSON
    events), strings (raw bytes of the stream), or numbers (seconds to wait).
    """

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []
        self.headers = []
        self.dropped = threading.Event()  # a client has closed the connection while it was written to
        loopback = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                loopback.requests.append((self.path, json.loads(body)))
                loopback.headers.append(dict(self.headers))
                reply = loopback.replies.pop(0) if len(loopback.replies) > 1 else loopback.replies[0]
                try:
                    self.answer(*reply)
                except OSError:
                    loopback.dropped.set()
                    self.close_connection = True

            def answer(self, status, headers, body):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if not isinstance(body, list):
                    data = body if isinstance(body, bytes) else json.dumps(body).encode()
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                    return
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                for item in body:
                    if isinstance(item, int | float):
                        time.sleep(item)
                    elif isinstance(item, str):
                        self.wfile.write(item.encode())
                    else:
                        self.wfile.write(f"data: {json.dumps(item)}\n\n".encode())
                    self.wfile.flush()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def chunk(content=None, reason=None, *, index=0, **delta):
    """A chunk of a chat stream."""
    if content is not None:
        delta["content"] = content
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason}]}


DONE = "data: [DONE]\n\n"


def events(*items):
    """A stream with these chunks and the end mark."""
    return (200, {}, [*items, DONE])
