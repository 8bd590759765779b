"""Finished groups reach the store once, whatever becomes of the line or the process."""

import asyncio
import threading

import pytest

from swe17 import types
from swe17.rollout import outbox
from swe17.store import faults, kv
from swe17.store import groups as group_store


class Line:
  """A store behind a line that can be cut: every call fails as a proxy's would."""

  def __init__(self, store: kv.Store, kind: str = 'drop_before'):
    self.cut, self.asked = False, 0
    away = kv.StoreError(store.url, '', 'no answer', transient=True)

    def rule(_: faults.Operation) -> faults.Fault | None:
      self.asked += 1
      return faults.Fault(kind, error=away) if self.cut else None

    self.store = faults.FaultStore(store, rule)


@pytest.fixture
def line(tmp_path, monkeypatch) -> Line:
  monkeypatch.setattr(outbox, '_PAUSE', 0.01)
  monkeypatch.setattr(outbox, '_LONGEST', 0.02)
  return Line(kv.open(f'file://{tmp_path}/store'))


def box(line: Line, tmp_path, stored=lambda group: None) -> outbox.Outbox:
  return outbox.Outbox(line.store, str(tmp_path / 'outbox'), stored)


def group(start: int, attempt: str = 'a') -> types.Group:
  return types.Group(f'{start:08d}-{attempt}.0', start, 'task', 'unit', ())


def files(tmp_path) -> list[str]:
  return sorted(path.name for path in (tmp_path / 'outbox').glob('*'))


async def asked(line: Line, more: int) -> None:
  until = line.asked + more
  while line.asked < until:
    await asyncio.sleep(0.005)


async def test_groups_wait_out_a_cut_and_are_stored_once_it_is_over(line, tmp_path):
  told = []
  out = box(line, tmp_path, lambda g: told.append(g.start))
  line.cut = True
  for start in range(6):
    out.put(group(start))
  await asked(line, 40)
  assert (out.waiting, told) == (6, [])
  out.check()  # nothing is wrong yet
  line.cut = False
  await asyncio.wait_for(out.flush(), 60)
  assert out.waiting == 0
  assert sorted(told) == list(range(6))
  assert line.store.list('groups/') == [group_store.key_of(s) for s in range(6)]
  assert files(tmp_path) == []


async def test_a_group_whose_reply_was_lost_is_stored_once(line, tmp_path):
  line = Line(kv.open(f'file://{tmp_path}/store'), 'drop_after')
  told = []
  out = box(line, tmp_path, lambda g: told.append(g.id))
  line.cut = True
  out.put(group(3))
  await asked(line, 8)
  line.cut = False
  await asyncio.wait_for(out.flush(), 60)
  assert told == ['00000003-a.0']
  assert group_store.load(line.store, 'groups/00000003').id == '00000003-a.0'


async def test_what_a_process_could_not_store_the_next_one_does(line, tmp_path):
  out = box(line, tmp_path)
  line.cut = True
  for start in (2, 5):
    out.put(group(start))
  await asked(line, 8)
  await out.close()
  assert files(tmp_path) == ['00000002.group', '00000005.group']
  line.cut = False
  later = box(line, tmp_path)
  assert later.pick_up() == {2, 5}
  await asyncio.wait_for(later.flush(), 60)
  assert line.store.list('groups/') == ['groups/00000002', 'groups/00000005']
  assert files(tmp_path) == []
  assert box(line, tmp_path).pick_up() == set()


async def test_a_process_that_ends_before_its_first_try_leaves_its_groups(
  line, tmp_path
):
  out = box(line, tmp_path)
  for start in range(outbox._AT_ONCE + 2):
    out.put(group(start))
  await out.close()  # none of them has even been tried
  later = box(line, tmp_path)
  assert later.pick_up() == set(range(outbox._AT_ONCE + 2))
  await later.close()


async def test_a_group_whose_store_hangs_is_in_a_file_within_seconds(
  line, tmp_path, monkeypatch
):
  """The store may try for minutes of its own; a kill meanwhile must not lose it."""
  monkeypatch.setattr(outbox, '_KEPT_AFTER', 0.05)
  held = threading.Event()
  slow = faults.FaultStore(
    line.store, lambda _: faults.Fault('delay', 60.0), lambda _: held.wait(60)
  )
  out = outbox.Outbox(slow, str(tmp_path / 'outbox'), lambda group: None)
  for start in range(outbox._AT_ONCE + 1):  # the last one has not even been tried
    out.put(group(start))
  try:
    while len(files(tmp_path)) <= outbox._AT_ONCE:
      await asyncio.sleep(0.01)
  finally:
    held.set()
  await asyncio.wait_for(out.flush(), 60)
  assert files(tmp_path) == []


async def test_a_group_that_is_stored_soon_is_never_in_a_file(
  line, tmp_path, monkeypatch
):
  monkeypatch.setattr(outbox, '_KEPT_AFTER', 0.05)
  out = box(line, tmp_path)
  out.put(group(1))
  await asyncio.wait_for(out.flush(), 60)
  await asyncio.sleep(0.1)
  assert files(tmp_path) == []


async def test_a_damaged_file_is_set_aside_and_the_rest_goes_on(line, tmp_path):
  (tmp_path / 'outbox').mkdir()
  (tmp_path / 'outbox' / '00000001.group').write_bytes(b'half a')
  out = box(line, tmp_path)
  line.cut = True
  out.put(group(2))
  await asked(line, 4)
  await out.close()
  line.cut = False
  later = box(line, tmp_path)
  assert later.pick_up() == {2}
  await asyncio.wait_for(later.flush(), 60)
  assert files(tmp_path) == ['00000001.damaged']


async def test_patience_ends_and_the_group_is_kept(line, tmp_path, monkeypatch):
  monkeypatch.setattr(outbox, 'PATIENCE', 0.05)
  out = box(line, tmp_path)
  line.cut = True
  out.put(group(1))
  with pytest.raises(kv.StoreError, match='no answer'):
    await asyncio.wait_for(out.flush(), 60)
  await out.close()
  assert files(tmp_path) == ['00000001.group']


async def test_what_waiting_does_not_help_is_raised_at_once(line, tmp_path):
  full = faults.FaultStore(line.store, lambda _: faults.Fault('full'))
  out = outbox.Outbox(full, str(tmp_path / 'outbox'), lambda group: None)
  out.put(group(1))
  with pytest.raises(kv.StoreError, match='the disk is full'):
    await asyncio.wait_for(out.flush(), 60)
  assert full.log and len(full.log) <= 3


async def test_a_bug_is_not_taken_for_a_cut(line, tmp_path):
  def stored(_: types.Group) -> None:
    raise ZeroDivisionError('a bug')

  out = box(line, tmp_path, stored)
  out.put(group(1))
  with pytest.raises(ZeroDivisionError):
    await asyncio.wait_for(out.flush(), 60)


async def test_insisting_does_not_block_the_loop(line):
  held = threading.Event()

  def call() -> int:
    held.wait(60)
    return 7

  waiting = asyncio.ensure_future(outbox.insist(call))
  await asyncio.sleep(0.02)
  assert not waiting.done()
  held.set()
  assert await asyncio.wait_for(waiting, 60) == 7
