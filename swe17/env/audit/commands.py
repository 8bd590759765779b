"""What a command of a shell writes and runs, as far as its text tells.

No shell is parsed: an agent that hides what it does behind quotes and variables is not
found by its words. What it leaves behind is looked at as well.
"""

from collections.abc import Mapping
import functools
import re

from swe17.env.audit import patterns_own

# The tests run by their own command, which is an agent's work.
_RUNS_TESTS = re.compile(
  r'((?:^|[;&|(\n])[ \t]*'
  r'(?:(?:env|exec|time|timeout[ \t]+\S+|\w+=[^\s;|&()]*)[ \t]+)*)'
  r'(?:(?:[\w./~-]{0,200}/)?python[\d.]*[ \t]+-m[ \t]+)?'
  r'(?:pytest|unittest)(?=[\s;&|)]|$)'
)
# Files that a command's output goes to.
_GOES_TO = re.compile(
  r"""((?<![<>&=-])&?>>?[|&]?|\btee(?:[ \t]+-[\w-]*)*)[ \t]*"""
  r"""['"]?(?:\$\{?\w+\}?['"]?/)?([\w./~-]*\w)"""
)
_HERE = re.compile(
  r"""^(?P<line>[^\n]*)<<-?[ \t]*['"]?(?P<end>\w[\w-]*)['"]?(?P<after>[^\n]*)\n"""
  r"""(?P<body>.*?)^[ \t]*(?P=end)[ \t]*$""",
  re.MULTILINE | re.DOTALL,
)
_SCRATCH = re.compile(r'(^|/)(test|test_[^/]*|[^/]*_test)\.py$')  # anybody's
_CHECKOUT = re.compile(r'^(/testbed/|\./)')


def outputs(command: str) -> list[tuple[str, bool]]:
  """(path, whether it is added to) of the files that a command's output goes to."""
  found = {}
  for match in _GOES_TO.finditer(command):
    more = '>>' in match[1] or '-a' in match[1]
    found[_CHECKOUT.sub('', match[2]), more] = None
  return list(found)


def scratch(path: str) -> bool:
  """Whether a file is a test of an agent's own, beside the task's."""
  return not re.search(r'(^|/)tests?/', path) and _SCRATCH.search(path) is not None


def said(command: str) -> str:
  """What a command writes and runs, but for running the tests."""
  # As printf writes it: else a name is one word with the n before it.
  return _RUNS_TESTS.sub(r'\1', command).replace('\\n', '\n')


def split(command: str) -> tuple[str, list[tuple[str, str]]]:
  """(what is run, [(path, text) of what goes to files]), for an agent's own shell."""
  written: list[tuple[str, str]] = []

  def take(match: re.Match[str]) -> str:
    line = match['line'] + match['after']
    paths = [path for path, _ in outputs(line)]
    written.extend((path, match['body']) for path in paths)
    return f'{line}\n' if paths else match[0]

  left = _HERE.sub(take, command)
  return patterns_own.EXCLUDED.sub('', said(left)), written


def is_source(path: str, files: Mapping[str, str]) -> bool:
  """Whether a file would be taken for a checkout's source: beside some that are."""
  if not path.endswith('.py') or path[:1] == '/' or patterns_own.TEST.search(path):
    return False
  return path in files or ('/' in path and path.partition('/')[0] in _folders(files))


def installs(text: str, files: Mapping[str, str]) -> str:
  """The command that fetches a release of what is in the checkout, or anybody's; ''."""
  found = list(patterns_own.INSTALLS.finditer(text))
  names = {re.sub('^(src|lib)/', '', path) for path in files if path and found}
  names = {n.partition('/')[0].removesuffix('.py').replace('_', '-') for n in names}
  for match in found:
    for word in match['what'].split():
      word = word.strip('\'"').lower().replace('_', '-')
      if re.match('git[+]|https?:', word):
        return match[0]
      if re.split(r'[=<>~!\[]', word)[0] in names:
        return match[0]
  return ''


def _folders(files: Mapping[str, str]) -> set[str]:
  tops = {
    path.partition('/')[0] for path in files if path.endswith('.py') and '/' in path
  }
  return tops - {'tests', 'test', 'docs', 'doc', 'examples'}


def named(path: str, given: str) -> bool:
  """Whether a task's own words name a file, or give it with its whole path."""
  return path in _names(given)


@functools.lru_cache(maxsize=16)
def _names(given: str) -> frozenset[str]:
  """Words of a text as they stand, and all ends of those that are whole paths."""
  found = set()
  for word in given.split():
    word = word.strip('`\'"()[]{},;:.!?')
    found.add(word)
    if word[:1] == '/':
      parts = word.split('/')
      found.update('/'.join(parts[i:]) for i in range(1, len(parts)))
  return frozenset(found)
