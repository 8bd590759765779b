"""The supervisor, on stand-in roles: real processes, real signals, no model.

Each test starts the supervisor in a process of its own, since it takes over signals
and adopts what its children leave behind. A stand-in role does what the test's
scenario says and writes its process id where the test finds it.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from launch import watch
from swe17 import config

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEADLINE = 60.0  # s; only a hang takes that long

# Runs as: supervisor.py <run_dir> <role script>
SUPERVISOR = """
import os, sys
from launch import folder, local
from swe17 import settings

run_dir, script = sys.argv[1:]
parent = str(os.getpid())
rollout = {'processes': int(os.environ.get('ROLLOUTS', 1))}
learners = int(os.environ.get('LEARNERS', 1))
mesh = {'fsdp': learners, 'processes': learners}
values = {'run_dir': run_dir, 'steps': 2, 'rollout': rollout, 'mesh': mesh}
cfg = settings.resolve(values)
local.LEARNER_DEATHS = 1
lock = folder.claim(run_dir, resume=False)
origin = settings.origins({}, {})
folder.fill(run_dir, settings.to_json(cfg, origin), ['stand-in'])

def command(role, index, resume):
  return [sys.executable, script, role, str(index), str(resume), run_dir, parent]

def env_of(role, index):
  return {'STANDS_IN': f'{role}-{index % 2}'} if role in ('sampler', 'rollout') else {}

sys.exit(local.run(cfg, resume=False, command=command, env_of=env_of))
"""

# Runs as: role.py <role> <index> <resume> <run_dir> <parent>; a scenario is appended.
ROLE = """
import os, pathlib, signal, subprocess, sys, time
from launch import process

role, index, resume, run_dir, parent = sys.argv[1:]
name = role + (f'-{index}' if role == 'sampler' or index != '0' else '')
run_dir = pathlib.Path(run_dir)
(run_dir / 'pids').mkdir(exist_ok=True)
(run_dir / 'pids' / f'{name}.{os.getpid()}').touch()
first = len(list((run_dir / 'pids').glob(f'{name}.*'))) == 1
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
process.GRACE = 1.0  # for `end_with`; the supervisor's own is the real one
process.end_with(int(parent))

def say(mark):
  (run_dir / mark).touch()

def wait_for(mark):
  while not (run_dir / mark).exists():
    time.sleep(0.02)

def leave_a_child():
  # In a session of its own, as a grader may be: out of reach of the group's kill.
  child = subprocess.Popen(['sleep', '600'], start_new_session=True)
  (run_dir / 'pids' / f'grandchild.{child.pid}').touch()

"""

FOREVER = '\nwhile True:\n  time.sleep(0.05)\n'


def start(tmp_path: pathlib.Path, scenario: str) -> subprocess.Popen:
  """Starts the supervisor over roles that do `scenario`, then live for ever."""
  (tmp_path / 'run').mkdir()
  (tmp_path / 'supervisor.py').write_text(SUPERVISOR)
  role = ROLE + textwrap.dedent(scenario) + FOREVER
  (tmp_path / 'role.py').write_text(role)
  argv = [tmp_path / 'supervisor.py', tmp_path / 'run', tmp_path / 'role.py']
  return subprocess.Popen(
    [sys.executable, *map(str, argv)],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def pids(run_dir: pathlib.Path) -> dict[int, str]:
  names = [path.name.rsplit('.', 1) for path in (run_dir / 'pids').glob('*')]
  return {int(pid): name for name, pid in names}


def alive(run_dir: pathlib.Path) -> list[str]:
  """Names of the scenario's processes that still exist (a zombie counts)."""
  found = []
  for pid, name in pids(run_dir).items():
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, 0)
      found.append(name)
  return found


def wait_until(condition) -> None:
  until = time.monotonic() + DEADLINE
  while not condition():
    assert time.monotonic() < until, 'waited too long'
    time.sleep(0.05)


def events(run_dir: pathlib.Path) -> list[dict]:
  return [json.loads(x) for x in (run_dir / 'events.jsonl').read_text().splitlines()]


def evaluation(version: int, rates: dict[str, list[float]]) -> str:
  values = [x for unit in rates.values() for x in unit]
  mean = sum(values) / len(values)
  e = {'version': version, 'split': 'heldout', 'pass_at_1': mean, 'units': rates}
  tasks = {f'{u}/{i}': x for u, xs in rates.items() for i, x in enumerate(xs)}
  e |= {'tasks': tasks, 'task_units': {k: k.split('/')[0] for k in tasks}}
  return json.dumps({**e, 'low': 0.0, 'high': 1.0})


def test_a_finished_run_ends_every_process_and_says_before_and_after(tmp_path):
  run_dir = tmp_path / 'run'
  (tmp_path / 'evals').mkdir()
  before, after = {'f': [0.0, 0.25], 'g': [0.25, 0.5]}, {'f': [1.0, 0.75], 'g': [1, 1]}
  (tmp_path / 'evals' / '0.json').write_text(evaluation(0, before))
  (tmp_path / 'evals' / '9.json').write_text(evaluation(9, after))
  popen = start(
    tmp_path,
    """
    if role == 'learner':
      sys.exit(0)  # all steps done: not a death
    leave_a_child()
    if role == 'rollout':
      (run_dir.parent / 'evals').rename(run_dir / 'evals')
      time.sleep(0.5)
      sys.exit(0)
    """,
  )
  out, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == 0, err
  assert 'held-out solve rate at version 0: 25.0 % [0.0, 100.0]' in out
  assert 'held-out solve rate at version 9: 93.8 %' in out
  assert 'paired difference: +68.8 points' in out
  assert '(95 %, 2 functions resampled)' in out
  assert f'run folder: {run_dir}' in out
  assert alive(run_dir) == []
  assert len([n for n in pids(run_dir).values() if n == 'learner']) == 1
  assert (run_dir / 'report.html').exists()
  assert json.loads((run_dir / 'run.json').read_text())['seconds'] > 0


def test_before_and_after_are_compared_on_the_tasks_that_both_have(tmp_path):
  (tmp_path / 'evals').mkdir()
  before, after = {'f': [0.5, 0.25], 'g': [0.5]}, {'f': [0.75], 'g': [1.0], 'h': [0.0]}
  (tmp_path / 'evals' / 'a.json').write_text(evaluation(0, before))
  cfg = config.Config(run_dir=str(tmp_path))
  assert 'paired' not in watch.summary(cfg, 60.0)
  (tmp_path / 'evals' / 'b.json').write_text(evaluation(5, after))
  said = watch.summary(cfg, 60.0)
  assert 'paired difference: +37.5 points [+25.0, +50.0]' in said
  assert '2 functions resampled; 2 tasks are without an outcome on one side' in said
  (tmp_path / 'evals' / 'b.json').write_text(evaluation(5, {'h': [1.0], 'i': [1.0]}))
  assert 'paired difference: not computed: ' in watch.summary(cfg, 60.0)


def test_a_killed_sampler_is_started_again_and_named(tmp_path):
  popen = start(
    tmp_path,
    """
    if name == 'sampler-1' and first:
      print('serving version 3')
      leave_a_child()
      os.kill(os.getpid(), signal.SIGKILL)
    if name == 'sampler-1':
      say('again')
    if role == 'rollout':
      wait_for('again')
      sys.exit(0)
    """,
  )
  out, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == 0, err
  (event,) = events(tmp_path / 'run')
  dead = min(p for p, n in pids(tmp_path / 'run').items() if n == 'sampler-1')
  want = (
    f'sampler-1 (pid {dead}) was killed by SIGKILL, its log ends: serving version 3'
  )
  assert event['text'].startswith(want)
  assert want in out
  assert alive(tmp_path / 'run') == []


def test_of_several_rollouts_the_first_ends_the_run(tmp_path, monkeypatch):
  monkeypatch.setenv('ROLLOUTS', '3')
  popen = start(
    tmp_path,
    """
    if name == 'rollout-1' and first:
      os.kill(os.getpid(), signal.SIGKILL)
    if name == 'rollout-1':
      say('again')
    if name == 'rollout-2':
      say('ended')
      sys.exit(0)  # the plan said so: nothing more for it to do
    if name == 'rollout':
      wait_for('again')
      wait_for('ended')
      time.sleep(1.0)
      sys.exit(0)
    """,
  )
  out, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == 0, err
  (event,) = events(tmp_path / 'run')
  assert event['role'] == 'rollout-1'
  assert 'rollout-1 (pid ' in out and 'was killed by SIGKILL' in out
  started = [name for name in pids(tmp_path / 'run').values()]
  assert [started.count(f'rollout-{i}') for i in (1, 2)] == [2, 1]
  assert started.count('rollout') == 1
  assert alive(tmp_path / 'run') == []
  logs = {path.stem for path in (tmp_path / 'run' / 'logs').glob('rollout*.log')}
  assert logs == {'rollout', 'rollout-1', 'rollout-2'}


def test_every_role_may_have_an_environment_of_its_own(tmp_path, monkeypatch):
  monkeypatch.setenv('ROLLOUTS', '2')
  popen = start(
    tmp_path,
    """
    say(f'{name} in {os.environ.get("STANDS_IN")}')
    if name == 'rollout':
      wait_for('learner in None')
      wait_for('sampler-1 in sampler-1')
      wait_for('rollout in rollout-0')
      wait_for('rollout-1 in rollout-1')
      sys.exit(0)
    """,
  )
  _, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == 0, err


def test_what_all_rollouts_do_is_on_the_screen(tmp_path):
  folder = tmp_path / 'status'
  folder.mkdir()

  def says(role: str, phase: str, detail: str) -> None:
    text = {'phase': phase, 'detail': detail, 'fraction': None, 'time': 0}
    (folder / f'{role}.json').write_text(json.dumps(text))

  says('learner', 'training', 'step 3/24')
  says('rollout', 'rollout', '4 groups of 8')
  assert watch.phase(tmp_path)['detail'] == 'step 3/24; rollout: rollout 4 groups of 8'
  says('rollout-1', 'rollout', '0 groups of 8, 6 to store')
  assert watch.phase(tmp_path)['detail'].endswith(
    '; rollout-1: rollout 0 groups of 8, 6 to store'
  )
  says('learner', 'done', '24 steps')
  says('rollout', 'evaluating', '3/40')
  assert watch.phase(tmp_path)['detail'] == '3/40'


def test_a_dead_learner_is_resumed_and_only_it_gets_the_flag(tmp_path):
  popen = start(
    tmp_path,
    """
    say(f'{name} resume={resume}')
    if role == 'learner' and first:
      sys.exit(1)
    if role == 'rollout':
      wait_for('learner resume=True')
      sys.exit(0)
    """,
  )
  _, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == 0, err
  marks = sorted(path.name for path in (tmp_path / 'run').glob('* resume=*'))
  assert marks == [
    'learner resume=False',
    'learner resume=True',
    'rollout resume=False',
    'sampler-0 resume=False',
    'sampler-1 resume=False',
  ]


def test_a_learner_that_keeps_dying_ends_the_run_with_1(tmp_path):
  popen = start(
    tmp_path,
    """
    if role == 'learner':
      print('Traceback ...')
      print('RuntimeError: out of luck')
      sys.exit(1)
    """,
  )
  _, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == 1
  assert 'exited 1' in err and 'RuntimeError: out of luck' in err
  assert f'--resume --run_dir={tmp_path / "run"}' in err
  assert alive(tmp_path / 'run') == []


def test_exit_code_2_stops_the_run_with_the_roles_sentence(tmp_path):
  popen = start(
    tmp_path,
    """
    if role == 'rollout':
      print('verifying')
      print('error: tasks.table: line 7 is no task', file=sys.stderr)
      print('a thread says goodbye', file=sys.stderr)
      sys.exit(2)
    """,
  )
  _, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == 2
  assert err == 'error: tasks.table: line 7 is no task\n'
  assert len(pids(tmp_path / 'run')) <= 4  # nobody was started again
  assert alive(tmp_path / 'run') == []


HUNG = """
if name == 'sampler-0':
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


@pytest.mark.parametrize(
  ('kind', 'code', 'hung'), [(signal.SIGINT, 130, HUNG), (signal.SIGTERM, 143, '')]
)
def test_a_signal_leaves_no_process_and_says_how_to_resume(tmp_path, kind, code, hung):
  popen = start(tmp_path, hung + 'leave_a_child()')
  run_dir = tmp_path / 'run'
  wait_until(lambda: len(pids(run_dir)) == 8)
  popen.send_signal(kind)
  _, err = popen.communicate(timeout=DEADLINE)
  assert popen.returncode == code
  assert alive(run_dir) == []
  assert f'go on with: python -m experiments.swe17 --resume --run_dir={run_dir}' in err
  assert 'Traceback' not in err


def test_roles_end_when_their_supervisor_is_killed(tmp_path):
  popen = start(tmp_path, HUNG)
  run_dir = tmp_path / 'run'
  wait_until(lambda: len(pids(run_dir)) == 4)
  popen.kill()
  popen.communicate(timeout=DEADLINE)
  # Orphans go to whoever adopts them here, who may be slow to reap: zombies are over.
  wait_until(lambda: all(map(over, pids(run_dir))))


def over(pid: int) -> bool:
  try:
    status = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return True
  return status.rpartition(')')[2].split()[0] == 'Z'
