"""The container engine as a sandbox, against a stub, and a real one where it runs."""

import asyncio
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from swe17 import config
from swe17.env import container, sandbox
from tests import container_stub

CFG = config.Sandbox(
  backend='container', image='some:image', wall_seconds=20.0, memory_mib=64
)


class Engine:
  """The stub as a command, and what it was told."""

  def __init__(self, folder: pathlib.Path):
    self.state = folder / 'state'
    self.state.mkdir()
    self.path = folder / 'engine'
    stub = pathlib.Path(container_stub.__file__)
    self.path.write_text(
      f'#!/bin/sh\nexec {sys.executable} -S -E {stub} {self.state} "$@"\n'
    )
    self.path.chmod(0o755)
    self.cfg = dataclasses.replace(CFG, engine=str(self.path))

  def misbehave(self, mode: str) -> None:
    (self.state / 'mode').write_text(mode)

  def calls(self) -> list[list[str]]:
    lines = (self.state / 'calls.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]

  def verbs(self) -> list[str]:
    return [call[0] for call in self.calls()]

  def left(self) -> list[str]:
    """Containers, and processes of containers, that are still there."""
    folders = [path.name for path in self.state.iterdir() if path.is_dir()]
    for place in pathlib.Path('/proc').glob('[0-9]*/environ'):
      try:
        if f'{container_stub.NAME}={self.state}/'.encode() in place.read_bytes():
          folders.append(place.parent.name)
      except OSError:
        continue  # ended meanwhile
    return folders


@pytest.fixture
def engine(tmp_path) -> Engine:
  return Engine(tmp_path)


async def nothing_left(engine: Engine) -> None:
  for _ in range(200):
    if not engine.left():
      return
    await asyncio.sleep(0.02)
  raise AssertionError(f'still there: {engine.left()}')


def pairs(call: list[str]) -> set[tuple[str, str]]:
  return set(itertools.pairwise(call))


async def test_a_container_has_no_network_no_privileges_and_bounds(engine):
  await container.run(engine.cfg, ['true'])
  run, removed = engine.calls()
  assert run[:3] == ['run', '--rm', '--interactive'] and '--read-only' in run
  assert pairs(run) >= {
    ('--network', 'none'),
    ('--cap-drop', 'ALL'),
    ('--security-opt', 'no-new-privileges'),
    ('--user', '65534:65534'),
    ('--pids-limit', '10'),
    ('--memory', '64m'),
    ('--memory-swap', '64m'),
    ('--cpus', '1'),
    ('--ulimit', 'nofile=256'),
    ('--ulimit', 'core=0'),
    ('--ulimit', f'fsize={64 << 20}'),
    ('--ulimit', 'cpu=1'),
    ('--tmpfs', '/work:rw,exec,nosuid,nodev,size=64m,mode=1777'),
    ('--workdir', '/work'),
    ('--pull', 'never'),
    ('--log-driver', 'none'),
    ('--entrypoint', '/bin/sh'),
  }
  assert run[run.index('--entrypoint') + 2] == 'some:image'
  name = run[run.index('--name') + 1]
  assert removed == ['rm', '--force', name]
  assert not [word for word in run if word in ('--privileged', '--volume', '-v')]


async def test_files_stdin_output_and_exit_status_pass_through(engine):
  done = await sandbox.run(
    engine.cfg,
    'container',
    ['sh', '-c', 'cat; cat a/b.txt; echo problem >&2; exit 7'],
    files={'a/b.txt': b'\x00\xffinside'},
    stdin=b'from stdin,',
  )
  assert done == sandbox.Completed(
    7, b'from stdin,\x00\xffinside', b'problem\n', False, False
  )
  assert not engine.left()


async def test_a_command_over_time_is_killed_with_all_it_started(engine):
  cfg = dataclasses.replace(engine.cfg, wall_seconds=1.0)
  script = 'echo said; setsid sleep 300 & (sleep 300 &) ; sleep 300'
  done = await container.run(cfg, ['sh', '-c', script])
  assert done.timed_out and done.returncode is None and done.stdout == b'said\n'
  await nothing_left(engine)


async def test_output_beyond_the_bound_is_dropped(engine):
  cfg = dataclasses.replace(engine.cfg, output_kib=4)
  done = await container.run(cfg, ['sh', '-c', 'head -c 100000 /dev/zero; echo x >&2'])
  assert len(done.stdout) == 4096 and done.truncated and done.stderr == b'x\n'


@pytest.mark.parametrize(
  ('mode', 'said'),
  [('down', 'Cannot connect'), ('no_image', 'Unable to find image')],
)
async def test_a_failing_engine_is_an_infrastructure_fault(engine, mode, said):
  engine.misbehave(mode)
  with pytest.raises(OSError, match=said):
    await container.run(engine.cfg, ['true'])
  with pytest.raises(OSError, match=said):
    await container.open_container(engine.cfg, 'some:image')
  with pytest.raises(ValueError, match=f'cannot run here .*{said}'):
    sandbox.choose_backend(engine.cfg)


async def test_the_exit_code_of_a_failing_engine_may_be_the_commands_own(engine):
  done = await container.run(engine.cfg, ['sh', '-c', 'exit 125'])
  assert done.returncode == 125


async def test_an_engine_that_starts_nothing_is_no_time_out_of_the_command(engine):
  engine.misbehave('hang')
  cfg = dataclasses.replace(engine.cfg, wall_seconds=0.5)
  with pytest.raises(TimeoutError, match='no start within'):
    await container.run(cfg, ['true'])


async def test_an_engine_that_is_not_there_is_named(tmp_path):
  cfg = dataclasses.replace(CFG, engine=str(tmp_path / 'none'))
  with pytest.raises(OSError, match='none'):
    await container.run(cfg, ['true'])
  assert 'none' in container.why_not(cfg)


async def test_what_the_engine_says_before_the_start_is_not_the_commands(engine):
  engine.misbehave('warn')
  done = await container.run(engine.cfg, ['sh', '-c', 'echo mine >&2'])
  assert done.stderr == b'mine\n'


async def test_a_container_that_is_not_removed_is_a_fault(engine):
  engine.misbehave('stubborn')
  with pytest.raises(OSError, match=r'was not removed: .*busy'):
    await container.run(engine.cfg, ['true'])


async def test_files_stay_between_commands_and_processes_do_not(engine):
  box = await container.open_container(engine.cfg, 'other:image', writable=True)
  await box.run(['sh', '-c', 'echo one > kept; setsid sleep 300 & echo started'])
  assert [name for name in engine.left() if name != box.name] == []
  done = await box.run(['cat', 'kept', 'given'], files={'given': b'two\n'})
  assert done.stdout == b'one\ntwo\n'
  assert '--read-only' not in engine.calls()[0]
  await box.close()
  await box.close()  # twice does no harm
  assert not engine.left() and engine.verbs()[-1] == 'rm'
  with pytest.raises(OSError, match='No such container'):
    await box.run(['true'])


async def test_a_late_command_leaves_its_container_usable(engine):
  box = await container.open_container(engine.cfg, 'other:image')
  try:
    late = await box.run(['sh', '-c', 'echo before; sleep 300'], seconds=1.0)
    assert late.timed_out and late.stdout == b'before\n'
    assert (await box.run(['echo', 'after'])).stdout == b'after\n'
  finally:
    await box.close()
  await nothing_left(engine)


async def test_a_cancelled_command_leaves_nothing_behind(engine):
  task = asyncio.create_task(container.run(engine.cfg, ['sleep', '300']))
  while not engine.left():
    await asyncio.sleep(0.02)
  task.cancel()
  with pytest.raises(asyncio.CancelledError):
    await task
  await nothing_left(engine)


async def test_a_container_that_nobody_closed_is_removed(engine):
  box = await container.open_container(engine.cfg, 'other:image')
  assert engine.left() == [box.name]
  del box
  gc.collect()
  await nothing_left(engine)


async def test_a_container_ends_by_itself():
  begin = time.monotonic()
  words = ['sh', '-c', container._WAIT, 'name', '1']
  subprocess.run(words, check=True, timeout=20)
  assert time.monotonic() - begin >= 1


def test_the_sweep_spares_a_machine_that_is_no_container_of_ours():
  harmless = container._SWEEP.replace('kill -9 -1', 'exit 0')
  assert 'kill' not in harmless
  done = subprocess.run(['sh', '-c', harmless, 'sh', 'swe17-none'], check=False)
  assert done.returncode == 3


def test_files_outside_the_directory_are_refused():
  for name in ('/etc/passwd', '../up', 'a/../../up', ''):
    with pytest.raises(ValueError, match='want relative paths'):
      container.pack({name: b''})


def test_graders_do_not_run_in_a_container():
  with pytest.raises(ValueError, match=r'repair\.runner does not run'):
    sandbox.program('container', 'repair.runner', 'main')


def test_a_container_without_an_image_is_refused():
  with pytest.raises(ValueError, match=r'sandbox\.image'):
    sandbox.choose_backend(config.Sandbox(backend='container'))


@pytest.fixture(scope='module')
def real() -> config.Sandbox:
  """Settings of an engine that runs here, with the image named in the environment."""
  image = os.environ.get('SWE17_TEST_IMAGE', 'busybox')
  reasons = []
  for name in ('docker', 'podman'):
    cfg = dataclasses.replace(CFG, engine=name, image=image)
    reason = container.why_not(cfg)
    if not reason:
      return cfg
    reasons.append(f'{name}: {reason}')
  pytest.skip('; '.join(reasons))


async def test_a_real_engine_isolates_and_bounds(real):
  done = await container.run(
    real,
    ['sh', '-c', 'id -u; cat given; touch /etc/x || touch y; ls /sys/class/net'],
    files={'given': b'here\n'},
  )
  assert done.stdout.split() == [b'65534', b'here', b'lo']
  late = dataclasses.replace(real, wall_seconds=3.0)
  assert (await container.run(late, ['sleep', '60'])).timed_out


async def test_a_real_engine_keeps_files_and_no_processes(real):
  box = await container.open_container(real, real.image)
  try:
    await box.run(['sh', '-c', 'echo one > kept; sleep 300 & echo'])
    done = await box.run(['sh', '-c', 'cat kept; ps | grep -c "[s]leep 300"'])
    assert done.stdout.split() == [b'one', b'0']
  finally:
    await box.close()
