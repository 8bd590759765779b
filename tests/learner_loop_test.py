"""The learner's process against a file store with scripted groups."""

from collections.abc import Callable, Iterator
import dataclasses
import json
import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

from swe17 import config
from swe17.agent import tokenizer
from swe17.learner import checkpoint, loop, optimizer, process, reference
from swe17.learner import state as st
from swe17.metrics import records
from swe17.model import params as p
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import apply, codec, manifest, publisher
from tests import fixtures

MODEL = config.Model(
  layers=1,
  width=16,
  ffn=16,
  heads=2,
  kv_heads=1,
  head_dim=8,
  rotary_dim=4,
  unroll=False,
)
STEPS = 4
VOCAB = tokenizer.load().vocab_size


@pytest.fixture(scope='module', autouse=True)
def compiled_once(tmp_path_factory) -> Iterator[None]:
  """Every run below compiles the same programs: keep them, as production does."""
  names = {
    'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('programs')),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
  }
  before = {name: getattr(jax.config, name) for name in names}
  for name, value in names.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def settings(folder: pathlib.Path, **changes) -> config.Config:
  cfg = config.Config(
    run_dir=str(folder),
    store=f'file://{folder}/store',
    steps=STEPS,
    model=MODEL,
    agent=config.Agent(max_context=32, max_new_tokens=8),
    imitation=config.Imitation(episodes=2, steps=2, rows=2),
    sampler=config.Sampler(top_k=4, top_p=0.9),
    rollout=config.Rollout(group_size=2, max_staleness=10),
    batch=config.Batch(groups=2, row_length=32, micro_rows=2),
    optim=dataclasses.replace(fixtures.OPTIM, warmup=2),
    checkpoint=config.Checkpoint(every=2),
  )
  return dataclasses.replace(cfg, **changes)


def a_group(start: int, values=(1.0, 0.0), version: int = 0):
  return fixtures.group(start, values, vocab=VOCAB, version=version)


def stock(cfg: config.Config, groups) -> kv.Store:
  """A store with the scripted episodes and the given groups."""
  scripted = fixtures.group(0, (1.0, 1.0), vocab=VOCAB, width=0)
  group_store.append(kv.open(cfg.store + '/imitation'), scripted)
  store = kv.open(cfg.store)
  for group in groups:
    group_store.append(store, group)
  return store


def run(
  cfg: config.Config, resume: bool = False, at: dict[int, Callable] | None = None
) -> int:
  """Runs the learner; `at[n]` is called with its SIGTERM handler in the nth batch."""
  handlers, calls = [], []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.signal, 'signal', lambda _, handler: handlers.append(handler))
    real = loop.summary.of_groups

    def of_groups(*args):
      calls.append(0)
      if at and len(calls) in at:
        at[len(calls)](lambda: handlers[0](15, None))
      return real(*args)

    patch.setattr(loop.summary, 'of_groups', of_groups)
    return loop.run(cfg, resume)


def saved(cfg: config.Config) -> tuple[st.State, dict]:
  values = p.init(p.abstract(cfg.model, VOCAB), jax.random.key(0))
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  found = checkpoint.Checkpoints(cfg.run_dir, cfg.checkpoint)
  return found.restore(st.init(values, tx))


def manifests(store: kv.Store) -> list[manifest.Manifest]:
  newest = publisher.latest(store)
  assert newest is not None
  found = [manifest.read(store, v) for v in range(newest + 1)]
  assert all(m is not None for m in found)
  return [m for m in found if m is not None]


def events(cfg: config.Config, kind: str) -> list[dict]:
  every = records.read_events(cfg.run_dir + '/events.jsonl')
  return [e for e in every if e['kind'] == kind]


@pytest.fixture(scope='module')
def straight(tmp_path_factory) -> tuple[config.Config, kv.Store]:
  """A run of four steps without an interruption."""
  cfg = settings(tmp_path_factory.mktemp('straight'))
  store = stock(cfg, [a_group(i) for i in range(2 * STEPS)])
  assert run(cfg) == 0
  return cfg, store


def test_every_step_publishes_one_dense_version_that_carries_the_plan(straight):
  _, store = straight
  found = manifests(store)
  assert [m.version for m in found] == [m.step for m in found] == list(range(STEPS + 1))
  assert len({m.digest for m in found}) == STEPS + 1  # each step moved the weights
  assert [m.plan['consumed_below'] for m in found] == [0, 2, 4, 6, 8]
  assert [m.plan['done'] for m in found] == [False] * STEPS + [True]
  assert found[0].plan['sampling']['top_k'] == 4


def test_rows_have_no_gap_and_say_what_was_trained(straight):
  cfg, _ = straight
  rows = records.read(cfg.run_dir)
  assert [row['step'] for row in rows] == [1, 2, 3, 4]
  assert [row['version'] for row in rows] == [1, 2, 3, 4]
  for i, row in enumerate(rows):
    assert (row['groups_trained'], row['episodes'], row['solve_rate']) == (2, 4, 0.5)
    assert row['trained_tokens'] == row['token_count'] == 40
    assert row['staleness_max'] == i
    assert row['skipped_steps'] == 0
  assert [row['lr'] for row in rows] == pytest.approx([0.005, 0.01, 0.01, 0.01])


def test_consumed_groups_leave_the_store_once_their_checkpoint_is_committed(straight):
  cfg, store = straight
  assert group_store.list_new(store, set()) == []
  state, extra = saved(cfg)
  assert (int(state.step), extra['below'], extra['rest']) == (STEPS, 2 * STEPS, [])
  assert extra['version'] == STEPS


def test_the_published_weights_are_the_checkpoints_in_bfloat16(straight):
  cfg, store = straight
  state, _ = saved(cfg)
  host = apply.to_host(state.params)
  last = manifests(store)[-1]
  assert last.digest == codec.digest(host, last.block_bytes)


def test_told_to_stop_it_checkpoints_between_two_steps_and_resumes_bit_equal(
  straight, tmp_path
):
  cfg = settings(tmp_path)
  store = stock(cfg, [a_group(i) for i in range(2 * STEPS)])
  assert run(cfg, at={3: lambda stop: stop()}) == 1
  state, extra = saved(cfg)
  assert (int(state.step), extra['below']) == (3, 6)
  # As if it had died between the commit and the discarding of what it had consumed.
  for start in (4, 5):
    assert group_store.append(store, a_group(start))
  assert run(cfg, resume=True) == 0
  assert saved(cfg)[1]['below'] == 2 * STEPS
  assert fixtures.same_bits(saved(cfg)[0], saved(straight[0])[0])
  assert [row['step'] for row in records.read(cfg.run_dir)] == [1, 2, 3, 4]
  # The resumed learner publishes in full before its first step; no number is skipped.
  assert [m.step for m in manifests(store)] == [0, 1, 2, 3, 3, 4]


def test_the_reference_is_where_rl_started_before_and_after_a_resume(tmp_path):
  runs = []
  for name in ('whole', 'cut'):
    cfg = settings(tmp_path / name, loss=config.Loss(kl_weight=0.5))
    store = stock(cfg, [a_group(i) for i in range(2 * STEPS)])
    if name == 'cut':
      assert run(cfg, at={3: lambda stop: stop()}) == 1
    assert run(cfg, resume=name == 'cut') == 0
    state, _ = saved(cfg)
    held = reference.load(cfg.run_dir, state.params)
    first = manifests(store)[0]  # version 0, whatever was published since
    host = apply.to_host(held)
    assert first.digest == codec.digest(host, first.block_bytes)
    runs.append((state, held, records.read(cfg.run_dir)))
  (a, held, rows), (b, again, resumed) = runs
  assert fixtures.same_bits((a, held), (b, again))
  for key in ('kl_reference', 'kl_reference_k3', 'trained_tokens'):
    assert [row[key] for row in rows] == [row[key] for row in resumed]
  assert abs(rows[0]['kl_reference']) < 1e-5  # it has not moved yet
  assert all(row['kl_reference_k3'] > 1e-5 for row in rows[1:])


def test_without_a_penalty_there_is_no_reference(straight):
  cfg, _ = straight
  assert not pathlib.Path(cfg.run_dir, 'reference').exists()
  for row in records.read(cfg.run_dir):
    assert row['kl_reference'] is None and row['kl_reference_k3'] is None


def test_killed_after_its_checkpoint_it_goes_on_from_there_bit_equal(
  straight, tmp_path
):
  class Killed(RuntimeError):
    pass

  def die(_) -> None:
    raise Killed

  cfg = settings(tmp_path, checkpoint=config.Checkpoint(every=100))
  store = stock(cfg, [a_group(i) for i in range(6)])
  with pytest.raises(Killed):
    run(cfg, at={3: die})
  assert publisher.latest(store) == 2
  assert int(saved(cfg)[0].step) == 0
  assert len(group_store.list_new(store, set())) == 6  # nothing is lost
  # Groups of a version whose steps are lost arrive after the restart.
  for start in (6, 7):
    group_store.append(store, a_group(start, version=2))
  assert run(cfg, resume=True) == 0
  assert fixtures.same_bits(saved(cfg)[0], saved(straight[0])[0])
  rows = records.read(cfg.run_dir)
  assert [row['step'] for row in rows] == [1, 2, 3, 4]
  assert all(row['staleness_max'] >= 0 for row in rows)
  assert [m.step for m in manifests(store)] == [0, 1, 2, 0, 1, 2, 3, 4]


def test_a_start_set_aside_after_the_checkpoint_stays_used_up(straight, tmp_path):
  class Killed(RuntimeError):
    pass

  def die(_) -> None:
    raise Killed

  cfg = settings(tmp_path, steps=2, checkpoint=config.Checkpoint(every=100))
  store = stock(cfg, [a_group(i) for i in (0, 2, 3, 4)])
  store.write(group_store.key_of(1), b'garbage')
  with pytest.raises(Killed):
    run(cfg, at={2: die})
  assert saved(cfg)[1]['below'] == 0
  assert run(cfg, resume=True) == 0
  assert manifests(store)[-1].plan['consumed_below'] == 5
  rows = records.read(cfg.run_dir)
  assert [row['groups_trained'] for row in rows] == [2, 2]


def test_batches_without_signal_stop_the_run_with_the_reasons(tmp_path, capsys):
  cfg = settings(tmp_path)
  dead = [a_group(i, (1.0, 1.0)) for i in range(8)]
  spoiled = [a_group(i, (1.0, None)) for i in range(8, 2 * loop.DEAD_BATCHES)]
  store = stock(cfg, dead + spoiled)
  assert run(cfg) == 2
  said = capsys.readouterr().err
  assert f'{loop.DEAD_BATCHES} batches in a row gave no training signal' in said
  assert '8 groups without a difference' in said
  assert '2 with fewer than 2 valid' in said
  assert [e['text'] for e in events(cfg, 'alarm')] == [said[len('error: ') :].strip()]
  # No step was taken; versions carry the cursor so that rollouts went on.
  found = manifests(store)
  assert {m.step for m in found} == {0}
  assert len({m.digest for m in found}) == 1
  assert [m.plan['consumed_below'] for m in found] == [0, 2, 4, 6, 8, 10]
  assert records.read(cfg.run_dir) == []


def test_a_few_dead_batches_are_waited_through_and_counted(tmp_path):
  cfg = settings(tmp_path, steps=1)
  values = [(1.0, 1.0)] * 3 + [(1.0, 0.0)]
  stock(cfg, [a_group(i, v) for i, v in enumerate(values)])
  assert run(cfg) == 0
  (row,) = records.read(cfg.run_dir)
  assert (row['groups_trained'], row['groups_no_signal']) == (1, 3)


def test_told_to_stop_while_it_waits_for_scripted_episodes_it_ends(tmp_path):
  cfg = settings(tmp_path)
  with pytest.MonkeyPatch.context() as patch:
    real = process.imitation.Episodes.wait
    handlers = []
    patch.setattr(loop.signal, 'signal', lambda _, handler: handlers.append(handler))

    def wait(self, count, stopped):
      handlers[0](15, None)
      return real(self, count, stopped)

    patch.setattr(process.imitation.Episodes, 'wait', wait)
    assert loop.run(cfg, False) == 1
  assert publisher.latest(kv.open(cfg.store)) is None


def test_stopped_after_a_batch_without_signal_it_discards_nothing_uncommitted(tmp_path):
  # The checkpoint of step 0 exists and does not name the groups consumed since.
  cfg = settings(tmp_path)
  store = stock(cfg, [a_group(i, (1.0, 1.0)) for i in range(2)])
  with pytest.MonkeyPatch.context() as patch:
    real = loop._no_signal
    handlers = []
    patch.setattr(loop.signal, 'signal', lambda _, handler: handlers.append(handler))

    def no_signal(*args):
      real(*args)
      handlers[0](15, None)

    patch.setattr(loop, '_no_signal', no_signal)
    assert loop.run(cfg, False) == 1
  assert saved(cfg)[1]['below'] == 0
  assert len(group_store.list_new(store, set())) == 2


# Finite, so that nothing refuses it at the door; the gradient of it is not.
HUGE = (3e38, -3e38)


def overflown(folder, policy: str) -> tuple[int, config.Config, kv.Store]:
  """(exit code, settings, store) of four steps, the second of which overflows."""
  cfg = settings(folder)
  optim = dataclasses.replace(cfg.optim, on_nonfinite=policy)
  cfg = dataclasses.replace(cfg, optim=optim)
  values = [(1.0, 0.0)] * 2 + [HUGE] * 2 + [(1.0, 0.0)] * 4
  store = stock(cfg, [a_group(i, v) for i, v in enumerate(values)])
  return run(cfg), cfg, store


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_counted(tmp_path):
  code, cfg, store = overflown(tmp_path, 'skip')
  assert code == 0
  rows = records.read(cfg.run_dir)
  assert [row['skipped_steps'] for row in rows] == [0, 1, 1, 1]
  assert [row['grad_norm'] is None for row in rows] == [False, True, False, False]
  digests = [m.digest for m in manifests(store)]  # of version 0 and after each step
  assert digests[1] == digests[2]
  assert len(set(digests)) == 4


def test_or_it_stops_the_run_with_another_exit_code(tmp_path, capsys):
  code, cfg, store = overflown(tmp_path, 'stop')
  assert code == 2
  said = capsys.readouterr().err
  assert 'step 2: the gradient is not finite (optim.on_nonfinite=stop)' in said
  assert len(records.read(cfg.run_dir)) == 1
  assert max(m.step for m in manifests(store)) == 1  # what it left is not published


def test_the_status_file_says_done(straight):
  cfg, _ = straight
  status = json.loads(pathlib.Path(cfg.run_dir, 'status', 'learner.json').read_text())
  assert (status['phase'], status['fraction']) == ('done', 1.0)


def test_length_budgets_are_in_the_checkpoint_and_the_phase_in_the_plan(tmp_path):
  length = config.Length(kind='alternating', phase_steps=1, w_turns=0, w_tool=0)
  cfg = settings(tmp_path, loss=config.Loss(length=length))
  store = stock(cfg, [a_group(i) for i in range(8)])
  assert run(cfg) == 0
  # The one that solved sampled 10 tokens; all were drawn by version 0, of step 0.
  assert saved(cfg)[1]['budgets'] == {f'task/{i}': 10 for i in range(8)}
  phases = [m.plan['penalty_phase'] for m in manifests(store)]
  assert phases == ['unconstrained', 'budget'] * 2 + ['unconstrained']
  rows = records.read(cfg.run_dir)
  assert [row['reward'] for row in rows] == [0.5] * STEPS
  assert [row['episode_count'] for row in rows] == [4] * STEPS
  assert all(row['over_budget_share'] == 0 for row in rows)
