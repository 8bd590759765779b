"""Problems in the shape of KernelBench: read, refused without a device, run."""

import importlib.util
import pathlib

import pytest

from swe17 import config
from swe17.env import families
from swe17.env.kernels import bench, kernel_bench

PROBLEM = '''import torch
import torch.nn as nn


class Model(nn.Module):
  """Doubles, slowly."""

  def __init__(self, scale):
    super().__init__()
    self.weight = nn.Parameter(torch.randn(200))
    self.scale = scale

  def forward(self, x):
    rows = []
    for row in x:
      rows.append(torch.relu(row * self.weight) * self.scale)
    return torch.stack(rows)


def get_inputs():
  return [torch.randn(400, 200)]


def get_init_inputs():
  return [2.0]
'''
FAST = """import torch
import torch.nn as nn


class ModelNew(nn.Module):
  def __init__(self, scale):
    super().__init__()
    self.weight = nn.Parameter(torch.randn(200))
    self.scale = scale

  def forward(self, x):
    return torch.relu(x * self.weight) * self.scale
"""


@pytest.fixture
def root(tmp_path) -> pathlib.Path:
  for level in ('level1', 'level2'):
    (tmp_path / level).mkdir()
  for i in range(12):
    (tmp_path / 'level1' / f'{i}_scaled.py').write_text(PROBLEM)
  (tmp_path / 'level2' / 'broken.py').write_text('class Model(:')
  (tmp_path / 'level2' / 'other.py').write_text('def get_inputs():\n  return []\n')
  return tmp_path


def settings(root: pathlib.Path | str, **more) -> config.Tasks:
  return config.Tasks(family=kernel_bench.FAMILY, root=str(root), **more)


def test_problems_are_read_and_files_that_are_none_are_named(root):
  tasks, aside = kernel_bench.read(settings(root))
  assert len(tasks) == 12 and {t.split for t in tasks} == {'train', 'heldout'}
  assert aside['level2/other'] == 'it defines no Model, get_init_inputs'
  assert aside['level2/broken'].startswith('it does not parse')
  assert 'class ModelNew' in tasks[0].prompt and PROBLEM in tasks[0].prompt


def test_too_few_problems_or_no_folder_are_refused(root):
  with pytest.raises(ValueError, match=r'tasks.train: .* want 99'):
    kernel_bench.read(settings(root, train=99))
  with pytest.raises(ValueError, match=r'tasks\.root: got .*nowhere'):
    kernel_bench.read(settings(root / 'nowhere'))


@pytest.mark.skipif(bool(kernel_bench.devices()), reason='there is a device')
async def test_without_a_device_the_family_is_refused_with_the_reason():
  family = families.get(kernel_bench.FAMILY)
  with pytest.raises(ValueError, match=r'family=kernel_bench: .*no GPU|not installed'):
    await family.open(config.Sandbox())


@pytest.mark.skipif(importlib.util.find_spec('torch') is None, reason='needs torch')
async def test_candidates_are_run_compared_and_timed_as_on_a_device(root):
  task = kernel_bench.read(settings(root, train=1, heldout=1))[0][0]
  cfg = config.Sandbox(workers=1, cpu_seconds=30.0, wall_seconds=60.0)
  host = await kernel_bench.open_host(cfg, 'cpu')
  asked = kernel_bench.problem(task, 'cpu')
  try:
    env = host.env(task)
    await env.reset()
    said = await env.step('attempt', {'code': FAST, 'summary': 'At once.'})
    assert said.startswith('correct: ') and (await env.verify()).value > 2.0
    for source, kind, words in (
      (PROBLEM, 'barred', 'copies_reference'),
      (FAST.replace('* self.scale', '* 2.1'), 'wrong', 'other values'),
      (FAST.replace('x * self', 'x[:9] * self'), 'wrong', 'other values'),
      (FAST.replace('ModelNew', 'Other'), 'run', 'AttributeError'),
      ('import os\n' + FAST, 'barred', 'reaches_out'),
      (
        FAST.replace('import torch\n', 'import torch\ntorch.randn = 1\n', 1),
        'barred',
        '',
      ),
    ):
      verdict = await host.judge.judge(asked, source)
      assert verdict.kind == kind and words in verdict.words, (source, verdict)
    assert isinstance(verdict, bench.Verdict) and verdict.flag == 'patches'
  finally:
    await host.close()
