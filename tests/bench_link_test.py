"""The slow line of the benches: its clock exactly, and what is seen through it."""

from collections.abc import Callable
import contextlib
import socket
import threading
import time

import pytest

from experiments.bench import link


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


def test_a_pipe_sends_one_thing_after_another_and_each_arrives_later():
  clock = Clock()
  pipe = link.Pipe(0.15, 1000.0, clock)
  assert pipe.arrival(100) == pytest.approx(0.25)
  assert pipe.arrival(100) == pytest.approx(0.35)  # behind the first
  clock.now = 10.0  # the line was idle, and saves nothing up for it
  assert pipe.arrival(500) == pytest.approx(10.65)
  assert pipe.arrival(0) == pytest.approx(10.65)
  assert pipe.bytes == 700
  for bad in ((-1.0, 1.0), (0.0, 0.0)):
    with pytest.raises(ValueError, match='rate > 0'):
      link.Pipe(*bad, clock)


@pytest.fixture
def echo():
  """A server that sends everything back, and how many connections it has now."""
  server = socket.create_server(('127.0.0.1', 0))

  def talk(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
      while data := connection.recv(1 << 16):
        connection.sendall(data)

  def accept() -> None:
    with contextlib.suppress(OSError):
      while True:
        connection, _ = server.accept()
        threading.Thread(target=talk, args=(connection,), daemon=True).start()

  threading.Thread(target=accept, daemon=True).start()
  yield server.getsockname()
  server.close()


def exchange(at: socket.socket, size: int) -> float:
  """Seconds until `size` bytes are sent and back, whole and in order."""
  data = bytes(range(256)) * (size // 256) + bytes(size % 256)
  began = time.monotonic()
  sending = threading.Thread(target=at.sendall, args=(data,), daemon=True)
  sending.start()
  got = bytearray()
  while len(got) < size:
    part = at.recv(1 << 16)
    assert part, 'the connection ended early'
    got += part
  sending.join()
  assert got == data
  return time.monotonic() - began


def takes(want: float, measure: Callable[[], float]) -> bool:
  """Whether no try is faster than asked, and one not much slower: others only add."""
  for _ in range(40):
    seconds = measure()
    if seconds <= want * 1.3:
      return seconds >= want * 0.99
  return False


def test_round_trip_and_rate_are_what_was_asked(echo):
  with link.Link(echo, latency=0.1, rate=1e6) as line:
    with socket.create_connection(('127.0.0.1', line.port)) as at:
      sent = []

      def send(size: int) -> float:
        sent.append(size)
        return exchange(at, size)

      send(1)  # the handshake
      assert takes(0.2, lambda: send(1))
      # Both ways at once: the line back is not slowed by the line there.
      assert takes(0.2 + 0.6, lambda: send(600_000))
    assert line.up.bytes == line.down.bytes == sum(sent)


def test_connections_share_the_rate(echo):
  with (
    link.Link(echo, latency=0.0, rate=1e6) as line,
    contextlib.ExitStack() as stack,
  ):

    def together() -> float:
      ends = [socket.create_connection(('127.0.0.1', line.port)) for _ in range(4)]
      for at in ends:
        stack.enter_context(at)
      began = time.monotonic()
      threads = [threading.Thread(target=exchange, args=(at, 150_000)) for at in ends]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join(60)
      return time.monotonic() - began

    assert takes(0.6, together)


def test_a_cut_line_breaks_connections_and_a_healed_one_takes_new_ones(echo):
  with link.Link(echo, latency=0.01, rate=1e6) as line:
    with socket.create_connection(('127.0.0.1', line.port)) as at:
      at.settimeout(60)
      exchange(at, 10)
      line.cut()
      with pytest.raises(OSError):
        while at.recv(1):
          pass
        raise ConnectionError('ended')
    with (
      socket.create_connection(('127.0.0.1', line.port)) as at,
      pytest.raises((OSError, AssertionError)),
    ):
      at.settimeout(60)
      at.sendall(b'x')
      assert at.recv(1), 'the connection ended early'
    line.heal()
    with socket.create_connection(('127.0.0.1', line.port)) as at:
      exchange(at, 1000)


def test_an_end_of_stream_and_a_dead_server_are_passed_on(echo):
  with (
    link.Link(echo, latency=0.01, rate=1e6) as line,
    socket.create_connection(('127.0.0.1', line.port)) as at,
  ):
    at.settimeout(60)
    at.sendall(b'last words')
    at.shutdown(socket.SHUT_WR)
    got = b''
    while part := at.recv(100):
      got += part
    assert got == b'last words'
  with socket.create_server(('127.0.0.1', 0)) as server:
    dead = server.getsockname()
  with (
    link.Link(dead, latency=0.0, rate=1e6) as line,
    socket.create_connection(('127.0.0.1', line.port)) as at,
  ):
    at.settimeout(60)
    with pytest.raises(OSError):
      if not at.recv(1):
        raise ConnectionError('ended')
