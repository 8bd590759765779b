"""Harbor task folders: what is read, what is refused, what earns a reward."""

from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib

import pytest

from experiments import check_env
from swe17 import config
from swe17.env import check, families, sandbox
from swe17.env.formats import dockerfiles, harbor, harbor_places, harbor_tasks

CFG = config.Sandbox(backend='bubblewrap', workers=2, wall_seconds=30.0)
FIELDS = pathlib.Path(__file__).parent / 'data/harbor_0.26.0_fields.json'
# As harbor's own template has it, with less installed.
TEST = """#!/bin/bash
if pytest -q /tests/test_outputs.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
OUTPUTS = """import pathlib


def test_outputs():
  assert pathlib.Path('/app/sum.txt').read_text().strip() == '42'
"""
DOCKERFILE = """# a plain one
FROM python:3.12-slim
ENV GREETING="good day" PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
COPY numbers.txt \\
     ./
"""
INSTRUCTION = """<!-- canary GUID 00000000 -->

Write the sum of the numbers in /app/numbers.txt to /app/sum.txt.
"""


def folder(
  root: pathlib.Path, name: str = 'sum', changes: Mapping[str, str | None] | None = None
) -> pathlib.Path:
  """A task folder; `changes` replace files by their paths, None leaves one out."""
  files: dict[str, str | None] = {
    'task.toml': 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 60.0\n',
    'instruction.md': INSTRUCTION,
    'environment/Dockerfile': DOCKERFILE,
    'environment/numbers.txt': '40\n2\n',
    'tests/test.sh': TEST,
    'tests/test_outputs.py': OUTPUTS,
    'solution/solve.sh': '#!/bin/bash\npaste -sd+ numbers.txt | bc > sum.txt || '
    'python3 -c "print(sum(map(int, open(\'numbers.txt\'))))" > sum.txt\n',
  }
  for path, text in {**files, **(changes or {})}.items():
    if text is None:
      continue
    (root / name / path).parent.mkdir(parents=True, exist_ok=True)
    (root / name / path).write_text(text)
  return root / name


def local(root: pathlib.Path) -> config.Tasks:
  return config.Tasks(family=harbor.FAMILY, root=str(root), place='local')


@pytest.fixture
def bubblewrap() -> None:
  reason = sandbox._why_not_bubblewrap()
  if reason:
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')


def test_the_settings_are_those_of_the_real_schema():
  known = json.loads(FIELDS.read_text())['fields']
  ours = {name: set(text.split()) for name, text in harbor_tasks._SECTIONS.items()}
  ours[''] -= {'version'}  # the older name of schema_version
  ours['environment'] -= {'memory', 'storage'}  # older names too
  assert ours == {name: set(fields) for name, fields in known.items()}


def test_a_folder_is_read_with_its_files_and_without_its_canary(tmp_path):
  made = harbor_tasks.read(folder(tmp_path))
  assert made.id == 'sum' and made.verifier_seconds == 60.0
  assert (
    made.instruction.startswith('Write the sum') and 'canary' not in made.prompt
    if hasattr(made, 'prompt')
    else True
  )
  assert set(made.tests) == {'test.sh', 'test_outputs.py'}


@pytest.mark.parametrize(
  ('toml', 'reason'),
  [
    ('[environment]\ngpus = 1', r'environment\.gpus: 1 is not to be had'),
    ('[environment]\ngpu_types = ["H100"]', r'environment\.gpu_types'),
    ('[environment.tpu]\ntype = "v6e"\ntopology = "2x2"', r'environment\.tpu'),
    ('[environment]\nos = "Windows"', r'environment\.os: it wants Windows'),
    ('[environment.healthcheck]\ncommand = "true"', r'environment\.healthcheck'),
    ('[environment]\nallowed_hosts = ["x.org"]', 'no host is reachable'),
    ('[[environment.mcp_servers]]\nname = "a"', r'environment\.mcp_servers'),
    ('[verifier]\nenvironment_mode = "separate"', 'an environment of its own'),
    ('[verifier.env]\nKEY = "${OPENAI_API_KEY}"', r'verifier\.env\.KEY: it wants'),
    ('[agent]\nuser = "alice"', "agent.user: it wants user 'alice'"),
    ('[[steps]]\nname = "a"', 'steps: tasks of several steps'),
    ('schema_version = "2.0"', "schema_version: got '2.0'"),
    ('[environment]\nmemmory_mb = 1', r'environment\.memmory_mb: not known; is memory'),
    ('[environment]\nmemory_mb = -1', r'environment\.memory_mb: got -1'),
    ('[verifier]\ntimeout_sec = 0', r'verifier\.timeout_sec'),
    ('[environment]\ndocker_image = 3', r'environment\.docker_image: got int'),
    ('environment = 3', 'environment: got int, want a table'),
    ('a = ', r'task\.toml: '),
  ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(tmp_path, toml, reason):
  with pytest.raises(harbor_tasks.Refused, match=reason):
    harbor_tasks.read(folder(tmp_path, changes={'task.toml': toml}))


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({'tests/test.sh': None}, r'no tests/test\.sh'),
    ({'solution/solve.sh': None}, r'no solution/solve\.sh'),
    ({'instruction.md': None}, r'no instruction\.md'),
    ({'instruction.md': '# canary x\n\n'}, r'instruction\.md is empty'),
    ({'environment/docker-compose.yaml': ''}, 'several containers do not run here'),
    ({'tests/Dockerfile': ''}, 'the verifier has an image of its own'),
    ({'environment/Dockerfile': None}, r'neither environment\.docker_image'),
    ({'tests/.harborignore': ''}, 'its rules are not followed'),
    ({'task.toml': None, 'task.yaml': 'instruction: x'}, 'Terminal-Bench 1 folder'),
  ],
)
def test_a_folder_that_lacks_something_is_refused(tmp_path, changes, reason):
  with pytest.raises(harbor_tasks.Refused, match=reason):
    harbor_tasks.read(folder(tmp_path, changes=changes))


def test_a_link_out_of_the_folder_is_refused(tmp_path):
  path = folder(tmp_path)
  (path / 'tests/link').symlink_to('/etc/passwd')
  with pytest.raises(harbor_tasks.Refused, match='tests/link: a link'):
    harbor_tasks.read(path)


def test_older_names_of_settings_are_read(tmp_path):
  toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nallow_internet = false'
  assert (
    harbor_tasks.read(folder(tmp_path, changes={'task.toml': toml})).memory_mib == 2048
  )


def test_a_plain_dockerfile_is_files_and_a_place():
  context = {'Dockerfile': b'', 'numbers.txt': b'1', 'd/a': b'2', 'd/b/c': b'3'}
  made = dockerfiles.read(f'{DOCKERFILE}COPY d /data\nCOPY ["d/a", "x"]\n', context)
  assert made.files == {
    '/app/numbers.txt': b'1',
    '/data/a': b'2',
    '/data/b/c': b'3',
    '/app/x': b'2',
  }
  assert made.workdir == '/app' and made.env['GREETING'] == 'good day'


@pytest.mark.parametrize(
  'line',
  [
    'RUN apt-get update',
    'FROM nvidia/cuda:12',
    'FROM python:3.12 AS base',
    'COPY --from=x /a /b',
    'COPY *.txt /b',
    'COPY none.txt /b',
    'ADD http://x.org/a /b',
    'USER alice',
    'ARG A',
    'ENV A=$B',
    'WORKDIR $HOME',
    'SHELL ["x"]',
  ],
)
def test_a_dockerfile_that_needs_a_build_is_refused_with_its_line(line):
  text = line if line.startswith('FROM') else f'FROM ubuntu:24.04\n{line}\n'
  with pytest.raises(dockerfiles.NotPlain, match='Dockerfile: '):
    dockerfiles.read(text, {'a.txt': b''})


def test_a_place_of_the_system_is_not_worked_at(tmp_path):
  for workdir in ('/usr/src/app', '/', '/etc'):
    text = f'FROM ubuntu\nWORKDIR {workdir}\n'
    path = folder(tmp_path, changes={'environment/Dockerfile': text})
    with pytest.raises(dockerfiles.NotPlain, match='a place of the system'):
      harbor_places.start(harbor_tasks.read(path))


@pytest.mark.parametrize(
  ('files', 'want'),
  [
    ({'txt': '1\n'}, 1.0),
    ({'txt': '0.25'}, 0.25),
    ({'txt': '0', 'json': '{"reward": 1}'}, 1.0),  # JSON first, as in Harbor
    ({'json': '0.5'}, 0.5),
    ({'json': '{"accuracy": 0.5}'}, 0.5),
    ({'json': '{"reward": 1, "speed": 3}'}, 1.0),
    ({'json': '{"a": 1, "b": 0}'}, 'none of them named reward'),
    ({'json': '{}'}, 'none of them named reward'),
    ({'json': 'NaN'}, 'a reward of nan'),
    ({'json': '1e999'}, 'a reward of inf'),
    ({'json': '{"reward": "1"}'}, 'a reward that is no number'),
    ({'json': 'true'}, 'a reward that is no number'),
    ({'txt': 'nan'}, 'a reward of nan'),
    ({'txt': ''}, 'holds'),
    ({'txt': 'solved'}, 'holds'),
    ({}, 'wrote no reward'),
  ],
)
def test_a_reward_is_a_finite_number_or_none_at_all(files, want):
  named = {f'logs/verifier/reward.{k}': v.encode() for k, v in files.items()}
  got = harbor_places.reward(named)
  if isinstance(want, float):
    assert isinstance(got, float) and got == want and math.isfinite(got)
  else:
    assert isinstance(got, str) and want in got


def test_tasks_that_need_an_image_are_set_aside_here(tmp_path):
  folder(tmp_path, 'plain')
  image = {'task.toml': '[environment]\ndocker_image = "a/b:1"'}
  folder(tmp_path, 'image', image)
  no_build = {'environment/Dockerfile': None, 'environment/numbers.txt': None}
  folder(tmp_path, 'only', {**image, **no_build})
  tasks, aside = harbor.read(local(tmp_path))
  assert [task.id for task in tasks] == ['image', 'plain']  # its Dockerfile is plain
  assert 'it needs a/b:1' in aside['only']
  tasks, aside = harbor.read(dataclasses.replace(local(tmp_path), place='container'))
  assert [task.id for task in tasks] == ['image', 'only']
  assert 'images are not built here' in aside['plain']
  with pytest.raises(ValueError, match=r'tasks\.root'):
    harbor.read(config.Tasks(family=harbor.FAMILY))


def test_two_folders_of_one_name_are_refused(tmp_path):
  for name in ('a', 'b'):
    folder(tmp_path, name, {'task.toml': '[task]\nname = "org/same"'})
  with pytest.raises(ValueError, match="another folder has the name 'org/same'"):
    harbor.read(local(tmp_path))


async def test_the_solution_earns_the_reward_and_tricks_do_not(tmp_path, bubblewrap):
  folder(tmp_path)
  (task,), _ = harbor.read(local(tmp_path))
  assert 'in /app: only files stay' in task.prompt
  host = await harbor.open_host(CFG)
  try:
    (sound,), aside = await host.verify([task])
    assert not aside
    assert await check.environment(host.env, [sound]) == []

    async def played(*commands: str):
      env = host.env(sound)
      await env.reset()
      said = [await env.step('bash', {'command': c}) for c in commands]
      await env.step('submit', {})
      return await env.verify(), env.flags, said

    got, flags, said = await played('echo 42 > sum.txt', 'echo $GREETING; cat n*')
    assert got.value == 1.0 and flags == () and said[1] == 'good day\n40\n2\n'
    weak = 'echo "echo 1 > /logs/verifier/reward.txt" > /tests/test.sh'
    got, flags, _ = await played(weak, 'rm -rf /tests; ln -s /app /tests')
    assert (got.value, flags) == (0.0, ())
    got, flags, _ = await played('echo 1 > /logs/verifier/reward.json; ls /solution')
    assert got.value == 0.0 and flags == ('reward_file',)
    assert got.reason == 'cheating: reward_file'
    got, flags, _ = await played('echo "import os; os._exit(0)" > sitecustomize.py')
    assert got.value == 0.0 and flags == ('shadowing_module',)
  finally:
    await host.close()


async def test_folders_whose_tests_show_nothing_are_set_aside(tmp_path, bubblewrap):
  always = 'echo 1 > /logs/verifier/reward.txt\n'
  folder(tmp_path, 'always', {'tests/test.sh': always})
  folder(tmp_path, 'never', {'solution/solve.sh': 'true\n'})
  folder(tmp_path, 'silent', {'tests/test.sh': 'true\n'})
  short = '[verifier]\ntimeout_sec = 0.5\n'
  folder(tmp_path, 'slow', {'tests/test.sh': 'sleep 60\n', 'task.toml': short})
  tasks, _ = harbor.read(local(tmp_path))
  host = await harbor.open_host(CFG)
  sound, aside = await host.verify(tasks)
  assert not sound
  assert 'an untouched folder is rewarded with 1' in aside['always']
  assert 'its solution is rewarded with 0, want 1' in aside['never']
  for name in ('silent', 'slow'):
    assert 'with its solution: the verifier wrote no reward' in aside[name]


async def test_local_tasks_need_bubblewrap(tmp_path):
  folder(tmp_path)
  tasks, _ = harbor.read(local(tmp_path))
  host = await harbor.open_host(dataclasses.replace(CFG, backend='process'))
  _, aside = await host.verify(tasks)
  assert 'needs bubblewrap' in aside['sum']
  with pytest.raises(ValueError, match='pass it to verify first'):
    host.env(tasks[0])


async def test_check_env_is_told_where_the_tasks_are(tmp_path, bubblewrap):
  folder(tmp_path, 'gpu', {'task.toml': '[environment]\ngpus = 1\n'})
  words = [f'tasks.root={tmp_path}', 'tasks.place=local', 'sandbox.workers=1']
  found = await check_env.problems('families:harbor', words)
  assert found == [
    'gpu: set aside: environment.gpus: 1 is not to be had here',
    'there is no task to check with',
  ]
  for word in ('tasks.rot=x', 'root=x', 'tasks.root', 'agent.max_turns=3'):
    with pytest.raises(ValueError, match=r'want tasks\.name=value'):
      check_env.settings([word])
  tasks, box = check_env.settings(['tasks.train=3', 'sandbox.wall_seconds=9'])
  assert tasks.train == 3 and box.wall_seconds == 9.0


def test_the_family_is_in_the_table():
  assert families.get(harbor.FAMILY).open is harbor.open_host
