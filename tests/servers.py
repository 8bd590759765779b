"""Object stores on loopback for tests: thin fixtures over launch/emulator.py."""

from collections.abc import Callable, Iterator
import contextlib
import http.client
import http.server
import os
import pathlib
import threading
from unittest import mock
import uuid

from launch import emulator
from swe17.store import kv, retry

Rule = Callable[[str, str], str]
BUCKET = 'swe17'


@contextlib.contextmanager
def gcs(
  tmp_path: pathlib.Path | None = None, bucket: str = BUCKET
) -> Iterator[tuple[dict[str, str], str]]:
  """Yields (env, 'gs://bucket') of a fake-gcs-server of its own.

  Its environment is set in this process too, and put back at the end. Objects lie in
  `tmp_path`, or in memory.
  """
  with emulator.gcs(str(tmp_path or '')) as server, environ(server.env):
    yield server.env, server.url(bucket)


@contextlib.contextmanager
def s3(bucket: str = BUCKET) -> Iterator[tuple[dict[str, str], str]]:
  """Yields (env, 's3://bucket') of a moto server of its own; see `gcs`."""
  with emulator.s3() as server, environ(server.env):
    yield server.env, server.url(bucket)


@contextlib.contextmanager
def environ(env: dict[str, str]) -> Iterator[None]:
  """Sets variables in this process, and puts the old ones back."""
  with mock.patch.dict(os.environ, env):
    yield


@contextlib.contextmanager
def gate(address: str, rule: Rule) -> Iterator[str]:
  """Yields the address of an HTTP proxy before `address` that spoils what `rule` says.

  `rule(method, path)` is asked at every request, in order, and answers with '' (let it
  through), a status such as '503' (answered without asking the server), 'drop_before'
  (hung up on, the server never hears of it), 'drop_after' (done, but the reply is
  lost), 'cut' (the first half of the reply's body, then hung up) or 'hang' (never
  answered). It may do something of its own first.
  """
  ended = threading.Event()

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    wbufsize = -1  # headers and body in one packet

    def handle_one_request(self) -> None:
      self.raw_requestline = self.rfile.readline()
      if not self.raw_requestline or not self.parse_request():
        self.close_connection = True
        return
      if self.headers.get('Expect') == '100-continue':
        self.send_response_only(100)
        self.end_headers()
      body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
      with lock:
        fault = rule(self.command, self.path)
      if fault == 'hang':
        ended.wait(60)
      if fault in ('hang', 'drop_before'):
        self.close_connection = True
        return
      if fault.isdecimal():
        self._answer(int(fault), [], b'{}')
        return
      to = http.client.HTTPConnection(host, port, timeout=30)
      headers = {k: v for k, v in self.headers.items() if k not in ('Expect',)}
      to.request(self.command, self.path, body, headers)
      reply = to.getresponse()
      data = reply.read()
      to.close()
      if fault == 'drop_after':
        self.close_connection = True
        return
      self._answer(reply.status, reply.getheaders(), data, cut=fault == 'cut')

    def _answer(
      self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False
    ) -> None:
      self.send_response_only(status)
      for name, value in headers:
        if name.lower() not in ('content-length', 'connection', 'transfer-encoding'):
          self.send_header(name, value)
      self.send_header('Content-Length', str(len(data)))
      self.end_headers()
      if self.command != 'HEAD':
        self.wfile.write(data[: len(data) // 2] if cut else data)
      self.wfile.flush()
      self.close_connection = self.close_connection or cut

  host, port = address.removeprefix('http://').split(':')
  port, lock = int(port), threading.Lock()
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  server.daemon_threads = True
  thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_address[1]}'
  finally:
    ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def line(server: emulator.Server) -> Iterator['Line']:
  """A `Line` to `server` with its gate open."""
  made = Line(server)
  with gate(server.address, made.rule) as made.address:
    yield made


class Line:
  """A bucket under a fresh prefix, behind a gate once it is used through `line`.

  `faults` are met by the next requests, one each, `always` by all that follow.
  """

  def __init__(self, server: emulator.Server):
    self.server, self.address = server, server.address
    self.faults: list[str] = []
    self.always = ''
    self.seen: list[tuple[str, str]] = []
    self.before = lambda method, path: None  # called at every request
    self.url = f'{server.url(BUCKET)}/{uuid.uuid4().hex}'
    with environ(server.env):
      self.direct = kv.open(self.url)  # past the gate

  def rule(self, method: str, path: str) -> str:
    self.seen.append((method, path))
    self.before(method, path)
    return self.faults.pop(0) if self.faults else self.always

  def open(self, deadline: float = 10.0) -> retry.RetryStore:
    """The bucket through the gate."""
    env = emulator.gcs_env if self.server.scheme == 'gs' else emulator.s3_env
    with environ(env(self.address)):
      store = kv.open(self.url, deadline=deadline)
    self.seen.clear()
    store._policy = retry.Policy(deadline, first_pause=0.01)  # tests are in a hurry
    return store
