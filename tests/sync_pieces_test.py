"""Pieces of sharded tensors: cut, named, put together, read by whom they concern."""

import json
import os
import pathlib
import subprocess
import sys

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from swe17.sync import pieces


@st.composite
def cut_array(draw) -> tuple[np.ndarray, pieces.Cuts]:
  parts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
  shape = [n * draw(st.integers(1, 3)) for n in parts]
  return np.arange(np.prod(shape)).reshape(shape), pieces.cuts(shape, parts)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(made=cut_array(), backwards=st.booleans())
def test_joined_pieces_are_the_tensor(made, backwards: bool):
  array, cut = made
  tensors = {'a/w': array, 'b': np.array(3.0)}
  found = pieces.split(tensors, {'a/w': cut})
  assert list(found) == [*pieces.names('a/w', cut), 'b']
  assert all(part.flags.c_contiguous for part in found.values())
  assert sum(part.size for part in found.values()) == array.size + 1
  if backwards:
    found = dict(reversed(found.items()))
  whole = pieces.join(found)
  assert whole.keys() == tensors.keys()
  for name, want in tensors.items():
    np.testing.assert_array_equal(whole[name], want)
    assert whole[name].shape == want.shape


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(made=cut_array(), data=st.data())
def test_a_shard_is_put_together_from_the_pieces_inside_it(made, data):
  array, cut = made
  found = pieces.split({'w': array}, {'w': cut})
  index = [slice(None)] * array.ndim
  for axis, n in cut:
    size = array.shape[axis] // n
    first = data.draw(st.integers(0, n - 1))
    last = data.draw(st.integers(first + 1, n))
    index[axis] = slice(first * size, last * size)
  got = pieces.shard(found, 'w', array.shape, cut, index)
  np.testing.assert_array_equal(got, array[tuple(index)])
  names = [name for name, _ in pieces.of_shard('w', array.shape, cut, index)]
  assert len(set(names)) == len(names)
  read = sum(found[name].size for name in names)
  assert read == array[tuple(index)].size  # nothing is fetched for a part of it


def test_an_expert_is_a_tensor_of_its_own():
  experts = np.arange(24).reshape(4, 2, 3)
  found = pieces.split({'moe/w': experts}, {'moe/w': ((0, 4),)})
  assert list(found) == [f'moe/w@0:{i}/4' for i in range(4)]
  np.testing.assert_array_equal(found['moe/w@0:2/4'], experts[2:3])
  assert np.shares_memory(found['moe/w@0:2/4'], experts)  # no copy along axis 0


def test_names_of_pieces_say_where_they_lie():
  assert pieces.parse('layer/w') == ('layer/w', ())
  assert pieces.parse('w@0:3/4@2:0/2') == ('w', ((0, 3, 4), (2, 0, 2)))
  for bad in ('w@', '@0:1/2', 'w@0:2/2', 'w@1:0/2@0:0/2', 'w@0:0/2@0:1/2', 'w@x:0/2'):
    with pytest.raises(ValueError, match='piece'):
      pieces.parse(bad)


@pytest.mark.parametrize(
  'edit,want',
  [
    (lambda found: found.pop('w@0:1/2'), 'do not make up a whole'),
    (lambda found: found.update({'w@0:0/4': np.zeros(1)}), 'do not make up a whole'),
    (lambda found: found.update(w=np.zeros(4)), 'do not make up a whole'),
    (lambda found: found.update({'w@0:1/2': np.zeros(3)}), 'differ in shape'),
  ],
)
def test_pieces_that_do_not_fit_are_refused(edit, want: str):
  found = pieces.split({'w': np.arange(4.0)}, {'w': ((0, 2),)})
  edit(found)
  with pytest.raises(ValueError, match=want):
    pieces.join(found)


def test_grids_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"\['x'\], which are no tensors"):
    pieces.split({'w': np.zeros(4)}, {'x': ((0, 2),)})
  with pytest.raises(ValueError, match='has no 3 equal parts'):
    pieces.split({'w': np.zeros(4)}, {'w': ((0, 3),)})
  with pytest.raises(ValueError, match='has no 2 equal parts'):
    pieces.cuts((0, 4), (2, 1))
  with pytest.raises(ValueError, match='@ is kept for'):
    pieces.split({'w@0:0/1': np.zeros(4)}, {})


def test_a_grid_coarser_than_the_mesh_is_refused_with_what_to_do():
  for index in ((slice(0, 2), slice(0, 4)), (slice(0, 4), slice(0, 2))):
    with pytest.raises(ValueError, match='at least as fine as the mesh'):
      pieces.of_shard('w', (8, 4), ((0, 2),), index)


def test_each_of_four_followers_reads_a_quarter_and_the_whole_is_right():
  """Two dtypes, full and delta: see the program for what it checks bit for bit."""
  program = pathlib.Path(__file__).with_name('sync_pieces_main.py')
  env = {**os.environ, 'PYTHONPATH': str(program.parent.parent), 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(
    [sys.executable, str(program)],
    check=False,
    env=env,
    text=True,
    capture_output=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  for shares in json.loads(done.stdout.splitlines()[-1]).values():
    for version, row in enumerate(shares):
      if version == 2:  # one expert and one row changed: two followers of four read
        assert sorted(share > 0 for share in row) == [False, False, True, True]
      else:
        assert all(0.2 < share < 0.3 for share in row), row
