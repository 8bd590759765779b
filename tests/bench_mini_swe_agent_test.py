"""The bench of mini-swe-agent: what it counts as the same tokens."""

import dataclasses

import numpy as np
import pytest

from experiments.bench import mini_swe_agent
from swe17 import types
from tests import fixtures


class Drawn:
  """What a bench's route knows, without an engine."""

  def __init__(self) -> None:
    self.drawn: dict[str, dict[int, list[types.GenerateResult]]] = {}


def recorded() -> tuple[types.Group, Drawn]:
  """A group of two episodes of two turns, and the results that they were made of."""
  group, route = fixtures.group(turns=((5, 4), (3, 6))), Drawn()
  for one in group.episodes:
    (segment,) = one.segments
    results: dict[int, list[types.GenerateResult]] = {}
    for turn in (0, 1):
      own = segment.mask_T & (segment.turn_T == turn)
      result = types.GenerateResult(
        token_T=segment.token_T[own],
        logp_T=segment.mu_logp_T[own],
        entropy_T=segment.entropy_T[own],
        version_T=segment.version_T[own],
        kept=types.KeptSets(np.zeros(own.sum() + 1, np.int32), np.zeros(0, np.int32)),
        finish='stop',
      )
      results[int(np.argmax(own))] = [result]
    route.drawn[f'{one.id}.0'] = results
  return group, route


def test_all_that_was_drawn_and_nothing_else_is_trained_once():
  group, route = recorded()
  assert mini_swe_agent.same_tokens(group, route) == 20


def test_a_drawn_turn_that_is_not_trained_is_found():
  group, route = recorded()
  first, *_ = route.drawn
  (result,) = route.drawn[first][5]
  route.drawn[f'{group.episodes[0].id}.1'] = {99: [result]}
  with pytest.raises(ValueError, match='1 drawn turns that are not trained'):
    mini_swe_agent.same_tokens(group, route)


def test_a_turn_trained_in_two_segments_is_found():
  group, route = recorded()
  one, *rest = group.episodes
  twice = dataclasses.replace(one, segments=one.segments * 2)
  group = dataclasses.replace(group, episodes=(twice, *rest))
  with pytest.raises(ValueError, match='2 trained turns that were not'):
    mini_swe_agent.same_tokens(group, route)


def test_one_other_id_is_found():
  group, route = recorded()
  first, *_ = route.drawn
  (result,) = route.drawn[first][5]
  other = result.token_T.copy()
  other[0] ^= 1
  route.drawn[first][5] = [dataclasses.replace(result, token_T=other)]
  with pytest.raises(ValueError, match='1 trained turns that were not'):
    mini_swe_agent.same_tokens(group, route)
