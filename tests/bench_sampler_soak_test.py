"""The sampler's soak: its verdict on what it has seen."""

import types

import numpy as np

from experiments.bench import sampler_soak

COUNTERS = {
  'compilations': 0.0,
  'pages_used': 20.0,
  'pages_total': 32.0,
  'busy_slots': 0.0,
}


def seen(rss_mb, wrong=()) -> types.SimpleNamespace:
  weights = types.SimpleNamespace(versions=[0] * 5)
  return types.SimpleNamespace(
    rss_mb=list(rss_mb), wrong=list(wrong), answers=9, refused=9, weights=weights
  )


def broken(rss_mb, wrong=(), **counters) -> list[str]:
  found = sampler_soak.report(seen(rss_mb, wrong), {**COUNTERS, **counters}, 1.0)
  return found['broken']


FLAT = 300 + np.tile([0.0, 1.0, 4.0], 20)


def test_flat_memory_and_a_warm_up_are_sound():
  assert broken(FLAT) == []
  warm = np.concatenate([np.linspace(100, 300, 15), FLAT])
  assert broken(warm) == []


def test_memory_that_grows_slowly_is_found():
  leak = FLAT + 0.5 * np.arange(FLAT.size)
  (text,) = broken(leak)
  assert text == 'memory grew by 19.5 MB'


def test_a_compilation_or_a_slot_that_is_held_or_a_wrong_answer_is_found():
  assert broken(FLAT, compilations=1.0) == ['1 compilations after the start']
  assert 'held by nobody' in broken(FLAT, busy_slots=1.0)[0]
  assert broken(FLAT, wrong=['chat: HTTP 500']) == ['chat: HTTP 500']
