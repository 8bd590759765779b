"""The learner's process and other learners: it stops with the reason, or goes on."""

import collections
import threading
import types as python_types

import numpy as np

from swe17 import config
from swe17.learner import loop, process
from swe17.metrics import records
from swe17.store import kv
from swe17.sync import manifest, publisher


def test_a_learner_that_meets_another_one_stops_with_the_reason(
  tmp_path, monkeypatch, capsys
):
  events = records.EventLog(str(tmp_path / 'events.jsonl'))
  closed = []

  def begin(run_, resume: bool) -> None:
    raise publisher.PublishConflict(
      'version 3 was published by attempt b: two learners'
    )

  monkeypatch.setattr(loop.signal, 'signal', lambda *_: None)
  monkeypatch.setattr(
    process,
    'open_run',
    lambda cfg, team, stop: python_types.SimpleNamespace(
      events=events,
      jobs=python_types.SimpleNamespace(close=lambda: closed.append(1)),
    ),
  )
  monkeypatch.setattr(process, 'begin', begin)
  cfg = config.Config(run_dir=str(tmp_path), store=f'file://{tmp_path}/store')
  assert loop.run(cfg, False) == 2  # which asks for no restart
  said = capsys.readouterr().err
  assert said == 'error: version 3 was published by attempt b: two learners\n'
  (event,) = records.read_events(str(tmp_path / 'events.jsonl'))
  assert event['kind'] == 'alarm' and event['text'] in said
  assert closed == [1]
  events.close()


def test_a_resumed_learner_goes_on_from_what_was_published_last(tmp_path):
  cfg = config.Config(run_dir=str(tmp_path), store=f'file://{tmp_path}/store')
  store = kv.open(cfg.store)
  weights = {'w': np.arange(100, dtype=np.float32)}
  old = publisher.Publisher(store, cfg.sync, attempt='a')
  old.publish(0, weights, step=0, plan={})
  old.publish(1, weights, step=1, plan={})
  stop = threading.Event()
  stop.set()  # it ends before its warm start
  run_ = python_types.SimpleNamespace(
    cfg=cfg,
    store=store,
    stop=stop,
    state=python_types.SimpleNamespace(params=weights),
    status=python_types.SimpleNamespace(set=lambda *_: None),
    jobs=python_types.SimpleNamespace(
      checkpoints=python_types.SimpleNamespace(latest=lambda: None)
    ),
    buffer=python_types.SimpleNamespace(
      consumed={0, 1, 5}, dropped=collections.Counter()
    ),
    publisher=publisher.Publisher(store, cfg.sync, attempt='b'),
    events=python_types.SimpleNamespace(write=lambda *_, **__: None),
    step=7,
    step_of={},
    version=-1,
  )
  process.begin(run_, resume=True)
  assert run_.version == 1
  process.publish(run_, {'w': weights['w'] + 1})
  made = manifest.read(store, 2)
  assert (made.base, made.attempt) == (1, 'b')
  assert made.plan['consumed_below'] == 2 and made.plan['consumed_rest'] == [5]
  assert made.plan['tasks'] == [
    {'family': cfg.tasks.family, 'kinds': [], 'weight': 1.0}
  ]
  assert made.plan['sampling']['top_p'] == cfg.sampler.top_p
