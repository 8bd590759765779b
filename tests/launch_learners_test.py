"""The supervisor over several learner processes, on stand-in roles: one program."""

import signal
import types

import pytest

from launch import local, process
from swe17 import config
from tests import launch_local_test as stands_in

TWO = config.Config(mesh=config.Mesh(fsdp=2, processes=2))


@pytest.mark.parametrize('killed', ['learner', 'learner-1'])
def test_a_killed_learner_process_has_all_of_them_started_again(
  tmp_path, monkeypatch, killed
):
  """The other hangs; both resume together, on a new port."""
  monkeypatch.setenv('LEARNERS', '2')
  monkeypatch.setenv('KILLED', killed)
  popen = stands_in.start(
    tmp_path,
    """
    if role == 'learner':
      say(f'{name} {resume} {os.environ["JAX_COORDINATOR_ADDRESS"]}')
    killed = os.environ['KILLED']
    if name == killed and first:
      wait_for('waiting')
      os.kill(os.getpid(), signal.SIGKILL)
    if role == 'learner' and first:
      say('waiting')  # and hangs, as a collective may
    if role == 'rollout':
      while len(list(run_dir.glob('learner*True*'))) < 2:
        time.sleep(0.02)
      sys.exit(0)
    """,
  )
  _, err = popen.communicate(timeout=stands_in.DEADLINE)
  assert popen.returncode == 0, err
  run_dir = tmp_path / 'run'
  (event,) = stands_in.events(run_dir)
  assert event['role'] == killed
  assert 'was killed by SIGKILL' in event['text']
  assert event['text'].endswith(
    'starting all 2 learner processes again with --resume in 0.5 s'
  )
  marks = [path.name.split() for path in run_dir.glob('learner* 127.0.0.1:*')]
  assert sorted(mark[:2] for mark in marks) == [
    [name, resume] for name in ('learner', 'learner-1') for resume in ('False', 'True')
  ]
  # Both meet at one address, and at another one the second time.
  address = {(name, resume): at for name, resume, at in marks}
  assert address['learner', 'False'] == address['learner-1', 'False']
  assert address['learner', 'True'] == address['learner-1', 'True']
  assert len(set(address.values())) == 2
  assert stands_in.alive(run_dir) == []
  assert (run_dir / 'logs' / 'learner-1.log').exists()


@pytest.mark.parametrize(
  ('codes', 'first'),
  [
    ((-9, local.LOST), 0),
    ((local.LOST, -9), 1),
    ((local.LOST, 1), 1),
    ((local.LOST, None), 0),
    ((0, 1), 1),
    ((-9, -6), 0),  # JAX aborts who finds process 0 gone
    ((2, local.LOST), 0),
  ],
)
def test_who_died_first_is_told_from_who_ended_because_of_it(codes, first, tmp_path):
  learners = [
    local.Child(
      'learner', i, tmp_path, types.SimpleNamespace(poll=lambda code=code: code)
    )
    for i, code in enumerate(codes)
  ]
  assert local._first_to_die(learners) == (learners[first], codes[first])


def test_a_learner_process_that_refuses_its_input_stops_the_run(tmp_path, monkeypatch):
  monkeypatch.setenv('LEARNERS', '2')
  popen = stands_in.start(
    tmp_path,
    f"""
    if name == 'learner':
      print('error: store: the disk is full', file=sys.stderr)
      sys.exit(2)
    if name == 'learner-1':
      time.sleep(0.2)
      sys.exit({local.LOST})
    """,
  )
  _, err = popen.communicate(timeout=stands_in.DEADLINE)
  assert (popen.returncode, err) == (2, 'error: store: the disk is full\n')
  assert stands_in.alive(tmp_path / 'run') == []


def test_a_signal_ends_all_learner_processes(tmp_path, monkeypatch):
  monkeypatch.setenv('LEARNERS', '2')
  popen = stands_in.start(tmp_path, '')
  run_dir = tmp_path / 'run'
  stands_in.wait_until(lambda: len(stands_in.pids(run_dir)) == 5)
  popen.send_signal(signal.SIGTERM)
  popen.communicate(timeout=stands_in.DEADLINE)
  assert popen.returncode == 128 + signal.SIGTERM
  assert stands_in.alive(run_dir) == []


def test_on_one_machine_the_learners_get_a_free_port_and_otherwise_what_is_set():
  first, second = (process.coordinator_env(TWO) for _ in range(2))
  assert first.keys() == second.keys() == {'JAX_COORDINATOR_ADDRESS'}
  mesh = config.Mesh(fsdp=2, processes=2, coordinator='learner-0:1234')
  assert process.coordinator_env(config.Config(mesh=mesh)) == {}
  assert process.coordinator(config.Config(mesh=mesh)) == 'learner-0:1234'
  assert process.coordinator(config.Config()) == ''


def test_a_learner_that_does_not_know_where_the_others_are_says_so(monkeypatch):
  monkeypatch.delenv('JAX_COORDINATOR_ADDRESS', raising=False)
  with pytest.raises(ValueError, match=r'mesh\.processes=2: got no mesh\.coordinator'):
    process.coordinator(TWO)
