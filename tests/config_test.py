"""Settings: what is accepted, what is refused and in which words.

Everything goes through the program's own `main` or `parse`; a refusal is one sentence
on stderr and exit code 2, before JAX or anything else that is slow is imported.
"""

import json
import os
import pathlib
import subprocess
import sys
import types as python_types

import pytest

from experiments import options, swe17
from launch import folder
from swe17 import config, settings

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUICKSTART = str(ROOT / 'experiments' / 'configs' / 'quickstart.py')
DICT = 'def get_config(arg=""):\n  return {}\n'
FILE = """
from swe17 import settings
def get_config():
  cfg = settings.default()
  {}
  return cfg
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
  """Writes a config file and returns `--config=` for it; the test runs beside it."""
  monkeypatch.chdir(tmp_path)

  def write(text: str) -> str:
    (tmp_path / 'mine.py').write_text(text)
    return f'--config={tmp_path / "mine.py"}'

  return write


def refused(argv: list[str], capsys) -> str:
  """The sentence with which `argv` is refused."""
  assert swe17.main(argv) == 2
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith('error: ') and err.count('\n') == 1, err
  return err


# Changes made by a config file and flags, and the resolved value.
ACCEPTED = [
  ('pass', [], 'optim.lr', config.Config().optim.lr),
  ('cfg.optim.lr = 3e-4', [], 'optim.lr', 3e-4),
  ('cfg.optim.lr = 3e-4', ['--config.optim.lr=5e-4'], 'optim.lr', 5e-4),
  ('cfg.optim.lr = 1', [], 'optim.lr', 1.0),
  ('pass', ['--config.optim.lr', '1'], 'optim.lr', 1.0),
  ('pass', ['--config.seed=4294967295'], 'seed', 4294967295),
  ('cfg.loss.replay = False', [], 'loss.replay', False),
  ('cfg.loss.replay = False', ['--config.loss.replay'], 'loss.replay', True),
  ('pass', ['--noconfig.loss.replay'], 'loss.replay', False),
  ('cfg.tasks.verify = True', ['--config.tasks.verify=false'], 'tasks.verify', False),
  ('cfg.tasks.verify = False', ['--config.seed=1'], 'tasks.verify', False),
  ('pass', ['--config.steps=3', '--config.steps=4'], 'steps', 4),
  ('return {"optim": {"lr": 1}}', [], 'optim.lr', 1.0),
  ('return {"optim": {"lr": 1}}', ['--config.optim.lr=0.5'], 'optim.lr', 0.5),
  ('return {"optim": {"lr": 1}}', ['--config.steps=7'], 'steps', 7),
  ('pass', ['--run_dir=here'], 'run_dir', '<cwd>/here'),
  ('cfg.run_dir = "there"', ['--run_dir=here/'], 'run_dir', '<cwd>/here'),
]


@pytest.mark.parametrize(('change', 'argv', 'name', 'want'), ACCEPTED)
def test_flags_win_over_the_file_over_the_defaults(file, change, argv, name, want):
  chosen = options.parse([file(FILE.format(change)), *argv])
  got = settings.flatten(chosen.cfg)[name]
  if isinstance(want, str):
    want = want.replace('<cwd>', os.getcwd())
  assert got == want and type(got) is type(want)


# Changes made by a config file and flags, and what the refusal names.
REFUSED = [
  # Misspelt or unknown.
  ('pass', ['--config.optim.learning_rat=1e-6'], 'optim.learning_rat', 'optim.lr'),
  ('pass', ['--config.sampler.top_pp=0.9'], 'sampler.top_pp', 'sampler.top_p'),
  ('cfg.optim.learning_rat = 1e-6', [], 'optim.learning_rat', 'optim.lr'),
  ('return {"rollout": {"groupsize": 4}}', [], 'groupsize', 'rollout.group_size'),
  ('pass', ['--config.loss=gspo'], '--config.loss is a section', 'loss.objective'),
  ('pass', ['--stepz=3'], '--stepz', '--config.steps'),
  ('pass', ['--resum'], '--resum', '--resume'),
  ('pass', ['steps=3'], "'steps=3'", '--config.name=value'),
  # Of the wrong type.
  ('pass', ['--config.loss.replay=maybe'], 'loss.replay', 'true or false'),
  ('return {"loss": {"replay": "false"}}', [], "loss.replay: got 'false'", 'False'),
  ('return {"loss": {"replay": 1}}', [], 'loss.replay: got 1', 'True or False'),
  ('return {"steps": True}', [], 'steps: got True', 'an integer'),
  ('return {"steps": 3.0}', [], 'steps: got 3.0', 'an integer'),
  ('return {"optim": 3}', [], 'optim: got 3', 'a section'),
  ('cfg.steps = "many"', [], 'mine.py line 5', 'steps'),
  ('pass', ['--config.seed=abc'], 'config.seed', "'abc'"),
  # Out of range.
  ('pass', ['--config.optim.lr=nan'], 'optim.lr: got nan', 'finite'),
  ('pass', ['--config.sampler.top_p=0'], 'sampler.top_p: got 0.0', 'in (0, 1]'),
  ('pass', ['--config.sampler.top_p=1.1'], 'sampler.top_p: got 1.1', 'in (0, 1]'),
  ('pass', ['--config.rollout.group_size=1'], 'rollout.group_size: got 1', '>= 2'),
  ('pass', ['--config.loss.baseline=median'], "got 'median'", 'leave_one_out'),
  ('pass', ['--config.loss.objective=grpo'], "got 'grpo'", 'reinforce_tis'),
  ('pass', ['--config.loss.length.cap=1.0'], 'loss.length.cap: got 1.0', '[0, 1)'),
  ('return {"loss": {"objective": "gspo", "level": "turn"}}', [], 'loss.level', 'gspo'),
  ('pass', ['--config.loss.credit=token'], "loss.credit: got 'token'", 'turn'),
  ('pass', ['--config.loss.gamma=1.1'], 'loss.gamma: got 1.1', 'in [0, 1]'),
  ('pass', ['--config.loss.kl_weight=-1'], 'loss.kl_weight: got -1.0', '>= 0'),
  ('pass', ['--config.tasks.kinds=operator,of_by_one'], "'of_by_one'", "'off_by_one'"),
  ('return {"tasks": {"kinds": "operator,"}}', [], "kinds: got ''", 'dropped_line'),
  ('pass', ['--config.model.kv_heads=7'], 'model.kv_heads: got 7', 'model.heads='),
  ('pass', ['--config.model.ngram=0'], 'model.ngram: got 0', '>= 1'),
  ('pass', ['--config.model.rotary_dim=5'], 'model.rotary_dim: got 5', 'even'),
  ('pass', ['--config.model.rotary_dim=0'], 'model.rotary_dim: got 0', 'from 2'),
  ('pass', ['--config.model.rotary_dim=998'], 'rotary_dim: got 998', 'model.head_dim='),
  ('return {"model": {"head_dim": 4, "rotary_dim": 6}}', [], 'got 6', 'head_dim=4'),
  ('pass', ['--config.model.bigram=false'], 'model.bigram', 'model.'),
  (
    'pass',
    ['--config.store=ftp://x'],
    "store: got 'ftp://x'",
    'file:///absolute/folder',
  ),
  ('pass', ['--config.tasks.table=no.json'], 'tasks.table', 'no.json'),
  # Forbidden pairs.
  ('pass', ['--config.regions=3'], 'sampler.processes: got 2', 'regions=3'),
  ('pass', ['--config.regions=2'], 'rollout.processes: got 1', 'regions=2'),
  (
    'return {"loss": {"credit": "turn", "length": {"kind": "linear"}}}',
    [],
    "loss.credit='turn'",
    "loss.length.kind='linear'",
  ),
  ('cfg.sampler.repetition_penalty = 1.1', [], 'loss.replay=True', 'penalty=1.1'),
  ('pass', ['--config.sampler.temperature=0'], 'sampler.temperature=0.0', '> 0'),
  ('pass', ['--config.sampler.top_k=0'], 'loss.replay=True', 'sampler.top_k=0'),
  ('pass', ['--config.agent.max_context=9999'], 'max_context=9999', 'row_length='),
  ('pass', ['--config.agent.max_new_tokens=999'], 'new_tokens=999', 'context='),
  ('pass', ['--config.sync.publish_every=9'], 'publish_every=9', 'max_staleness='),
  # The file itself.
  ('return None', [], 'mine.py', 'None'),
  ('raise KeyError("gone")', [], 'mine.py line 5', 'gone'),
  ('import no_such_module', [], 'mine.py line 5', 'no_such_module'),
  ('this is no python', [], 'mine.py', 'SyntaxError'),
  # The command line.
  ('pass', ['--role=cook'], 'role=cook', 'learner'),
  ('pass', ['--role=learner'], '--role', '--run_dir'),
  ('pass', ['--index=1'], '--index=1', '--role=sampler'),
  ('pass', ['--resume'], '--resume', '--run_dir'),
]


@pytest.mark.parametrize(('change', 'argv', 'thing', 'hint'), REFUSED)
def test_bad_input_is_one_sentence_and_exit_code_2(
  file, change, argv, thing, hint, capsys
):
  said = refused([file(FILE.format(change)), *argv], capsys)
  assert thing in said and hint in said, said


@pytest.mark.parametrize(
  ('argv', 'thing', 'hint'),
  [
    ([], 'nothing to run', '--config='),
    (['--config'], '--config', 'a file'),
    (['--config=mime.py'], 'mime.py', 'did you mean mine.py'),
    (['--config=.'], 'no config file', '.'),
    (['--config=empty.py'], 'empty.py', 'get_config'),
    ([f'--config={QUICKSTART}:no_reply'], "'no_reply'", "'no_replay' or 'no_top_p'"),
    (
      ['--run_dir=mine.py/run', f'--config={QUICKSTART}'],
      'mine.py/run',
      'cannot write',
    ),
    (['--resume', '--run_dir=nowhere'], 'nowhere', 'no config.json'),
    (['--role=sampler', '--run_dir=nowhere'], 'nowhere', 'no config.json'),
  ],
)
def test_missing_things_are_named(file, argv, thing, hint, capsys):
  file(DICT)
  pathlib.Path('empty.py').touch()
  said = refused(argv, capsys)
  assert thing in said and hint in said, said


# Another allowed value, where half of the default (or one more) is not allowed.
OTHER = {
  'tasks.family': 'kernels', 'sandbox.backend': 'process', 'store': 'file:///elsewhere/store',
  'agent.on_malformed': 'answer', 'loss.baseline': 'mean', 'optim.on_nonfinite': 'stop',
  'model.heads': 2 * config.Model().heads, 'model.kv_heads': 1,
  'model.head_dim': 2 * config.Model().head_dim, 'run_dir': '/elsewhere',
  'model.rotary_dim': config.Model().rotary_dim - 2 or 4, 'tasks.kinds': 'off_by_one',
  'loss.objective': 'gspo', 'loss.baseline_tokens': 'signal', 'loss.level': 'turn',
  'loss.sequence_mask': 'geometric', 'loss.calls_scale': 'divide',
  'loss.credit': 'turn', 'sync.codec': 'xor',
  'loss.geometric_high': 1.2, 'loss.length.kind': 'linear', 'loss.length.form': 'hard',
  'loss.length.effort': 'low', 'sync.verify_device': 'checksum',
  'sampler.host': '0.0.0.0', 'sampler.address': 'node-3',
  'relay.cluster': 'west', 'relay.nodes': 'a:1,b:2', 'relay.host': '0.0.0.0',
  'agent.thoughts': 'strip', 'model.attention': 'mla',
  'model.attention_kernel': 'cudnn', 'model.dtype': 'bfloat16',
  'model.rope.scaling': 'linear', 'model.moe.experts': 4,
  'model.moe.exchange': 'blocks',
  'model.moe.quantise': 'weights', 'model.moe.router': 'sigmoid',
  'model.lora.targets': 'q,v', 'mesh.coordinator': 'learner-0:1234',
  'agent.max_context': config.Agent().max_context - 1,
  'agent.harness': 'command: true', 'sampler.on_swap': 'drain',
  'tasks.difficulty': '/elsewhere/difficulty.jsonl', 'tasks.cache': '/elsewhere',
  'tasks.root': '/elsewhere', 'tasks.place': 'local', 'tasks.units': 'a,b',
  'tasks.factory': 'module:function', 'tasks.arguments': '{"a": 1}',
  'sandbox.engine': 'podman', 'sandbox.image': 'python:3.12', 'sandbox.user': '0:0',
  'sampler.decode_widths': str(max(config.Sampler().slots // 2, 1)),
}  # fmt: skip
# Settings that alone have one allowed value: all others must be refused, by name.
ONE_VALUE = {
  'regions': 2, 'model.lora.rank': 8, 'mesh.processes': 2,
  'sampler.repetition_penalty': 1.1, 'loss.kl_reference': 'newest',
}  # fmt: skip


def another(name: str, tmp_path: pathlib.Path):
  value = settings.flatten(config.Config())[name]
  if name == 'tasks.table':
    (tmp_path / 'table.json').touch()
    return str(tmp_path / 'table.json')
  if name == 'agent.harness_settings':
    (tmp_path / 'agent.yaml').touch()
    return str(tmp_path / 'agent.yaml')
  if name in OTHER:
    return OTHER[name]
  if isinstance(value, bool):
    return not value
  return value + 1 if isinstance(value, int) else value / 2 or 0.5


# `model.source` sets others: tests/experiments_source_test.py.
SETTABLE = settings.leaves().keys() - ONE_VALUE.keys() - {'model.source'}


@pytest.mark.parametrize('name', sorted(SETTABLE))
def test_every_setting_can_be_set_from_both_sides(name, file, tmp_path):
  want = another(name, tmp_path)
  plain = options.parse([file(DICT)])
  by_flag = options.parse([file(DICT), f'--config.{name}={want}'])
  by_file = options.parse([file(FILE.format(f'cfg.{name} = {want!r}'))])
  before = settings.flatten(plain.cfg)
  for side, chosen in (('flag', by_flag), ('file', by_file)):
    now = settings.flatten(chosen.cfg)
    changed = {key for key in now if now[key] != before[key]} - {'run_dir'}
    assert now[name] == want and changed <= {name}
    odd = {key: origin for key, origin in chosen.origin.items() if origin != 'default'}
    assert odd == {name: side}


@pytest.mark.parametrize('name', ONE_VALUE)
def test_a_setting_that_does_nothing_else_refuses_other_values(name, file, capsys):
  assert name in refused([file(DICT), f'--config.{name}={ONE_VALUE[name]}'], capsys)


def test_every_setting_says_what_it_means():
  for name, field in settings.leaves().items():
    assert field.metadata['doc'].strip(), name


def test_quickstart_arguments_are_the_ablations():
  plain = options.parse([f'--config={QUICKSTART}']).cfg
  no_replay = options.parse([f'--config={QUICKSTART}:no_replay']).cfg
  no_top_p = options.parse([f'--config={QUICKSTART}:no_top_p']).cfg
  assert plain.loss.replay and plain.sampler.sampling.truncates
  assert not no_replay.loss.replay
  assert no_replay.sampler == plain.sampler
  assert not no_top_p.sampler.sampling.truncates
  assert os.path.basename(no_top_p.run_dir).startswith('quickstart-no_top_p-')


def a_run(tmp_path: pathlib.Path, *flags: str) -> str:
  """A run folder as a start leaves it."""
  run_dir = str(tmp_path / 'run')
  chosen = options.parse([f'--config={QUICKSTART}', f'--run_dir={run_dir}', *flags])
  lock = folder.claim(run_dir, resume=False)
  folder.fill(run_dir, settings.to_json(chosen.cfg, chosen.origin), ['program', *flags])
  os.close(lock)
  return run_dir


def test_config_json_holds_value_origin_and_meaning_and_reads_back(tmp_path):
  run_dir = a_run(tmp_path, '--config.optim.lr=0.5')
  document = json.loads(pathlib.Path(run_dir, 'config.json').read_text())
  assert document['optim.lr']['value'] == 0.5
  assert document['optim.lr']['origin'] == 'flag'
  assert document['run_dir']['origin'] == 'flag'
  assert document['steps']['origin'] == 'default'
  assert 'learning rate' in document['optim.lr']['doc']
  cfg = settings.load(run_dir)
  assert cfg.optim.lr == 0.5 and cfg.run_dir == run_dir
  assert cfg == options.parse(['--role=learner', f'--run_dir={run_dir}']).cfg


def test_resume_takes_the_settings_of_the_run_wherever_it_lies_now(tmp_path):
  a_run(tmp_path, '--config.optim.lr=0.5')
  moved = str((tmp_path / 'run').rename(tmp_path / 'moved'))
  chosen = options.parse(['--resume', f'--run_dir={moved}', '--config.steps=99'])
  assert chosen.cfg.optim.lr == 0.5
  assert (chosen.cfg.steps, chosen.cfg.run_dir) == (99, moved)
  assert (chosen.origin['optim.lr'], chosen.origin['steps']) == ('flag', 'flag')
  assert chosen.origin['optim.warmup'] == 'default'
  role = options.parse(['--role=learner', '--resume', f'--run_dir={moved}']).cfg
  assert (role.run_dir, role.store) == (moved, f'file://{moved}/store')


def test_resume_refuses_settings_that_change_the_meaning(tmp_path, capsys):
  run_dir = a_run(tmp_path, '--config.optim.lr=0.5')
  base = ['--resume', f'--run_dir={run_dir}']
  said = refused([*base, '--config.seed=3', '--config.loss.replay=false'], capsys)
  assert 'seed=3 (the run has 0)' in said
  assert 'loss.replay=False (the run has True)' in said
  said = refused([*base, f'--config={QUICKSTART}'], capsys)  # has the default lr
  assert 'optim.lr=' in said and '(the run has 0.5)' in said
  same = options.parse([*base, f'--config={QUICKSTART}', '--config.optim.lr=0.5'])
  assert same.cfg.optim == settings.load(run_dir).optim


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path, capsys):
  run_dir = a_run(tmp_path)
  before = pathlib.Path(run_dir, 'config.json').read_bytes()
  said = refused([f'--config={QUICKSTART}', f'--run_dir={run_dir}'], capsys)
  assert run_dir in said and '--resume' in said
  assert pathlib.Path(run_dir, 'config.json').read_bytes() == before


def test_a_folder_in_use_is_refused_with_the_process(tmp_path, capsys):
  run_dir = a_run(tmp_path)
  lock = folder.claim(run_dir, resume=True)
  said = refused(['--resume', f'--run_dir={run_dir}'], capsys)
  os.close(lock)
  assert run_dir in said and f'process {os.getpid()}' in said
  os.close(folder.claim(run_dir, resume=True))  # free again


@pytest.mark.parametrize('text', ['{', '[]', '{"steps": 3}', '{"stepz": {"value": 3}}'])
def test_a_damaged_config_json_is_named(text, tmp_path, capsys):
  run_dir = a_run(tmp_path)
  pathlib.Path(run_dir, 'config.json').write_text(text)
  said = refused(['--resume', f'--run_dir={run_dir}'], capsys)
  assert os.path.join(run_dir, 'config.json') in said


def test_roles_take_settings_from_the_run_folder_only(tmp_path, capsys):
  run_dir = a_run(tmp_path)
  argv = ['--role=sampler', f'--run_dir={run_dir}']
  assert options.parse([*argv, '--index=1']).index == 1
  rollout = ['--role=rollout', argv[1], '--index=1']
  assert 'rollout.processes=1' in refused(rollout, capsys)
  assert 'sampler.processes=2' in refused([*argv, '--index=2'], capsys)
  assert 'leave out' in refused([*argv, '--config.seed=1'], capsys)


def test_a_full_disk_is_refused_at_the_start(tmp_path, capsys):
  small = tmp_path / 'small'
  small.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(small)]
  if subprocess.run(mount, capture_output=True, check=False).returncode:
    pytest.skip('needs the right to mount a small disk')
  try:
    said = refused([f'--config={QUICKSTART}', f'--run_dir={small / "run"}'], capsys)
  finally:
    subprocess.run(['umount', str(small)], check=True)
  assert str(small / 'run') in said and 'full' in said


def test_a_disk_that_fills_up_under_a_role_is_exit_code_2(
  tmp_path, monkeypatch, capsys
):
  def run(cfg: config.Config, index: int) -> int:
    with open('/dev/full', 'w') as f:
      f.write(cfg.run_dir)
    return 0

  manager = python_types.SimpleNamespace(run=run)
  monkeypatch.setitem(sys.modules, 'swe17.rollout.manager', manager)
  said = refused(['--role=rollout', f'--run_dir={a_run(tmp_path)}'], capsys)
  assert 'No space left on device' in said and '--resume' in said


@pytest.mark.parametrize(
  ('error', 'code', 'last'),
  [
    (RuntimeError('a sampler is gone'), 1, 'RuntimeError: a sampler is gone'),
    (ValueError('group 7 is no group'), 2, 'error: group 7 is no group'),
  ],
)
def test_only_a_fault_that_may_pass_asks_for_a_restart(
  error, code, last, tmp_path, monkeypatch, capsys
):
  def run(cfg: config.Config, index: int) -> int:
    raise error

  manager = python_types.SimpleNamespace(run=run)
  monkeypatch.setitem(sys.modules, 'swe17.rollout.manager', manager)
  assert swe17.main(['--role=rollout', f'--run_dir={a_run(tmp_path)}']) == code
  err = capsys.readouterr().err
  assert 'Traceback' in err and err.splitlines()[-1] == last


def test_help_teaches_the_commands(capsys):
  assert swe17.main(['--help']) == 0
  out = capsys.readouterr().out
  assert '--config=experiments/configs/quickstart.py' in out and '--resume' in out
  assert swe17.main(['--helpfull']) == 0
  out = capsys.readouterr().out
  assert all(f'--config.{name}=' in out for name in settings.leaves())


@pytest.mark.parametrize(
  ('argv', 'said'),
  [
    (['--config.optim.learning_rat=1e-6'], 'the nearest is optim.lr'),
    (['--config.sampler.repetition_penalty=1.2'], 'loss.replay=True'),
    (['--config.tasks.kinds=of_by_one'], "the nearest is 'off_by_one'"),
    (['--run_dir=/dev/null/run'], 'cannot write to run folder /dev/null/run'),
  ],
)
def test_the_program_refuses_before_it_loads_anything_slow(argv, said):
  code = (
    'import sys; from experiments import swe17; code = swe17.main(sys.argv[1:]); '
    'slow = {"jax", "tensorstore", "tokenizers", "matplotlib"} & sys.modules.keys(); '
    'sys.exit(f"loaded {slow}" if slow else code)'
  )
  for program in (['-c', code], ['-m', 'experiments.swe17']):
    done = subprocess.run(
      [sys.executable, *program, f'--config={QUICKSTART}', *argv],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and done.stderr.count('\n') == 1
