"""Every notebook runs top to bottom; its claims are assertions inside it.

Committed notebooks hold no outputs: what they show is made anew where they are run.
"""

import json
import os
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))


def code(path: pathlib.Path) -> list[str]:
  cells = json.loads(path.read_text())['cells']
  return [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']


def test_there_are_seven_numbered_without_a_gap():
  assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(1, 8))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_claims_hold(path, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', str(ROOT), prepend=os.pathsep)
  monkeypatch.delenv('XLA_FLAGS')  # compiled as for a reader
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=300,
    kernel_name='python3',
    resources={'metadata': {'path': str(ROOT / 'notebooks')}},
  )
  client.execute()  # an assertion that fails raises CellExecutionError
  outputs = [o for cell in notebook.cells for o in cell.get('outputs', [])]
  figures = [o for o in outputs if 'image/png' in o.get('data', {})]
  assert len(figures) == 1


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_the_product_and_asserts_a_claim(path):
  text = '\n'.join(code(path))
  assert 'from swe17' in text or 'from experiments' in text
  assert 'assert ' in text
  assert '**Claim.**' in path.read_text()


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
  for cell in json.loads(path.read_text())['cells']:
    assert not cell.get('outputs') and cell.get('execution_count') is None


def test_a_claim_that_is_false_fails_the_test():
  cells = [nbformat.v4.new_code_cell('assert 1 + 1 == 3')]
  notebook = nbformat.v4.new_notebook(cells=cells)
  with pytest.raises(nbclient.exceptions.CellExecutionError, match='AssertionError'):
    nbclient.NotebookClient(notebook, timeout=300, kernel_name='python3').execute()
