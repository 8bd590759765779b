"""Several processes that are one learner: how they meet, what they say, how they end.

  process 0 ── orders: a name, values, arrays ──> each of the others, in one order
            <── its shards, 'stop', 'failed' ────

`jax.distributed` brings them together and carries the collectives. What comes next is
said by a connection from process 0 to each other process, not by a collective: the wait
for it may take minutes, which a collective does not survive (or spends on a busy
accelerator), and every process gets its own rows and no more. A process that dies
closes its connections at once, whatever the others are doing: they end too, with one
sentence and exit code `LOST`, and all are started again together. (A machine that
vanishes without a word is noticed after `mesh.heartbeat_seconds`, by JAX.)

The connections are authenticated by a key that is made afresh and travels, as does the
port, by a broadcast among the processes that JAX has joined.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import multiprocessing
from multiprocessing import connection
import os
import queue
import secrets
import sys
import threading
import time
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from swe17 import config

LOST = 3  # exit code of a process that ends because another one did
_AHEAD = 4  # messages that are read ahead of whoever takes them
_KEY_BYTES = 32
_POLL = 0.2  # s between two looks at the stop event while an order is waited for
_SECONDS_TO_END = 30  # for the slowest process, once all is done
_LOOPBACK = ('localhost', '127.0.0.1', '::1')


@dataclasses.dataclass(frozen=True)
class Message:
  """A name, JSON-able values, and arrays."""

  name: str
  values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def send(to: connection.Connection, message: Message) -> None:
  """Sends a message: a line of JSON, then the bytes of each array."""
  arrays = {k: np.asarray(v) for k, v in message.arrays.items()}
  shapes = [(k, v.dtype.name, v.shape) for k, v in arrays.items()]
  to.send_bytes(json.dumps([message.name, message.values, shapes]).encode())
  for array in arrays.values():
    # Viewed as bytes, not copied; what has no elements has no view.
    flat = np.ascontiguousarray(array).reshape(-1)
    to.send_bytes(flat.view(np.uint8).data if flat.size else b'')


def receive(by: connection.Connection) -> Message:
  """Reads what `send` sent. EOFError or OSError if the other side is gone."""
  name, values, shapes = json.loads(by.recv_bytes())
  arrays = {}
  for key, dtype, shape in shapes:
    flat = np.frombuffer(by.recv_bytes(), jnp.dtype(dtype))
    arrays[key] = flat.reshape(shape)
  return Message(name, values, arrays)


def join(cfg: config.Mesh, index: int, address: str, stop: threading.Event) -> 'Team':
  """Joins the other learner processes; alone, if there are none.

  Args:
    cfg: how many processes there are.
    index: which one this is; 0 decides.
    address: host:port of process 0, where they find each other.
    stop: set when process 0 is told to stop, by whichever process.
  """
  if cfg.processes == 1:
    return Team(0, {}, stop)
  host = address.rpartition(':')[0].strip('[]')
  local = host in _LOOPBACK
  jax.distributed.initialize(
    address,
    cfg.processes,
    index,
    cluster_detection_method='deactivate',  # the settings say it all
    heartbeat_timeout_seconds=cfg.heartbeat_seconds,
    shutdown_timeout_seconds=_SECONDS_TO_END,
    coordinator_bind_address=address if local else None,
  )
  others = range(1, cfg.processes)
  if index:
    port, key = _announced(None)
    peer = connection.Client((host, port), authkey=key)
    send(peer, Message('here', {'index': index}))
    return Team(index, {0: peer}, stop)
  # Other machines may know this one by a name that it does not have itself.
  where = host if local else '0.0.0.0'
  key = secrets.token_bytes(_KEY_BYTES)
  with connection.Listener((where, 0), backlog=len(others), authkey=key) as door:
    _announced((door.address[1], key))
    return Team(0, _welcome(door, len(others)), stop)


def _announced(said: tuple[int, bytes] | None) -> tuple[int, bytes]:
  """Port and key: process 0 says them to all."""
  found = np.zeros(4 + _KEY_BYTES, np.uint8)
  if said is not None:
    found[:4] = np.frombuffer(said[0].to_bytes(4, 'big'), np.uint8)
    found[4:] = np.frombuffer(said[1], np.uint8)
  told = np.asarray(multihost_utils.broadcast_one_to_all(found)).astype(np.uint8)
  return int.from_bytes(told[:4].tobytes(), 'big'), told[4:].tobytes()


def _welcome(door: connection.Listener, count: int) -> dict[int, connection.Connection]:
  """The connections of all others, by their index."""
  peers: dict[int, connection.Connection] = {}
  while len(peers) < count:
    try:
      peer = door.accept()
      peers[receive(peer).values['index']] = peer
    except (multiprocessing.AuthenticationError, EOFError, OSError):
      continue  # somebody who is none of us; those of us who die end this process
  return peers


class Team:
  """This process among the learner's processes. `index` 0 decides; alone, nobody else.

  `peers`: on process 0 the connections to all others, on these the one to process 0.
  """

  def __init__(
    self,
    index: int,
    peers: Mapping[int, connection.Connection],
    stop: threading.Event,
  ):
    self.index, self._peers, self._stop = index, dict(peers), stop
    self._asked = self._ending = False
    self._inbox: dict[int, queue.Queue[Message]] = {
      # Bounded: shards of weights must not pile up in the memory of process 0.
      i: queue.Queue(_AHEAD)
      for i in self._peers
    }
    for i in self._peers:
      name = f'learner-{i}'
      threading.Thread(target=self._read, args=(i,), name=name, daemon=True).start()

  @property
  def others(self) -> list[int]:
    """The processes that process 0 gives orders to; [] on all but process 0."""
    return [] if self.index else sorted(self._peers)

  @property
  def several(self) -> bool:
    """Whether there are processes beside this one."""
    return bool(self._peers)

  def tell(
    self,
    name: str,
    values: Mapping[str, Any] | None = None,
    arrays: Callable[[int], Mapping[str, np.ndarray]] = lambda index: {},
  ) -> None:
    """Tells every other process to do `name`; `arrays(i)` are those of process i.

    Nothing on other processes than 0: what they do they were told.
    """
    for i in self.others:
      self._send(i, Message(name, values or {}, arrays(i)))

  def give(self, message: Message) -> None:
    """Sends process 0 what it has asked for."""
    self._send(0, message)

  def take(self, index: int) -> Message:
    """The next message of process `index`, in the order in which it sent them.

    While one waits, a stop that this process is told of is passed on to process 0.
    """
    while True:
      try:
        return self._inbox[index].get(timeout=_POLL)
      except queue.Empty:
        if self.index and self._stop.is_set() and not self._asked:
          self._asked = True
          self.give(Message('stop'))

  def end(self, code: int, text: str = '') -> None:
    """Ends all together: process 0 says so with an exit code, every process leaves.

    The others are to be at `take`, or on their way to it.
    """
    self._ending = True
    self.tell('end', {'code': code, 'text': text})
    if self.several:
      jax.distributed.shutdown()  # which waits for all

  def fail(self, text: str) -> None:
    """Says to the others that this process cannot go on: they end at once."""
    self._ending = True
    for peer in self._peers.values():
      try:
        send(peer, Message('failed', {'text': text}))
      except OSError:
        continue  # gone already

  def settle(self, seconds: float) -> None:
    """Waits for the word that another process is gone, which ends this one.

    To be called when a collective fails: that is usually why. Returns if it is not.
    """
    if self.several:
      time.sleep(seconds)

  def _send(self, index: int, message: Message) -> None:
    try:
      send(self._peers[index], message)
    except OSError:
      self._lost(f'learner process {index} is gone')

  def _read(self, index: int) -> None:
    """Takes in what one other process says, until it ends or is gone."""
    while True:
      try:
        message = receive(self._peers[index])
      except (EOFError, OSError):
        if not self._ending:
          self._lost(f'learner process {index} is gone')
        return
      if message.name == 'stop':
        self._stop.set()
      elif message.name == 'failed':
        self._lost(f'learner process {index} failed ({message.values["text"]})')
      else:
        self._ending = self._ending or message.name == 'end'
        self._inbox[index].put(message)

  def _lost(self, why: str) -> NoReturn:
    """Ends this process as a kill would: the others cannot be waited for."""
    print(
      f'{why}: learner process {self.index} ends too; all of them start again '
      'together, with --resume',
      file=sys.stderr,
      flush=True,
    )
    os._exit(LOST)
