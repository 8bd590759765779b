"""One-shot commands in a sandbox: what they cannot reach, what they leave behind."""

import asyncio
import contextlib
import logging
import os
import pathlib
import sys
import tempfile

import psutil
import pytest

from swe17 import config
from swe17.env import sandbox

PYTHON = os.path.realpath(sys.executable)
CFG = config.Sandbox(cpu_seconds=1.0, wall_seconds=6.0, memory_mib=128, output_kib=64)
SHORT = config.Sandbox(cpu_seconds=1.0, wall_seconds=0.8, memory_mib=128)


@pytest.fixture(scope='module')
def bubblewrap() -> str:
  reason = sandbox._why_not_bubblewrap()
  if reason:
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')
  return 'bubblewrap'


@pytest.fixture(params=['bubblewrap', 'process'])
def backend(request) -> str:
  if request.param == 'bubblewrap':
    request.getfixturevalue('bubblewrap')
  return request.param


async def python(backend: str, code: str, cfg=CFG, **kwargs) -> sandbox.Completed:
  return await sandbox.run(cfg, backend, [PYTHON, '-I', '-c', code], **kwargs)


async def shell(backend: str, code: str, cfg=CFG, **kwargs) -> sandbox.Completed:
  return await sandbox.run(cfg, backend, ['/bin/sh', '-c', code], **kwargs)


def sleepers(marker: str) -> list[int]:
  found = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
      if marker in process.cmdline():
        found.append(process.pid)
  return found


async def assert_gone(marker: str) -> None:
  for _ in range(100):
    if not sleepers(marker):
      return
    await asyncio.sleep(0.02)
  raise AssertionError(f'still running: {sleepers(marker)}')


async def test_files_stdin_output_and_exit_status_pass_through(backend):
  done = await shell(
    backend,
    'cat; cat a/b.txt; echo problem >&2; exit 7',
    files={'a/b.txt': b'\x00\xffinside'},
    stdin=b'from stdin,',
  )
  assert done == sandbox.Completed(
    7, b'from stdin,\x00\xffinside', b'problem\n', False, False
  )


async def test_directory_is_private_and_gone_afterwards(backend):
  before = set(os.listdir(tempfile.gettempdir()))
  first = await shell(backend, 'echo secret > left; pwd; ls', files={'mine': b''})
  assert first.stdout.split()[1:] == [b'left', b'mine']
  second = await shell(backend, 'ls; cat left')
  assert second.stdout == b'' and second.returncode != 0
  if backend == 'process':
    assert not pathlib.Path(first.stdout.split()[0].decode()).exists()
  left = set(os.listdir(tempfile.gettempdir())) - before
  assert not [name for name in left if name.startswith('sandbox-')]


async def test_two_runs_at_once_do_not_see_each_other(bubblewrap):
  code = 'echo {0} > {0}; sleep .3; ls; ls /proc | grep -c "^[0-9]"'
  one, two = await asyncio.gather(
    shell(bubblewrap, code.format('one')), shell(bubblewrap, code.format('two'))
  )
  assert one.stdout.split()[0] == b'one' and len(one.stdout.split()) == 2
  assert two.stdout.split()[0] == b'two'
  assert int(one.stdout.split()[1]) <= 6  # our own processes only


async def test_network_is_absent(bubblewrap):
  done = await python(
    bubblewrap,
    'import socket\n'
    'print(socket.if_nameindex())\n'
    's = socket.socket(); s.settimeout(2)\n'
    "try: s.connect(('192.0.2.1', 80)); print('connected')\n"
    'except OSError as e: print(type(e).__name__, e.errno)',
  )
  assert done.stdout.splitlines() == [b"[(1, 'lo')]", b'OSError 101'], done


async def test_system_is_read_only(bubblewrap):
  places = ['/', '/usr', '/usr/lib', '/dev', '/code', sys.base_prefix]
  done = await python(
    bubblewrap,
    'import os\n'
    f'for place in {places!r}:\n'
    "  try: open(os.path.join(place, 'x'), 'w'); print('wrote', place)\n"
    '  except OSError: print("refused")',
  )
  assert done.stdout.split() == [b'refused'] * len(places), done


async def test_host_files_and_environment_are_absent(bubblewrap, tmp_path, monkeypatch):
  (tmp_path / 'secret').write_text('x')
  tmp_path.chmod(0o777)
  monkeypatch.setenv('MY_SECRET_TOKEN', 'x')
  done = await shell(bubblewrap, f'cat {tmp_path}/secret; cat /etc/passwd; env')
  assert b'SECRET' not in done.stdout and b'root:' not in done.stdout
  assert done.stderr.count(b'No such file') == 2


async def test_command_has_no_privileges(bubblewrap):
  done = await shell(bubblewrap, 'id -u; grep -E "CapEff|NoNewPrivs" /proc/self/status')
  uid, *rest = done.stdout.split()
  assert int(uid) != 0
  assert rest == [b'CapEff:', b'0' * 16, b'NoNewPrivs:', b'1']


async def test_fork_bomb_is_bounded(bubblewrap):
  done = await python(
    bubblewrap,
    'import os, time\n'
    'n = 0\n'
    'try:\n'
    '  while n < 200:\n'
    '    if os.fork() == 0: time.sleep(60); os._exit(0)\n'
    '    n += 1\n'
    'except OSError: pass\n'
    'print(n)',
  )
  assert 0 < int(done.stdout) < CFG.processes, done
  assert (await shell(bubblewrap, 'echo fine | cat')).stdout == b'fine\n'


async def test_memory_hog_is_bounded(backend):
  hog = 'x=x; while :; do x=$x$x; done'
  done = await shell(backend, hog)
  assert done.returncode != 0 and not done.timed_out, done
  assert (await shell(backend, 'echo fine')).stdout == b'fine\n'


async def test_cpu_spin_is_bounded(bubblewrap):
  done = await shell(bubblewrap, 'echo started; while :; do :; done')
  assert done.returncode == 137 or done.timed_out, done  # SIGKILL by RLIMIT_CPU
  assert done.stdout == b'started\n'
  assert (await shell(bubblewrap, 'echo fine')).stdout == b'fine\n'


async def test_private_directory_is_bounded(bubblewrap):
  code = 'for i in 1 2 3 4; do head -c 100000000 /dev/zero > f$i || exit 3; done'
  done = await shell(bubblewrap, code)
  assert done.returncode == 3, done
  assert (await shell(bubblewrap, 'echo fine > f; cat f')).stdout == b'fine\n'


async def test_output_flood_is_bounded_and_said(backend):
  done = await shell(backend, 'head -c 5000000 /dev/zero; exit 4')
  assert len(done.stdout) == CFG.output_kib << 10
  assert done.truncated and done.returncode == 4


async def test_no_process_outlives_the_call(backend):
  marker = f'98765.{os.getpid()}'
  codes = (
    'sleep {0} & sleep {0}',
    'setsid sleep {0} & sleep .2',
    '(setsid sh -c "sleep {0} & sleep {0}" &) ; exit 0',
    'trap "" TERM INT HUP; sleep {0}',
  )
  quiet = ' >/dev/null 2>&1 </dev/null'
  runs = [shell(backend, code.format(marker) + quiet, cfg=SHORT) for code in codes]
  await asyncio.gather(*runs)
  await assert_gone(marker)


async def test_signals_to_its_group_or_to_all_do_not_reach_the_keeper(backend):
  # To all only where 'all' is the sandbox.
  everybody = 'kill -TERM -1; ' if backend == 'bubblewrap' else ''
  done = await shell(backend, f'trap "" TERM; kill -TERM 0; {everybody}exit 5')
  assert done.returncode == 5, done


async def test_time_out_returns_the_output_so_far(backend):
  done = await shell(backend, 'echo before; sleep 60', cfg=SHORT)
  assert done == sandbox.Completed(None, b'before\n', b'', True, False)


async def test_cancelled_call_leaves_nothing(backend):
  marker = f'87654.{os.getpid()}'
  task = asyncio.create_task(shell(backend, f'sleep {marker}'))
  for _ in range(200):
    if sleepers(marker):
      break
    await asyncio.sleep(0.02)
  assert sleepers(marker)
  task.cancel()
  with pytest.raises(asyncio.CancelledError):
    await task
  await assert_gone(marker)


@pytest.mark.parametrize('name', ['/etc/x', '../x', 'a/../../x', '.', ''])
async def test_file_names_cannot_leave_the_directory(backend, name):
  with pytest.raises(ValueError, match='relative'):
    await shell(backend, 'true', files={name: b''})


async def test_missing_command_is_said(backend):
  done = await sandbox.run(CFG, backend, ['/no/such/command'])
  assert done.returncode == 127 and b'/no/such/command' in done.stderr


def test_auto_takes_bubblewrap_where_it_works(bubblewrap, caplog):
  assert sandbox.choose_backend(config.Sandbox()) == 'bubblewrap'
  assert not caplog.records


def test_without_namespaces_auto_falls_back_with_one_warning(monkeypatch, caplog):
  monkeypatch.setattr(sandbox, '_bwrap', lambda: '/bin/false')
  with caplog.at_level(logging.WARNING):
    assert sandbox.choose_backend(config.Sandbox()) == 'process'
  assert len(caplog.records) == 1 and 'WITHOUT isolation' in caplog.text
  with pytest.raises(ValueError, match=r'sandbox\.backend'):
    sandbox.choose_backend(config.Sandbox(backend='bubblewrap'))


def test_process_backend_is_warned_about(caplog):
  assert sandbox.choose_backend(config.Sandbox(backend='process')) == 'process'
  assert 'WITHOUT isolation' in caplog.text
