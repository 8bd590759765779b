"""Runs tests inside an image and writes a record for each; given to its own Python.

Reads {"token", "tests"} from its input, and writes `token {json}` lines to where its
output was; what tests print goes nowhere. Records: {"number": 0, "begun": true}, then
{"number", "test", "outcome"} each, last {"number", "over": true}.

This file is run by the Pythons of images, from 3.6 on, and by nothing of ours.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
  """Runs pytest on the tests it is told."""
  spec = json.loads(sys.stdin.read())
  write, dumps, count = os.write, json.dumps, [0]
  out = os.dup(1)
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  own = os.getpid()

  def send(**record: object) -> None:
    if os.getpid() != own:
      return  # a child of a test
    record['number'] = count[0]
    count[0] += 1
    data = (spec['token'] + ' ' + dumps(record) + '\n').encode()
    while data:
      data = data[write(out, data) :]

  os.environ['PYTHONDONTWRITEBYTECODE'] = '1'
  import pytest

  class Records:
    """One record a test: the worst of its set-up, its call and its tear-down."""

    def __init__(self) -> None:
      self.reports = []

    def pytest_collectreport(self, report: Any) -> None:
      if report.failed:
        send(test=report.nodeid, outcome='error')

    def pytest_runtest_logreport(self, report: Any) -> None:
      self.reports.append((report.when, report.outcome))
      if report.when != 'teardown':
        return
      outcomes = dict(self.reports)
      self.reports = []
      if 'failed' in (outcomes.get('setup'), outcomes.get('teardown')):
        outcome = 'error'
      elif 'skipped' in outcomes.values():
        outcome = 'skipped'
      else:
        outcome = outcomes.get('call', 'error')
      send(test=report.nodeid, outcome=outcome)

  send(begun=True)
  words = ['-p', 'no:cacheprovider', '--continue-on-collection-errors', '-q']
  code = pytest.main(words + spec['tests'], plugins=[Records()])
  send(over=True, code=int(code))


if __name__ == '__main__':
  main()
