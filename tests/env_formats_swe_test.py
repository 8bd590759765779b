"""SWE-bench rows: their schema, files without history, grading on clean copies."""

import dataclasses
import io
import json
import pathlib
import re
import sys
import tarfile

import pytest

from swe17 import config, types
from swe17.env import check, families, pool, sandbox
from swe17.env.formats import patches, repositories, rows, swe_bench, swe_trees
from tests import swe_fixture as fixture

CFG = config.Sandbox(backend='bubblewrap', workers=2, wall_seconds=30.0)


@pytest.fixture(scope='module')
def world(tmp_path_factory) -> tuple[pathlib.Path, str]:
  """A folder with a clone and a table, and the base commit."""
  root = tmp_path_factory.mktemp('swe')
  commit = fixture.repository(root / 'numbers')
  return root, commit


def table(root: pathlib.Path, *rows_: dict, name: str = 'rows.jsonl') -> config.Tasks:
  text = ''.join(json.dumps(row) + '\n' for row in rows_)
  (root / name).write_text(text)
  return config.Tasks(
    family=swe_bench.FAMILY, table=str(root / name), root=str(root), place='local'
  )


@pytest.fixture(scope='module')
def task(world) -> types.Task:
  root, commit = world
  found, aside = swe_bench.read(table(root, fixture.row(commit, root / 'scratch')))
  assert not aside
  return found[0]


@pytest.fixture
def bubblewrap() -> None:
  reason = sandbox._why_not_bubblewrap()
  if reason:
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')


def test_the_fields_are_those_of_the_real_schema():
  known = json.loads(fixture.FIELDS.read_text())
  assert set(known['SWEbenchInstance']) | set(known['make_test_spec reads']) <= set(
    rows.KNOWN
  )
  assert set(fixture.row('a' * 40, pathlib.Path('/tmp'))) == set(
    known['SWEbenchInstance']
  )


def test_lists_may_be_lists_or_json_text(world):
  root, commit = world
  row = fixture.row(commit, root / 'scratch')
  given = rows.parse(row)
  as_lists = {name: json.loads(row[name]) for name in ('FAIL_TO_PASS', 'PASS_TO_PASS')}
  assert given == rows.parse({**row, **as_lists})
  assert isinstance(given, rows.Instance)
  assert given.fail_to_pass == (f'{fixture.TEST}::test_high',)


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({'FAIL_TO_PASS': '[]'}, 'FAIL_TO_PASS is empty'),
    ({'FAIL_TO_PASS': 'test_a'}, 'FAIL_TO_PASS: text that is not a JSON list'),
    ({'FAIL_TO_PASS': '[1]'}, 'FAIL_TO_PASS: holds something that is no name'),
    ({'FAIL_TO_PASS': ['a', 'a']}, 'FAIL_TO_PASS: names a test twice'),
    ({'FAIL_TO_PASS': ['a'], 'PASS_TO_PASS': ['a']}, 'a is in FAIL_TO_PASS and in'),
    ({'patch': ''}, 'patch is empty'),
    ({'patch': 'see above'}, 'patch does not look like a diff'),
    ({'test_patch': None}, 'no test_patch'),
    ({'base_commit': 'main'}, "base_commit: got 'main', want a hash"),
    ({'base_commit': '--output=x'}, 'base_commit: got'),
    ({'repo': '../../etc'}, 'repo: got'),
    ({'instance_id': 'a/b'}, 'instance_id: got'),
    ({'problem_statement': 7}, 'problem_statement: got int, want text'),
  ],
)
def test_a_row_that_cannot_be_graded_is_set_aside(world, changes, reason):
  root, commit = world
  assert reason in str(rows.parse({**fixture.row(commit, root / 'scratch'), **changes}))


def test_a_field_by_another_name_is_not_taken_but_named(world):
  root, commit = world
  row = fixture.row(commit, root / 'scratch')
  row['fail_to_pass'] = row.pop('FAIL_TO_PASS')
  assert rows.parse(row) == "no FAIL_TO_PASS; is 'fail_to_pass' meant?"


def test_tables_are_read_as_lines_or_as_one_list(world, tmp_path):
  root, commit = world
  row = fixture.row(commit, root / 'scratch', problem_statement='one\u2028two')
  (tmp_path / 'a.jsonl').write_text(json.dumps(row, ensure_ascii=False) + '\n\n')
  (tmp_path / 'a.json').write_text(json.dumps([row]))
  good, aside = rows.read(tmp_path / 'a.jsonl')
  assert not aside and good == rows.read(tmp_path / 'a.json')[0]
  for name, text, why in (
    ('b.json', '{}', 'want a list of rows'),
    ('b.jsonl', '{', 'not JSON'),
    ('b.csv', '', r'want \.jsonl'),
    ('c.jsonl', f'{json.dumps(row)}\n{json.dumps(row)}\n', 'two rows have'),
  ):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=why):
      rows.read(tmp_path / name)
  with pytest.raises(ValueError, match='no file'):
    rows.read(tmp_path / 'none.jsonl')


def test_parquet_without_its_reader_is_said_so(tmp_path, monkeypatch):
  (tmp_path / 'a.parquet').write_bytes(b'PAR1')
  monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
  with pytest.raises(ValueError, match='needs pyarrow'):
    rows.read(tmp_path / 'a.parquet')


def test_ids_that_pytest_cannot_be_asked_for_are_set_aside(world):
  root, commit = world
  for name, why in (
    ('test_x (pkg.Class)', 'is no pytest id'),
    ('tests/test_a.py::test_b[log(x', 'is cut short'),
    ('/etc/a.py::test', 'is no pytest id'),
  ):
    row = fixture.row(commit, root / 'scratch', FAIL_TO_PASS=[name])
    _, aside = swe_bench.read(table(root, row, name='odd.jsonl'))
    assert why in aside['someone__numbers-1']


def test_a_missing_repository_or_image_is_set_aside_with_the_reason(world, tmp_path):
  root, commit = world
  row = fixture.row(commit, root / 'scratch')
  cfg = table(root, row)
  _, aside = swe_bench.read(dataclasses.replace(cfg, root=str(tmp_path)))
  assert 'no repository of someone/numbers' in aside['someone__numbers-1']
  _, aside = swe_bench.read(dataclasses.replace(cfg, place='container', root=''))
  assert 'names no image' in aside['someone__numbers-1']
  with pytest.raises(ValueError, match=r'tasks\.root'):
    swe_bench.read(dataclasses.replace(cfg, root=''))
  with pytest.raises(ValueError, match=r'got 0 usable, want 3; 1 were set.*names no'):
    swe_bench.read(dataclasses.replace(cfg, place='container', train=3))


def test_held_out_are_whole_repositories(world):
  units = [f'a/{n}' for n in range(20)]
  assert len(swe_bench.heldout('', units * 3)) == 4
  assert swe_bench.heldout('a/3, a/1', units) == {'a/1', 'a/3'}
  with pytest.raises(ValueError, match=r"tasks\.units: got 'a/99'"):
    swe_bench.heldout('a/99', units)


# ---- repositories -------------------------------------------------------------------


def test_a_snapshot_is_the_base_and_nothing_later(world):
  root, commit = world
  made = repositories.snapshot(str(root / 'numbers'), commit)
  assert made.files[fixture.FILE].decode() == fixture.SOURCE
  # git archive would have left the tests out: .gitattributes says so.
  assert fixture.TEST in made.files and made.links == {'link': 'README'}
  assert made.executable == {'run.sh'}
  assert not [name for name in made.files if '.git/' in name]
  assert b'nobody may find' not in made.tar and b'return high' not in made.tar
  with tarfile.open(fileobj=io.BytesIO(made.tar)) as tar:
    assert tar.getmember('run.sh').mode == 0o755
    assert tar.getmember('link').issym()


def test_a_clone_a_bare_clone_and_a_bundle_give_the_same(world, tmp_path):
  root, commit = world
  clone = root / 'numbers'
  fixture.git(clone, 'bundle', 'create', '-q', str(tmp_path / 'numbers.bundle'), 'main')
  fixture.git(clone, 'clone', '-q', '--bare', '.', str(tmp_path / 'x__numbers.git'))
  want = repositories.snapshot(str(clone), commit)
  for repo, instance in (('someone/numbers', 'none'), ('x/numbers', 'none')):
    place = repositories.find(tmp_path, repo, instance)
    assert place is not None
    assert repositories.snapshot(str(place), commit) == want


def test_a_plain_folder_is_taken_as_it_is(tmp_path):
  (tmp_path / 'a/__pycache__').mkdir(parents=True)
  (tmp_path / 'a/b.py').write_text('x = 1\n')
  (tmp_path / 'a/__pycache__/b.pyc').write_bytes(b'compiled')
  made = repositories.snapshot(str(tmp_path), 'a' * 40)
  assert made.files == {'a/b.py': b'x = 1\n'}


def test_hooks_and_filters_of_a_clone_do_not_run(world, tmp_path):
  root, commit = world
  clone = tmp_path / 'clone'
  fixture.git(root, 'clone', '-q', str(root / 'numbers'), str(clone))
  fixture.git(clone, 'config', 'filter.x.smudge', f'touch {tmp_path}/ran')
  fixture.git(clone, 'config', 'core.fsmonitor', f'touch {tmp_path}/ran')
  (clone / '.git/info/attributes').write_text('* filter=x\n')
  repositories.snapshot(str(clone), commit)
  assert not (tmp_path / 'ran').exists()


def test_what_is_no_repository_is_named(world, tmp_path):
  root, _ = world
  with pytest.raises(ValueError, match='is not there'):
    repositories.snapshot(str(root / 'numbers'), 'f' * 40)
  with pytest.raises(ValueError, match='want a clone'):
    repositories.snapshot(str(tmp_path / 'none'), 'f' * 40)
  (tmp_path / 'a.bundle').write_bytes(b'no bundle')
  with pytest.raises(ValueError, match='git clone'):
    repositories.snapshot(str(tmp_path / 'a.bundle'), 'f' * 40)


# ---- diffs --------------------------------------------------------------------------


def test_diffs_change_make_delete_and_rename(tmp_path):
  diff = fixture.diff('a/x.py', 'one\n', 'two\n', tmp_path)
  assert patches.apply(diff, {'a/x.py': b'one\n', 'b': b''}) == {'a/x.py': b'two\n'}
  new = (
    'diff --git a/n.py b/n.py\nnew file mode 100644\n'
    '--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+x\n'
  )
  assert patches.apply(new, {}) == {'n.py': b'x\n'}
  empty = 'diff --git a/e b/e\nnew file mode 100644\nindex 0000000..e69de29\n'
  assert patches.apply(empty, {}) == {'e': b''}
  gone = (
    'diff --git a/n.py b/n.py\ndeleted file mode 100644\n'
    '--- a/n.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n'
  )
  assert patches.apply(gone, {'n.py': b'x\n'}) == {'n.py': None}
  moved = (
    'diff --git a/o d.py b/n w.py\nsimilarity index 100%\n'
    'rename from o d.py\nrename to n w.py\n'
  )
  assert patches.apply(moved, {'o d.py': b'x'}) == {'n w.py': b'x', 'o d.py': None}
  assert patches.over({'a': b'1', 'b': b'2'}, {'a': None, 'c': b'3'}) == {
    'b': b'2',
    'c': b'3',
  }


def test_a_diff_that_does_not_apply_is_refused_whole(tmp_path):
  both = fixture.diff('a.py', 'one\n', 'two\n', tmp_path)
  both += fixture.diff('b.py', 'one\n', 'two\n', tmp_path)
  with pytest.raises(patches.PatchError, match=r'b\.py'):
    patches.apply(both, {'a.py': b'one\n', 'b.py': b'other\n'})


@pytest.mark.parametrize('name', ['../out.py', '/tmp/out.py', '.git/config'])
def test_a_diff_cannot_lead_out_of_the_tree(name, tmp_path):
  new = f'diff --git a/{name} b/{name}\nnew file mode 100644\n'
  new += f'--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n'
  with pytest.raises(patches.PatchError):
    patches.apply(new, {})
  link = 'diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n'
  link += '@@ -0,0 +1 @@\n+/tmp\n\\ No newline at end of file\n'
  link += 'diff --git a/l/x b/l/x\nnew file mode 100644\n--- /dev/null\n+++ b/l/x\n'
  link += '@@ -0,0 +1 @@\n+x\n'
  with pytest.raises(patches.PatchError):
    patches.apply(link, {})


# ---- grading ------------------------------------------------------------------------


def test_source_is_what_is_not_test_and_hidden_tests_come_last(task):
  made = swe_trees.local(task)
  tree = made.tree
  assert tree.is_source(fixture.FILE) and not tree.is_source(fixture.TEST)
  assert tree.path == ('', 'src')
  files = {
    **made.base.files,
    fixture.TEST: b'def test_high(): pass\n',
    'conftest.py': b'raise SystemExit\n',
    'tests/test_new.py': b'',
    'pytest.ini': b'[pytest]\naddopts = --collect-only\n',
    'src/numbers_of/new.py': b'x = 1\n',
  }
  graded = made.graded(files).files
  assert graded[fixture.TEST].decode() == fixture.HIDDEN
  assert set(graded) - set(made.base.files) == {'src/numbers_of/new.py'}


def test_a_package_called_test_is_source():
  names = ['django/test/client.py', 'django/test/__init__.py', 'pkg/test/test_a.py']
  names += ['pkg/tests/b.py', 'pkg/c.py']
  files = dict.fromkeys(names, b'')
  tree = swe_trees.tree_of('x', files, {'pkg/d.py': b''})
  assert tree.is_source('django/test/client.py') and tree.is_source('pkg/c.py')
  assert not any(map(tree.is_source, ('pkg/test/x.py', 'pkg/tests/b.py', 'pkg/d.py')))


async def outcome(env, *commands: str) -> types.Outcome:
  await env.reset()
  for command in commands:
    await env.step('bash', {'command': command})
  await env.step('submit', {})
  return await env.verify()


async def test_gold_scores_and_nothing_else_does(task, bubblewrap):
  host = await swe_bench.open_host(CFG)
  try:
    (sound,), aside = await host.verify([task])
    assert not aside
    assert await check.environment(host.env, [sound]) == []
    fix = f"sed -i '5s/low/high/' {fixture.FILE}"
    env = host.env(sound)
    assert (await outcome(env, fix)).value == 1.0
    assert env.figures['files_changed'] == 1
    weak = f'printf "def test_high(): pass" > {fixture.TEST}'
    hook = 'printf "import os; os._exit(0)" > conftest.py'
    shadow = 'printf "raise SystemExit(0)" > pytest.py; cp pytest.py sitecustomize.py'
    link = f'ln -sf /etc/passwd {fixture.FILE}'
    for commands in ([weak, hook, shadow], [link]):
      assert (await outcome(host.env(sound), *commands)).value == 0.0, commands
    assert (await outcome(host.env(sound), fix, weak, hook, shadow)).value == 1.0
  finally:
    await host.close()


async def test_the_agent_finds_no_history_no_package_and_no_hidden_test(
  task, bubblewrap
):
  host = await swe_bench.open_host(CFG)
  env = host.env(task)
  assert 'clamp() gives' in await env.reset()
  said = await env.step('bash', {'command': 'git log; ls -A'})
  assert 'not a git repository' in said and '.git\n' not in said
  said = await env.step('bash', {'command': 'grep -rn test_high . ; echo none'})
  assert said.strip() == 'none'
  said = await env.step('bash', {'command': 'pytest -q tests'})
  assert '2 passed' in said
  said = await env.step('bash', {'command': 'x' * 200_000})
  assert 'at most' in said
  assert 'null character' in await env.step('bash', {'command': 'a\0'})
  said = await env.step('bash', {'command': 'yes | head -c 100000; exit 3'})
  assert 'characters left out' in said and said.endswith('[exit code 3]')
  await host.close()


async def test_rows_whose_gold_or_base_is_wrong_are_set_aside(world, bubblewrap):
  root, commit = world
  scratch = root / 'scratch'
  high, low = f'{fixture.TEST}::test_high', f'{fixture.TEST}::test_low'
  wrong = fixture.SOURCE.replace('// 2', '// 3')
  made = [
    fixture.row(commit, scratch, instance_id='gold', patch=fixture.diff(
      fixture.FILE, fixture.SOURCE, wrong, scratch)),
    fixture.row(commit, scratch, instance_id='base', FAIL_TO_PASS=[high, low],
                PASS_TO_PASS=[]),
    fixture.row(commit, scratch, instance_id='absent', PASS_TO_PASS=[low + 'er']),
    fixture.row(commit, scratch, instance_id='diff', test_patch=fixture.diff(
      fixture.TEST, 'no\n', 'yes\n', scratch)),
    fixture.row('f' * 40, scratch, instance_id='commit'),
  ]  # fmt: skip
  tasks, _ = swe_bench.read(table(root, *made, name='wrong.jsonl'))
  host = await swe_bench.open_host(CFG)
  sound, aside = await host.verify(tasks)
  assert not sound
  for name, why in (
    ('gold', 'with the gold patch .*test_high is failed'),
    ('base', 'without the gold patch .*test_low passes already'),
    ('absent', 'test_lower is absent'),
    ('diff', 'test_patch does not apply'),
    ('commit', 'is not there'),
  ):
    assert re.search(why, aside[name]), aside[name]


async def test_a_sandbox_that_fails_is_no_outcome(task, monkeypatch):
  host = await swe_bench.open_host(CFG)
  env = host.env(task)
  await env.reset()

  async def broken(*args, **kwargs):
    raise OSError('no space left')

  monkeypatch.setattr(pool.Pool, 'run', broken)
  got = await env.verify()
  assert got.value is None and 'no space left' in got.reason
  _, aside = await host.verify([task])
  assert 'the verifier failed' in aside[task.id]


def test_the_family_is_in_the_table():
  assert families.get(swe_bench.FAMILY).open is swe_bench.open_host
